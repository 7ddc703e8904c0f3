"""Flags of the programs. Field docs are the help texts; nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Literal

DEMO_SEED = 5_500_003
"""Scene seed of demonstrations. Training (7_700_003), validation (9_300_003) and test (9_000_003) scenes differ."""


@dataclass(frozen=True)
class RecordConfig:
    """How expert episodes are recorded."""

    episodes: int = 200
    """Number of scenes the expert tries; only its clean lifts are kept."""
    seed: int = DEMO_SEED
    """Scene seed."""
    first_index: int = 0
    """Index of the first scene."""
    distractors: tuple[int, int] = (0, 8)
    """Fewest and most distractor pieces in a scene."""
    image_size: int = 128
    """Side of the square camera images [px]."""
    near_fraction: float = 0.35
    """Share of the episodes whose arm starts near the piece: recoveries for free."""
    variety: float = 1.0
    """Spread of the expert's speed, approach yaw and hover; 0 gives one motion per scene."""
    aim_error_mm: float = 0.0
    """Sloppiness: standard deviation of an aim error that stays for a whole episode [mm]."""
    hesitation_frames: int = 0
    """Sloppiness: the expert pauses up to this many control frames at its waypoints."""
    close_shift_frames: int = 0
    """Sloppiness: the jaws close up to this many control frames too early or too late."""
    workers: int = 2
    """Recording processes."""


@dataclass(frozen=True)
class DemosConfig:
    """Record expert episodes into a LeRobotDataset."""

    out: str
    """Folder of the dataset. An unfinished one is continued; a finished one is refused."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """Scenes, images and the expert's manners."""
    video: bool = False
    """Store AV1 video (small, lossy) instead of exact images."""


@dataclass(frozen=True)
class CloneConfig:
    """Clone expert demonstrations into a SmolVLA by flow matching."""

    out: str
    """Policy folder to write; must not exist."""
    policy: str = "new"
    """Policy folder to start from, or "new" for a freshly initialized SmolVLA of --size."""
    size: Literal["2m", "8m", "30m", "450m"] = "2m"
    """Size of a new policy (parameters)."""
    demos: str | None = None
    """LeRobotDataset folder to learn from; without it episodes are recorded into memory."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """Episodes recorded when no --demos is given."""
    stride: int = 6
    """Every how many control frames an observation is kept."""
    train: Literal["all", "expert"] = "all"
    """What is trained: every weight, or the action expert and its projections on a frozen VLM."""
    reset_expert: bool = False
    """Start the action expert and its projections from random weights again."""
    steps: int = 2000
    """Optimizer steps."""
    batch: int = 64
    """Observations in a step."""
    lr: float = 1e-3
    """Peak learning rate (AdamW, betas .9 and .95, cosine to 1 % of it)."""
    warmup: int = 300
    """Steps of linear warm-up."""
    weight_decay: float = 1e-4
    """Weight decay of matrices; vectors get none."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down."""
    max_seconds: float | None = None
    """Fit for so long at most [s]: the learning rate's cosine then ends with the time. None: all --steps."""
    seed: int = 0
    """Seed of initial weights, minibatches and noise."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    preset: str | None = None
    """JSON file with defaults for flowrl-train, copied into the policy folder as preset.json. Without it the preset
    names the environment arguments of the recorded scenes alone."""


@dataclass(frozen=True)
class ExpertConfig:
    """Measure the scripted expert on unchecked scenes."""

    episodes: int = 200
    """Scenes."""
    seed: int = 9_300_003
    """Scene seed (validation scenes by default)."""
    distractors: tuple[int, int] = (0, 15)
    """Fewest and most distractor pieces in a scene."""
    pieces: str = "pawn,knight"
    """Kinds of target and distractors, separated by commas, or "all"."""
    task: Literal["white", "square"] = "white"
    """Whether the target is the only white piece."""
    randomization: Literal["none", "default", "wide"] = "default"
    """How far lights, colours, cameras, the arm's start and the physics vary."""
    workers: int = 2
    """Processes."""


@dataclass(frozen=True)
class PlayConfig:
    """Play episodes with an agent: watch them in a window or a video, or only measure them."""

    agent: Literal["expert", "random", "zero", "policy"] = "expert"
    """expert: the scripted pick. random: uniform joint targets. zero: no motion. policy: the one of --policy."""
    policy: str = ""
    """Policy folder or hub id, with --agent policy. Empty: models/chess-tiny."""
    episodes: int = 1
    """Number of scenes."""
    seed: int = 9_300_003
    """Scene seed (validation scenes by default)."""
    first_index: int = 0
    """Index of the first scene."""
    video: str = ""
    """MP4 file to write: the scene with the target marked, both cameras, frame number and end. Empty: none."""
    json: str = ""
    """JSON file to write: the measures of every episode. Empty: none."""
    window: Literal["auto", "on", "off"] = "auto"
    """Show the episodes in a window. auto: when there is a display and neither --video nor --json is given."""
    overwrite: bool = False
    """Replace the files of --video and --json if they exist."""
    distractors: tuple[int, int] | None = None
    """Fewest and most pieces beside the target. None: the policy's own, or the environment's default."""
    image_size: int | None = None
    """Side of the square images that a policy sees [px]. None: the policy's own, or the environment's default."""
    seconds: float | None = None
    """Time limit of an episode [s]. None: the policy's own, or 20."""
    fen: str = ""
    """Position of the pieces in Forsyth-Edwards notation, in place of the scene's own; needs chess_env[fen]. Empty: the scene's own."""
    square: str = ""
    """Square of the piece to pick, for example e4. Empty: the scene's own target, or one drawn from the position."""
    env_kwargs: str = "{}"
    """Further arguments of the environment, as JSON, for example '{"randomization": "wide"}'."""
    device: str = "auto"
    """Where a policy runs: auto (cuda if there is one), cpu, cuda, cuda:N."""
    torch_threads: int = 2
    """Threads of torch on the CPU."""


@dataclass(frozen=True)
class PictureConfig:
    """Draw one scene for the documentation."""

    out: str = "docs/images/scene.png"
    """PNG file to write; with --view all the folder of all of them."""
    view: Literal["scene", "overview", "top", "wrist", "grasp", "video", "arms", "all"] = "scene"
    """scene: an overview beside what the two cameras see. overview, top, wrist: one picture. grasp: the wrist camera just
    before the jaws close. video: a frame as in a video. arms: the built-in arm above that of --robot. all: every one."""
    seed: int = 9_300_003
    """Scene seed."""
    index: int = 3
    """Scene index."""
    size: int = 480
    """Height of the picture [px]."""
    distractors: tuple[int, int] = (12, 15)
    """Fewest and most distractor pieces."""
    pieces: str = "pawn,knight"
    """Kinds of the pieces, or all."""
    frame: int = 66
    """Control frames of the expert's pick before the picture is taken."""
    robot: str | None = None
    """SO-101 MJCF file with the published meshes, for --view arms and all."""

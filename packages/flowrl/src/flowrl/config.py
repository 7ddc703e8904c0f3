"""Every flag of the programs: frozen dataclasses whose field docs are the command-line help.

This file imports neither torch nor lerobot, so that `--help` and a bad flag answer at once.
"""

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from flowrl.errors import FlowRLError
from flowrl.flag_values import parse_env_kwargs as parse_env_kwargs
from flowrl.flag_values import parse_rename as parse_rename
from flowrl.flag_values import parse_schedules as parse_schedules
from flowrl.noise_flags import check_noise_flags

TEST_SEED = 9_000_003
"""Seed of the test scenes. Nothing that is chosen, trained or tuned may look at them."""


@dataclass(frozen=True)
class TrainConfig:
    """Improve a flow-matching policy with PPO in a Gymnasium environment."""

    policy: str = "models/chess-tiny"
    """Policy to start from: a LeRobot policy folder, a checkpoint of this program, or a hub id."""
    env_id: str = "chess_env:ChessPick-v0"
    """Environment, in Gymnasium's `module:id` form. It executes a chunk of targets in one step."""
    env_kwargs: str = "{}"
    """Further arguments of the environment, as JSON, for example '{"distractors": [0, 4]}'."""
    rename: tuple[str, ...] = ()
    """Names of cameras and state in the environment and in the policy: top=camera1 wrist=camera2; `wrist=` drops one."""
    task: str = ""
    """Instruction for environments that give none in `info["task"]`."""
    out: str = ""
    """Folder for the record and the checkpoints; new without --resume. Empty: runs/<name of the policy>."""
    resume: bool = False
    """Go on with the run in --out from its newest checkpoint, with its flags. Only --iterations, --val-every, --save-every,
    --envs, --pipeline, --device, --torch-threads and --offload may be given anew."""
    device: str = "auto"
    """Where the policy runs: auto (cuda if there is one), cpu, cuda, cuda:N."""
    torch_threads: int = 2
    """Threads of the policy on a CPU; results do not depend on their number there if it is small and not compiled, since each thread
    then has whole parts of the minibatch or of the environments. More of them than cores are free starve the simulators."""
    velocity: Literal["auto", "exact", "fused", "split", "tf32"] = "auto"
    """How SmolVLA's denoising is computed. exact: LeRobot's own operations. fused: fewer and larger ones, on a GPU as CUDA graphs;
    actions differ by rounding. split: fused, its float32 products in three bfloat16 ones. tf32: fused, its float32 products in
    TF32 (10 bits of mantissa), the update's too. auto: fused on a GPU, else exact."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile makes few kernels of a layer's many; never of the exact one's. auto: on a GPU, for a policy of 100 M
    parameters and more, where Triton and a C compiler are."""
    update_precision: Literal["float32", "tf32"] = "float32"
    """Precision of the update's matrix products on a GPU. tf32 is several times as fast, with 10 bits of mantissa; the
    old log-probabilities are then scored by the same products, and sampling stays in float32."""
    offload: Literal["auto", "gpu", "cpu"] = "auto"
    """Where an iteration's encoded observations wait for the update: gpu, cpu (pinned host memory), or auto: on the GPU while
    they fit. The results are the same. Without a GPU it has no effect."""
    expert_bf16: bool = False
    """Train the action expert in the checkpoint's own dtype instead of float32. Small updates are lost."""

    iterations: int = 30
    """Iterations: each collects episodes, then updates the weights."""
    envs: int = 10
    """Environments that run side by side."""
    pipeline: int = 0
    """Groups that the environments are dealt into, of at least two: while some simulate, another has its chunks sampled. The
    results are the same, on a GPU up to the rounding of batches of another size. 0: 2 on a GPU, and 1 on a CPU, where the
    policy takes the simulators' cores."""
    episodes: int = 100
    """Training episodes an iteration."""
    seconds: float = 20.0
    """Time limit of an episode [s], for environments that take a `seconds` argument."""
    early_stop: bool = True
    """End a training episode as soon as it is spoilt, where the environment can. Validation never does."""
    train_seed: int = 7_700_003
    """Seed of the training scenes, of which none is used twice, and of the minibatch order."""

    val_seed: int = 9_300_003
    """Seed of the validation scenes, which no update ever sees."""
    val_episodes: int = 60
    """Validation episodes, always the same scenes, without noise."""
    val_every: int = 5
    """Validate before the first update and after every so many iterations."""
    noise_tax_episodes: int = 0
    """Measure what the exploration noise costs in success (or return), on so many validation scenes, before the run. 0: do not."""
    save_every: int = 5
    """Keep a checkpoint after every so many iterations. A run that is killed repeats those since the last one."""

    lr: float = 3e-7
    """Learning rate of the policy."""
    sigma_lr: float = 3e-3
    """Learning rate of the noise, with --learn-sigma or --noise-kind head."""
    critic_lr: float = 3e-4
    """Learning rate of the critic."""
    kl_adapt: float | None = None
    """Per-element KL that the policy's learning rate is steered to, by a factor of 0.5 to 2 an iteration. None: fixed rate."""

    noise_kind: Literal["geometric", "head", "flow-sde"] = "geometric"
    """Exploration noise. geometric: from --sigma-start to --sigma-end. head: the same, trained to depend on the observation
    (ReinFlow). flow-sde: the flow's stochastic differential equation (Flow-GRPO), of size --flow-sde-level."""
    sigma_start: float = 0.2
    """Standard deviation of the exploration noise at the first denoising step [normalized action]."""
    sigma_end: float = 0.002
    """Standard deviation at the last denoising step; geometric in between."""
    learn_sigma: bool = False
    """Train the standard deviation per denoising step and joint, inside [0.5 * smaller, 1.5 * larger] of the two ends."""
    flow_sde_level: float = 0.5
    """a of --noise-kind flow-sde: the diffusion is a * sqrt(t / (1 - t))."""
    entropy_coef: float = 0.0
    """Weight of the noise's entropy in the objective, per element; needs --learn-sigma or --noise-kind head."""
    noise_basis: Literal["white", "dct"] = "white"
    """white: every target of the chunk on its own. dct: only the lowest cosine modes over the chunk, which an arm can follow."""
    noise_modes: int = 6
    """Number of cosine modes, with --noise-basis dct."""

    gamma: float = 0.99
    """Discount from one decision to the next."""
    reward_scale: float = 1.0
    """Factor on the rewards that the update sees, so that the critic's targets are of the order of 1. Reported returns are the
    environment's own."""
    lam: float = 0.95
    """Lambda of the generalized advantage estimate."""
    bootstrap_truncated: bool = False
    """Count the critic's value of the last observation when an episode ran out of time; otherwise 0."""
    ratio: Literal["element", "step", "chunk"] = "element"
    """Unit of the clipped probability ratio: one scored value, one denoising step, one whole chain."""
    clip: float = 0.2
    """Ratios are clipped to [1 - clip, 1 + clip]."""
    epochs: int = 2
    """Passes over the iteration's decisions."""
    minibatch: int = 16
    """Decisions in one optimizer step."""
    target_kl: float = 0.02
    """Stop after an epoch whose mean per-element KL exceeds this."""
    vf_coef: float = 0.5
    """Weight of the critic's loss, 0.5 * squared error."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this, for policy, noise and critic separately."""
    average_decay: float = 0.0
    """Validate and save a moving average of the policy's weights that looks back about 1 / (1 - decay) iterations: most of a policy
    gradient is noise, which the average loses. 0: the weights themselves."""
    critic_warmup: int = 1
    """First iterations that train the critic only."""
    critic_epochs: int = 0
    """Additional passes of the critic alone over the iteration's decisions."""
    grad_cosine: bool = False
    """Log the cosine between the policy gradients of two halves of the decisions (costs one more pass)."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluate policies without exploration noise on fixed scenes."""

    policy: str = "models/chess-tiny"
    """Policy to evaluate: a LeRobot policy folder, a checkpoint of flowrl-train, or a hub id."""
    versus: str = ""
    """Another policy, evaluated on the same scenes; the difference is written to versus.json."""
    env_id: str = "chess_env:ChessPick-v0"
    """Environment, in Gymnasium's `module:id` form."""
    env_kwargs: str = "{}"
    """Further arguments of the environment, as JSON."""
    rename: tuple[str, ...] = ()
    """Names of cameras and state in the environment and in the policy: top=camera1 wrist=camera2; `wrist=` drops one."""
    task: str = ""
    """Instruction for environments that give none in `info["task"]`."""
    episodes: int = 100
    """Number of scenes, with index 0, 1, 2, ..."""
    seed: int = TEST_SEED
    """Seed of the scenes."""
    workers: int = 10
    """Environments that run side by side, with --fast."""
    pipeline: int = 0
    """Groups that these are dealt into, of at least two: while some simulate, another has its chunks sampled. 0: 2 on a GPU, 1
    on a CPU."""
    seconds: float = 20.0
    """Time limit of an episode [s], for environments that take a `seconds` argument."""
    fast: bool = False
    """Batch over environments. Otherwise one at a time, through LeRobot's own `predict_action_chunk`."""
    noise: bool = False
    """With the exploration noise that the checkpoint was trained with (needs --fast)."""
    expert_fp32: bool = False
    """Run the action expert in float32 instead of the checkpoint's own dtype, as training does."""
    video_episodes: int = 0
    """Write videos of the first so many episodes into --out/videos; of finished results, those that are missing."""
    velocity: Literal["auto", "exact", "fused", "split", "tf32"] = "auto"
    """How SmolVLA's denoising is computed. exact: LeRobot's own operations. fused: fewer and larger ones, on a GPU as CUDA graphs;
    actions differ by rounding. split: fused, its float32 products in three bfloat16 ones. tf32: fused, its float32 products in
    TF32 (10 bits of mantissa), the update's too. auto: fused on a GPU, else exact."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile makes few kernels of a layer's many; never of the exact one's. auto: on a GPU, for a policy of 100 M
    parameters and more, where Triton and a C compiler are."""
    device: str = "auto"
    """Where the policy runs: auto (cuda if there is one), cpu, cuda, cuda:N."""
    torch_threads: int = 2
    """Threads of the policy on a CPU."""
    out: str = ""
    """Folder for the results. Empty: outputs/eval/<name of the policy>."""


@dataclass(frozen=True)
class CheckConfig:
    """Check before a training run that what is trained is what is measured. Exit code 1 when a check fails."""

    policy: str = "models/chess-tiny"
    """Policy to check: a LeRobot policy folder, a checkpoint of flowrl-train, or a hub id."""
    env_id: str = "chess_env:ChessPick-v0"
    """Environment, in Gymnasium's `module:id` form."""
    env_kwargs: str = "{}"
    """Further arguments of the environment, as JSON."""
    rename: tuple[str, ...] = ()
    """Names of cameras and state in the environment and in the policy: top=camera1 wrist=camera2; `wrist=` drops one."""
    task: str = ""
    """Instruction for environments that give none in `info["task"]`."""
    same_episodes: int = 8
    """Scenes on which training's path must repeat flowrl-eval; also those whose chains are rescored."""
    noise_episodes: int = 60
    """Scenes on which success is measured with every noise and with none."""
    seed: int = 9_300_003
    """Seed of the scenes; by default those of the validation."""
    noise_seed: int = 9_300_003
    """Seed of the scenes on which success is measured with noise."""
    schedules: str = "0.1:0.002,0.2:0.002,0.3:0.003"
    """Noise schedules to measure beside the policy's own: standard deviation at the first and last denoising step."""
    noise_kind: Literal["geometric", "head", "flow-sde"] = TrainConfig.noise_kind
    """Exploration noise that training would use, see flowrl-train; its defaults are the policy's preset."""
    sigma_start: float = TrainConfig.sigma_start
    """Its standard deviation at the first denoising step [normalized action]."""
    sigma_end: float = TrainConfig.sigma_end
    """Its standard deviation at the last denoising step."""
    learn_sigma: bool = TrainConfig.learn_sigma
    """Whether its standard deviation is trained."""
    flow_sde_level: float = TrainConfig.flow_sde_level
    """a of --noise-kind flow-sde."""
    noise_basis: Literal["white", "dct"] = TrainConfig.noise_basis
    """Its basis over the chunk."""
    noise_modes: int = TrainConfig.noise_modes
    """Number of cosine modes, with --noise-basis dct."""
    workers: int = 10
    """Environments that run side by side."""
    seconds: float = 20.0
    """Time limit of an episode [s], for environments that take a `seconds` argument."""
    velocity: Literal["auto", "exact", "fused", "split", "tf32"] = "auto"
    """How SmolVLA's denoising is computed. exact: LeRobot's own operations. fused: fewer and larger ones, on a GPU as CUDA graphs;
    actions differ by rounding. split: fused, its float32 products in three bfloat16 ones. tf32: fused, its float32 products in
    TF32 (10 bits of mantissa), the update's too. auto: fused on a GPU, else exact."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile makes few kernels of a layer's many; never of the exact one's. auto: on a GPU, for a policy of 100 M
    parameters and more, where Triton and a C compiler are."""
    device: str = "auto"
    """Where the policy runs: auto (cuda if there is one), cpu, cuda, cuda:N."""
    torch_threads: int = 2
    """Threads of the policy on a CPU."""
    out: str = ""
    """Folder for check.md and check.json. Empty: outputs/check/<name of the policy>."""


@dataclass(frozen=True)
class RelocateConfig:
    """Rewrite the path of the vision-language model in a checkpoint that was moved, for LeRobot's own tools."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Policy folder or checkpoint."""
    vlm_path: str = ""
    """What to write, for example a path relative to the repository's root. Empty: the present absolute path."""


def flag(name: str) -> str:
    """The command-line spelling of a field: val_every -> --val-every."""
    return "--" + name.replace("_", "-")


AT_LEAST_ONE = (
    "envs",
    "episodes",
    "val_episodes",
    "val_every",
    "save_every",
    "noise_modes",
    "epochs",
    "minibatch",
    "torch_threads",
    "workers",
    "same_episodes",
    "noise_episodes",
)
AT_LEAST_ZERO = (
    "iterations",
    "pipeline",
    "critic_warmup",
    "critic_epochs",
    "video_episodes",
    "train_seed",
    "val_seed",
    "seed",
    "noise_seed",
    "sigma_lr",
    "lr",
    "critic_lr",
    "vf_coef",
    "entropy_coef",
    "noise_tax_episodes",
)
POSITIVE = ("reward_scale", "seconds", "sigma_start", "sigma_end", "target_kl", "max_grad_norm", "kl_adapt")


def check_config(config: TrainConfig | EvalConfig | CheckConfig) -> None:
    """Raises FlowRLError, one line, for a value that cannot work."""
    values = asdict(config)
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise FlowRLError(f"{flag(name)} {value}: must be a finite number")
        if name in AT_LEAST_ONE and value < 1:
            raise FlowRLError(f"{flag(name)} {value}: must be at least 1")
        if name in AT_LEAST_ZERO and value < 0:
            raise FlowRLError(f"{flag(name)} {value}: must not be negative")
        if name in POSITIVE and not value > 0:
            raise FlowRLError(f"{flag(name)} {value}: must be greater than 0")
        if name in ("gamma", "lam") and not 0 <= value <= 1:
            raise FlowRLError(f"{flag(name)} {value}: must lie between 0 and 1")
        if name == "average_decay" and not 0 <= value < 1:
            raise FlowRLError(f"{flag(name)} {value}: must be at least 0 and less than 1, for example 0.95")
        if name == "clip" and not 0 < value < 1:
            raise FlowRLError(f"{flag(name)} {value}: must lie between 0 and 1, both excluded")
        if name == "device" and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise FlowRLError(f"{flag(name)} {value!r}: must be auto, cpu, cuda or cuda:N")
    parse_env_kwargs(config.env_kwargs)
    parse_rename(config.rename)
    if isinstance(config, CheckConfig):
        parse_schedules(config.schedules)
    if not isinstance(config, EvalConfig):
        check_noise_flags(config)
    if isinstance(config, TrainConfig):
        _check_entropy(config)
    if not isinstance(config, EvalConfig):
        for name in ("train_seed", "val_seed", "seed", "noise_seed"):
            if values.get(name) == TEST_SEED:
                raise FlowRLError(
                    f"{flag(name)} {TEST_SEED}: is the seed of the test scenes, which only flowrl-eval may use; choose another"
                )
    if isinstance(config, TrainConfig) and config.train_seed == config.val_seed:
        raise FlowRLError(
            f"--val-seed {config.val_seed} equals --train-seed: validation scenes would be trained on; choose another"
        )


def _check_entropy(config: TrainConfig) -> None:
    """The entropy's weight needs a noise that is trained."""
    if config.entropy_coef and not (config.learn_sigma or config.noise_kind == "head"):
        raise FlowRLError(
            f"--entropy-coef {config.entropy_coef}: the entropy of a noise that is not trained is constant; "
            "give --learn-sigma or --noise-kind head, or leave it out"
        )

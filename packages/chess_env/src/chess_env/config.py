"""Frozen, validated configurations of the environment: the defaults live here and nowhere else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from chess_env.errors import ConfigError, UnknownArgumentError

CONTROL_HZ = 30  # one joint target per frame, as LeRobot records the real arm
PHYSICS_TIMESTEP_S = 1.0 / 240.0
MAX_DISTRACTORS = 15
PieceKind = Literal["pawn", "knight", "bishop", "rook", "queen", "king"]
PIECES: tuple[PieceKind, ...] = get_args(PieceKind)
DEFAULT_PIECES: tuple[PieceKind, ...] = ("pawn", "knight")
TASKS = ("white", "square")
IMAGE_SIZE_LIMITS = (16, 2048)
OBSERVATIONS = ("pixels", "state")
RENDER_MODES = ("rgb_array", "rgb_array_list", "human")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class RewardConfig:
    """Weights of the reward's terms; a weight of 0 turns a term off."""

    success: float = 1.0
    """Paid once, when the target has been held 40 mm up for 10 frames."""
    reach: float = 0.0
    """Potential-based: decrease of the distance from the jaws to the grasp point."""
    lift: float = 0.0
    """Potential-based: height of a held target."""
    disturb: float = 0.0
    """Penalty, paid once, when a distractor is moved more than 10 mm or falls."""
    topple: float = 0.0
    """Penalty, paid once, when the target falls over."""
    discount: float = 0.99
    """The trainer's discount of one environment step; the potential-based terms need the same."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _require(_is_number(value), f"reward {item.name}={value!r}: a finite number is needed")
            _require(value >= 0, f"reward {item.name}={value!r}: a weight of at least 0 is needed")
        _require(self.discount <= 1, f"reward discount={self.discount!r}: at most 1 is allowed")


REWARDS: dict[str, RewardConfig] = {
    "sparse": RewardConfig(),
    "shaped": RewardConfig(reach=0.2, lift=0.3, disturb=0.2, topple=0.2),
}


@dataclass(frozen=True)
class Randomization:
    """How far a new scene's look and start vary; every draw is uniform in +- the value around the nominal."""

    arm_start_deg: float = 3.0
    """Start pose of the five arm joints [deg]; the gripper varies by the same number of units of 0..100."""
    piece_colour: float = 0.04
    """Brightness of the pieces' colours [0..1]."""
    piece_tint: float = 0.015
    """Each colour channel of the pieces on its own [0..1]."""
    light_intensity: float = 0.15
    """Intensity of the lights, as a fraction."""
    light_position_m: float = 0.10
    """Position of the lights [m]."""
    camera_position_m: float = 0.003
    """Position of both cameras [m]."""
    camera_angle_deg: float = 0.5
    """Orientation of both cameras about each axis [deg]."""
    piece_friction: float = 0.0
    """Sliding friction of the pieces, as a fraction."""
    piece_mass: float = 0.0
    """Mass of the pieces, as a fraction."""
    board_colour: float = 0.0
    """Brightness of the light and of the dark squares, each on its own [0..1]."""
    board_tint: float = 0.0
    """Each colour channel of the light and of the dark squares on its own [0..1]."""
    servo_gain: float = 0.0
    """Gain of the arm's servos, as a fraction."""
    joint_damping: float = 0.0
    """Damping of the arm's joints, as a fraction."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _require(
                _is_number(value) and value >= 0,
                f"randomization {item.name}={value!r}: a finite number of at least 0 is needed",
            )
        limits = {
            "light_intensity": 0.9, "arm_start_deg": 10.0, "piece_colour": 0.2, "piece_friction": 0.9, "piece_mass": 0.5,
            "board_colour": 0.2, "servo_gain": 0.5, "joint_damping": 0.5,
        }  # fmt: skip
        for name, limit in limits.items():
            value = getattr(self, name)
            _require(value <= limit, f"randomization {name}={value!r}: at most {limit} is allowed")


RANDOMIZATIONS: dict[str, Randomization] = {
    "none": Randomization(**{item.name: 0.0 for item in fields(Randomization)}),
    "default": Randomization(),
    "wide": Randomization(
        arm_start_deg=5.0,
        piece_colour=0.05,
        piece_tint=0.03,
        light_intensity=0.4,
        light_position_m=0.3,
        camera_position_m=0.01,
        camera_angle_deg=2.0,
        piece_friction=0.2,
        piece_mass=0.25,
        board_colour=0.06,
        board_tint=0.03,
        servo_gain=0.1,
        joint_damping=0.2,
    ),
}


def _named[T](value: str | Mapping[str, float] | T, kind: type[T], presets: dict[str, T], name: str) -> T:
    """A preset's name, a mapping of fields or the dataclass itself, as the dataclass."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        _require(value in presets, f"{name}={value!r}: allowed are {', '.join(map(repr, presets))}")
        return presets[value]
    if isinstance(value, Mapping):
        known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
        unknown = sorted(set(value) - set(known))
        _require(not unknown, f"{name} has no field {unknown}: allowed are {', '.join(known)}")
        return kind(**value)
    raise ConfigError(
        f"{name}={value!r}: give one of {', '.join(map(repr, presets))}, a dict of fields or a {kind.__name__}"
    )


def _pieces(value: object) -> tuple[PieceKind, ...]:
    """ "all", one kind, kinds separated by commas, or a sequence of kinds, in the order of `PIECES`."""
    names = PIECES if value == "all" else value.split(",") if isinstance(value, str) else value
    allowed = f"allowed are 'all' and {', '.join(map(repr, PIECES))}"
    _require(isinstance(names, (tuple, list)) and len(names) > 0, f"pieces={value!r}: {allowed}")
    assert isinstance(names, (tuple, list))
    unknown = [name for name in names if name not in PIECES]
    _require(not unknown, f"pieces={value!r} has {unknown}: {allowed}")
    return tuple(kind for kind in PIECES if kind in names)


def _image_size(value: int | tuple[int, int]) -> tuple[int, int]:
    size = (value, value) if isinstance(value, int) else tuple(value)
    low, high = IMAGE_SIZE_LIMITS
    _require(
        len(size) == 2 and all(isinstance(n, int) and low <= n <= high for n in size),
        f"image_size={value!r}: one size or (height, width) in pixels from {low} to {high} is needed",
    )
    return int(size[0]), int(size[1])


@dataclass(frozen=True)
class EnvConfig:
    """Every argument of `gymnasium.make("ChessPick-v0", ...)` but `render_mode`; see `ChessPickEnv`."""

    chunk_size: int = 50
    n_action_steps: int = 50
    seconds: float = 20.0
    image_size: tuple[int, int] = (256, 256)
    distractors: tuple[int, int] = (0, MAX_DISTRACTORS)
    pieces: tuple[PieceKind, ...] = DEFAULT_PIECES
    task: str = "white"
    early_stop: bool = False
    observation: str = "pixels"
    reward: RewardConfig = field(default_factory=RewardConfig)
    randomization: Randomization = field(default_factory=Randomization)
    physics_timestep: float = PHYSICS_TIMESTEP_S
    offsamples: int = 0
    measure: bool = True
    robot: str | None = None

    @classmethod
    def from_arguments(cls, **arguments: Any) -> "EnvConfig":
        """Arguments as users write them (preset names, one image size, lists) as a validated config.

        Raises:
            ConfigError: An argument is unknown or outside what is allowed.
        """
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(arguments) - set(known))
        if unknown:
            raise UnknownArgumentError(
                f"got an unexpected keyword argument {unknown[0]!r}: allowed are {', '.join(known)}"
            )
        values = dict(arguments)
        if "image_size" in values:
            _require(
                isinstance(values["image_size"], (int, tuple, list)),
                f"image_size={values['image_size']!r}: one size or (height, width) in pixels is needed",
            )
            values["image_size"] = _image_size(values["image_size"])
        if "distractors" in values:
            pair = values["distractors"]
            pair = (pair, pair) if isinstance(pair, int) else pair
            _require(
                isinstance(pair, (tuple, list)) and len(pair) == 2,
                f"distractors={values['distractors']!r}: a number or (lowest, highest) is needed",
            )
            values["distractors"] = tuple(pair)
        if "pieces" in values:
            values["pieces"] = _pieces(values["pieces"])
        if "reward" in values:
            values["reward"] = _named(values["reward"], RewardConfig, REWARDS, "reward")
        if "randomization" in values:
            values["randomization"] = _named(
                values["randomization"], Randomization, RANDOMIZATIONS, "randomization"
            )
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("chunk_size", "n_action_steps"):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"{name}={value!r}: a whole number of targets, at least 1, is needed",
            )
        _require(
            self.n_action_steps <= self.chunk_size,
            f"n_action_steps={self.n_action_steps} of a chunk_size={self.chunk_size}: at most the chunk can be executed",
        )
        _require(
            _is_number(self.seconds) and self.seconds * CONTROL_HZ >= 1,
            f"seconds={self.seconds!r}: a time of at least one frame (1/{CONTROL_HZ} s) is needed",
        )
        _image_size(self.image_size)
        low, high = self.distractors
        _require(
            all(isinstance(n, int) and not isinstance(n, bool) for n in self.distractors)
            and 0 <= low <= high <= MAX_DISTRACTORS,
            f"distractors={self.distractors!r}: (lowest, highest) with 0 <= lowest <= highest <= {MAX_DISTRACTORS}",
        )
        _require(
            _pieces(self.pieces) == self.pieces,
            f"pieces={self.pieces!r}: a tuple of different kinds in the order of {PIECES}: use EnvConfig.from_arguments",
        )
        _require(self.task in TASKS, f"task={self.task!r}: allowed are {', '.join(map(repr, TASKS))}")
        for name in ("early_stop", "measure"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name}={value!r}: True or False is needed")
        _require(
            self.observation in OBSERVATIONS,
            f"observation={self.observation!r}: allowed are {', '.join(map(repr, OBSERVATIONS))}",
        )
        _require(
            isinstance(self.reward, RewardConfig) and isinstance(self.randomization, Randomization),
            "reward and randomization must be a RewardConfig and a Randomization: use EnvConfig.from_arguments",
        )
        _require(
            isinstance(self.offsamples, int) and self.offsamples in (0, 2, 4, 8),
            f"offsamples={self.offsamples!r}: allowed are 0 (no anti-aliasing), 2, 4 and 8",
        )
        _require(
            self.robot is None or Path(self.robot).is_file(),
            f"robot={self.robot!r}: no such file; give the path of an SO-101 MJCF, or None for the built-in arm",
        )
        _ = self.physics_steps_per_frame

    @property
    def physics_steps_per_frame(self) -> int:
        """Physics steps in one control frame, exactly.

        Raises:
            ConfigError: `physics_timestep` does not divide a frame.
        """
        step = self.physics_timestep
        valid = _is_number(step) and step > 0
        ratio = 1.0 / (CONTROL_HZ * step) if valid else 0.0
        steps = round(ratio)
        _require(
            valid and steps >= 1 and abs(ratio - steps) < 1e-6,
            f"physics_timestep={step!r} does not divide a control frame of 1/{CONTROL_HZ} s: use 1/(30 * n), such as 1/240",
        )
        return steps

    @property
    def max_frames(self) -> int:
        """Control frames until the timeout."""
        return round(self.seconds * CONTROL_HZ)


DEFAULT_ARGUMENTS: dict[str, Any] = {
    **{item.name: getattr(EnvConfig(), item.name) for item in fields(EnvConfig)},
    "image_size": EnvConfig().image_size[0],
    "reward": "sparse",
    "randomization": "default",
}
"""Every argument of `gymnasium.make` with its default as a plain value: what the registered specification lists."""

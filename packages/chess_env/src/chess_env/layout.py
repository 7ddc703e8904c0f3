"""A scene is a pure function of (seed, index): which pieces stand where, the arm's start, and how it looks.

Every property is drawn from a stream of its own, so that changing one argument (the number of distractors, how far
the lights vary) leaves everything else of the scene as it was. Only raw bits of NumPy's Philox and SeedSequence are
used, whose streams NumPy guarantees, so a scene is the same with every NumPy version and on every machine.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Philox, SeedSequence
from numpy.typing import NDArray

from chess_env.board import REACHABLE_SQUARES, SQUARES
from chess_env.config import MAX_DISTRACTORS
from chess_env.errors import OptionError
from chess_env.pieces import DEFAULT_KINDS as TARGET_KINDS
from chess_env.pieces import PieceKind

DISTRACTOR_KINDS: tuple[PieceKind, ...] = ("pawn", "knight")
OFFSET_M = 0.003  # a piece stands this far from its square's centre at most, along each axis
MAX_SEED = 2**63 - 1
STREAMS = ("target", "distractors", "arm", "lights", "colours", "cameras", "friction")
POLICY_STREAM = len(STREAMS)


class Stream:
    """Random numbers of one property of one scene, from raw 64-bit outputs alone."""

    def __init__(self, seed: int, index: int, attempt: int, name: str) -> None:
        sequence = SeedSequence([seed, index], spawn_key=(attempt, STREAMS.index(name)))
        self._bits = Philox(sequence)

    def unit(self, size: int) -> NDArray[np.float64]:
        """`size` uniform numbers in [0, 1), with 53 bits each."""
        return (self._bits.random_raw(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def symmetric(self, size: int) -> NDArray[np.float64]:
        """`size` uniform numbers in [-1, 1)."""
        return 2.0 * self.unit(size) - 1.0

    def choice(self, count: int) -> int:
        """A whole number from 0 to count - 1."""
        return int(self.unit(1)[0] * count)

    def permutation(self, count: int) -> list[int]:
        """The numbers 0 to count - 1 in random order."""
        return np.argsort(self.unit(count), kind="stable").tolist()


@dataclass(frozen=True)
class PieceLayout:
    """One piece on the board: kind, square ("e4"), offset from its centre (x, y) [m], and yaw [rad]."""

    kind: PieceKind
    square: str
    offset_m: tuple[float, float]
    yaw: float


@dataclass(frozen=True)
class Variation:
    """How far each varied property is from its nominal value, as fractions in [-1, 1) of `Randomization`'s ranges.

    Attributes:
        arm_start: Six joints.
        piece_brightness: Target, distractors.
        piece_tint: Red, green and blue of the target, then of the distractors.
        light_intensity: One for all lights.
        light_position: x, y, z.
        camera_position: x, y, z of the top camera, then of the wrist camera.
        camera_angle: Rotation about x, y, z of the top camera, then of the wrist camera.
        piece_friction: One for all pieces.
    """

    arm_start: tuple[float, ...]
    piece_brightness: tuple[float, ...]
    piece_tint: tuple[float, ...]
    light_intensity: float
    light_position: tuple[float, ...]
    camera_position: tuple[float, ...]
    camera_angle: tuple[float, ...]
    piece_friction: float


@dataclass(frozen=True)
class Layout:
    """Everything that a reset needs to build a scene."""

    seed: int
    index: int
    attempt: int
    target: PieceLayout
    distractors: tuple[PieceLayout, ...]
    variation: Variation


def check_seed(value: int, name: str = "seed") -> int:
    """`value` as a Python int.

    Raises:
        OptionError: Not a whole number from 0 to 2**63 - 1.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise OptionError(f"{name}={value!r}: a whole number from 0 to 2**63 - 1 is needed")
    if not 0 <= int(value) <= MAX_SEED:
        raise OptionError(f"{name}={value!r}: a whole number from 0 to 2**63 - 1 is needed")
    return int(value)


def draw_layout(
    seed: int, index: int, distractors: tuple[int, int] = (0, MAX_DISTRACTORS), attempt: int = 0
) -> Layout:
    """The scene of (seed, index); `attempt` counts the redraws of a scene that was refused.

    `distractors` (lowest, highest number) decides how many stand on the board, not where: the first of a scene with
    few are the first of the same scene with many.
    """
    target_stream = Stream(seed, index, attempt, "target")
    kind = TARGET_KINDS[target_stream.choice(len(TARGET_KINDS))]
    square = REACHABLE_SQUARES[target_stream.choice(len(REACHABLE_SQUARES))]
    target = _piece(kind, square, target_stream.symmetric(3))

    others = Stream(seed, index, attempt, "distractors")
    low, high = distractors
    number = low + int(others.unit(1)[0] * (high - low + 1))
    free = [name for name in SQUARES if name != square]
    squares = [free[i] for i in others.permutation(len(free))[:MAX_DISTRACTORS]]
    kinds = [DISTRACTOR_KINDS[int(u * len(DISTRACTOR_KINDS))] for u in others.unit(MAX_DISTRACTORS)]
    places = others.symmetric(3 * MAX_DISTRACTORS).reshape(MAX_DISTRACTORS, 3)
    pieces = tuple(_piece(*item) for item in zip(kinds[:number], squares, places))
    return Layout(seed, index, attempt, target, pieces, _draw_variation(seed, index, attempt))


def _piece(kind: PieceKind, square: str, fractions: NDArray[np.float64]) -> PieceLayout:
    x, y, turn = fractions.tolist()
    return PieceLayout(kind, square, (OFFSET_M * x, OFFSET_M * y), float(np.pi * turn))


def _draw_variation(seed: int, index: int, attempt: int) -> Variation:
    arm, lights, colours, cameras, friction = (
        Stream(seed, index, attempt, name) for name in ("arm", "lights", "colours", "cameras", "friction")
    )
    return Variation(
        arm_start=tuple(arm.symmetric(6).tolist()),
        piece_brightness=tuple(colours.symmetric(2).tolist()),
        piece_tint=tuple(colours.symmetric(6).tolist()),
        light_intensity=float(lights.symmetric(1)[0]),
        light_position=tuple(lights.symmetric(3).tolist()),
        camera_position=tuple(cameras.symmetric(6).tolist()),
        camera_angle=tuple(cameras.symmetric(6).tolist()),
        piece_friction=float(friction.symmetric(1)[0]),
    )


def torch_seed(seed: int, index: int) -> int:
    """A 63-bit seed for the noise of a policy in this scene, whatever was redrawn."""
    bits = Philox(SeedSequence([seed, index], spawn_key=(0, POLICY_STREAM))).random_raw(1)
    return int(bits[0]) >> 1

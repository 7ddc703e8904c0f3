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
from chess_env.config import DEFAULT_PIECES, MAX_DISTRACTORS, PieceKind
from chess_env.errors import OptionError
from chess_env.position import SIDES, PositionPiece, Side

OFFSET_M = 0.003  # a piece stands this far from its square's centre at most, along each axis
MAX_SEED = 2**63 - 1
STREAMS = (
    "target", "distractors", "arm", "lights", "colours", "cameras", "friction", "policy", "sides", "mass", "board", "servos",
)  # fmt: skip
"""A scene depends on the order: new ones come last."""
WHITE_INSTRUCTION = "Pick up the white chess piece."


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
    """One piece on the board: kind, square ("e4"), offset from its centre (x, y) [m], yaw [rad], and colour."""

    kind: PieceKind
    square: str
    offset_m: tuple[float, float]
    yaw: float
    side: Side


@dataclass(frozen=True)
class Variation:
    """How far each varied property is from its nominal value, as fractions in [-1, 1) of `Randomization`'s ranges.

    Attributes:
        arm_start: Six joints.
        piece_brightness: White pieces, black pieces.
        piece_tint: Red, green and blue of the white pieces, then of the black ones.
        light_intensity: One for all lights.
        light_position: x, y, z.
        camera_position: x, y, z of the top camera, then of the wrist camera.
        camera_angle: Rotation about x, y, z of the top camera, then of the wrist camera.
        piece_friction: One for all pieces.
        piece_mass: One for all pieces.
        board_brightness: Light squares, dark squares.
        board_tint: Red, green and blue of the light squares, then of the dark ones.
        servo_gain: One for all joints.
        joint_damping: One for all joints.
    """

    arm_start: tuple[float, ...]
    piece_brightness: tuple[float, ...]
    piece_tint: tuple[float, ...]
    light_intensity: float
    light_position: tuple[float, ...]
    camera_position: tuple[float, ...]
    camera_angle: tuple[float, ...]
    piece_friction: float
    piece_mass: float
    board_brightness: tuple[float, ...]
    board_tint: tuple[float, ...]
    servo_gain: float
    joint_damping: float


@dataclass(frozen=True)
class Layout:
    """Everything that a reset needs to build a scene."""

    seed: int
    index: int
    attempt: int
    target: PieceLayout
    distractors: tuple[PieceLayout, ...]
    variation: Variation

    @property
    def pieces(self) -> tuple[PositionPiece, ...]:
        """The position: the target, then the distractors."""
        return tuple(PositionPiece(p.square, p.kind, p.side) for p in (self.target, *self.distractors))


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
    seed: int,
    index: int,
    distractors: tuple[int, int] = (0, MAX_DISTRACTORS),
    attempt: int = 0,
    *,
    kinds: tuple[PieceKind, ...] = DEFAULT_PIECES,
    task: str = "white",
    position: tuple[PositionPiece, ...] | None = None,
    square: str | None = None,
) -> Layout:
    """The scene of (seed, index).

    Args:
        seed: Scene seed.
        index: Index of the scene.
        distractors: Lowest and highest number of them. It decides how many stand on the board, not where: the first of
            a scene with few are the first of the same scene with many.
        attempt: Counts the redraws of a scene that was refused.
        kinds: What the target and the distractors may be.
        task: "white": the target is white, the others are black. "square": either colour for each.
        position: The pieces on the board in place of drawn ones; offsets, yaws and looks are still drawn.
        square: The target's square; None: drawn among those within reach.
    """
    variation = _draw_variation(seed, index, attempt)
    if position is not None:
        target, pieces = _of_position(seed, index, attempt, position, square)
        return Layout(seed, index, attempt, target, pieces, variation)
    sides = [SIDES[0]] + [SIDES[1]] * MAX_DISTRACTORS
    if task == "square":
        sides = [SIDES[int(2 * u)] for u in Stream(seed, index, attempt, "sides").unit(1 + MAX_DISTRACTORS)]
    target_stream = Stream(seed, index, attempt, "target")
    kind = kinds[target_stream.choice(len(kinds))]
    drawn = REACHABLE_SQUARES[target_stream.choice(len(REACHABLE_SQUARES))]
    square = drawn if square is None else square
    target = _piece(kind, square, target_stream.symmetric(3), sides[0])

    others = Stream(seed, index, attempt, "distractors")
    low, high = distractors
    number = low + int(others.unit(1)[0] * (high - low + 1))
    free = [name for name in SQUARES if name != square]
    squares = [free[i] for i in others.permutation(len(free))[:MAX_DISTRACTORS]]
    other_kinds = [kinds[int(u * len(kinds))] for u in others.unit(MAX_DISTRACTORS)]
    places = others.symmetric(3 * MAX_DISTRACTORS).reshape(MAX_DISTRACTORS, 3)
    pieces = tuple(_piece(*item) for item in zip(other_kinds[:number], squares, places, sides[1:]))
    return Layout(seed, index, attempt, target, pieces, variation)


def _of_position(
    seed: int, index: int, attempt: int, position: tuple[PositionPiece, ...], square: str | None
) -> tuple[PieceLayout, tuple[PieceLayout, ...]]:
    """Target and distractors of a given position. A piece's offset and yaw belong to its square."""
    if square is None:
        within_reach = [piece.square for piece in position if piece.square in REACHABLE_SQUARES]
        square = within_reach[Stream(seed, index, attempt, "target").choice(len(within_reach))]
    places = Stream(seed, index, attempt, "distractors").symmetric(3 * len(SQUARES)).reshape(len(SQUARES), 3)
    pieces = {p.square: _piece(p.kind, p.square, places[SQUARES.index(p.square)], p.side) for p in position}
    target = pieces.pop(square)
    return target, tuple(pieces.values())


def instruction(layout: Layout, task: str) -> str:
    """The sentence that names the target: by its colour with task "white", where that is enough, else by its square."""
    target, others = layout.target, layout.distractors
    if task == "white" and target.side == "white" and all(piece.side == "black" for piece in others):
        return WHITE_INSTRUCTION
    return f"Pick up the {target.kind} on {target.square}."


def _piece(kind: PieceKind, square: str, fractions: NDArray[np.float64], side: Side) -> PieceLayout:
    x, y, turn = fractions.tolist()
    return PieceLayout(kind, square, (OFFSET_M * x, OFFSET_M * y), float(np.pi * turn), side)


def _draw_variation(seed: int, index: int, attempt: int) -> Variation:
    names = ("arm", "lights", "colours", "cameras", "friction", "mass", "board", "servos")
    arm, lights, colours, cameras, friction, mass, squares, servos = (
        Stream(seed, index, attempt, name) for name in names
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
        piece_mass=float(mass.symmetric(1)[0]),
        board_brightness=tuple(squares.symmetric(2).tolist()),
        board_tint=tuple(squares.symmetric(6).tolist()),
        servo_gain=float(servos.symmetric(1)[0]),
        joint_damping=float(servos.symmetric(1)[0]),
    )


def torch_seed(seed: int, index: int) -> int:
    """A 63-bit seed for the noise of a policy in this scene, whatever was redrawn."""
    bits = Philox(SeedSequence([seed, index], spawn_key=(0, STREAMS.index("policy")))).random_raw(1)
    return int(bits[0]) >> 1

"""The chess board: squares and their places in the world.

World frame: origin at the arm's base on the table, x away from the arm, y to its left, z up. Lengths [m].
White's first rank is next to the arm and file a on its left (y > 0), as a player in the arm's seat sees it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chess_env.errors import ConfigError
from chess_env.so101 import PAN_AXIS_XY

NUM_FILES = 8
SQUARE_SIZE = 0.040  # a piece of 29 mm fits between its neighbours with a finger; 45 and 50 mm work too
BOARD_NEAR_X = 0.12  # nearer, the arm cannot fold enough
BOARD_TOP_Z = 0.012
BORDER_WIDTH = 0.010
HALF_WIDTH = SQUARE_SIZE * NUM_FILES / 2
CENTER_XY = np.array([BOARD_NEAR_X + HALF_WIDTH, 0.0])
CENTER_XY.setflags(write=False)
# Distance from the pan axis [m] in which the arm can pick with the finger tips near the board.
REACH_MIN = 0.135
REACH_MAX = 0.405

SQUARES = tuple(f"{file}{rank}" for rank in range(1, NUM_FILES + 1) for file in "abcdefgh")


def square_center(square: str) -> NDArray[np.float64]:
    """World position of a square's centre [m], shape (2,).

    Raises:
        ConfigError: not a square such as "e4".
    """
    if square not in SQUARES:
        raise ConfigError(f"square={square!r} is not a square of the board; use a1 to h8, for example 'e4'")
    file, rank = "abcdefgh".index(square[0]), int(square[1]) - 1
    return np.array([BOARD_NEAR_X + SQUARE_SIZE * (rank + 0.5), SQUARE_SIZE * (NUM_FILES / 2 - 0.5 - file)])


def square_at(xy_m: NDArray[np.float64]) -> str | None:
    """The square that holds the world position ``xy_m`` [m], shape (2,); None when it is beside the board."""
    rank = int(np.floor((xy_m[0] - BOARD_NEAR_X) / SQUARE_SIZE))
    file = int(np.floor((HALF_WIDTH - xy_m[1]) / SQUARE_SIZE))
    if not (0 <= rank < NUM_FILES and 0 <= file < NUM_FILES):
        return None
    return f"{'abcdefgh'[file]}{rank + 1}"


def reach_of(xy_m: NDArray[np.float64]) -> float:
    """Distance of a world position [m], shape (2,) or (3,), from the arm's pan axis [m]."""
    return float(np.hypot(xy_m[0] - PAN_AXIS_XY[0], xy_m[1] - PAN_AXIS_XY[1]))


REACHABLE_SQUARES = tuple(s for s in SQUARES if REACH_MIN <= reach_of(square_center(s)) <= REACH_MAX)

"""Reset options: which there are, what they may be, and whether an environment can build the scene they ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from chess_env import board
from chess_env.config import EnvConfig
from chess_env.errors import OptionError
from chess_env.layout import check_seed
from chess_env.position import PositionPiece, read_fen

RESET_OPTIONS = ("index", "check_expert", "early_stop", "fen", "square")
IGNORED_OPTIONS = ("lerobot_new_rollout",)  # LeRobot sends it with every reset


@dataclass(frozen=True)
class ResetOptions:
    """Checked options of one reset.

    Attributes:
        index: Of the scene; None: the next one.
        early_stop: None: as the environment was made.
        check_expert: Redraw until the expert solves the scene.
        position: The pieces on the board; None: drawn.
        square: The target's; None: drawn.
    """

    index: int | None = None
    early_stop: bool | None = None
    check_expert: bool = False
    position: tuple[PositionPiece, ...] | None = None
    square: str | None = None


def check_options(options: Mapping[str, Any] | None, config: EnvConfig) -> ResetOptions:
    """Options of one reset of an environment with this configuration.

    Raises:
        OptionError: An option is unknown, has a wrong value, or asks for a scene that this environment cannot build.
    """
    given = {name: value for name, value in (options or {}).items() if name not in IGNORED_OPTIONS}
    for name in given:
        if name not in RESET_OPTIONS:
            raise OptionError(f"unknown reset option {name!r}: allowed are {', '.join(RESET_OPTIONS)}")
    position = read_fen(_text(given, "fen")) if "fen" in given else None
    square = _text(given, "square") if "square" in given else None
    if square is not None:
        _check_square(square)
    if position is not None:
        _check_position(position, square, config)
    return ResetOptions(
        index=check_seed(given["index"], "index") if "index" in given else None,
        early_stop=_flag(given, "early_stop") if "early_stop" in given else None,
        check_expert=_flag(given, "check_expert") if "check_expert" in given else False,
        position=position,
        square=square,
    )


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given[name]
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(f"reset option {name}={value!r}: True or False is needed")
    return bool(value)


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given[name]
    if not isinstance(value, str):
        raise OptionError(f"reset option {name}={value!r}: a string is needed")
    return str(value)


def _check_square(square: str) -> None:
    if square not in board.SQUARES:
        raise OptionError(f"reset option square={square!r}: a square from a1 to h8 is needed, such as 'e4'")
    if square not in board.REACHABLE_SQUARES:
        beyond = [name for name in board.SQUARES if name not in board.REACHABLE_SQUARES]
        raise OptionError(
            f"reset option square={square!r} is out of the arm's reach: use any square but {', '.join(beyond)}"
        )


def _check_position(position: tuple[PositionPiece, ...], square: str | None, config: EnvConfig) -> None:
    """The environment has these pieces, and one of them can be the target."""
    occupied = [piece.square for piece in position]
    if square is not None and square not in occupied:
        raise OptionError(
            f"reset option square={square!r} is empty in the position: use one of {', '.join(occupied) or 'none: it has no piece'}"
        )
    if not set(occupied) & set(board.REACHABLE_SQUARES):
        raise OptionError("reset option fen: no piece of the position stands within the arm's reach")
    counts = Counter(piece.kind for piece in position)
    missing = sorted(set(counts) - set(config.pieces))
    if missing:
        raise OptionError(
            f"reset option fen: the position has a {missing[0]}, this environment has {', '.join(config.pieces)}: "
            "make it with pieces='all'"
        )
    room = config.distractors[1]
    for kind, count in counts.items():
        if count > room + 1:
            raise OptionError(
                f"reset option fen: the position has {count} pieces of kind {kind}, this environment {room + 1}: "
                f"make it with distractors=(0, {count - 1}) if that is at most 15"
            )
    if config.observation == "state" and len(position) - 1 > room:
        raise OptionError(
            f"reset option fen: environment_state has room for {room} pieces beside the target, the position has "
            f"{len(position) - 1}: use fewer, distractors=(0, 15), or observation='pixels'"
        )

"""Chess positions in Forsyth-Edwards notation, and back. Reading one needs the package ``chess``.

White's first rank is next to the arm and file a on its left, so the arm sits where White's player sits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from chess_env import board
from chess_env.config import PIECES, PieceKind
from chess_env.errors import OptionError

Side = Literal["white", "black"]
SIDES: tuple[Side, ...] = ("white", "black")
_LETTERS: dict[PieceKind, str] = dict(zip(PIECES, "pnbrqk", strict=True))


@dataclass(frozen=True)
class PositionPiece:
    """One piece of a position."""

    square: str
    kind: PieceKind
    side: Side


def read_fen(fen: str) -> tuple[PositionPiece, ...]:
    """The pieces of a FEN, or of its first field alone, in the order a1, b1, ... h8.

    Raises:
        OptionError: Not a FEN, or ``chess`` is not installed.
    """
    chess = _import_chess()
    try:
        position = chess.Board(fen) if " " in fen.strip() else chess.BaseBoard(fen.strip())
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"reset option fen={fen!r}: {reason}; a FEN or its first field is needed, such as '8/8/8/4N3/8/8/8/8'"
        ) from None
    pieces = position.piece_map()
    return tuple(
        PositionPiece(name, PIECES[pieces[number].piece_type - 1], SIDES[0 if pieces[number].color else 1])
        for number, name in enumerate(board.SQUARES)
        if number in pieces
    )


def write_placement(pieces: Iterable[PositionPiece]) -> str:
    """First field of the FEN of some pieces."""
    letters = {
        piece.square: _LETTERS[piece.kind].upper() if piece.side == "white" else _LETTERS[piece.kind]
        for piece in pieces
    }
    ranks = []
    for rank in range(board.NUM_FILES, 0, -1):
        row, empty = "", 0
        for file in "abcdefgh":
            letter = letters.get(f"{file}{rank}")
            if letter is None:
                empty += 1
                continue
            row += (str(empty) if empty else "") + letter
            empty = 0
        ranks.append(row + (str(empty) if empty else ""))
    return "/".join(ranks)


def _import_chess() -> ModuleType:
    try:
        import chess
    except ImportError:
        raise OptionError(
            "reset option fen needs the package chess: install it with `pip install chess-env[fen]`"
        ) from None
    return chess

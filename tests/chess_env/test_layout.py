"""Scenes are a pure function of (seed, index)."""

from collections import Counter

import numpy as np
import pytest

from chess_env.board import REACHABLE_SQUARES, SQUARES
from chess_env.config import PIECES
from chess_env.errors import OptionError
from chess_env.layout import (
    OFFSET_M,
    WHITE_INSTRUCTION,
    Stream,
    check_seed,
    draw_layout,
    instruction,
    torch_seed,
)
from chess_env.position import PositionPiece

GOLDEN_PIECES = ("pawn", "g4", 14)
GOLDEN_YAW = 3.097776294748543
GOLDEN_TORCH_SEED = 8679811155560811418


def test_layout_is_the_same_every_time_and_differs_between_indices_and_seeds():
    assert draw_layout(5, 3) == draw_layout(5, 3)
    layouts = {str(draw_layout(seed, index).target) for seed in (5, 6) for index in range(20)}
    assert len(layouts) == 40


def test_layout_is_the_stored_one():
    """Pinned numbers: a scene of a published result must never change."""
    layout = draw_layout(9_000_003, 0)
    assert (layout.target.kind, layout.target.square, len(layout.distractors)) == GOLDEN_PIECES
    assert layout.target.yaw == GOLDEN_YAW
    assert torch_seed(9_000_003, 0) == GOLDEN_TORCH_SEED


def test_stream_uses_the_top_53_bits_of_raw_philox_output():
    sequence = np.random.SeedSequence([7, 2], spawn_key=(1, 2))
    raw = np.random.Philox(sequence).random_raw(4)
    expected = [int(word) // 2**11 / 2**53 for word in raw]
    assert Stream(7, 2, 1, "arm").unit(4).tolist() == expected


def test_number_of_distractors_changes_nothing_else():
    for index in range(30):
        few, many = draw_layout(1, index, (0, 4)), draw_layout(1, index, (15, 15))
        assert few.target == many.target
        assert few.variation == many.variation
        assert few.distractors == many.distractors[: len(few.distractors)]
        assert len(many.distractors) == 15


def test_redraw_changes_the_pieces_but_not_the_noise_of_the_policy():
    first, second = draw_layout(1, 0, attempt=0), draw_layout(1, 0, attempt=1)
    assert first.target != second.target
    assert 0 <= torch_seed(1, 0) < 2**63
    assert len({torch_seed(1, index) for index in range(200)}) == 200


def test_pieces_stand_on_squares_of_their_own_and_the_target_within_reach():
    for index in range(200):
        layout = draw_layout(2, index, (0, 15))
        pieces = [layout.target, *layout.distractors]
        assert len({piece.square for piece in pieces}) == len(pieces)
        assert layout.target.square in REACHABLE_SQUARES
        assert all(abs(x) <= OFFSET_M for piece in pieces for x in piece.offset_m)
        assert all(-np.pi <= piece.yaw <= np.pi for piece in pieces)


def test_draws_are_even_over_kinds_squares_and_numbers():
    layouts = [draw_layout(3, index) for index in range(2000)]
    kinds = Counter(layout.target.kind for layout in layouts)
    assert abs(kinds["pawn"] - 1000) < 4 * np.sqrt(2000 * 0.25)  # 4 standard deviations of a fair coin
    assert {layout.target.square for layout in layouts} == set(REACHABLE_SQUARES)
    numbers = Counter(len(layout.distractors) for layout in layouts)
    assert sorted(numbers) == list(range(16))
    assert all(abs(count - 125) < 4 * np.sqrt(2000 / 16) for count in numbers.values())


def test_kinds_are_drawn_evenly_from_those_allowed_and_move_nothing():
    layouts = [draw_layout(3, index, kinds=PIECES) for index in range(1200)]
    for kinds in (
        Counter(layout.target.kind for layout in layouts),
        Counter(piece.kind for layout in layouts for piece in layout.distractors),
    ):
        assert set(kinds) == set(PIECES)
        total = sum(kinds.values())
        assert all(abs(n - total / 6) < 4 * np.sqrt(total * 5 / 36) for n in kinds.values())
    for index, layout in enumerate(layouts[:20]):
        two = draw_layout(3, index)
        assert [(p.square, p.offset_m, p.yaw) for p in (layout.target, *layout.distractors)] == [
            (p.square, p.offset_m, p.yaw) for p in (two.target, *two.distractors)
        ]


def test_only_the_target_is_white_unless_the_task_names_the_square():
    for index in range(50):
        layout = draw_layout(4, index)
        assert layout.target.side == "white" and {p.side for p in layout.distractors} <= {"black"}
        assert instruction(layout, "white") == WHITE_INSTRUCTION == "Pick up the white chess piece."
    layouts = [draw_layout(4, index, task="square") for index in range(300)]
    sides = Counter(layout.target.side for layout in layouts)
    assert abs(sides["white"] - 150) < 4 * np.sqrt(300 * 0.25)
    alike = [any((p.side, p.kind) == (x.target.side, x.target.kind) for p in x.distractors) for x in layouts]
    assert sum(alike) > 150  # of the target's colour and kind
    target = layouts[0].target
    assert instruction(layouts[0], "square") == f"Pick up the {target.kind} on {target.square}."


def test_target_stands_on_the_square_that_is_asked_for_and_nobody_else():
    for index in range(40):
        layout = draw_layout(5, index, (15, 15), square="d5")
        assert layout.target.square == "d5"
        assert "d5" not in {piece.square for piece in layout.distractors}
        assert layout.target.kind == draw_layout(5, index).target.kind


def test_pieces_of_a_position_have_offsets_of_their_square_alone():
    position = (
        PositionPiece("a1", "king", "white"), PositionPiece("c3", "knight", "black"), PositionPiece("e4", "pawn", "white"),
    )  # fmt: skip
    layout = draw_layout(6, 2, position=position, square="c3")
    assert (layout.target.kind, layout.target.square, layout.target.side) == ("knight", "c3", "black")
    assert [piece.square for piece in layout.distractors] == ["a1", "e4"]
    assert layout.variation == draw_layout(6, 2).variation
    without_king = draw_layout(6, 2, position=position[1:], square="e4")
    assert without_king.target == layout.distractors[1] and without_king.distractors == (layout.target,)
    assert draw_layout(6, 3, position=position, square="c3").target.offset_m != layout.target.offset_m
    assert draw_layout(6, 2, attempt=1, position=position, square="c3").target.yaw != layout.target.yaw


def test_target_of_a_position_without_a_square_is_drawn_among_those_within_reach():
    position = tuple(PositionPiece(name, "pawn", "black") for name in SQUARES if name[1] in "18")
    drawn = {draw_layout(7, index, position=position).target.square for index in range(300)}
    assert drawn == {piece.square for piece in position} & set(REACHABLE_SQUARES)


@pytest.mark.parametrize("value", [-1, 2**63, 1.5, True, "3", None])
def test_wrong_seed_is_named(value):
    with pytest.raises(OptionError, match="a whole number from 0 to"):
        check_seed(value)


def test_numpy_integers_are_seeds():
    assert check_seed(np.int64(7)) == 7

"""`chess-expert`: its table against counts by hand, and two scenes of it."""

import pytest

from chess_apps.config import ExpertConfig
from chess_apps.expert_gate import Outcome, run, table
from flowrl.errors import FlowRLError


def outcome(index: int, piece: str, num_distractors: int, clean: bool) -> Outcome:
    return Outcome(index, piece, "e4", num_distractors, "success" if clean else "timeout", clean)


def test_table_counts_by_kind_and_by_number_of_distractors_with_wilson_intervals():
    outcomes = [outcome(i, "pawn", 3, clean=i > 0) for i in range(10)]
    outcomes += [outcome(i, "king", 4, clean=True) for i in range(2)]
    rows = {line.split(" | ")[0].strip("| "): line for line in table(outcomes)[2:]}
    assert set(rows) == {"all", "pawn", "king", "0 to 3 distractors", "4 to 7 distractors"}
    # Wilson, z = 1.96: (9 + 1.92) / 13.84 -+ 1.96 / 13.84 * sqrt(9 * 1 / 10 + 0.96) = 0.789 -+ 0.193
    assert rows["pawn"] == "| pawn | 9/10 | 90.0 % | 59.6 to 98.2 |"
    assert rows["0 to 3 distractors"] == "| 0 to 3 distractors | 9/10 | 90.0 % | 59.6 to 98.2 |"
    assert rows["king"].startswith("| king | 2/2 | 100.0 % | 34.2 to 100.0")
    assert rows["all"].startswith("| all | 11/12 | 91.7 %")


def test_two_scenes_of_all_kinds_are_tried_and_printed(capsys):
    run(ExpertConfig(episodes=2, pieces="all", task="square", distractors=(0, 2), workers=1))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| all | ") and "/2 |" in line for line in lines)
    assert lines[-1].startswith("ends: {")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"episodes": 0}, "--episodes 0: at least 1"),
        ({"workers": 0}, "--workers 0: at least 1"),
        ({"pieces": "ace"}, "pieces='ace' has"),
    ],
)
def test_wrong_flag_is_one_readable_line(flags, message):
    with pytest.raises(FlowRLError, match=message):
        run(ExpertConfig(**flags))

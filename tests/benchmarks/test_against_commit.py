"""Two commits in turn: the fastest process counts, and a commit that is not there is told."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def against_commit(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("against_commit")


def test_fastest_process_counts_with_the_mean_of_its_iterations(against_commit):
    runs = [
        [{"rollout_s": 4.0, "update_s": 6.0, "decisions": 70}, {"rollout_s": 5.0, "update_s": 5.0, "decisions": 80}],
        [{"rollout_s": 3.0, "update_s": 4.0, "decisions": 70}, {"rollout_s": 4.0, "update_s": 5.0, "decisions": 80}],
    ]  # fmt: skip
    assert against_commit.summary(runs) == {
        "rollout_s": 3.5, "update_s": 4.5, "iteration_s": 8.0, "decisions": 75, "all_iterations_s": [10.0, 8.0],
    }  # fmt: skip


def test_unknown_commit_is_one_line(against_commit):
    with pytest.raises(SystemExit, match="no such commit"):
        against_commit.commit_of("no-such-branch")

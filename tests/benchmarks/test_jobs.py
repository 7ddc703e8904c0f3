"""The driver of the long measurements: nothing twice, nothing past the time limit, no failure unsaid."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("jobs")


def job(jobs, folder, name, code, needs_s=0.0, weight=1):
    """A job of one Python program whose result is the file `folder/name`."""
    command = [sys.executable, "-c", f"from pathlib import Path; out = Path({str(folder / name)!r}); {code}"]
    return jobs.Job(name, [jobs.Step(lambda: command, (folder / name).exists, needs_s)], weight)


def run(jobs, todo, folder, seconds=60.0, parallel=2):
    machine = jobs.Machine(cores=[0], gpus=[])
    return jobs.run_jobs(todo, folder, time.monotonic() + seconds, machine, parallel)


def test_what_is_done_is_not_done_again(jobs, tmp_path):
    todo = [job(jobs, tmp_path, name, "out.touch()") for name in ("a", "b", "c")]
    assert run(jobs, todo, tmp_path) == {"a": "done", "b": "done", "c": "done"}
    (tmp_path / "b").unlink()
    assert run(jobs, todo, tmp_path) == {"a": "done", "b": "done", "c": "done"}
    lines = [json.loads(line) for line in (tmp_path / "jobs.jsonl").read_text().splitlines()]
    assert sorted(line["job"] for line in lines) == ["a", "b", "b", "c"]


def test_a_failure_is_told_after_a_second_attempt_and_stops_no_other(jobs, tmp_path):
    todo = [
        job(jobs, tmp_path, "broken", "print('the reason'); raise SystemExit(5)"),
        job(jobs, tmp_path, "silent", "pass"),
        job(jobs, tmp_path, "good", "out.touch()"),
    ]
    outcome = run(jobs, todo, tmp_path)
    assert outcome["broken"] == "FAILED, exit code 5: the reason"
    assert outcome["silent"].startswith("FAILED, it ended without its result")
    assert outcome["good"] == "done"
    codes = [json.loads(line)["code"] for line in (tmp_path / "jobs.jsonl").read_text().splitlines()]
    assert sorted(codes) == [0, 0, 0, 5, 5]


def test_a_program_that_works_at_the_second_attempt_is_done(jobs, tmp_path):
    mark = tmp_path / "tried"
    code = f"m = Path({str(mark)!r}); out.touch() if m.exists() else m.touch()"
    assert run(jobs, [job(jobs, tmp_path, "a", code)], tmp_path) == {"a": "done"}


def test_time_limit_stops_what_runs_and_starts_nothing_that_needs_longer(jobs, tmp_path):
    limit = jobs.STOP_BEFORE_S + 0.5
    todo = [
        job(jobs, tmp_path, "endless", "import time; time.sleep(600)"),
        job(jobs, tmp_path, "large", "out.touch()", needs_s=300.0),
    ]
    start = time.monotonic()
    outcome = run(jobs, todo, tmp_path, seconds=limit)
    assert time.monotonic() - start < limit
    assert outcome["endless"] == "not finished"
    assert outcome["large"] == "not finished: its next program needs about 300 s"
    assert not (tmp_path / "large").exists()


def test_cores_are_shared_by_weight_and_gpus_in_turn(jobs, tmp_path):
    machine = jobs.Machine(cores=list(range(32)), gpus=["0", "1"])
    todo = [job(jobs, tmp_path, str(weight), "", weight=weight) for weight in (16, 5, 5, 6)]
    slots = machine.slots(todo, 4)
    assert [len(slot.cores) for slot in slots] == [16, 5, 5, 6]
    assert sorted(core for slot in slots for core in slot.cores) == list(range(32))
    assert [slot.gpu for slot in slots] == ["0", "1", "0", "1"]
    assert [len(slot.cores) for slot in machine.slots([*todo, *todo], 4)] == [8] * 4


def test_threads_of_openmp_do_not_hide_cores(jobs, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CORES", raising=False)
    assert len(jobs.Machine(gpus=[]).cores) == len(os.sched_getaffinity(0))

"""Two processes cannot work in one run's folder."""

import os
import signal
import subprocess
import sys

import pytest

from flowrl.errors import FlowRLError
from flowrl.lock import run_lock
from flowrl.record import check_unused

HOLD = """
import sys
from pathlib import Path
from flowrl.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(out) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_folder_that_another_process_has_is_refused_and_one_whose_process_was_killed_is_not(tmp_path):
    out = tmp_path / "run"
    process = hold(out)
    try:
        with (
            pytest.raises(FlowRLError, match="another process is training in it; wait") as error,
            run_lock(out),
        ):
            pass
        assert "\n" not in str(error.value) and (out / ".lock").is_file()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert (out / ".lock").is_file()
    check_unused(out)  # what the killed one left is no run
    with run_lock(out):
        (out / "args.json").write_text("{}")
    assert [path.name for path in out.iterdir()] == ["args.json"]


def test_folders_that_nothing_was_written_to_are_removed(tmp_path):
    with pytest.raises(RuntimeError), run_lock(tmp_path / "runs" / "new"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    with run_lock(tmp_path / "old"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "old"]


def test_the_second_of_two_locks_in_one_process_is_refused_too(tmp_path):
    with (
        run_lock(tmp_path / "run"),
        pytest.raises(FlowRLError, match="another process"),
        run_lock(tmp_path / "run"),
    ):
        pass

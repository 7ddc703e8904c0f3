"""The processes of chess-demos, chess-bc and chess-expert: Ctrl-C and errors end them at once, a dead one is named."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from chess_apps.recording import worker_pool
from flowrl.errors import FlowRLError

PROGRAM = """
import os, time
from chess_apps.recording import worker_pool

def main():
    with worker_pool(2) as pool:
        print(*[pool.submit(os.getpid).result() for _ in range(2)], flush=True)
        futures = [pool.submit(time.sleep, 600) for _ in range(4)]
        {then}
        futures[-1].result()

if __name__ == "__main__":
    main()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(start_script, tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """The program, and the workers that it has started."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(then=then))
    program = start_script(script)
    assert program.stdout is not None
    return program, [int(word) for word in program.stdout.readline().split()]


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["terminal", "kill"])
def test_ctrl_c_ends_busy_workers_and_is_one_traceback(send, start_script, tmp_path):
    program, workers = start(start_script, tmp_path, "print('busy', flush=True)")
    assert program.stdout is not None and program.stdout.readline() == "busy\n"
    send(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=30)  # the work would take 20 minutes
    assert program.returncode != 0
    assert errors.count("Traceback") == 1 and errors.strip().endswith("KeyboardInterrupt")
    assert workers and not any(map(is_running, workers))


def test_an_error_of_the_program_ends_busy_workers(start_script, tmp_path):
    program, workers = start(start_script, tmp_path, "raise RuntimeError('of the program')")
    _, errors = program.communicate(timeout=30)
    assert program.returncode == 1
    assert errors.count("Traceback") == 1 and errors.strip().endswith("RuntimeError: of the program")
    assert workers and not any(map(is_running, workers))


def test_a_worker_that_dies_is_one_readable_line():
    began = time.monotonic()
    with (
        pytest.raises(FlowRLError, match=r"one of 1 worker processes died, .*fewer workers") as caught,
        worker_pool(1) as pool,
    ):
        pool.submit(os._exit, 1).result(timeout=60)
    assert "\n" not in str(caught.value) and time.monotonic() - began < 60

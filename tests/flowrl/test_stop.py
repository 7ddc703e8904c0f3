"""Ctrl-C and SIGTERM on a running training: one message, a complete checkpoint, exit code 0."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from flowrl.checkpoint import load_training_state

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from flowrl.cli import run_program
from flowrl.config import TrainConfig
from flowrl.train import train
from toy import load_toy

config = TrainConfig(
    policy="none", env_id="{env_id}", out={out!r}, iterations=100000, envs=2, episodes=4, val_episodes=2, val_every=3,
    save_every=100000, device="cpu",
)


def program(args):
    train(config, lambda path, **_: load_toy(path))


if __name__ == "__main__":
    sys.exit(run_program(program, []))
"""


def start(
    start_script, tmp_path: Path, env_id: str = "toy_env:ToyReach-v0"
) -> tuple[subprocess.Popen[str], Path]:
    program, out = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM.format(tests=str(TESTS), out=str(out), env_id=env_id))
    return start_script(program), out


def wait_for_lines(out: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "log.jsonl").is_file() and (out / "log.jsonl").read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not start")


def iterations(out: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (out / "log.jsonl").read_text().splitlines()]


def session_is_empty(pid: int) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_process_group_saves_and_ends_cleanly(start_script, tmp_path, number):
    process, out = start(start_script, tmp_path)
    wait_for_lines(out, 3)
    os.killpg(process.pid, number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert (
        "Traceback" not in told and "Exception" not in told and told.count("finishing the current step") == 1
    )
    state = load_training_state(out / "last")
    assert state.meta["iteration"] == iterations(out)[-1]
    assert state.meta["next_index"] == 4 * state.meta["iteration"]
    assert session_is_empty(process.pid)


def test_dead_environment_is_one_line_and_exit_code_2(start_script, tmp_path):
    process, _ = start(start_script, tmp_path, "toy_env:ToyDying-v0")
    _, told = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in told
    assert told.strip().splitlines()[-1].startswith("error: ") and "process died" in told
    assert session_is_empty(process.pid)

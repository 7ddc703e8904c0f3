"""What has to be set before MuJoCo is imported, and the signals that programs under test inherit."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if (
    sys.platform == "linux"
):  # chess_env chooses EGL by itself; MuJoCo's own renderer, which some tests use, has to be told
    os.environ.setdefault("MUJOCO_GL", "egl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what is in the background so; the programs that tests start would inherit it, and no
    # Ctrl-C would reach them. A signal with a handler is at its default in a new program.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start_script():
    """Starts a script in a session of its own, of which nothing is left after the test, whatever it found."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        program = subprocess.Popen(
            [sys.executable, str(path)], stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        started.append(program)
        return program

    yield start
    for program in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()

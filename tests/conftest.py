"""What has to be set before MuJoCo is imported, and the signals that programs under test inherit."""

import os
import signal
import sys

if (
    sys.platform == "linux"
):  # chess_env chooses EGL by itself; MuJoCo's own renderer, which some tests use, has to be told
    os.environ.setdefault("MUJOCO_GL", "egl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what is in the background so; the programs that tests start would inherit it, and no
    # Ctrl-C would reach them. A signal with a handler is at its default in a new program.
    signal.signal(signal.SIGINT, signal.default_int_handler)

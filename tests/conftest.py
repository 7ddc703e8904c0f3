"""What has to be set before MuJoCo is imported."""

import os
import sys

if (
    sys.platform == "linux"
):  # chess_env chooses EGL by itself; MuJoCo's own renderer, which some tests use, has to be told
    os.environ.setdefault("MUJOCO_GL", "egl")

"""A fresh interpreter for tests of what a process imports, prints and leaves behind."""

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code`; `environment` adds variables."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )

"""One process at a time in a run's folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrl.errors import FlowRLError
from flowrl.record import LOCK, writing


@contextmanager
def run_lock(out: Path) -> Iterator[None]:
    """Holds the folder of a run, and creates it. A folder in which nothing was written is removed again.

    The operating system holds the lock for the process and ends it with the process, so one that was killed blocks nobody.

    Raises:
        FlowRLError: another process has the folder, or it cannot be written.
    """
    if out.is_file():  # told by who looks into the folder
        yield
        return
    created = [folder for folder in (out, *out.parents) if not folder.exists()]
    path = out / LOCK
    with writing(path):
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino
        except BlockingIOError:
            is_ours = False
        if not is_ours:  # the other one may have removed the file just now
            raise FlowRLError(
                f"--out {out}: another process is training in it; wait until it ends, or choose another folder"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                for folder in created:
                    folder.rmdir()
    finally:
        os.close(descriptor)

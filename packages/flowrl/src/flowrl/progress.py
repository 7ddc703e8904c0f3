"""Progress of a long stage: a bar in a terminal, plain lines otherwise."""

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Counts to `total` with rate and time left; a context manager.

    Args:
        label: What is counted, for example "iteration 3: episodes".
        total: How many there are.
        unit: Name of one, for example "episode".
    """

    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._start = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total, desc=label, unit=unit, leave=False, dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def advance(self, count: int = 1, note: str = "") -> None:
        """Counts `count` more; `note` is shown beside the numbers."""
        self.done += count
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            rate = self.done / (now - self._start)
            left = (self.total - self.done) / rate if rate > 0 else float("inf")
            tell(
                f"{self.label}: {self.done}/{self.total}, {rate:.2f} {self.unit}/s, {left:.0f} s left {note}".rstrip()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def tell(line: str) -> None:
    """Prints one line on stderr, above a bar where there is one."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()

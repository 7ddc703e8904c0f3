"""Ctrl-C and SIGTERM ask for an orderly end; the second Ctrl-C aborts."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from flowrl.progress import tell


class StopRequest:
    """Context manager that turns the first SIGINT or SIGTERM into `requested`, and a second SIGINT into KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = True
            tell(
                f"{signal.Signals(number).name}: finishing the current step, then saving; Ctrl-C (again) aborts"
            )

"""SIGTERM and SIGINT ask for a stop; the ranks agree on it after a step or between two packs of an evaluation."""

from __future__ import annotations

import signal
from types import FrameType


class StopAsked(Exception):
    """Raised on every rank at the same place, once any of them has been asked to stop."""


class StopRequest:
    """Becomes true at the first signal. Further signals change nothing."""

    def __init__(self) -> None:
        self.requested = False

    def __bool__(self) -> bool:
        return self.requested

    def install(self) -> StopRequest:
        """Take over SIGTERM and SIGINT of this process (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

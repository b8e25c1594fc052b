"""Tokens per second of training, without the time that evaluations and checkpoints take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ThroughputMeter:
    """Counts clean tokens (text that the model trains on; noised copies are not counted) against a clock.

    Args:
        clock: seconds, from anywhere.
        earlier: training seconds of earlier sittings of the same run.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, earlier: float = 0.0) -> None:
        self._clock, self._earlier = clock, earlier
        self._mark = clock()
        self._trained, self._tokens, self._pauses = 0.0, 0, 0
        self._since_last = 0.0

    def step(self, tokens: int) -> float:
        """Note that a step of ``tokens`` clean tokens (over all ranks) has ended.

        Returns:
            Tokens per second of this step.
        """
        self._collect()
        seconds, self._since_last = self._since_last, 0.0
        self._tokens += tokens
        return tokens / seconds if seconds > 0 else 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count. May be nested."""
        if self._pauses == 0:
            self._collect()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._mark = self._clock()

    def average(self) -> float:
        """Tokens per second over all steps of this sitting."""
        return self._tokens / self._trained if self._trained > 0 else 0.0

    def seconds(self) -> float:
        """Training seconds so far, earlier sittings included."""
        if self._pauses == 0:
            self._collect()
        return self._earlier + self._trained

    def _collect(self) -> None:
        now = self._clock()
        self._trained += now - self._mark
        self._since_last += now - self._mark
        self._mark = now

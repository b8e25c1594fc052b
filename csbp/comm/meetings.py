"""A barrier for threads at which values change hands, and which ends all waiting threads as soon as one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class LoopbackError(RuntimeError):
    """The simulated ranks do not fit together, or one of them failed while others waited for it."""


@dataclass
class Meeting:
    """What each rank brought, and, once all are there, what each takes home.

    Attributes:
        number: counts the meetings of a rank from 0.
        what: words for the messages of errors; all ranks must have come for the same.
    """

    number: int
    what: str
    brought: dict[int, Any] = field(default_factory=dict)
    results: list[Any] | None = None


class Meetings:
    """The meetings of ``world`` threads, one after another. Joining one does not wait; ``take`` does.

    Attributes:
        timeout: seconds that ``take`` waits for the others.
        error: the rank that failed first, and its error.
    """

    def __init__(self, world: int, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.error: tuple[int, BaseException] | None = None
        self._changed = threading.Condition()
        self._open: dict[int, Meeting] = {}
        self._joined = [0] * world  # how many meetings each rank has come to
        self._done: set[int] = set()

    def join(self, rank: int, what: str, value: Any, finish: Callable[[list[Any]], list[Any]]) -> Meeting:
        """Bring a value to this rank's next meeting; the last rank to come computes what all take home.

        Args:
            what: what this rank has come for.
            finish: from all ranks' values to all ranks' results.

        Raises:
            LoopbackError: another rank is there for something else, has finished or has failed; or ``finish`` says
                that the values do not fit.
        """
        with self._changed:
            self._raise_if_failed()
            number = self._joined[rank]
            self._joined[rank] += 1
            meeting = self._open.setdefault(number, Meeting(number, what))
            meeting.brought[rank] = value
            try:
                if meeting.what != what:
                    other = next(iter(meeting.brought))
                    raise LoopbackError(f"exchange {number}: rank {other} is at {meeting.what}, rank {rank} at {what}")
                self._check_absent(meeting)
                if len(meeting.brought) == self.world:
                    meeting.results = finish([meeting.brought[r] for r in range(self.world)])
                    del self._open[number]
                    self._changed.notify_all()
            except LoopbackError as error:
                self._fail(rank, error)
                raise
            return meeting

    def take(self, rank: int, meeting: Meeting) -> Any:
        """Wait for the others; this rank's result.

        Raises:
            LoopbackError: some rank has failed, or did not come in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: meeting.results is not None or self.error, self.timeout):
                absent = [r for r in range(self.world) if r not in meeting.brought]
                self._fail(rank, LoopbackError(f"exchange {meeting.number}: rank {rank} waited {self.timeout:g} s at "
                                               f"{meeting.what} for ranks {absent}"))
            if meeting.results is None:
                self._raise_if_failed()
            assert meeting.results is not None
            return meeting.results[rank]

    def leave(self, rank: int) -> None:
        """A rank has finished.

        Raises:
            LoopbackError: others wait for it, in vain.
        """
        with self._changed:
            self._done.add(rank)
            self._changed.notify_all()
            for meeting in self._open.values():
                self._check_absent(meeting)

    def abort(self, rank: int, error: BaseException) -> None:
        """End all waiting threads, and every later meeting, with an error of this rank; the first one counts."""
        with self._changed:
            self._fail(rank, error)

    def wait_for_all(self) -> None:
        """Wait until every rank has left, or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.error or len(self._done) == self.world)

    def _fail(self, rank: int, error: BaseException) -> None:
        self.error = self.error or (rank, error)
        self._changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self.error is not None:
            rank, error = self.error
            raise LoopbackError(f"rank {rank} failed: {type(error).__name__}: {error}") from error

    def _check_absent(self, meeting: Meeting) -> None:
        for rank in sorted(self._done - meeting.brought.keys()):
            raise LoopbackError(f"exchange {meeting.number}: rank {rank} finished after {self._joined[rank]} "
                                f"exchanges, ranks {sorted(meeting.brought)} wait for it at {meeting.what}")

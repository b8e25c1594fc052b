"""Many simulated ranks in one process: exchanges are carried by hand, checked and counted.

``LoopbackWorld.lock_step`` drives the phases of one operation for all ranks at once, in one thread (planning and
attention for 64 ranks on a laptop). ``run_threads`` gives every rank a thread and a ``LoopbackTransport``, so that
whole models run, as over a process group. Where a real network would hang or mix up rows, here an error says what
the ranks disagree about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from csbp.comm.meetings import LoopbackError, Meeting, Meetings
from csbp.comm.transport import Counting, Outgoing, Pending

Result = TypeVar("Result")
Steps = Generator[Outgoing | None, Tensor | None, Result]
# After a failure the other threads get this long to come to their next exchange and end.
GRACE_SECONDS = 2.0


def carry(outgoing: Sequence[Outgoing]) -> list[Tensor]:
    """Bring one exchange to an end.

    Args:
        outgoing: what each rank sends, by rank.

    Returns:
        What each rank receives: [sum(receive_counts), ...], grouped by source rank, in memory of its own: where it
        asked for it.

    Raises:
        LoopbackError: labels, dtypes, row shapes or counts of two ranks do not fit.
    """
    world, first = len(outgoing), outgoing[0]
    for rank, one in enumerate(outgoing):
        for name, mine, theirs in (("label", one.label, first.label), ("dtype", one.rows.dtype, first.rows.dtype),
                                   ("row shape", tuple(one.rows.shape[1:]), tuple(first.rows.shape[1:]))):
            if mine != theirs:
                raise LoopbackError(f"rank 0 exchanges {name} {theirs}, rank {rank} {mine}")
        if not len(one.send_counts) == len(one.receive_counts) == world or sum(one.send_counts) != len(one.rows):
            raise LoopbackError(f"rank {rank} of {world} sends {len(one.rows)} rows by counts {one.send_counts} and "
                                f"receives by {one.receive_counts}")
    for source in range(world):
        for target in range(world):
            sent, awaited = outgoing[source].send_counts[target], outgoing[target].receive_counts[source]
            if sent != awaited:
                raise LoopbackError(f"rank {source} sends {sent} rows of {first.label!r} to rank {target}, "
                                    f"which awaits {awaited}")
    parts = [one.rows.split(one.send_counts) for one in outgoing]
    return [torch.cat([part[rank] for part in parts], out=outgoing[rank].into) for rank in range(world)]


class LoopbackWorld:
    """``world`` simulated ranks.

    Attributes:
        transports: one a rank; they count rows and bytes in either way of driving.
        meetings: where the threads of ``run_threads`` wait for each other.
    """

    def __init__(self, world: int, timeout: float = 60.0) -> None:
        """``timeout``: seconds that a thread waits in one exchange for the others."""
        assert world > 0
        self.world = world
        self.meetings = Meetings(world, timeout)
        self.transports = tuple(LoopbackTransport(self.meetings, rank) for rank in range(world))

    def transport(self, rank: int) -> LoopbackTransport:
        """One rank's transport."""
        return self.transports[rank]

    def lock_step(self, steps: Sequence[Steps[Result]]) -> list[Result]:
        """Run every rank's generator to its next request, carry all rows, go on.

        Args:
            steps: one a rank. Each yields an ``Outgoing`` to start an exchange and None to be sent what arrived from
                the oldest one that it has not received yet.

        Returns:
            What the generators return, by rank.

        Raises:
            LoopbackError: the ranks ask for different things, or their exchanges do not fit.
        """
        assert len(steps) == self.world
        flying: list[list[Tensor]] = []
        replies: list[Tensor] | None = None
        while True:
            asked: list[tuple[str, Any]] = []
            for rank, one in enumerate(steps):
                try:
                    request = one.send(replies[rank] if replies else None)
                    asked.append(("receive", None) if request is None else ("send", request))
                except StopIteration as stop:
                    asked.append(("finish", stop.value))
            action = asked[0][0]
            for rank, (other, _) in enumerate(asked):
                if other != action:
                    raise LoopbackError(f"rank 0 is to {action}, rank {rank} to {other}")
            values, replies = [value for _, value in asked], None
            if action == "finish":
                return values
            if action == "send":
                for transport, outgoing in zip(self.transports, values, strict=True):
                    transport.count(outgoing)
                flying.append(carry(values))
            elif not flying:
                raise LoopbackError("the ranks wait for an exchange that none has started")
            else:
                replies = flying.pop(0)


class LoopbackTransport(Counting):
    """One simulated rank's ``Transport``, for a thread of its own (see ``run_threads``)."""

    def __init__(self, meetings: Meetings, rank: int) -> None:
        super().__init__(rank, meetings.world)
        self._meetings = meetings

    def start(self, outgoing: Outgoing) -> Pending:
        """Begin an exchange without waiting for the others.

        Raises:
            LoopbackError: another rank is at something else, has finished or has failed.
        """
        self.count(outgoing)
        meeting = self._meetings.join(self.rank, f"an exchange of {outgoing.label!r}", outgoing, carry)
        return _Started(self._meetings, self.rank, meeting)

    def gather(self, value: Any, label: str = "values") -> list[Any]:
        """Every rank's value, by rank; waits for all. What sums and broadcasts over the ranks are made of."""
        meeting = self._meetings.join(self.rank, f"a gathering of {label!r}", value,
                                      lambda brought: [list(brought) for _ in brought])
        return self._meetings.take(self.rank, meeting)


@dataclass(frozen=True)
class _Started:
    meetings: Meetings
    rank: int
    meeting: Meeting

    def wait(self) -> Tensor:
        return self.meetings.take(self.rank, self.meeting)


def run_threads(world: LoopbackWorld, function: Callable[[LoopbackTransport], Result]) -> list[Result]:
    """Call ``function`` once for every rank, each on its own thread, with the rank's transport.

    Args:
        world: the ranks; a world whose threads have run is not used for threads again.
        function: one rank's whole work. It must touch nothing that another rank's call changes.

    Returns:
        The results, by rank.

    Raises:
        The error of the rank that failed first, with its rank as a note; the other ranks end at their next exchange.
        LoopbackError: the ranks' exchanges differ in number, order or size, or a rank was waited for too long.
    """
    results: dict[int, Result] = {}
    meetings = world.meetings

    def work(rank: int) -> None:
        try:
            results[rank] = function(world.transport(rank))
            meetings.leave(rank)
        except BaseException as error:  # also SystemExit: the others must not wait for this rank
            meetings.abort(rank, error)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank{rank}", daemon=True)
               for rank in range(world.world)]
    for thread in threads:
        thread.start()
    try:
        meetings.wait_for_all()
    except BaseException as interruption:  # a test's timeout or Ctrl-C, raised in this thread
        meetings.abort(-1, interruption)
        raise
    end = time.monotonic() + GRACE_SECONDS
    for thread in threads:
        # A thread cannot be killed: one that computes without end is left behind, and dies with the process.
        thread.join(max(0.0, end - time.monotonic()) if meetings.error else None)
    if meetings.error is not None:
        rank, error = meetings.error
        error.add_note(f"on simulated rank {rank} of {world.world}")
        raise error
    return [results[rank] for rank in range(world.world)]


__all__ = ["LoopbackError", "LoopbackTransport", "LoopbackWorld", "carry", "run_threads"]

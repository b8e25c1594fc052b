"""Moving rows between the ranks of the sequence axis.

A transport starts an uneven all-to-all and hands back something to wait for. It also counts what leaves
the rank, so that tests can hold the bytes against the plan. Three exist: a process group, nothing at all
for one rank, and ``loopback`` for simulated ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from csbp.comm.buffers import Buffers


@dataclass(frozen=True)
class Outgoing:
    """Rows to send.

    Attributes:
        rows: [sum(send_counts), ...], grouped by destination rank.
        send_counts, receive_counts: rows per peer; a rank sends none to itself.
        label: what travels, for the counters: "keys", "queries", "outputs", "gradients" or "query_gradients".
        into: memory like ``rows`` for what is received; None: new memory.
    """

    rows: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    label: str
    into: Tensor | None = None


class Pending(Protocol):
    """A started exchange."""

    def wait(self) -> Tensor:
        """[sum(receive_counts), ...], grouped by source rank."""
        ...


class Transport(Protocol):
    """What the attention operator needs of a network."""

    rank: int
    world: int
    sent_rows: dict[str, int]
    sent_bytes: dict[str, int]
    waited_seconds: float
    buffers: Buffers

    def start(self, outgoing: Outgoing) -> Pending:
        """Begin; every rank of the axis must start the same exchanges in the same order, empty or not."""
        ...


class Counting:
    """Rank, world, counters and memory of a transport."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.buffers = Buffers()
        self.sent_rows: dict[str, int] = {}
        self.sent_bytes: dict[str, int] = {}
        self.waited_seconds = 0.0  # of the host, for exchanges that were not over when their rows were needed
        # To measure: events of the device's stream before and after each wait. None: no events are made.
        self.waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def count(self, outgoing: Outgoing) -> None:
        """Note what leaves the rank."""
        rows, label = outgoing.rows, outgoing.label
        self.sent_rows[label] = self.sent_rows.get(label, 0) + len(rows)
        self.sent_bytes[label] = self.sent_bytes.get(label, 0) + rows.numel() * rows.element_size()


@dataclass(frozen=True)
class _Done:
    received: Tensor

    def wait(self) -> Tensor:
        return self.received


@dataclass(frozen=True)
class _InFlight:
    work: dist.Work
    received: Tensor
    sent: Tensor  # kept alive until the exchange is over
    transport: Counting

    def wait(self) -> Tensor:
        waits = self.transport.waits
        if waits is not None:
            waits.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            waits[-1][0].record()
        started = time.perf_counter()
        self.work.wait()
        self.transport.waited_seconds += time.perf_counter() - started
        if waits is not None:
            waits[-1][1].record()
        return self.received


class LocalTransport(Counting):
    """One rank: nothing travels."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def start(self, outgoing: Outgoing) -> Pending:
        """Nothing to send and nothing to wait for."""
        assert len(outgoing.rows) == 0
        return _Done(outgoing.rows)


class ProcessGroupTransport(Counting):
    """All-to-all over torch.distributed process groups (gloo or NCCL): ``group``, and ``home`` for gradients on their
    way to their owners, which may have to wait long for a peer's."""

    def __init__(self, group: dist.ProcessGroup, home: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group, self.home = group, home or group

    def start(self, outgoing: Outgoing) -> Pending:
        """Begin the exchange without waiting for it."""
        self.count(outgoing)
        sent = outgoing.rows.contiguous()
        received = outgoing.into
        if received is None:
            received = sent.new_empty(sum(outgoing.receive_counts), *sent.shape[1:])
        group = self.home if outgoing.label in ("gradients", "query_gradients") else self.group
        work = dist.all_to_all_single(received, sent, list(outgoing.receive_counts),
                                      list(outgoing.send_counts), group=group, async_op=True)
        assert work is not None
        return _InFlight(work, received, sent, self)

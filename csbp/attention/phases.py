"""The distributed forward and backward of one attention layer, as steps that any transport can drive.

Each function is a generator: it yields an ``Outgoing`` to start an exchange and later None to be sent what arrived from
the oldest one that it has not received yet; between the two it computes. A process group drives one rank; a simulation
drives many in lock-step. Where query rows move (see ``guests``), every rank takes part in their exchanges, empty or
not. Legend: S query rows, Sc own clean rows, Sn own noised rows, R received rows, F guest rows, N query heads, K
key/value heads, D head dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.attention.core import Backend, merge
from csbp.attention.guests import BoundGuests, Pair, outgoing, unpack
from csbp.attention.mask import IntervalMask
from csbp.attention.reference import compute_dtype
from csbp.comm.buffers import Buffers
from csbp.comm.transport import Outgoing, Pending, Transport

Phases = Generator[Outgoing | None, Tensor | None, "tuple[Tensor, ...]"]


@dataclass(frozen=True)
class BoundKind:
    """One layer kind of a rank's plan, on its device.

    Attributes:
        here: mask into [own clean rows | own noised rows].
        arrived: mask into the received rows in global order.
        sees_far: whether it lets any row see any.
        send: int64, own rows to send, by destination; in the "csbp" scheme clean rows only.
        to_global: int64 [R], permutation of the received rows into global order.
        backend: the kernel.
        travels: whether any rank sends anything.
        num_clean: Sc.
        wire: dtype in which gradients travel home; None: that of the keys.
        guests: its part in moving query rows; None where no rank's do.
        memory: for what travels.
    """

    here: IntervalMask
    arrived: IntervalMask
    sees_far: bool
    send: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    to_global: Tensor
    backend: Backend
    travels: bool
    num_clean: int
    wire: torch.dtype | None
    guests: BoundGuests | None
    memory: Buffers

    def ship(self, key: Tensor, value: Tensor) -> Outgoing:
        """Own keys and values on their way to those who need them."""
        rows = torch.cat((key[self.send], value[self.send]), -1)
        return outgoing(rows, self.send_counts, self.receive_counts, "keys", self.memory)

    def unpack(self, received: Tensor | None, key: Tensor, value: Tensor) -> tuple[Pair, Pair]:
        """(K, V) of the received rows in global order (the one copy they need), and (K, V) that guests see."""
        assert received is not None
        rows, guests, clean = len(self.to_global), self.guests, self.num_clean
        both = guests is not None and guests.received and guests.own
        found = []
        for own, part in ((key, received[..., :key.shape[-1]]), (value, received[..., key.shape[-1]:])):
            all_rows = self.memory.take((rows + clean * both, *own.shape[1:]), own.dtype)
            torch.index_select(part, 0, self.to_global, out=all_rows[:rows])
            if both:
                all_rows[rows:] = own[:clean]
            found.append((all_rows[:rows], own[:clean] if guests is not None and not guests.received else all_rows))
        (far_key, seen_key), (far_value, seen_value) = found
        return (far_key, far_value), (seen_key, seen_value)

    def home(self, parts: list[tuple[Tensor, Tensor]], key: Tensor, value: Tensor) -> Outgoing:
        """Gradients of the received rows on their way to their owners.

        Args:
            parts: gradients of K and of V, [R, K, D] each, to be added.
        """
        wire = self.wire or key.dtype
        rows = self.memory.take((len(self.to_global), key.shape[1], key.shape[2] + value.shape[2]), wire)
        if parts:
            wide = compute_dtype(key.dtype)
            sums = [side[0] if len(side) == 1 else side[0].to(wide) + side[1].to(wide)
                    for side in zip(*parts, strict=True)]
            rows[self.to_global] = torch.cat(sums, -1).to(wire)
        else:
            rows.zero_()
        return outgoing(rows, self.receive_counts, self.send_counts, "gradients", self.memory)


def forward_phases(query: Tensor, key: Tensor, value: Tensor, kind: BoundKind, scale: float) -> Phases:
    """Attention of one rank's queries [S, N, D] over all rows they see, here and elsewhere.

    Args:
        key, value: [Sc + Sn, K, D], own clean rows, then own noised rows.

    Returns:
        (out [S, N, D], lse [S, N]).
    """
    backend, guests, memory = kind.backend, kind.guests, kind.memory
    memory.begin(query.device)
    if kind.travels:
        yield kind.ship(key, value)
    if guests is not None:
        yield guests.lend(query, memory)
    whole = backend.forward(query, key, value, kind.here, scale)
    if not kind.travels:
        return whole
    far, seen = kind.unpack((yield None), key, value)
    if guests is not None:
        asked = yield None
        assert asked is not None
        yield guests.attend(asked, seen, backend, scale, memory)
    if kind.sees_far:
        whole = merge([whole, backend.forward(query, *far, kind.arrived, scale)])
    if guests is not None:
        returned = yield None
        assert returned is not None
        lse, out = unpack(returned, [(x.shape[1:], x.dtype) for x in whole[::-1]])
        whole = guests.merge(whole, (out, lse))
    return whole


def backward_phases(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                    kind: BoundKind, scale: float) -> Phases:
    """Gradients of query, key and value, in their dtype.

    The rows travel a second time (shards are kept, never gathered buffers). Gradients of received rows are computed
    first, those of guests before those of own rows, and travel home while the local part runs; an owner adds them in
    rank order.
    """
    backend, guests, memory, wide = kind.backend, kind.guests, kind.memory, compute_dtype(key.dtype)
    memory.begin(query.device)
    if kind.travels:
        yield kind.ship(key, value)
    if guests is not None:
        yield guests.lend_all(dout, query, out, lse, memory)
    dq_far: Tensor | None = None
    own_clean: Pair | None = None  # what guests give own clean rows
    if kind.travels:
        rows, parts = len(kind.to_global), []
        far, seen = kind.unpack((yield None), key, value)
        if guests is not None:
            lent = yield None
            assert lent is not None
            wire = kind.wire or query.dtype
            back, of_keys = guests.gradients(lent, (lse, query, out), seen, backend, scale, memory, wire)
            yield back
            if guests.received:
                parts.append((of_keys[0][:rows], of_keys[1][:rows]))
            if guests.own:
                first = rows if guests.received else 0
                own_clean = of_keys[0][first:], of_keys[1][first:]
        if kind.sees_far:
            dq_far, *rest = backend.backward(dout, query, *far, out, lse, kind.arrived, scale)
            parts.append((rest[0], rest[1]))
        yield kind.home(parts, key, value)
    dq, dk, dv = backend.backward(dout, query, key, value, out, lse, kind.here, scale)
    if dq_far is not None:
        dq += dq_far
    if guests is not None:
        guests.add(dq, (yield None))
    if kind.travels:
        dk, dv = dk.to(wide), dv.to(wide)
        if own_clean is not None:
            dk[:kind.num_clean] += own_clean[0].to(wide)
            dv[:kind.num_clean] += own_clean[1].to(wide)
        returned = yield None
        assert returned is not None
        for mine, part in zip(kind.send.split(kind.send_counts), returned.split(kind.send_counts), strict=True):
            # A source rank names each row at most once, so the order of the sum is the order of ranks.
            dk[mine] += part[..., :key.shape[-1]].to(wide)
            dv[mine] += part[..., key.shape[-1]:].to(wide)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


@dataclass(frozen=True)
class _Received:
    rows: Tensor

    def wait(self) -> Tensor:
        return self.rows


@torch.compiler.disable  # the body of an op must not be traced when the code around it falls back to eager
def drive(phases: Phases, transport: Transport, overlap: bool = True) -> tuple[Tensor, ...]:
    """Run one rank's phases over its transport.

    Args:
        overlap: False waits for each exchange as soon as it has started: what overlap hides is then seen.
    """
    reply: Tensor | None = None
    pending: deque[Pending] = deque()
    while True:
        try:
            request = phases.send(reply)
        except StopIteration as stop:
            return stop.value
        if request is None:
            reply = pending.popleft().wait()
        else:
            started = transport.start(request)
            pending.append(started if overlap else _Received(started.wait()))
            reply = None

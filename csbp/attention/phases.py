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

from csbp.attention.bound import BoundKind, Gradients
from csbp.attention.guests import unpack
from csbp.attention.merge import Pair, merge_next
from csbp.attention.reference import compute_dtype
from csbp.attention.sums import total
from csbp.comm.transport import Outgoing, Pending, Transport

Phases = Generator[Outgoing | None, Tensor | None, "tuple[Tensor, ...]"]


def forward_phases(query: Tensor, key: Tensor, value: Tensor, kind: BoundKind, scale: float) -> Phases:
    """Attention of one rank's queries [S, N, D] over all rows they see, here and elsewhere.

    Args:
        key, value: [Sc + Sn, K, D], own clean rows, then own noised rows.

    Returns:
        (out [S, N, D], lse [S, N]).
    """
    backend, guests, memory = kind.backend, kind.guests, kind.memory
    memory.begin(query.device)
    for stage in kind.stages:
        yield kind.ship(stage, key, value)
    if guests is not None:
        yield guests.lend(query, memory)
    whole = backend.forward(query, key, value, kind.here, scale)
    last = max((place for place, stage in enumerate(kind.stages) if stage.sees_far), default=0)
    for place, stage in enumerate(kind.stages):
        far, seen = kind.unpack(stage, (yield None), key, value)
        if guests is not None:
            asked = yield None
            assert asked is not None
            yield guests.attend(asked, seen, backend, scale, memory)
        if stage.sees_far:
            # One part after another: what is rounded each time is rounded little.
            dtype = query.dtype if place == last else compute_dtype(query.dtype)
            whole = merge_next(whole, backend.forward(query, *far, stage.arrived, scale), dtype)
    if guests is not None:
        returned = yield None
        assert returned is not None
        lse, out = unpack(returned, [(x.shape[1:], x.dtype) for x in whole[::-1]])
        guests.merge(whole, (out, lse))
    return whole


def backward_phases(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                    kind: BoundKind, scale: float) -> Phases:
    """Gradients of query, key and value, in their dtype.

    The rows travel a second time (shards are kept, never gathered buffers). A part of the local work runs while they
    come; then gradients of received rows are computed, stage by stage, those of guests before those of own rows, and
    travel home while the next stage and the rest of the local work run. An owner adds them in the order of stages and
    ranks.
    """
    guests, memory, mine = kind.guests, kind.memory, (dout, query, key, value, out, lse)
    memory.begin(query.device)
    for stage in kind.stages:
        yield kind.ship(stage, key, value)
    if guests is not None:
        yield guests.lend_all(dout, query, out, lse, memory)
    early = [kind.local(part, *mine, scale) for part in kind.parts[:-1]]
    dq_far: Tensor | None = None
    own_clean: Pair | None = None  # what guests give own clean rows
    for stage in kind.stages:
        rows, parts = len(stage.to_global), []
        far, seen = kind.unpack(stage, (yield None), key, value)
        if guests is not None:
            lent = yield None
            assert lent is not None
            back, of_keys = guests.gradients(lent, (lse, query, out), seen, kind.backend, scale, memory,
                                             kind.wire or query.dtype)
            yield back
            if guests.received:
                parts.append((of_keys[0][:rows], of_keys[1][:rows]))
            if guests.own:
                first = rows if guests.received else 0
                own_clean = of_keys[0][first:], of_keys[1][first:]
        if stage.sees_far:
            dq, *rest = kind.backend.backward(dout, query, *far, out, lse, stage.arrived, scale)
            dq_far = dq if dq_far is None else dq_far.to(compute_dtype(dq.dtype)).add_(dq)
            parts.append((rest[0], rest[1]))
        yield kind.home(stage, parts, key, value)
    local = [kind.local(kind.parts[-1], *mine, scale), *early]  # of which the last has seen all keys
    dq = _queries([*early, local[0]], dq_far)
    if guests is not None:
        guests.add(dq, (yield None))
    keys = [(dk, dv) for _, dk, dv in local] + ([] if own_clean is None else [own_clean])
    for place, stage in enumerate(kind.stages):
        last = place == len(kind.stages) - 1
        keys = [kind.with_returned(stage, keys, (yield None), key.dtype if last else compute_dtype(key.dtype))]
    dk, dv = (total(side, key.dtype) for side in zip(*keys, strict=True))
    return dq.to(query.dtype), dk, dv


def _queries(parts: list[Gradients], dq_far: Tensor | None) -> Tensor:
    """Gradients of query rows: each part has its own; ``dq_far`` of all of them is added."""
    if dq_far is None:
        return parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts])
    for mine, (part, *_) in zip(dq_far.split([len(part[0]) for part in parts]), parts, strict=True):
        mine += part
    return dq_far


@dataclass(frozen=True)
class _Received:
    rows: Tensor

    def wait(self) -> Tensor:
        """What has come already."""
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

"""The distributed forward and backward of one attention layer, as steps that any transport can drive.

Each function is a generator: it yields an ``Outgoing`` to start an exchange and later None to be sent what
arrived; between the two it computes. A process group drives one rank; a simulation drives many in
lock-step. Legend: S query rows, Sc own clean rows, Sn own
noised rows, R received rows, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.attention.core import Backend, merge
from csbp.attention.mask import IntervalMask
from csbp.attention.reference import compute_dtype
from csbp.comm.transport import Outgoing, Pending, Transport

Phases = Generator[Outgoing | None, Tensor | None, "tuple[Tensor, ...]"]


@dataclass(frozen=True)
class BoundKind:
    """One layer kind of a rank's plan, on its device.

    Attributes:
        here: mask into [own clean rows | own noised rows].
        arrived: mask into the received rows in global order.
        send: int64, own rows to send, by destination; in the "csbp" scheme clean rows only.
        to_global: int64 [R], permutation of the received rows into global order.
        backend: the kernel.
        travels: whether any rank sends anything.
        wire: dtype in which gradients travel home; None: that of the keys.
    """

    here: IntervalMask
    arrived: IntervalMask
    send: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    to_global: Tensor
    backend: Backend
    travels: bool
    wire: torch.dtype | None = None


def _ship(key: Tensor, value: Tensor, kind: BoundKind) -> Outgoing:
    rows = torch.cat((key[kind.send], value[kind.send]), -1)
    return Outgoing(rows, kind.send_counts, kind.receive_counts, "keys")


def _unpack(received: Tensor | None, kind: BoundKind, key_dim: int) -> tuple[Tensor, Tensor]:
    """Received rows in global order, K and V apart (the one copy they need)."""
    assert received is not None
    return received[..., :key_dim][kind.to_global], received[..., key_dim:][kind.to_global]


def forward_phases(query: Tensor, key: Tensor, value: Tensor, kind: BoundKind, scale: float) -> Phases:
    """Attention of one rank's queries [S, N, D] over all rows they see, here and elsewhere.

    Args:
        key, value: [Sc + Sn, K, D], own clean rows, then own noised rows.

    Returns:
        (out [S, N, D], lse [S, N]).
    """
    if kind.travels:
        yield _ship(key, value, kind)
    here = kind.backend.forward(query, key, value, kind.here, scale)
    if not kind.travels:
        return here
    far_key, far_value = _unpack((yield None), kind, key.shape[-1])
    return merge([here, kind.backend.forward(query, far_key, far_value, kind.arrived, scale)])


def backward_phases(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                    kind: BoundKind, scale: float) -> Phases:
    """Gradients of query, key and value, in their dtype.

    The rows travel a second time (shards are kept, never gathered buffers). Gradients of received rows are
    computed first and travel home while the local part runs; an owner adds them in rank order.
    """
    if kind.travels:
        yield _ship(key, value, kind)
    key_dim = key.shape[-1]
    dq_far: Tensor | None = None
    if kind.travels:
        far_key, far_value = _unpack((yield None), kind, key_dim)
        dq_far, dk_far, dv_far = kind.backend.backward(dout, query, far_key, far_value, out, lse, kind.arrived,
                                                       scale)
        wire = kind.wire or key.dtype
        home = torch.empty(*far_key.shape[:2], key_dim + value.shape[-1], dtype=wire, device=key.device)
        home[kind.to_global] = torch.cat((dk_far, dv_far), -1).to(wire)
        yield Outgoing(home, kind.receive_counts, kind.send_counts, "gradients")
    dq, dk, dv = kind.backend.backward(dout, query, key, value, out, lse, kind.here, scale)
    if kind.travels:
        assert dq_far is not None
        dq += dq_far
        returned = yield None
        assert returned is not None
        dk, dv = dk.to(compute_dtype(dk.dtype)), dv.to(compute_dtype(dv.dtype))
        for rows, part in zip(kind.send.split(kind.send_counts), returned.split(kind.send_counts), strict=True):
            # A source rank names each row at most once, so the order of the sum is the order of ranks.
            dk[rows] += part[..., :key_dim].to(dk.dtype)
            dv[rows] += part[..., key_dim:].to(dv.dtype)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


@torch.compiler.disable  # the body of an op must not be traced when the code around it falls back to eager
def drive(phases: Phases, transport: Transport) -> tuple[Tensor, ...]:
    """Run one rank's phases over its transport."""
    reply: Tensor | None = None
    pending: Pending | None = None
    while True:
        try:
            request = phases.send(reply)
        except StopIteration as stop:
            return stop.value
        if request is None:
            assert pending is not None
            reply, pending = pending.wait(), None
        else:
            reply, pending = None, transport.start(request)

"""The distributed attention operator, and a rank's plan bound to its device and transport.

The operator is a pair of custom ops, ``csbp::attend`` and ``csbp::attend_backward``: opaque to
``torch.compile`` and visible to selective activation checkpointing, which keeps (out, lse) and never runs
attention again. A plan crosses into an op as an integer handle. Legend: S query rows, Sc own clean rows,
Sn own noised rows, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csbp.attention.bound import BoundKind, bind_kind
from csbp.attention.core import check_shapes, default_scale, resolved
from csbp.attention.phases import backward_phases, drive, forward_phases
from csbp.attention.reference import compute_dtype
from csbp.comm.buffers import Buffers
from csbp.comm.transport import Transport
from csbp.plan.plan import RankPlan
from csbp.plan.stages import AT_ONCE, Stages


@dataclass(frozen=True, eq=False)
class _Call:
    """What an op needs beside tensors."""

    kind: BoundKind
    transport: Transport
    overlap: bool


# Handle -> call. Whoever made a plan keeps it until its backwards are done; a plan that is gone leaves no trace.
_CALLS: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
_HANDLES = itertools.count(1)


class BoundPlan:
    """A rank's plan with its index tensors on the device, a kernel and a transport.

    Keep it until every backward that used it is done.

    Attributes:
        rank_plan: the pure plan it was made from.
        native: where nothing travels, use a kernel's own autograd if it has one. Selective checkpointing does not see
            it as attention, and a compiler cannot trace how it is given its mask.
        transport: how rows travel, while attention runs unless ``overlap`` is False (to measure what that hides), in
            shares, as ``stages`` has it, of which the first is attended while the others come.
        kinds: layer kind name -> masks and exchange.
        num_clean, num_noised: own rows of the two streams (a dummy row counts as noised).
        numbers_layers: whether ``attend`` must be told the layer's number.
    """

    numbers_layers = False

    def __init__(self, rank_plan: RankPlan, transport: Transport, device: torch.device | str = "cpu",
                 backend: str = "auto", wire: torch.dtype | None = None, native: bool = False,
                 overlap: bool = True, stages: Stages = AT_ONCE) -> None:
        assert (rank_plan.rank, rank_plan.world) == (transport.rank, transport.world)
        self.rank_plan, self.transport, self.native = rank_plan, transport, native
        self.num_clean, self.num_noised = len(rank_plan.rows.clean), len(rank_plan.rows.noised)
        travels = rank_plan.world > 1 and rank_plan.scheme != "block"
        plain = Buffers(reuse=False)
        self.kinds = {name: bind_kind(kind, self.num_clean, device, backend, wire,
                                      plain if kind.guests is None else transport.buffers,
                                      stages=stages if travels else None, overlap=overlap)
                      for name, kind in rank_plan.kinds.items()}
        self._calls = {name: _Call(kind, transport, overlap) for name, kind in self.kinds.items()}
        self._handles = {name: next(_HANDLES) for name in self.kinds}
        for name, handle in self._handles.items():
            _CALLS[handle] = self._calls[name]

    def attend(self, kind: str, query: Tensor, key: Tensor, value: Tensor, *, layer: int,
               scale: float | None = None) -> Tensor:
        """Attention of an ordinary decoder layer over this rank's rows [own clean | own noised].

        Args:
            kind: layer kind name.
            query: [S, N, D]; key, value: [S, K, D], all S = Sc + Sn rows.
            layer: the layer's number; unused here, a generation cache needs it.
            scale: score factor; default 1 / sqrt(D).

        Returns:
            [S, N, D].

        Raises:
            ValueError: unknown kind, or rows, heads or dtypes that do not fit the plan.
        """
        if kind not in self.kinds:
            raise ValueError(f"layer_kind={kind!r}: the plan has {', '.join(self.kinds)}")
        check_shapes(query, key, value, len(self.kinds[kind].here))
        rows = self.num_clean + (self.num_noised if self.rank_plan.kinds[kind].kind.noised else 0)
        if len(key) != rows:
            raise ValueError(f"{len(key)} keys; the plan gives this rank {rows}")
        bound = self.kinds[kind]
        whole = getattr(resolved(bound.backend, query, value), "attend", None) if self.native else None
        if whole is not None and not bound.stages and len(query) and len(key):
            return whole(query, key, value, bound.here, default_scale(query, scale))[0]
        out, _ = torch.ops.csbp.attend(query, key, value, self._handles[kind], default_scale(query, scale))
        return out


@torch.library.custom_op("csbp::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    call = _CALLS[handle]
    out, lse = drive(forward_phases(query, key, value, call.kind, scale), call.transport, call.overlap)
    return out.contiguous(), lse.t().contiguous().t()  # as promised below, whatever the backend


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    rows, heads = query.shape[:2]
    return (query.new_empty(rows, heads, value.shape[2]),
            query.new_empty(heads, rows, dtype=compute_dtype(query.dtype)).t())


@torch.library.custom_op("csbp::attend_backward", mutates_args=())
def _attend_backward(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, handle: int,
                     scale: float) -> tuple[Tensor, Tensor, Tensor]:
    call = _CALLS[handle]
    phases = backward_phases(dout, query, key, value, out, lse, call.kind, scale)
    dq, dk, dv = drive(phases, call.transport, call.overlap)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_attend_backward.register_fake
def _(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, handle: int,
      scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.handle, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.set_materialize_grads(False)
    if type(ctx.handle) is int:  # while a compiler traces, it may be a symbol
        ctx.call = _CALLS.get(ctx.handle)  # an eager graph keeps its plan alive by itself


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dlse is None, "the log-sum-exp of csbp::attend is for its backward, not for a loss"
    if dout is None:
        return None, None, None, None, None
    query, key, value, out, lse = ctx.saved_tensors
    grads = torch.ops.csbp.attend_backward(dout, query, key, value, out, lse, ctx.handle, ctx.scale)
    return (*grads, None, None)


_attend.register_autograd(_backward, setup_context=_setup)


def attend_distributed(query: Tensor, key_clean: Tensor, value_clean: Tensor, key_noised: Tensor,
                       value_noised: Tensor, plan: BoundPlan, layer_kind: str, *,
                       scale: float | None = None) -> Tensor:
    """softmax(QK^T)V where the clean keys are sharded over the ranks and the noised ones are at home.

    Collective: every rank of the sequence axis calls it for the same layers in the same order, with
    gradients or without alike. Exact: gradients are those of one device holding every row.

    Args:
        query: [S, N, D], this rank's query rows: its clean rows, then its noised, as the kind has them.
        key_clean, value_clean: [Sc, K, D], this rank's shard of the clean stream.
        key_noised, value_noised: [Sn, K, D], this rank's own blocks, [0, K, D] in a pass over clean rows
            alone. They never leave the rank.
        plan: this rank's plan. layer_kind: which of its kinds this layer is.
        scale: score factor; default 1 / sqrt(D).

    Returns:
        [S, N, D]; rows that see nothing are 0.

    Raises:
        ValueError: unknown kind, or rows, heads or dtypes that do not fit the plan.
    """
    if len(key_clean) != plan.num_clean or len(value_clean) != plan.num_clean:
        raise ValueError(f"{len(key_clean)} clean keys; the plan gives this rank {plan.num_clean}")
    return plan.attend(layer_kind, query, torch.cat((key_clean, key_noised)),
                       torch.cat((value_clean, value_noised)), layer=0, scale=scale)

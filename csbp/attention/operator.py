"""The distributed attention operator, and a rank's plan bound to its device and transport.

Legend: S query rows, Sc own clean rows, Sn own noised rows, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from csbp.attention.core import check_shapes, default_scale, get_backend
from csbp.attention.mask import IntervalMask
from csbp.attention.phases import BoundKind, backward_phases, drive, forward_phases
from csbp.comm.transport import Transport
from csbp.plan.plan import KindPlan, RankPlan


class BoundPlan:
    """A rank's plan with its index tensors on the device, a kernel and a transport.

    Attributes:
        rank_plan: the pure plan it was made from.
        transport: how clean rows travel.
        kinds: layer kind name -> masks and exchange.
        num_clean, num_noised: own rows of the two streams (a dummy row counts as noised).
    """

    def __init__(self, rank_plan: RankPlan, transport: Transport, device: torch.device | str = "cpu",
                 backend: str = "auto") -> None:
        assert (rank_plan.rank, rank_plan.world) == (transport.rank, transport.world)
        self.rank_plan, self.transport = rank_plan, transport
        self.num_clean, self.num_noised = len(rank_plan.rows.clean), len(rank_plan.rows.noised)
        travels = rank_plan.world > 1 and rank_plan.scheme != "block"
        self.kinds = {name: _bind(kind, travels, device, backend) for name, kind in rank_plan.kinds.items()}

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
        """
        clean = self.num_clean
        return attend_distributed(query, key[:clean], value[:clean], key[clean:], value[clean:], self, kind,
                                  scale=scale)


def _bind(kind: KindPlan, travels: bool, device: torch.device | str, backend: str) -> BoundKind:
    def mask(ranges: Any) -> IntervalMask:
        return IntervalMask.from_arrays(ranges.prefix_start, ranges.prefix_end, ranges.block_start,
                                        ranges.block_end, device)

    exchange = kind.exchange
    return BoundKind(
        here=mask(kind.here), arrived=mask(kind.arrived),
        send=torch.from_numpy(exchange.send).to(device), send_counts=exchange.send_counts,
        receive_counts=exchange.receive_counts, to_global=torch.from_numpy(exchange.to_global).to(device),
        backend=get_backend(backend), travels=travels)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key_clean: Tensor, value_clean: Tensor, key_noised: Tensor,
                value_noised: Tensor, kind: BoundKind, transport: Transport, scale: float) -> Tensor:
        inputs = (query, key_clean, value_clean, key_noised, value_noised)
        out, lse = drive(forward_phases(*inputs, kind, scale), transport)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.kind, ctx.transport, ctx.scale = kind, transport, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key_clean, value_clean, key_noised, value_noised, out, lse = ctx.saved_tensors
        grads = drive(backward_phases(dout, query, key_clean, value_clean, key_noised, value_noised, out, lse,
                                      ctx.kind, ctx.scale), ctx.transport)
        return (*grads, None, None, None)


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
    if layer_kind not in plan.kinds:
        raise ValueError(f"layer_kind={layer_kind!r}: the plan has {', '.join(plan.kinds)}")
    kind = plan.kinds[layer_kind]
    check_shapes(query, key_noised, value_noised, len(kind.here))
    check_shapes(query, key_clean, value_clean, len(kind.here))
    noised = plan.num_noised if plan.rank_plan.kinds[layer_kind].kind.noised else 0
    if (len(key_clean), len(key_noised)) != (plan.num_clean, noised):
        raise ValueError(f"{len(key_clean)} clean and {len(key_noised)} noised keys; the plan gives this rank "
                         f"{plan.num_clean} and {noised}")
    return _Attend.apply(query, key_clean, value_clean, key_noised, value_noised, kind, plan.transport,
                         default_scale(query, scale))

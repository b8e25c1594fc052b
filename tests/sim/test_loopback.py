"""The operator's phases for many simulated ranks in lock-step, in one process, against dense attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import dense_attention, dense_mask
from packs import anchor_geometry, make_layout, make_pack
from torch import Tensor

from csbp.attention.operator import BoundPlan
from csbp.attention.phases import Phases, backward_phases, forward_phases
from csbp.comm.transport import LocalTransport, Outgoing
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import plan_rank

FULL, NEAR = LayerKind(clean="token_causal"), LayerKind("near", clean="token_causal", window=6)
BLOCK, DRAFT = LayerKind("block"), LayerKind("draft", clean="absent", window=9, window_anchor="row")
UNEVEN = make_layout(make_pack([1, 3, 5, 13, 17]), 4).geometry
CASES: list[tuple[Geometry, LayerKind, int]] = [
    (UNEVEN, FULL, 2), (UNEVEN, NEAR, 3), (UNEVEN, BLOCK, 5), (UNEVEN, BLOCK, 32),
    (make_layout(make_pack([96, 40]), 8).geometry, BLOCK, 8), (make_layout(make_pack([33]), 64).geometry, BLOCK, 4),
    (make_layout(make_pack([60], targets=[range(30, 50)]), 8).geometry, FULL, 16),
    (anchor_geometry([30, 14], [(0, 3), (0, 4), (0, 29), (1, 0), (1, 14)], 6), DRAFT, 4),
]


def lock_step(phases: list[Phases]) -> list[tuple[Tensor, ...]]:
    """Run every rank to its next request, carry all rows, go on."""
    results: list[tuple[Tensor, ...] | None] = [None] * len(phases)
    replies: list[Tensor | None] = [None] * len(phases)
    flying: list[Outgoing] = []
    while any(r is None for r in results):
        requests = []
        for rank, one in enumerate(phases):
            try:
                requests.append(one.send(replies[rank]))
            except StopIteration as stop:
                results[rank] = stop.value
        if all(isinstance(r, Outgoing) for r in requests) and requests:
            flying, replies = requests, [None] * len(phases)  # type: ignore[assignment]
            continue
        replies = [torch.cat([out.rows.split(out.send_counts)[rank] for out in flying]) for rank in range(len(phases))]\
            if requests else replies
    return results  # type: ignore[return-value]


@pytest.mark.parametrize(("geometry", "kind", "world"), CASES)
def test_simulated_ranks_equal_dense_attention(geometry: Geometry, kind: LayerKind, world: int) -> None:
    clean, total = geometry.num_clean, geometry.num_clean + geometry.num_noised
    rng = np.random.default_rng(world)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal((total, heads, 6))) for heads in (4, 2, 2, 4))
    plans = [plan_rank(geometry, (kind,), world, rank) for rank in range(world)]
    bound = []
    for plan in plans:
        transport = LocalTransport()
        transport.rank, transport.world = plan.rank, world
        bound.append(BoundPlan(plan, transport).kinds[kind.name])
    padded = [torch.cat((x, torch.zeros(1, *x.shape[1:], dtype=x.dtype))) for x in (q, k, v, dout)]

    def local(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        rows = plans[rank].rows
        return x[torch.from_numpy(rows.clean)], x[torch.from_numpy(np.where(rows.noised < 0, -1, clean + rows.noised))]

    inputs, gradients = [], []
    for rank in range(world):
        (qc, qn), (kc, kn), (vc, vn), (gc, gn) = (local(x, rank) for x in padded)
        asks = kind.clean != "absent"
        inputs.append((torch.cat((qc, qn)) if asks else qn, torch.cat((kc, kn)), torch.cat((vc, vn))))
        gradients.append(torch.cat((gc, gn)) if asks else gn)
    forward = lock_step([forward_phases(*inputs[r], bound[r], 0.4) for r in range(world)])
    backward = lock_step([backward_phases(gradients[r], *inputs[r], *forward[r], bound[r], 0.4) for r in range(world)])

    sees = torch.from_numpy(dense_mask(geometry, kind))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = dense_attention(leaves[0] * 0.4 * 6 ** 0.5, leaves[1], leaves[2], sees)
    if kind.clean == "absent":
        dout = torch.cat((torch.zeros_like(dout[:clean]), dout[clean:]))
    want_grads = torch.autograd.grad(want, leaves, dout)
    for rank, plan in enumerate(plans):
        rows = np.concatenate([plan.rows.clean if kind.clean != "absent" else [], clean + plan.rows.noised]).astype(int)
        real = rows >= (clean if kind.clean == "absent" else 0)
        real[-1] &= plan.rows.noised.min(initial=0) >= 0
        dq, dk, dv = backward[rank]
        held = len(plan.rows.clean)
        dkc, dvc, dkn, dvn = dk[:held], dv[:held], dk[held:], dv[held:]
        for got, expected in ((forward[rank][0], want), (dq, want_grads[0])):
            torch.testing.assert_close(got[real], expected[rows[real]], rtol=0, atol=1e-12)
        noised = plan.rows.noised[plan.rows.noised >= 0]
        for got_clean, got_noised, expected in ((dkc, dkn, want_grads[1]), (dvc, dvn, want_grads[2])):
            torch.testing.assert_close(got_clean, expected[plan.rows.clean], rtol=0, atol=1e-12)
            torch.testing.assert_close(got_noised[:len(noised)], expected[clean + noised], rtol=0, atol=1e-12)

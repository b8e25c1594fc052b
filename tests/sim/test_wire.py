"""The dtype in which gradients travel home: half as many bytes, or none of the rounding."""

from __future__ import annotations

import numpy as np
import torch
from packs import make_layout, make_pack

from csbp.attention.operator import BoundPlan
from csbp.attention.phases import backward_phases, forward_phases
from csbp.comm.loopback import LoopbackWorld
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import plan_rank


def gradients(wire: torch.dtype | None) -> tuple[list[torch.Tensor], int]:
    """dK of every rank in bfloat16, from four ranks, and the bytes of gradients that travelled."""
    geometry = make_layout(make_pack([90, 7]), 8).geometry
    network, bound, inputs = LoopbackWorld(4), [], []
    rng = np.random.default_rng(0)
    for rank in range(4):
        plan = BoundPlan(plan_rank(geometry, (LayerKind(),), 4, rank), network.transport(rank), wire=wire)
        rows = plan.num_clean + plan.num_noised
        inputs.append([torch.from_numpy(rng.standard_normal((rows, heads, 8))).bfloat16() for heads in (4, 2, 2, 4)])
        bound.append(plan.kinds["full"])
    forward = network.lock_step([forward_phases(*x[:3], kind, 0.3) for x, kind in zip(inputs, bound, strict=True)])
    backward = network.lock_step([backward_phases(x[3], *x[:3], *done, kind, 0.3)
                                  for x, done, kind in zip(inputs, forward, bound, strict=True)])
    sent = sum(network.transport(rank).sent_bytes.get("gradients", 0) for rank in range(4))
    return [grads[1] for grads in backward], sent


def test_float32_doubles_the_bytes_and_changes_only_the_rounding() -> None:
    (half, few), (full, many) = gradients(None), gradients(torch.float32)
    assert many == 2 * few > 0
    assert all(g.dtype == torch.bfloat16 for g in half + full)
    assert any(not torch.equal(a, b) for a, b in zip(half, full, strict=True))
    for a, b in zip(half, full, strict=True):
        torch.testing.assert_close(a, b, rtol=2 ** -5, atol=2 ** -5)

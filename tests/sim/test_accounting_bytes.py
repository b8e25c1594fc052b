"""The bytes that ``csbp plan`` predicts are those that simulated ranks send, under every checkpointing policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from moved import with_moves
from packs import make_layout, make_pack
from torch import Tensor, nn

from csbp.attention.operator import BoundPlan
from csbp.comm.loopback import LoopbackTransport, LoopbackWorld, run_threads
from csbp.config.schema import CHECKPOINTING
from csbp.observe.accounting import exact_bytes
from csbp.parallel.activations import apply_checkpointing
from csbp.plan.counts import count_plan
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import EXCHANGES, PackPlan
from csbp.plan.shapes import AttentionLayers, ModelShape
from csbp.plan.wire import buffer_bytes

SHAPE = ModelShape((AttentionLayers(LayerKind(), 2, heads=4, kv_heads=2, head_dim=8),
                    AttentionLayers(LayerKind("near", window=12), 1, heads=4, kv_heads=1, head_dim=16)),
                   hidden=16, ffn=16, vocabulary=16, tied=True)
WORLD = 3
MOVED = ("csbp", "moved")


class Layer(nn.Module):
    """One attention layer without weights: each head reads a slice of the input."""

    def __init__(self, part: AttentionLayers) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, plan: BoundPlan) -> Tensor:
        part, width = self.part, x.shape[1]

        def heads(count: int) -> Tensor:
            return x[:, torch.arange(count * part.head_dim) % width].view(len(x), count, part.head_dim)

        out = plan.attend(part.kind.name, heads(part.heads), heads(part.kv_heads), heads(part.kv_heads), layer=0)
        return x + out.flatten(1)[:, :width]


@pytest.mark.parametrize("policy", CHECKPOINTING)
@pytest.mark.parametrize(("scheme", "exchange"), [*(("csbp", e) for e in EXCHANGES), ("context", "exact"),
                                                      MOVED])
def test_predicted_bytes_are_sent(policy: str, scheme: str, exchange: str) -> None:
    geometry = make_layout(make_pack([50, 7, 64]), 8).geometry
    moved = (scheme, exchange) == MOVED
    plan = PackPlan(geometry, SHAPE.kinds, WORLD, scheme, "exact" if moved else exchange)
    if moved:
        plan = with_moves(plan, seed=3)
        assert all(counts.lent.any() for counts in count_plan(plan).kinds.values())

    def work(transport: LoopbackTransport) -> int:
        bound = BoundPlan(plan.rank_plan(transport.rank), transport, backend="reference")
        layers = [Layer(part) for part in SHAPE.attention for _ in range(part.count)]
        apply_checkpointing(layers, policy)
        x = torch.randn(bound.num_clean + bound.num_noised, 16, dtype=torch.float32, requires_grad=True)
        y = x
        for layer in layers:
            y = layer(y, bound)
        y.square().sum().backward()
        return sum(transport.sent_bytes.values())

    counts, world = count_plan(plan), LoopbackWorld(WORLD)
    expected = exact_bytes(SHAPE, counts, checkpointing=policy, itemsize=4)
    sent = run_threads(world, work)
    assert min(sent) > 0
    np.testing.assert_array_equal(sent, np.stack([part.sent for part in expected.values()]).sum(0))
    assert sum(part.received.sum() for part in expected.values()) == sum(sent)
    buffers = np.max([buffer_bytes(counts.kinds[part.kind.name], counts.clean, part, 4) for part in SHAPE.attention], 0)
    used = np.array([transport.buffers.most for transport in world.transports])
    parts = 12 * 256  # where each part of it begins
    own = counts.clean * max(part.row_elements for part in SHAPE.attention) * 4  # guests may see them, or not
    assert (used <= buffers + parts).all() and (used >= buffers - own).all() and bool(used.any()) == moved

"""What each checkpointing policy runs again, and that none changes a bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from csbp.attention.operator import BoundPlan
from csbp.comm.transport import LocalTransport
from csbp.config.schema import CHECKPOINTING
from csbp.parallel.activations import apply_checkpointing
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan

WIDTH, HEADS = 32, 2
PACK = whole_pack([5, 9], 4, noised=True)


class Layer(nn.Module):
    """Attention with one projection in and, with a bias, one out, and an MLP with a product of stacked matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Parameter(torch.randn(1, WIDTH, 2 * WIDTH) / 6), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, plan: BoundPlan) -> Tensor:
        q, k, v = self.qkv(x.sin()).unflatten(-1, (3 * HEADS, -1)).split(HEADS, 1)
        x = x + self.out(plan.attend("full", q, k, v, layer=0).flatten(1)).tanh()
        return x + self.down(torch.bmm(x.cos()[None], self.up)[0].exp().sigmoid())


class Counting(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step(policy: str) -> tuple[list[Tensor], Counter[str], Counter[str]]:
    """Gradients of two layers, and what their forward and their backward run."""
    torch.manual_seed(0)
    layers = [Layer().double() for _ in range(2)]
    apply_checkpointing(layers, policy)
    plan = BoundPlan(PackPlan(PACK, (LayerKind(),), 1).rank_plan(0), LocalTransport(), backend="reference")
    first = torch.randn(PACK.num_clean + PACK.num_noised, WIDTH, dtype=torch.float64, requires_grad=True)
    with Counting() as forward:
        x = first
        for layer in layers:
            x = layer(x, plan)
    with Counting() as backward:
        x.square().sum().backward()
    return [first.grad, *(p.grad for layer in layers for p in layer.parameters())], forward.ran, backward.ran


@pytest.mark.parametrize("policy", CHECKPOINTING)
def test_what_is_run_again(policy: str) -> None:
    grads, forward, backward = step(policy)
    plain, _, without = step("none")
    for a, b in zip(grads, plain, strict=True):
        assert torch.equal(a, b)
    again = backward - without
    ran = {name: again[f"{op}.default"] for name, op in (
        ("attention", "csbp.attend"), ("mm", "aten.mm"), ("addmm", "aten.addmm"), ("bmm", "aten.bmm"),
        ("pointwise", "aten.tanh"))}
    assert forward["aten.mm.default"] == 4 and forward["csbp.attend.default"] == 2
    # A layer's last product is not run again: no backward needs its result.
    expected = {"none": (0, 0, 0, 0, 0), "matmuls": (0, 0, 0, 0, 2), "attention": (0, 2, 2, 2, 2),
                "full": (2, 2, 2, 2, 2)}
    assert tuple(ran.values()) == expected[policy], ran

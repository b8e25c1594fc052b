"""On one rank a kernel's own autograd stands in for the operator, where it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from csbp.attention import core, reference
from csbp.attention.core import interval_attention
from csbp.attention.mask import IntervalMask
from csbp.attention.operator import BoundPlan
from csbp.comm.loopback import LoopbackWorld
from csbp.comm.transport import LocalTransport
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import plan_rank

PACK = whole_pack([13, 5], 4, noised=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes "flex" a kernel that notes how often its own autograd is used."""
    seen: list[int] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask,
               scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(q))
        return interval_attention(q, k, v, mask, scale=scale, backend="reference")

    monkeypatch.setitem(core.BACKENDS, "flex", SimpleNamespace(
        forward=reference.forward, backward=reference.backward, attend=attend))
    return seen


def gradients(native: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    plan = BoundPlan(plan_rank(PACK, (LayerKind(),), 1, 0), LocalTransport(), backend="flex", native=native)
    inputs = [torch.randn(36, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    out = plan.attend("full", *inputs, layer=0)
    return [out, *torch.autograd.grad(out, inputs, torch.randn_like(out))]


def test_own_autograd_gives_the_same(calls: list[int]) -> None:
    expected = gradients(native=False)
    assert not calls
    for found, wanted in zip(gradients(native=True), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert calls == [36]


def test_not_where_keys_travel(calls: list[int]) -> None:
    plan = BoundPlan(plan_rank(PACK, (LayerKind(),), 2, 0), LoopbackWorld(2).transport(0), backend="flex", native=True)
    assert plan.kinds["full"].stages
    rows = plan.num_clean + plan.num_noised
    with pytest.raises(Exception, match="exchange"):  # the other rank never comes
        plan.transport._meetings.abort(1, RuntimeError("no exchange with rank 1"))  # type: ignore[attr-defined]
        plan.attend("full", torch.zeros(rows, 4, 8), torch.zeros(rows, 2, 8), torch.zeros(rows, 2, 8), layer=0)
    assert not calls

"""The flex backend's mask, and gradients of parts of a softmax. Its kernels run on GPUs only."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from csbp.attention import core, flex, interval_attention, reference
from csbp.attention.mask import IntervalMask
from csbp.attention.operator import BoundPlan
from csbp.comm.transport import LocalTransport
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import plan_rank


def case(seed: int) -> tuple[Tensor, Tensor, Tensor, IntervalMask, np.random.Generator]:
    rng = np.random.default_rng(seed)
    rows, clean, noised = int(rng.integers(1, 400)), int(rng.integers(1, 300)), int(rng.integers(0, 300))
    ends, own = np.sort(rng.integers(0, clean + 1, rows)), np.sort(rng.integers(clean, clean + noised + 1, rows))
    low, end = rng.integers(0, ends + 1), np.minimum(own + rng.integers(0, 64, rows), clean + noised)
    low[:rows // 5], end[:rows // 5] = ends[:rows // 5], own[:rows // 5]  # see nothing
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, heads, 16, generator=generator) for n, heads in
               ((rows, 4), (clean + noised, 2), (clean + noised, 2)))
    return q, k, v, IntervalMask.from_arrays(low, ends, own, end), rng


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("seed", range(4))
def test_forward_equals_reference(seed: int) -> None:
    q, k, v, mask, _ = case(seed)
    out, lse = flex.forward(q, k, v, mask, 0.3)
    expected, expected_lse = reference.forward(q, k, v, mask, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    assert lse.stride() == expected_lse.stride()


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_a_part_follow_from_its_own(seed: int) -> None:
    q, k, v, mask, rng = case(seed)
    q, k, v = q.double(), k.double(), v.double()
    cut = int(rng.integers(0, len(k)))  # the part's keys are those below
    part = IntervalMask.from_arrays(*(np.minimum(bound, cut) for bound in mask.host))
    out, lse = reference.forward(q, k, v, mask, 0.3)
    dout, dlse = torch.randn(out.shape).double(), torch.randn(lse.shape).double()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float) -> tuple[Tensor, Tensor]:
        return interval_attention(q, k, v, mask, scale=scale)

    for gradient in (None, dlse):
        expected = reference.backward(dout, q, k[:cut], v[:cut], out, lse, part, 0.3, gradient)
        found = flex.backward(dout, q, k[:cut], v[:cut], out, lse, part, 0.3, gradient, call=attend)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float) -> tuple[Tensor, Tensor]:
    """Attention in torch's own differentiable operations."""
    low, high, own, end = (torch.as_tensor(bound)[:, None] for bound in mask.host)
    place = torch.arange(len(k))
    seen = (place >= low) & (place < high) | (place >= own) & (place < end)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (torch.einsum("snd,tnd->nst", q, k) * scale).masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None]).exp()
    return torch.einsum("nst,tnd->snd", weights, v), lse.t()


def test_gradients_inside_the_distributed_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core.BACKENDS, "flex", SimpleNamespace(
        forward=reference.forward, backward=partial(flex.backward, call=plain)))
    pack = whole_pack([13, 5], 4, noised=True)
    inputs = [torch.randn(36, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    grads = []
    for backend in ("flex", "reference"):
        plan = BoundPlan(plan_rank(pack, (LayerKind(),), 1, 0), LocalTransport(), backend=backend)
        out = plan.attend("full", *inputs, layer=0)
        grads.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


def test_no_rows_and_no_keys() -> None:
    none = np.zeros(0, np.int64)
    empty, q, k = IntervalMask.from_arrays(none, none, none, none), torch.randn(0, 4, 16), torch.randn(5, 2, 16)
    out, lse = flex.forward(q, k, k, empty, 1.0)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
    assert all(not g.any() for g in flex.backward(out, q, k, k, out, lse, empty, 1.0))


@pytest.mark.parametrize("far", [2**31, 4000])
def test_rows_of_a_head_are_near_where_32_bits_would_not_do(far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention gets q, k, v as they are or, where rows are far apart, head by head; out's gradient always so."""
    apart: list[int] = []

    class Noting(torch.autograd.Function):
        """Notes how far apart the rows of a gradient are."""

        @staticmethod
        def forward(ctx: object, out: Tensor) -> Tensor:
            return out.view_as(out)

        @staticmethod
        def backward(ctx: object, dout: Tensor) -> Tensor:  # type: ignore[override]
            apart.append(dout.stride(2))
            return dout

    def stand_in(q: Tensor, k: Tensor, v: Tensor, **kwargs: object) -> tuple[Tensor, SimpleNamespace]:
        apart.extend(x.stride(2) for x in (q, k, v))
        out, lse = interval_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), mask, scale=0.3)
        return Noting.apply(out.transpose(0, 1)[None]), SimpleNamespace(lse=lse.t()[None])

    monkeypatch.setattr(flex, "_FAR", far)
    monkeypatch.setattr(flex, "flex_attention", stand_in)
    torch.manual_seed(0)
    q, k, v = torch.randn(100, 4, 16), torch.randn(50, 2, 16), torch.randn(50, 2, 16)  # 6400 and 1600 numbers
    mask = IntervalMask.from_arrays(*(np.full(100, bound) for bound in (0, 30, 30, 50)))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flex.attend(*inputs, mask, 0.3)
    dout = torch.randn(out.shape)
    found = torch.autograd.grad(out, inputs, dout)
    assert apart == ([64, 32, 32, 16] if far == 2**31 else [16, 32, 32, 16])
    for a, b in zip(found, reference.backward(dout, q, k, v, out, lse, mask, 0.3), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

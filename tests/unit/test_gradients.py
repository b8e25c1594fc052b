"""The gradient norm is the same sum however gradients are cut, also in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from csbp.parallel.gradients import global_norm


def parameter(gradient: torch.Tensor) -> nn.Parameter:
    found = nn.Parameter(torch.empty_like(gradient))
    found.grad = gradient
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gradient_is_summed_as_exactly_as_its_parts(dtype: torch.dtype) -> None:
    gradient = torch.randn(3000, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = gradient.double().square().sum().sqrt()
    for parts in ([gradient], gradient.chunk(8), [gradient.t(), gradient[:0]]):
        norm = global_norm(map(parameter, parts))
        assert norm.dtype == torch.float64
        torch.testing.assert_close(norm, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    gradient = torch.zeros(5)
    gradient[2] = bad
    assert not global_norm([parameter(torch.ones(3)), parameter(gradient)]).isfinite()

"""Runs the merge's kernel on the CPU, in Triton's interpreter. See test_merge.

A process of its own, because kernels are bound to the interpreter when they are first imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from csbp.attention.merge import Pair, merge
from csbp.attention.merge_kernel import ROWS, launch


def pair(rows: int, heads: int, dim: int, dtype: torch.dtype) -> Pair:
    """Outputs and log-sum-exps of which some rows saw nothing."""
    lse = (torch.randn(heads, rows) * 8).t()
    lse[::5] = float("-inf")
    out = torch.randn(rows, heads, dim).to(dtype)
    out[::5] = 0
    return out, lse


def expected(whole: Pair, part: Pair) -> tuple[Tensor, Tensor]:
    return merge([(whole[0].double(), whole[1].double()), (part[0].double(), part[1].double())])


def check(found: Pair, wanted: Pair, bound: float) -> None:
    error = float((found[0].double() - wanted[0]).abs().max())
    assert error < bound, error
    seen = ~torch.isinf(wanted[1])
    assert torch.equal(torch.isinf(found[1]), ~seen) and not found[0][~seen].any()
    torch.testing.assert_close(found[1][seen].double(), wanted[1][seen], rtol=1e-6, atol=1e-6)


def main() -> None:
    torch.manual_seed(0)
    for rows, heads, dim, dtype, into_dtype, bound in (
            (2 * ROWS + 7, 3, 40, torch.bfloat16, torch.float32, 1e-5),
            (ROWS, 2, 64, torch.float32, torch.bfloat16, 2e-2),
            (5, 4, 16, torch.bfloat16, torch.bfloat16, 2e-2), (1, 1, 8, torch.float32, torch.float32, 1e-5)):
        whole, part = pair(rows, heads, dim, dtype), pair(rows, heads, dim, torch.bfloat16)
        part[1][1::3] = float("-inf")
        wanted = expected(whole, part)
        into = whole[0] if dtype == into_dtype else torch.full_like(whole[0], float("nan"), dtype=into_dtype)
        launch(whole, part, into, None, None)
        check((into, whole[1]), wanted, bound)
    for chosen in (False, True):  # some rows, from where they lie among others or as they come; both views of parcels
        whole, more = pair(90, 2, 24, torch.bfloat16), pair(70, 2, 24, torch.bfloat16)
        parcels = torch.zeros(70, 2, 32, dtype=torch.bfloat16)
        parcels[..., :24] = more[0]
        part = parcels[..., :24], torch.stack([more[1], more[1]], 2)[..., 0]
        rows = torch.randperm(90)[:70 - 20 * chosen]
        places = torch.randperm(70)[:len(rows)] if chosen else None
        before = whole[0].clone(), whole[1].clone()
        taken = part if places is None else (part[0][places], part[1][places])
        wanted = expected((before[0][rows], before[1][rows]), taken)
        launch(whole, part, whole[0], rows, places)
        check((whole[0][rows], whole[1][rows]), wanted, 3e-2)
        others = torch.ones(90, dtype=torch.bool)
        others[rows] = False
        assert torch.equal(whole[0][others], before[0][others]) and torch.equal(whole[1][others], before[1][others])
    launch(pair(0, 2, 8, torch.float32), pair(0, 2, 8, torch.float32), torch.empty(0, 2, 8), None, None)
    print("agrees")


if __name__ == "__main__":
    main()

"""Runs the kernels that go over rows: ``rows_interpreted.py cpu`` in Triton's interpreter, or ``cuda``. See test_rows.

A process of its own, because kernels are bound to the interpreter when they are first imported.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = str(int(sys.argv[1] == "cpu"))

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csbp.attention import row_kernels
from csbp.attention.merge import Pair, merge
from csbp.attention.row_kernels import ROWS, add, join
from csbp.attention.sums import Returning, total


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


def joined() -> None:
    for rows, heads, dim, dtype, into_dtype, bound in (
            (2 * ROWS + 7, 3, 40, torch.bfloat16, torch.float32, 1e-5),
            (ROWS, 2, 64, torch.float32, torch.bfloat16, 2e-2),
            (5, 4, 16, torch.bfloat16, torch.bfloat16, 2e-2), (1, 1, 8, torch.float32, torch.float32, 1e-5)):
        whole, part = pair(rows, heads, dim, dtype), pair(rows, heads, dim, torch.bfloat16)
        part[1][1::3] = float("-inf")
        wanted = expected(whole, part)
        into = whole[0] if dtype == into_dtype else torch.full_like(whole[0], float("nan"), dtype=into_dtype)
        join(whole, part, into, None, None)
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
        join(whole, part, whole[0], rows, places)
        check((whole[0][rows], whole[1][rows]), wanted, 3e-2)
        others = torch.ones(90, dtype=torch.bool)
        others[rows] = False
        assert torch.equal(whole[0][others], before[0][others]) and torch.equal(whole[1][others], before[1][others])
    join(pair(0, 2, 8, torch.float32), pair(0, 2, 8, torch.float32), torch.empty(0, 2, 8), None, None)


def in_place() -> None:
    """Warps share the loads of what they overwrite: many rows, as a GPU runs thousands of programs at once."""
    for dim in (64, 96, 128, 256):
        whole, part = pair(40_000, 4, dim, torch.bfloat16), pair(40_000, 4, dim, torch.bfloat16)
        wanted = merge([(whole[0].float(), whole[1]), (part[0].float(), part[1])])
        before = whole[0].clone(), whole[1].clone()
        for rows in (None, torch.randperm(40_000)):
            whole = before[0].clone(), before[1].clone()
            taken = part if rows is None else (part[0][rows], part[1][rows])
            join(whole, taken, whole[0], rows, None)
            check(whole, (wanted[0].double(), wanted[1].double()), 3e-2)


def added() -> None:
    """Against the sum in float64, also of rows that many ranks return or none."""
    random = np.random.default_rng(0)
    for own, ranks, dim, dtype in ((70, 5, 24, torch.bfloat16), (33, 1, 40, torch.float32), (5, 3, 8, torch.float32)):
        counts = tuple(int(n) for n in random.integers(0, own + 1, ranks))
        rows = np.concatenate([np.sort(random.permutation(own - 1)[:n]) for n in counts])  # the last comes back never
        counts = tuple(min(n, own - 1) for n in counts)
        plain = Returning.bind(rows, counts, own, sys.argv[1])
        order = np.argsort(rows, kind="stable")
        first = np.searchsorted(rows[order], np.arange(own + 1))
        listed = replace(plain, first=torch.tensor(first.astype(np.int32)),
                         place=torch.tensor(order.astype(np.int32)))
        parcels = torch.randn(len(rows), 2, 2 * dim).bfloat16()
        now, other = torch.randn(own, 2, dim).to(dtype), torch.randn(own // 2, 2, dim).bfloat16()
        for part, back in ((other, None), (None, parcels[..., dim:]), (other, parcels[..., :dim])):
            parts = [now.double()] + ([] if part is None else [part.double()])
            want = total(parts, torch.float64, plain, None if back is None else back.double())
            for into, bound in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
                found = add(now.clone(), part, listed, back, into)
                assert found.dtype == into
                error = float((found.double() - want).abs().max())
                assert error < bound, (own, error)
    assert not len(add(torch.zeros(0, 2, 8), None, None, None, torch.bfloat16))


class Grids(list[tuple[int, ...]]):
    """Stands for a kernel, and is a list of the grids that it was started with."""

    def __getitem__(self, grid: Any) -> Any:
        self.append(grid)
        return lambda *args, **more: None


def many_rows() -> None:
    """A GPU takes 65,535 programs in all dimensions of a grid but the first."""
    row_kernels._join, row_kernels._add = joins, adds = Grids(), Grids()
    whole = torch.empty(3_000_000, 4, 8, device="meta"), torch.empty(3_000_000, 4, device="meta")
    join(whole, whole, whole[0], None, None)
    add(whole[0], None, None, None, torch.float32)
    for grid in (*joins, *adds):
        assert max((0, *grid[1:])) < 1 << 16 and np.prod(grid) == 4 * 3_000_000 / ROWS, grid
    assert len(joins) == len(adds) == 1


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_device(sys.argv[1])
    joined()
    added()
    if sys.argv[1] == "cuda":
        in_place()
    many_rows()
    print("agrees")

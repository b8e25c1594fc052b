"""Outputs over disjoint sets of keys joined, and gradients added: by torch, and by kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from csbp.attention.bound import bind_kind
from csbp.attention.merge import Pair, merge, merge_next, merge_rows
from csbp.attention.sums import Returning, total
from csbp.comm.buffers import Buffers
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.stages import AT_ONCE


def _pairs(count: int, rows: int = 30, dtype: torch.dtype = torch.float64) -> list[Pair]:
    found = []
    for seed in range(count):
        random = torch.Generator().manual_seed(seed)
        out = torch.randn(rows, 3, 8, generator=random, dtype=torch.float64)
        lse = 4 * torch.randn(3, rows, generator=random, dtype=torch.float64).t()
        blind = torch.rand(rows, generator=random) < 0.3
        out[blind], lse[blind] = 0, float("-inf")
        found.append((out.to(dtype), lse if dtype == torch.float64 else lse.float()))
    return found


def test_one_after_another_is_all_at_once() -> None:
    parts = _pairs(4)
    want, want_lse = merge(parts)
    whole = parts[0]
    for part in parts[1:]:
        whole = merge_next(whole, part, torch.float64)
    torch.testing.assert_close(whole[0], want, rtol=0, atol=1e-14)
    torch.testing.assert_close(whole[1], want_lse, rtol=0, atol=1e-14)
    assert bool(torch.isinf(want_lse).any()) and not torch.isnan(want).any()


def test_rounds_only_at_the_last() -> None:
    parts = _pairs(3, dtype=torch.bfloat16)
    middle = merge_next(parts[0], parts[1], torch.float32)
    last = merge_next(middle, parts[2], torch.bfloat16)
    assert middle[0].dtype == torch.float32 and last[0].dtype == torch.bfloat16
    exact, _ = merge([(out.double(), lse.double()) for out, lse in parts])
    torch.testing.assert_close(last[0], exact.bfloat16(), rtol=2 ** -7, atol=0)


@pytest.mark.parametrize("placed", [False, True])
def test_some_rows_in_place(placed: bool) -> None:
    whole, part = _pairs(2)
    rows, places = torch.tensor([7, 2, 29, 0]), torch.tensor([3, 28, 0, 11])
    taken = (part[0][places], part[1][places])
    want = merge([(whole[0][rows], whole[1][rows]), taken])
    others = [i for i in range(30) if i not in rows.tolist()]
    kept = whole[0][others], whole[1][others]
    merge_rows(whole, part if placed else taken, rows, places if placed else None)
    for found, wanted, before in zip(whole, want, kept, strict=True):
        assert torch.equal(found[rows], wanted) and torch.equal(found[others], before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_added_in_the_order_of_ranks_and_rounded_once(dtype: torch.dtype) -> None:
    rows, counts = np.array([4, 1, 4, 0, 1, 4]), (2, 0, 3, 1)
    returning, random = Returning.bind(rows, counts, 5, "cpu"), torch.Generator().manual_seed(3)
    late, early, back = (torch.randn(n, 2, 3, generator=random).to(dtype) for n in (5, 2, 6))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = late.to(wide, copy=True)
    for row, part in [*enumerate(early), *zip(rows.tolist(), back, strict=True)]:
        want[row] += part.to(wide)
    assert torch.equal(total([late.clone(), early], dtype, returning, back), want.to(dtype))
    assert torch.equal(total([late.clone()], dtype), late)


@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(clean="absent"), LayerKind(noised=False)], ids=str)
def test_gradients_may_come_back_of_all_own_keys(kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def bind(rows: np.ndarray, counts: tuple[int, ...], own: int, device: torch.device | str) -> Returning:
        asked.append(own)
        return Returning(torch.from_numpy(rows), counts, None, None)

    monkeypatch.setattr(Returning, "bind", bind)
    plan = PackPlan(whole_pack([50, 30], 8, noised=True), (kind,), 2).rank_plan(0)
    bind_kind(plan.kinds["full"], len(plan.rows.clean), "cpu", "reference", None, Buffers(reuse=False), stages=AT_ONCE,
              overlap=True)
    assert asked == [len(plan.rows.clean) + len(plan.rows.noised) * kind.noised]


def _compiled(kernel: Any, **values: int) -> str:
    """A kernel's PTX for an H200, outputs and gradients in bfloat16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"rows_ptr": "*i64", "places_ptr": "*i64", "first_ptr": "*i32", "place_ptr": "*i32", "lse_ptr": "*fp32",
             "part_lse_ptr": "*fp32"}
    signature = {name: "constexpr" if name in values else
                 types.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, of) in enumerate(signature.items())
               if of[0] == "*" or name.endswith(("_row", "_head")) and "lse" not in name}
    source = ASTSource(kernel, signature, values, aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_read_all_before_they_write_in_place() -> None:
    """Warps share loads of what they overwrite, which the interpreter cannot show."""
    from csbp.attention.row_kernels import ROWS, _add, _join

    for dim in (2, 64, 96, 256):
        size = {"D": dim, "DIM": 1 << (dim - 1).bit_length(), "ROWS": ROWS}
        for kernel, flags in ((_join, {"CHOSEN": 0, "PLACED": 0}), (_join, {"CHOSEN": 1, "PLACED": 1}),
                              (_add, {"OTHER": 1, "BACK": 1})):
            code = _compiled(kernel, **size, **flags)
            assert "bar.sync" in code[code.rindex("ld.global"):code.index("st.global")], (kernel, dim)


@pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                                 reason="Triton is not installed")),
    pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernels_agree(device: str) -> None:
    run = subprocess.run([sys.executable, str(Path(__file__).with_name("rows_interpreted.py")), device],
                         capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0 and "agrees" in run.stdout, run.stderr[-2000:]

"""Packs with more numbers than 32 bits count: a document's attention is what it is alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csbp.attention.merge import merge, merge_next, merge_rows
from csbp.attention.operator import BoundPlan
from csbp.attention.phases import backward_phases, forward_phases
from csbp.comm.loopback import LoopbackWorld
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan

LENGTH, BLOCK = 1000, 32


def attend(documents: int, inputs: list[Tensor], backend: str) -> list[Tensor]:
    """out, dq, dk and dv of so many documents; inputs q, k, v and dout."""
    plan = PackPlan(whole_pack([LENGTH] * documents, BLOCK, noised=True), (LayerKind(),), 1)
    world = LoopbackWorld(1)
    kind = BoundPlan(plan.rank_plan(0), world.transport(0), inputs[0].device, backend).kinds["full"]
    q, k, v, dout = inputs
    scale = q.shape[2] ** -0.5
    out, lse = world.lock_step([forward_phases(q, k, v, kind, scale)])[0]
    return [out, *world.lock_step([backward_phases(dout, q, k, v, out, lse, kind, scale)])[0]]


@pytest.mark.parametrize(("backend", "device", "documents", "heads", "kv_heads", "dim"), [
    ("reference", "cpu", 3, 2, 1, 8),
    pytest.param("flash", "cuda", 300, 32, 8, 128, marks=pytest.mark.gpu),
    pytest.param("flex", "cuda", 300, 32, 8, 128, marks=pytest.mark.gpu),
    pytest.param("wide", "cuda", 300, 16, 2, 512, marks=pytest.mark.gpu)])
def test_a_document_is_what_it_is_alone(backend: str, device: str, documents: int, heads: int, kv_heads: int,
                                        dim: int) -> None:
    torch.manual_seed(0)
    clean = documents * LENGTH
    inputs = [torch.randn(2 * clean, n, dim, device=device, dtype=torch.bfloat16)
              for n in (heads, kv_heads, kv_heads, heads)]
    assert device == "cpu" or inputs[0].numel() > 2**31
    some = torch.arange(LENGTH, device=device) + LENGTH * torch.tensor(
        [[0], [documents // 2], [documents - 1]], device=device)
    some = torch.cat([some, clean + some], 1)
    # The short ones first: what is compiled for them must not serve the long one.
    alone = [attend(1, [x[rows] for x in inputs], backend) for rows in some]
    whole = attend(documents, inputs, backend)
    wrong = {}
    for rows, wanted in zip(some, alone, strict=True):
        for name, found, want in zip(("out", "dq", "dk", "dv"), whole, wanted, strict=True):
            error = ((found[rows].float() - want.float()).norm() / want.float().norm()).item()
            if not error < 3e-3:
                wrong[name, int(rows[0]) // LENGTH] = error
    assert not wrong


@pytest.mark.parametrize(("device", "rows"), [("cpu", 1000), pytest.param("cuda", 600_000, marks=pytest.mark.gpu)])
def test_parts_join_row_by_row(device: str, rows: int) -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(rows, 32, 128, device=device, dtype=torch.bfloat16),
              torch.randn(32, rows, device=device).t()) for _ in range(2)]
    last = torch.arange(rows - 500, rows, device=device)
    taken = [(out[last], lse[last]) for out, lse in parts]
    want = merge([(out.double(), lse.double()) for out, lse in taken])
    merge_rows((parts[0][0], parts[0][1]), taken[1], last, None)
    torch.testing.assert_close(parts[0][0][last].double(), want[0], rtol=2**-7, atol=1e-4)
    parts[0][0][last], parts[0][1][last] = taken[0]
    out, lse = merge_next(parts[0], parts[1], torch.bfloat16)
    torch.testing.assert_close(out[last].double(), want[0], rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(lse[last].double(), want[1], rtol=1e-6, atol=1e-6)

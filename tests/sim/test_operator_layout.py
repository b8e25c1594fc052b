"""A compiler believes what the custom ops promise of their outputs; a backend may lay them out as it likes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moved import with_moves
from packs import make_layout, make_pack
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from csbp.attention import core, operator, reference
from csbp.attention.operator import BoundPlan
from csbp.comm.loopback import LoopbackTransport, LoopbackWorld, run_threads
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan

Layouts = list[tuple[tuple[int, ...], torch.dtype]]


class Oddly:
    """The reference with every output laid out the other way round."""

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = reference.forward(*args)
        return out.transpose(0, 1).contiguous().transpose(0, 1), lse.contiguous()

    def backward(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple(g.transpose(0, 1).contiguous().transpose(0, 1) for g in reference.backward(*args))


def _layouts(tensors: tuple[Tensor, ...]) -> Layouts:
    return [(t.stride(), t.dtype) for t in tensors]


@pytest.mark.parametrize(("world", "moved"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("backend", ["reference", "oddly"])
def test_outputs_lie_as_promised(world: int, moved: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core.BACKENDS, "oddly", Oddly())
    pack = PackPlan(make_layout(make_pack([70, 9]), 8).geometry, (LayerKind(),), world)
    pack = with_moves(pack, 1) if moved else pack
    assert bool(pack.served) == moved

    def work(transport: LoopbackTransport) -> tuple[Layouts, Layouts]:
        plan = BoundPlan(pack.rank_plan(transport.rank), transport, backend=backend)
        handle = next(h for h, call in operator._CALLS.items() if call.transport is transport)
        rows = plan.num_clean + plan.num_noised
        q, k, v, dout = (torch.randn(rows, heads, 8).bfloat16() for heads in (4, 2, 2, 4))
        done = torch.ops.csbp.attend(q, k, v, handle, 0.3)
        grads = torch.ops.csbp.attend_backward(dout, q, k, v, *done, handle, 0.3)
        with FakeTensorMode() as fake:
            q, k, v, dout = (fake.from_tensor(x) for x in (q, k, v, dout))
            promised = torch.ops.csbp.attend(q, k, v, handle, 0.3)
            promised_grads = torch.ops.csbp.attend_backward(dout, q, k, v, *promised, handle, 0.3)
        return _layouts((*done, *grads)), _layouts((*promised, *promised_grads))

    for real, promised in run_threads(LoopbackWorld(world), work):
        assert real == promised

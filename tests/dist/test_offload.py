"""Offloaded activations on a CPU, where copies are real and streams are none: the same gradients, bit for bit, weights
left alone, two units' worth on the device, each unit back before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import csbp_model, layouts, noising, step_here
from oracle import exact_norms, gradients
from packs import make_pack
from torch import nn

from csbp.config.schema import SELECTIVE, ParallelConfig
from csbp.models.registry import get_adapter
from csbp.parallel import offload
from csbp.parallel.activations import apply_checkpointing
from csbp.parallel.fsdp import shard_model
from csbp.parallel.offload import Mover, apply_offload
from csbp.parallel.runtime import start_runtime
from csbp.train.step import StepRunner

LAYERS = 5


@dataclass
class Log:
    """Units are numbered in forward order; a list of what happened to them."""

    events: list[tuple[str, int]] = field(default_factory=list)
    units: list[Any] = field(default_factory=list)
    bytes_away: int = 0
    most_here: int = 0

    def count(self) -> None:
        self.most_here = max(self.most_here, sum(bool(kept.here) for kept in self.units))


def watch(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    class Watched(offload._Kept):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.number = len(log.units)
            log.units.append(self)

        def close(self) -> None:
            log.count()
            super().close()
            log.bytes_away += sum(x.nbytes for x in self.buffers)
            assert len({x.data_ptr() for x in self.here}) == len(self.here)

        def fetch(self) -> None:
            if not self.here:
                log.events.append(("fetch", self.number))
            super().fetch()

        def unpack(self, kept: Any) -> torch.Tensor:
            if ("use", self.number) not in log.events:
                log.events.append(("use", self.number))
            return super().unpack(kept)

    monkeypatch.setattr(offload, "_Kept", Watched)
    return log


def found(policy: str, moved: bool, compiled: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = csbp_model(layers=LAYERS)
    units = get_adapter("qwen3").units(model)
    apply_checkpointing(units, policy)
    if compiled:
        for unit in units:
            unit.compile(dynamic=True, backend="aot_eager")
    if moved:
        apply_offload(units, Mover(None, smallest=1))
    how = noising(4)
    with exact_norms():  # also while a backward computes a layer again
        loss, _ = step_here(model, layouts([make_pack([6, 10])], how), how.objective.clean_stream)
        return loss.detach(), gradients(loss, model)


@pytest.mark.parametrize(("policy", "compiled"), [
    ("none", False), ("full", False), ("attention", False), ("matmuls", False),
    *(pytest.param(policy, True, marks=pytest.mark.slow) for policy in SELECTIVE)])
def test_the_same_gradients(monkeypatch, policy, compiled):
    torch._dynamo.reset()
    loss, wanted = found(policy, moved=False, compiled=compiled)
    log = watch(monkeypatch)
    other, grads = found(policy, moved=True, compiled=compiled)
    assert torch.equal(loss, other) and len(log.units) == LAYERS
    assert all(torch.equal(grads[name], value) for name, value in wanted.items())
    assert log.bytes_away > 0 and log.most_here <= 2
    # The last unit has not left when its backward begins. Any other is fetched while the one after it is used.
    assert [n for what, n in log.events if what == "use"] == [4, 3, 2, 1, 0]
    assert [n for what, n in log.events if what == "fetch"] == [3, 2, 1, 0]
    for n in (3, 2, 1, 0):
        assert log.events.index(("use", n + 1)) < log.events.index(("fetch", n)) < log.events.index(("use", n))


@pytest.mark.slow
def test_selective_checkpointing_is_moved_where_compiled(monkeypatch):
    """``predict_memory`` counts on it."""
    away = {}
    for compiled in (False, True):
        for policy in (*SELECTIVE, "full"):
            torch._dynamo.reset()
            log = watch(monkeypatch)
            found(policy, moved=True, compiled=compiled)
            away[policy, compiled] = log.bytes_away
            monkeypatch.undo()
    assert away["matmuls", True] > away["attention", True] > away["full", True]
    assert away["matmuls", False] == away["attention", False] == away["full", False]


def sharded(moved: bool) -> tuple[float, dict[str, torch.Tensor], set[int]]:
    """(loss, gradients, numbers of tensors that left a unit) of a rank, FSDP around the units."""
    config = ParallelConfig(nproc=dist.get_world_size(), device="cpu")
    runtime, adapter, model = start_runtime(config, lambda: Path("unused")), get_adapter("qwen3"), csbp_model()
    units, mover = adapter.units(model), Mover(None, smallest=1)
    if moved:
        apply_offload(units, mover)
    shard_model(model, units, runtime.shard_mesh, torch.float64)
    runner, away = StepRunner(model, adapter, runtime, "reference"), set()
    close = offload._Kept.close

    def closed(kept: Any) -> None:
        close(kept)
        away.add(len(kept.buffers))

    offload._Kept.close = closed  # type: ignore[method-assign]
    try:
        with exact_norms():
            loss = runner.run(runner.prepare([make_pack([6, 10])], noising(4), 0), train=True).loss
    finally:
        offload._Kept.close = close  # type: ignore[method-assign]
    return loss, {name: p.grad.full_tensor() for name, p in model.named_parameters()}, away  # type: ignore[union-attr]


def test_weights_that_fsdp_gathers_stay(ranks, monkeypatch):
    log = watch(monkeypatch)
    found("none", moved=True)  # here the weights are seen to stay, by their memory
    unsharded = {len(kept.buffers) for kept in log.units}
    plain, offloaded = (ranks(2, sharded, moved) for moved in (False, True))
    for (loss, grads, none), (other, moved, away) in zip(plain, offloaded, strict=True):
        assert loss == other and none == set() and away == unsharded
        assert all(torch.equal(moved[name], value) for name, value in grads.items())


def test_weights_and_small_tensors_stay(monkeypatch):
    log = watch(monkeypatch)
    unit = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
    apply_offload([unit], Mover(None, smallest=4 * 64 * 9))
    for rows, tensors in ((8, 0), (9, 2)):  # the input, and what the sigmoid gives, once, though two layers keep it
        x = torch.randn(rows, 64, requires_grad=True)
        unit(x).sum().backward()
        assert x.grad is not None and len(log.units[-1].buffers) == tensors
    with torch.no_grad():
        unit(x)
    assert len(log.units) == 2  # nothing is kept without a backward


def test_nothing_outlives_its_graph():
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    mover = Mover(None, smallest=1)
    apply_offload(list(model), mover)
    loss = model(torch.randn(4, 8)).sum()
    kept = mover.last
    assert isinstance(kept, weakref.ref) and kept() is not None
    loss.backward()
    del loss
    gc.collect()
    assert kept() is None

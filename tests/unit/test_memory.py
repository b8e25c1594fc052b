"""What a rank needs and what is free to it, before the ranks start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cad import dear_profile
from config_kit import changed
from packs import MASK, make_pack
from runs import SHAPE, make_corpus, tiny_run

from csbp import check, memory, prepare
from csbp.attention.operator import BoundPlan
from csbp.check import run_check
from csbp.comm.transport import LocalTransport
from csbp.config.schema import NoiseConfig, ObjectiveConfig, RunConfig
from csbp.data.batch import PackedBatch
from csbp.diffusion.build import build_layout
from csbp.errors import ConfigError
from csbp.memory import count_parameters, plan_first_step
from csbp.models.registry import get_adapter
from csbp.plan.counts import count_plan
from csbp.plan.estimate import Settings, predict_memory
from csbp.plan.plan import PackPlan
from csbp.plan.shapes import model_shape
from csbp.plan_cli import plan_result
from csbp.train.ready import build_on_meta
from csbp.train.scatter import scatter


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("corpus")
    return tiny_run(make_corpus(folder), folder / "run")


def need(config: RunConfig) -> int:
    """Bytes a rank."""
    model = build_on_meta(config, get_adapter(config.model.family))
    return 16 * sum(p.numel() for p in model.parameters())


def test_what_check_refuses_is_refused_before_the_ranks(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same words, and before texts are tokenized; what may fit is left to the run."""
    told = []
    for free in (need(config) - 1, need(config)):
        for module in (check, memory):
            monkeypatch.setattr(module, "free_memory", lambda device, free=free: free)
        for start in (run_check, prepare.prepare_run):
            try:
                start(config)
            except ConfigError as error:
                told.append(str(error))
    assert len(told) == 2 and told[0] == told[1]
    assert told[0].startswith("parallel.nproc=1: weights, gradients and optimizer need")


@pytest.mark.parametrize(("parallel", "environment", "ranks"), [
    ({"nproc": 4}, {}, 1.0), ({"nproc": 4, "dp_replicate": 2, "csbp": 1}, {}, 2.0),
    ({"nproc": 4, "dp_replicate": 4, "csbp": 1}, {}, 4.0),
    ({"nproc": 4}, {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 0.5),
    ({"nproc": 4}, {"RANK": "2"}, 0.25)])
def test_ranks_of_one_host_share_its_memory(config: RunConfig, monkeypatch: pytest.MonkeyPatch,
                                            parallel: Mapping[str, Any], environment: Mapping[str, str],
                                            ranks: float) -> None:
    """``ranks``: how many times the model lies in the memory of this host."""
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    there = changed(config, {f"parallel.{name}": value for name, value in parallel.items()})
    adapter = get_adapter(config.model.family)
    model = build_on_meta(there, adapter)
    whole = int(need(config) * ranks)
    for free, refused in ((0.99 * whole, True), (1.01 * whole, False)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: int(free))
        try:
            memory.expect_room(model, there.parallel, adapter.tp_plan(model))
            assert not refused
        except ConfigError as error:
            assert refused and error.field == "parallel.nproc"


def test_a_started_rank_looks_at_its_own_gpu(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    free = [10**12, 10]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[torch.device(device).index], 10**12))
    there = changed(config, {"parallel.nproc": 2, "parallel.device": "cuda"})
    adapter = get_adapter(config.model.family)
    model = build_on_meta(there, adapter)
    for rank, refused in ((None, True), ("0", False), ("1", True)):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if rank:
            monkeypatch.setenv("LOCAL_RANK", rank)
        try:
            memory.expect_room(model, there.parallel, {})
            assert not refused
        except ConfigError:
            assert refused


def test_a_gpu_that_the_run_leaves_alone_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((30, 20, 10)[torch.device(device).index], 40))
    assert [memory.free_memory(torch.device("cuda", last)) for last in range(3)] == [30, 20, 10]


def test_exact_parts_of_the_estimate(config: RunConfig) -> None:
    adapter = get_adapter(config.model.family)
    model, shape = build_on_meta(config, adapter), model_shape(SHAPE, "block_causal")
    assert all(p.is_meta for p in model.parameters())
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 8
    total = 2 * layer + 320 * 32 + 32
    counts = count_plan(PackPlan(build_layout(make_pack([40]), config.objective, config.noise, mask_token_id=MASK,
                                              seed=0, step=0).geometry, shape.kinds, 3))
    need = predict_memory(shape, counts, np.full(3, 4), Settings(3, "none", 2),
                          count_parameters(model, adapter.units(model)))
    shard = -(-total // 3)
    assert (need.weights, need.gradients, need.optimizer) == (4 * shard, 4 * shard, 8 * shard)
    assert need.gathered == 2 * (total - 2 * layer + 2 * layer) and not need.workspace.any()
    # Logits and their gradient; the gradient of the rows; the head's, in float32 and in the compute dtype.
    assert (need.logits == 2 * 2 * 4 * 320 + 2 * 4 * 32 + 320 * 32 * (4 + 2)).all()
    np.testing.assert_array_equal(
        need.total, need.certain + need.gathered + need.activations + np.maximum(need.keys, need.logits))


def kept_bytes(layers: int) -> tuple[int, float]:
    """Of a forward of a pack: what autograd really keeps beside the weights, and activations by the estimate."""
    adapter, fields = get_adapter("qwen3"), {**SHAPE, "num_hidden_layers": layers}
    model, shape = adapter.build(None, fields, torch.float32), model_shape(fields, "block_causal")
    layout = build_layout(make_pack([40, 24]), ObjectiveConfig(block_size=4), NoiseConfig(), mask_token_id=MASK, seed=0,
                          step=0)
    pack = PackPlan(layout.geometry, shape.kinds, 1)
    plan = pack.rank_plan(0)
    parameters, saved = {p.data_ptr() for p in model.parameters()}, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = adapter.forward(model, scatter(layout, plan.rows), BoundPlan(plan, LocalTransport()))
    assert out.requires_grad
    need = predict_memory(shape, count_plan(pack), np.zeros(1), Settings(1, "none", 4))
    return sum(saved.values()), float(need.activations[0])


def test_activations_are_near_what_autograd_keeps() -> None:
    """Within a fifth of the tensors that a layer really saves for its backward."""
    (one, said), (three, said_of_three) = kept_bytes(1), kept_bytes(3)
    assert 0.8 < (three - one) / (said_of_three - said) < 1.2


class Packs:
    """A stream that is these packs."""

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.packs = [make_pack(part, first_id=10 * n) for n, part in enumerate(lengths)]

    def first(self) -> int:
        return 0

    def take(self, cursor: int, count: int) -> tuple[list[PackedBatch], int]:
        return self.packs[cursor:cursor + count], cursor + count


@pytest.mark.parametrize(("parallel", "pool"), [
    ({"nproc": 2}, ""), ({"nproc": 2, "checkpointing": "full"}, ""), ({"nproc": 2, "kind": "context"}, ""),
    ({"nproc": 2, "checkpointing": "attention", "offload": True}, ""), ({"nproc": 4, "csbp": 2, "tp": 2}, ""),
    ({"nproc": 2}, "csbp"), ({"nproc": 2, "csbp": 1, "checkpointing": "full"}, "dp")])
def test_check_and_plan_have_one_estimate(config: RunConfig, tmp_path: Path, parallel: dict[str, Any],
                                          pool: str) -> None:
    """Of the same packs; where query rows move, they and the memory that stays for them are in both."""
    lengths = [[300, 200], [100] * 5]
    (tmp_path / "lengths").write_text("\n".join(str(n) for pack in lengths for n in pack))
    there = changed(config, {
        "data.seq_len": 500, "data.document_tokens": None, "data.document_lengths": str(tmp_path / "lengths"),
        "objective.block_size": 100, "train.packs_per_step": 2, "cad.enabled": pool != "", "cad.pool": pool or "csbp",
        "cad.tolerance": 0.0, "cad.min_gain": 0.0, "cad.profile": str(dear_profile(tmp_path)),
        **{f"parallel.{name}": value for name, value in parallel.items()}})
    # Packs are looked at one by one, unless they are planned together: the first is the one that csbp plan plans.
    stream: Any = Packs(lengths if pool == "dp" else lengths[:1])
    said = plan_first_step(there, model_shape(SHAPE, "block_causal"), None, stream, "cpu").memory
    plan = plan_result(there)
    for name, value in vars(plan.chosen.memory).items():
        np.testing.assert_array_equal(getattr(said, name), value, err_msg=name)
    assert said.keys.any() and (said.activations > 0).all()
    if plan.levelled:
        assert plan.chosen.plan.served and (said.logits - plan.levelled.without.memory.logits).max() > 50_000


def test_the_pack_that_takes_most_counts(config: RunConfig) -> None:
    shape = model_shape(SHAPE, "block_causal")
    there = changed(config, {"parallel.nproc": 2, "train.packs_per_step": 3})

    def total(*lengths: Sequence[int]) -> float:
        stream: Any = Packs(lengths)
        return float(plan_first_step(there, shape, None, stream, "cpu").memory.total.max())

    assert total([30], [60, 30], [20]) == total([60, 30]) > total([30])

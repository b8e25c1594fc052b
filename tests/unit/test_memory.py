"""What a rank needs and what is free to it, before the ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from config_kit import changed
from runs import make_corpus, tiny_run

from csbp import check, memory, prepare
from csbp.check import run_check
from csbp.config.schema import RunConfig
from csbp.errors import ConfigError
from csbp.models.registry import get_adapter
from csbp.train.ready import build_on_meta


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

"""All ranks of a run go by the same settings and documents, or each of them says what differs before any work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import make_corpus, tiny_run, train_here
from transformers import PreTrainedTokenizerFast

from csbp.config.cad import pooled
from csbp.config.schema import ModelConfig, ParallelConfig, RunConfig, SourceConfig
from csbp.config.shared import shared_settings
from csbp.errors import ConfigError
from csbp.parallel.rendezvous import RENDEZVOUS_FILE
from csbp.parallel.runtime import start_runtime
from csbp.train.session import expect_same_weights

Ranks = Callable[..., list[Any]]


def started(configs: list[RunConfig], folder: str) -> Any:
    """Join the others with this rank's configuration, as ranks that csbp starts do: what it had to say, what rank 0
    had prepared by then, and a sum over all ranks."""
    config, prepared = configs[dist.get_rank()], []
    dist.barrier()  # all are in the pool's group before one leaves it
    dist.destroy_process_group()
    os.environ[RENDEZVOUS_FILE] = f"{folder}/rendezvous"
    try:
        runtime = start_runtime(config.parallel, lambda: prepared.append(1) or Path(folder), pooled=pooled(config),
                                settings=shared_settings(config))
        found = "", prepared, runtime.total([1.0])
        runtime.close()
        return found
    except ConfigError as error:
        return str(error), prepared, error.shared
    finally:
        del os.environ[RENDEZVOUS_FILE]


def run(folder: Path, **changes: Any) -> RunConfig:
    return tiny_run(folder, folder, parallel={"nproc": 2}, **changes)


@pytest.mark.parametrize(("changes", "said"), [
    ({"cad": {"tolerance": 0.25}}, "cad.tolerance=0.25: so it is on rank 1, but 0.02 on rank 0"),
    ({"objective": {"block_size": 16}}, "objective.block_size=16: so it is on rank 1, but 4 on rank 0"),
    ({"parallel": {"nproc": 2, "csbp": 1}}, "parallel.csbp=1: so it is on rank 1, but null on rank 0"),
    ({"data": {"sources": [SourceConfig(path="here", include=["**/*", "x"])]}},
     "data.sources.0.include.1='x': so it is on rank 1, but null on rank 0"),
    ({"train": {"steps": 11}, "seed": 4}, "seed=4: so it is on rank 1, but 3 on rank 0"),
])
def test_what_differs_is_named_on_every_rank(ranks: Ranks, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    changed = tiny_run(tmp_path, tmp_path, **{"parallel": {"nproc": 2}, **changes})
    for message, prepared, shared in ranks(2, started, [run(tmp_path), changed], str(tmp_path)):
        assert message == f"{said}; start all ranks with the same settings"
        assert prepared == [] and shared


def test_what_is_a_hosts_own_may_differ(ranks: Ranks, tmp_path: Path) -> None:
    first = run(tmp_path)
    source = replace(first.data.sources[0], path="/elsewhere")
    other = tiny_run(tmp_path, tmp_path / "other", parallel={"nproc": 2, "threads": 2, "device": "auto"},
                     data={"cache_dir": "/scratch", "sources": [source], "tokenizer": "/elsewhere"},
                     model={"path": "/elsewhere"}, cad={"profile": "mine.json"}, plan={"device": "cpu"},
                     observe={"progress": "bar"})
    assert ranks(2, started, [first, other], str(tmp_path)) == [("", [1], [2.0]), ("", [], [2.0])]


def train_as(configs: list[RunConfig]) -> str:
    """The refusal of this rank's run."""
    with pytest.raises(ConfigError) as caught:
        train_here(configs[dist.get_rank()])
    assert caught.value.shared
    return str(caught.value)


def test_hosts_with_other_documents_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """The same settings, the same number of files of the same lengths: only a letter differs."""
    folders = [make_corpus(tmp_path / name) for name in ("first", "second")]
    text = folders[1] / "texts" / "07.txt"
    text.write_text(text.read_text().replace("w3", "x3"))
    configs = [tiny_run(folder, tmp_path / "run") for folder in folders]
    for message in ranks(2, train_as, configs):
        assert message.startswith("data.sources=[") and "some host reads other documents than rank 0's" in message


def test_hosts_with_other_tokenizers_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Their texts are the same tokens, but they would not mean the same by [MASK]."""
    folders = [make_corpus(tmp_path / name) for name in ("first", "second")]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders[1] / "tokenizer")
    tokenizer.add_tokens(["<never seen>"])
    tokenizer.save_pretrained(folders[1] / "tokenizer")
    for rank, message in enumerate(ranks(2, train_as, [tiny_run(folder, tmp_path / "run") for folder in folders])):
        assert f"another tokenizer than rank 0's, here of {257 + rank} ids" in message


def weigh(init: str, value: float, wide: int) -> str:
    """What is said of a model that differs on rank 1."""
    model, mine = torch.nn.Linear(3000, 2), dist.get_rank() == 1
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.constant_(model.bias, value if mine else 0.0)
    runtime = start_runtime(ParallelConfig(nproc=2, device="cpu"), Path)
    try:
        expect_same_weights(RunConfig(model=ModelConfig(init=init)), runtime, model if not mine else
                            torch.nn.Sequential(*[model] * wide) if wide else model)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("init", "value", "wide", "refused"), [
    ("pretrained", 0.0, 0, False), ("pretrained", 1e-6, 0, True), ("random", 1e-6, 0, False), ("random", 0.0, 2, True)])
def test_hosts_with_other_models_are_refused(ranks: Ranks, init: str, value: float, wide: int, refused: bool) -> None:
    assert ["another model than rank 0's" in said for said in ranks(2, weigh, init, value, wide)] == [refused] * 2


def test_settings_are_compared_one_by_one(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, tmp_path)
    found = shared_settings(config)
    assert found["model.shape.head_dim"] == 8 and found["data.sources.0.include.0"] == "**/*"
    assert not {"run_dir", "data.cache_dir", "data.sources.0.path", "cad.profile", "parallel.device"} & found.keys()
    assert list(found)[:2] == ["recipe", "experiment"] and {"cad.pool", "parallel.tp", "train.dtype"} < found.keys()

"""Training runs with a tp axis: the losses and gradient norms of one rank, checkpoints for any topology, exports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import SHAPE, losses, make_corpus, steps_of, tiny_run, train_here

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_rank(ranks: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("one")
    config = tiny_run(corpus, run, train={"steps": 20, "sample_every": 10}, checkpoint={"export": True})
    assert ranks(1, train_here, config) == [0]
    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "export" / "model.safetensors")


@pytest.mark.parametrize(("world", "parallel"), [
    pytest.param(2, {"tp": 2}, marks=slow), pytest.param(4, {"tp": 2}, marks=slow),
    pytest.param(4, {"tp": 2, "kind": "data"}, marks=slow),
    pytest.param(4, {"tp": 2, "csbp": 1, "dp_replicate": 2}, marks=slow)])
def test_twenty_steps_are_those_of_one_rank(ranks: Any, corpus: Path, tmp_path: Path, one_rank: Path, world: int,
                                            parallel: dict[str, Any]) -> None:
    config = tiny_run(corpus, tmp_path, parallel=parallel, train={"steps": 20, "sample_every": 10},
                      checkpoint={"export": True})
    assert ranks(world, train_here, config) == [0] * world
    np.testing.assert_allclose(losses(tmp_path), losses(one_rank), rtol=1e-5)
    found, wanted = steps_of(tmp_path), steps_of(one_rank)
    np.testing.assert_allclose([r["grad_norm"] for r in found], [r["grad_norm"] for r in wanted], rtol=1e-5)
    for name in ("clean_tokens", "supervised_tokens"):
        assert [r.get(name) for r in found] == [r.get(name) for r in wanted]
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (tmp_path, one_rank))
    assert ours["eval_loss_after"] == pytest.approx(theirs["eval_loss_after"], rel=1e-5)
    assert ours["masked_accuracy_after"] == pytest.approx(theirs["masked_accuracy_after"])
    exported, reference = weights(tmp_path), weights(one_rank)
    assert exported.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-3, atol=1e-4)


MOVES = [(2, {"tp": 2}, 2, {}), pytest.param(2, {}, 2, {"tp": 2}, marks=slow),
         pytest.param(4, {"tp": 2}, 3, {"csbp": 1}, marks=slow),
         pytest.param(3, {}, 4, {"tp": 2, "csbp": 1, "dp_replicate": 2}, marks=slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "before", "second", "after"), MOVES)
def test_a_run_goes_on_with_another_tp(ranks: Any, corpus: Path, tmp_path: Path, one_rank: Path, first: int,
                                       before: dict[str, Any], second: int, after: dict[str, Any]) -> None:
    ranks(first, train_here, tiny_run(corpus, tmp_path, train={"steps": 4}, parallel=before))
    ranks(second, train_here, tiny_run(corpus, tmp_path, train={"steps": 10}, resume="auto", parallel=after))
    np.testing.assert_allclose(losses(tmp_path), losses(one_rank)[:10], rtol=1e-5)


@slow
@pytest.mark.timeout(900)
def test_compiled_and_checkpointed_layers_agree(ranks: Any, corpus: Path, tmp_path: Path, one_rank: Path) -> None:
    how = {"tp": 2, "compile": True, "checkpointing": "attention"}
    ranks(2, train_here, tiny_run(corpus, tmp_path, train={"steps": 4}, parallel=how), timeout=800)
    np.testing.assert_allclose(losses(tmp_path), losses(one_rank)[:4], rtol=1e-5)


def launched(corpus: Path, run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``csbp train`` with its own ranks: twenty steps of the tiny model."""
    shape = ", ".join(f"{name}: {str(value).lower()}" for name, value in SHAPE.items())
    settings = ["experiment=quickstart", "model.path=", "model.init=random", f"model.shape={{{shape}}}",
                f"data.sources=[{{path: {corpus / 'texts'}}}]", f"data.tokenizer={corpus / 'tokenizer'}",
                f"data.cache_dir={corpus / 'cache'}", "data.validation_fraction=0.25", "data.seq_len=96",
                "data.document_tokens=64",
                "train.steps=20", "train.eval_every=0", "train.sample_every=0", "train.eval_packs=1",
                "checkpoint.export=false", "observe.plot=false", "observe.progress=off", f"run_dir={run}"]
    return subprocess.run([Path(sys.executable).parent / "csbp", "train", *settings, *words], capture_output=True,
                          text=True, check=False)


@slow
@pytest.mark.timeout(300)
def test_the_launcher_starts_a_mesh_with_a_tp_axis(corpus: Path, tmp_path: Path) -> None:
    meshes = {"one": ["parallel.nproc=1"], "mesh": ["parallel.nproc=4", "parallel.csbp=2", "parallel.tp=2"]}
    for name, words in meshes.items():
        done = launched(corpus, tmp_path / name, *words)
        assert done.returncode == 0, done.stderr
    one, mesh = (steps_of(tmp_path / name) for name in meshes)
    assert len(one) == 20
    for field in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[field] for row in mesh], [row[field] for row in one], rtol=1e-5)


@slow
def test_heads_that_tp_does_not_divide_are_refused_before_the_ranks_start(corpus: Path, tmp_path: Path) -> None:
    done = launched(corpus, tmp_path / "run", "parallel.nproc=4", "parallel.tp=4")
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "run").exists()
    assert done.stderr == ("csbp: parallel.tp=4: must divide the model's 2 key/value heads: one of 1, 2\n")

"""Training with attention shared among ranks: the same losses, and it goes on with or without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import losses, make_corpus, steps_of, tiny_run, train_here

pytestmark = pytest.mark.slow
LONG = {"seq_len": 500, "document_tokens": 400}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_corpus(tmp_path_factory.mktemp("corpus"))
    cost = {"tile": 10**9, "segment": 0, "pair": 10**9}  # so dear that whatever travels is hidden
    (folder / "dear.json").write_text(json.dumps({"format": 1, "name": "dear", "heads": 1, "kv_heads": 1, "head_dim": 8,
                                                  "fit": {"forward": cost, "backward": cost, "launch": 0}}))
    return folder


def run(corpus: Path, folder: Path, **changes: Any) -> Any:
    return tiny_run(corpus, folder, **{"data": LONG, "objective": {"block_size": 64}, "train": {"steps": 20},
                                       "parallel": {"csbp": 2}, **changes})


def cad(corpus: Path, pool: str) -> dict[str, Any]:
    return {"enabled": True, "pool": pool, "tolerance": 0.0, "min_gain": 0.0, "profile": str(corpus / "dear.json")}


@pytest.fixture(scope="module")
def without(ranks: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    assert ranks(4, train_here, run(corpus, folder)) == [0] * 4
    return folder


def check(found: Path, without: Path) -> None:
    """The same losses and gradient norms, and something moved."""
    np.testing.assert_allclose(losses(found), losses(without), rtol=1e-5)
    norms = [[row["grad_norm"] for row in steps_of(folder)] for folder in (found, without)]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    assert any(row["cad_bytes"] for row in steps_of(found))


@pytest.mark.parametrize("pool", ["csbp", "dp"])
def test_losses_are_those_without(ranks: Any, corpus: Path, tmp_path: Path, without: Path, pool: str) -> None:
    assert ranks(4, train_here, run(corpus, tmp_path, cad=cad(corpus, pool))) == [0] * 4
    check(tmp_path, without)


def train_with_own_profile(config: Any, folder: str) -> int:
    """As on hosts each of which has measured its devices: rank n has the file n.json."""
    import torch.distributed as dist

    return train_here(replace(config, cad=replace(config.cad, profile=f"{folder}/{dist.get_rank()}.json")))


def test_ranks_plan_by_one_profile(ranks: Any, corpus: Path, tmp_path: Path, without: Path) -> None:
    read = json.loads((corpus / "dear.json").read_text())
    for rank in range(4):
        read["fit"]["forward"] = {"tile": 10**(9 + rank), "segment": 10**(12 - 3 * rank), "pair": 10**9}
        (corpus / f"{rank}.json").write_text(json.dumps(read))
    asked = run(corpus, tmp_path, cad=cad(corpus, "dp"))
    assert ranks(4, train_with_own_profile, asked, str(corpus)) == [0] * 4
    np.testing.assert_allclose(losses(tmp_path), losses(without), rtol=1e-5)


def test_goes_on_without_and_over_replicas(ranks: Any, corpus: Path, tmp_path: Path, without: Path) -> None:
    assert ranks(4, train_here, run(corpus, tmp_path, cad=cad(corpus, "dp"), train={"steps": 7})) == [0] * 4
    assert ranks(2, train_here, run(corpus, tmp_path, train={"steps": 13}, resume="auto")) == [0] * 2
    assert ranks(4, train_here, run(corpus, tmp_path, cad=cad(corpus, "dp"), parallel={"csbp": 1},
                                    resume="auto")) == [0] * 4
    np.testing.assert_allclose(losses(tmp_path), losses(without), rtol=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("pool", "csbp"), [("csbp", 2), ("dp", 1)])
def test_compiled_layers_agree(ranks: Any, corpus: Path, tmp_path: Path, without: Path, pool: str, csbp: int) -> None:
    asked = run(corpus, tmp_path, cad=cad(corpus, pool), parallel={"csbp": csbp, "compile": True})
    assert ranks(2, train_here, asked, timeout=800) == [0] * 2
    check(tmp_path, without)

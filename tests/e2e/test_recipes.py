"""Every recipe by its name, with a tiny configuration, and what pages show as it is."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import losses, make_corpus, tiny_run

from csbp.config.compose import compose_run
from csbp.config.places import recipes
from csbp.config.validate import validate_run

TINY: dict[str, dict[str, Any]] = {
    "convert_qwen": {},
    "train_ar": {"objective": {"kind": "autoregressive", "clean_stream": "token_causal"}},
}


def run_recipe(config: Any) -> int:
    """Drive a recipe on this rank of an initialised world."""
    from csbp.parallel.runtime import start_runtime

    folder = Path(config.run_dir)
    folder.mkdir(exist_ok=True)
    runtime = start_runtime(config.parallel, lambda: folder)
    code: int = importlib.import_module(f"csbp.recipes.{config.recipe}").main(config, runtime)
    return code


def test_every_recipe_has_a_tiny_configuration() -> None:
    assert set(recipes()) == set(TINY)


@pytest.mark.parametrize("name", sorted(TINY))
def test_recipe(ranks: Any, tmp_path: Path, name: str) -> None:
    config = tiny_run(make_corpus(tmp_path / "corpus"), tmp_path / "run", recipe=name, train={"steps": 2}, **TINY[name])
    assert ranks(1, run_recipe, config) == [0]
    assert len(losses(tmp_path / "run")) == 2


def test_the_recorded_random_start_is_shown_only_where_it_holds() -> None:
    from csbp.train.drive import comparison_digest

    quickstart = compose_run(["experiment=quickstart", "parallel.nproc=4", "train.steps=5", "data.cache_dir=/x"])
    assert quickstart.observe.random_start_for == comparison_digest(quickstart)
    for word in ("train.eval_packs=2", "objective.block_size=4", "data.document_tokens=64"):
        other = compose_run(["experiment=quickstart", word])
        assert other.observe.random_start_for != comparison_digest(other)


def example(page: str) -> str:
    """The one whole configuration that a page shows."""
    text = (Path(__file__).parents[2] / page).read_text()
    (found,) = re.findall(r"```yaml\n(# @package _global_\n.*?)```", text, re.DOTALL)
    return found


def test_the_documented_chat_run_is_valid(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "chats.jsonl").write_text("{}\n")
    text = example("docs/data.md").replace("/models/Qwen3-0.6B", str(tmp_path / "model"))
    (tmp_path / "my_chats.yaml").write_text(text.replace("chats.jsonl", str(tmp_path / "chats.jsonl")))
    config = compose_run([f"experiment={tmp_path / 'my_chats.yaml'}"])
    validate_run(config)
    assert config.data.sources[0].format == "messages"


@pytest.mark.slow
def test_the_readme_example_trains_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(example("README.md"))
    (tmp_path / "csbp").symlink_to(Path(__file__).parents[2] / "csbp")
    run = tmp_path / "run"
    subprocess.run([str(Path(sys.executable).parent / "csbp"), "train", "experiment=my.yaml", f"run_dir={run}",
                    "train.steps=2", f"data.cache_dir={tmp_path / 'cache'}", "observe=quiet"], cwd=tmp_path, check=True,
                   timeout=100)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["eval_loss_after"] < summary["eval_loss_before"]
    assert (run / "export" / "model.safetensors").exists() and not (run / "loss.png").exists()


def test_the_shipped_model_is_small_and_loads() -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(__file__).parents[2] / "models" / "qwen3" / "tiny_ar"
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 8e6
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 2e6 <= sum(p.numel() for p in model.parameters()) <= 4e6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_has_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    found = []
    for nproc in (1, 3, 4):
        run = tmp_path / str(nproc)
        subprocess.run([str(Path(sys.executable).parent / "csbp"), "train", "experiment=quickstart", f"run_dir={run}",
                        f"parallel.nproc={nproc}", "train.steps=3", "train.eval_packs=1"], check=True, timeout=300)
        found.append(losses(run))
        summary = json.loads((run / "summary.json").read_text())
        assert summary["eval_loss_after"] < summary["eval_loss_before"]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5)

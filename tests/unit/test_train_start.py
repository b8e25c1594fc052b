"""What is refused before the first step: data without anything to learn, data that are not the checkpoint's."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cad import dear_profile, packed
from runs import SHAPE, make_corpus, tiny_run

from csbp.config.schema import RunConfig, SourceConfig
from csbp.data.stream import Cursor
from csbp.data.tokenizer import load_tokenizer
from csbp.errors import ConfigError
from csbp.plan.cad import cad_of
from csbp.plan.plan import PackPlan
from csbp.plan.shapes import model_shape
from csbp.train.progress import Progress, check_same_data
from csbp.train.ready import open_data
from csbp.train.trainer import Trainer

AR = {"kind": "autoregressive", "clean_stream": "token_causal"}
SHIFTED = {"clean_stream": "token_causal", "label_shift": True}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def texts(folder: Path, *contents: str) -> list[SourceConfig]:
    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"{number}.txt").write_text(content)
    return [SourceConfig(path=str(folder))]


def start(config: RunConfig) -> None:
    open_data(config, load_tokenizer(config.data.tokenizer, config.model.family))


@pytest.mark.parametrize("objective", [AR, SHIFTED])
def test_documents_of_one_token_teach_no_next_token(corpus: Path, tmp_path: Path, objective: dict[str, Any]) -> None:
    short, longer = texts(tmp_path / "short", "a", "b", "c"), texts(tmp_path / "longer", "ab", "cd")
    data = {"sources": short, "validation": longer, "validation_fraction": 0.0, "append_eos": False}
    with pytest.raises(ConfigError, match=r"data.sources=.*short.*each document is a single token.*longer documents"):
        start(tiny_run(corpus, tmp_path / "run", objective=objective, data=data))
    with pytest.raises(ConfigError, match=r"train.eval_packs=2: nothing to learn in the 1 held-out.*data.validation"):
        start(tiny_run(corpus, tmp_path / "run", objective=objective,
                       data={**data, "sources": longer, "validation": short}))
    start(tiny_run(corpus, tmp_path / "run", data=data))  # the hidden token itself is predicted
    start(tiny_run(corpus, tmp_path / "run", objective=objective, data={**data, "append_eos": True}))


def test_one_learnable_document_in_the_epoch_is_enough(corpus: Path, tmp_path: Path) -> None:
    data = {"sources": texts(tmp_path / "short", *"abcdefgh", "ab"), "validation_fraction": 0.0, "append_eos": False,
            "validation": texts(tmp_path / "held", "ab"), "seq_len": 2, "document_tokens": 2, "pack_window": 2}
    start(tiny_run(corpus, tmp_path / "run", objective=AR, data=data))


def session() -> Any:
    def on_main(check: Any) -> None:
        check()

    data = SimpleNamespace(sources=[SourceConfig(path="texts")], validation=[])
    return SimpleNamespace(runtime=SimpleNamespace(on_main=on_main), config=SimpleNamespace(data=data),
                           train_stream=SimpleNamespace(digest="t"), held_out=SimpleNamespace(digest="v"))


def test_a_checkpoint_that_does_not_know_its_data_is_taken_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_same_data(session(), {"train": "t", "validation": "v"}, Path("step-1"))
        assert caplog.text == ""
        check_same_data(session(), None, Path("step-1"))
    assert "step-1 does not say what data it comes from" in caplog.text
    with pytest.raises(ConfigError, match="the training and the held-out documents are not those that step-1 was"):
        check_same_data(session(), {"train": "x", "validation": "y"}, Path("step-1"))


def test_progress_of_an_earlier_version_is_read_and_skips_are_counted_anew() -> None:
    now = Progress(Cursor(1, 2, 3), step=7, skipped=2, best=1.5, best_step=4, evaluated=6, seconds=2.5)
    state = json.loads(json.dumps({"step": 7, **now.to_json(), "data": {}}))
    assert Progress.from_json(state) == replace(now, skipped=0)
    for name in ("evaluated", "best_step", "data"):
        del state[name]
    old = Progress.from_json({**state, "is_best": False})
    assert old == replace(now, skipped=0, best_step=-1, evaluated=7)


@pytest.mark.parametrize(("step", "lengths", "said"), [
    (0, [[100, 100], [300, 200]], r"by prediction, what moves saves \d\d?\.\d% of .* in the first step\. Later"),
    (6, [[100, 100]], r"nothing moves in step 7; csbp plan can say why\. Later steps differ: cad_bytes in metrics")])
def test_what_moves_is_foretold_of_all_of_a_step(corpus: Path, tmp_path: Path, step: int, lengths: list[list[int]],
                                                 said: str) -> None:
    """Also where nothing moves in its first micro-batch."""
    shape = model_shape(SHAPE, "block_causal")
    cad = cad_of(tiny_run(corpus, tmp_path, cad={"enabled": True, "tolerance": 0.0, "profile": str(
        dear_profile(tmp_path))}), shape, "cpu")
    assert cad is not None
    kinds = tuple(part.kind for part in shape.attention)
    plans = [cad.moved(PackPlan(packed(pack, 100), kinds, 2)) for pack in lengths]
    assert [bool(plan.served) for plan in plans] == [False, True][:len(plans)]
    notes = list[str]()
    fake: Any = SimpleNamespace(session=SimpleNamespace(runtime=SimpleNamespace(total=list)), _foretold=False,
                                progress=Progress(Cursor(), step), recorder=SimpleNamespace(note=notes.append))
    works: Any = [SimpleNamespace(whole=plan) for plan in plans]
    Trainer._foretell(fake, cad, works)
    assert len(notes) == 1 and re.search(said, notes[0]) and fake._foretold

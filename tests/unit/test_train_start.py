"""What is refused before the first step: data without anything to learn, data that are not the checkpoint's."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import make_corpus, tiny_run

from csbp.config.schema import RunConfig, SourceConfig
from csbp.data.stream import Cursor
from csbp.data.tokenizer import load_tokenizer
from csbp.errors import ConfigError
from csbp.train.progress import Progress, check_same_data
from csbp.train.ready import open_data

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

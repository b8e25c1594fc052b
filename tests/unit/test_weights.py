"""A model folder is held against its model before anything is loaded; surprises are said."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SHAPE, make_corpus, tiny_run
from safetensors.torch import load_file, save_file

from csbp.checkpoint.weights import expect_weights, tensor_shapes
from csbp.config.schema import RunConfig
from csbp.errors import ConfigError
from csbp.models.registry import get_adapter
from csbp.train.ready import check_model

ADAPTER = get_adapter("qwen3")
DIFFUSION = {"block_size": 4, "mask_token_id": 257, "label_shift": False, "clean_stream": "block_causal"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> RunConfig:
    """A run that goes on with a model in tmp_path/model."""
    model: Any = ADAPTER.build(None, {**SHAPE, "max_position_embeddings": 64}, torch.float32)
    model.save_pretrained(tmp_path / "model", max_shard_size="40kB")
    there = {"init": "pretrained", "path": str(tmp_path / "model"), "shape": {}}
    return tiny_run(corpus, tmp_path / "run", model=there)


def refused(run: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(run)
    assert caught.value.field == "model.path"
    return caught.value.fix


def test_whole_weights_pass_and_their_shapes_are_read(run: RunConfig, tmp_path: Path) -> None:
    assert check_model(run).notes == []
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        assert tensor_shapes(file) == {name: list(value.shape) for name, value in load_file(file).items()}


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_a_file_cut_short_is_named(run: RunConfig, tmp_path: Path, size: int) -> None:
    file = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file.name} is damaged or cut short" in refused(run)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": {"shape": [1]}}', b'{"a": 3}', b"\xff\xff"])
def test_a_header_that_is_none(run: RunConfig, tmp_path: Path, header: bytes) -> None:
    file = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert f"{file.name} is damaged or cut short" in refused(run)


def test_missing_files_and_tensors(run: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    index, last = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.unlink()
    assert f"{last.name} is missing" in refused(run)
    last.write_bytes(content)
    weights = load_file(last)
    gone = weights.pop(next(iter(weights)))
    save_file(weights, last)
    assert "has no weights for model." in refused(run) and gone.numel()
    last.write_bytes(content)
    file = next(f for f in folder.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    save_file({**load_file(file), "model.norm.weight": torch.zeros(7)}, file)
    assert "model.norm.weight has shape [7] there, and [32] by its config.json" in refused(run)
    index.write_text("{}")
    assert "index.json cannot be read" in refused(run)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert "holds no *.safetensors" in refused(run)


def test_a_bare_decoder_and_a_tied_head_are_whole(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    expect_weights(tmp_path, {"model.norm.weight": [3], "lm_head.weight": [5, 3]}, ["lm_head.weight"])
    with pytest.raises(ConfigError, match="lm_head.weight"):
        expect_weights(tmp_path, {"model.norm.weight": [3], "lm_head.weight": [5, 3]})


def test_documents_beyond_the_models_positions_are_noted(run: RunConfig) -> None:
    long = replace(run, data=replace(run.data, document_tokens=None))  # seq_len=96
    (note,) = check_model(long).notes
    assert "up to 96 tokens go beyond the model's max_position_embeddings=64" in note


def test_another_meaning_of_a_converted_model_is_said_loudly(run: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | DIFFUSION))
    assert check_model(run).notes == []
    objective = replace(run.objective, label_shift=True, clean_stream="token_causal", block_size=8)
    changed = replace(run, objective=objective, model=replace(run.model, mask_token_id=300))
    text = "\n".join(check_model(changed).notes)
    for said in ("WAS TRAINED WITH label_shift=False", "objective.label_shift=false", "clean_stream=block_causal",
                 "mask_token_id=257, this run has 300", "block_size=4, this run has 8"):
        assert said in text
    assert text.count("THE MODEL") == 3
    plain = replace(run, objective=replace(run.objective, kind="autoregressive", clean_stream="token_causal"))
    assert "trained by block diffusion" in "".join(check_model(plain).notes)

"""``csbp generate`` on an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from csbp.checkpoint.huggingface import export_model
from csbp.config.schema import GenerateConfig
from csbp.diffusion.sampler import generate
from csbp.errors import ConfigError
from csbp.generate import run_generate
from csbp.models.registry import get_adapter

ADAPTER, LETTERS = get_adapter("qwen3"), "<abcdefghijklmnopqrstuvwxyz "
MASK = len(LETTERS)
DIFFUSION = {"block_size": 4, "mask_token_id": MASK, "label_shift": False, "clean_stream": "block_causal"}


def letters() -> Any:
    """One token a letter; "<" ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<")


@pytest.fixture(scope="module")
def model() -> Any:
    shape = dict(vocab_size=MASK + 1, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
    torch.manual_seed(1)
    model = ADAPTER.build(None, shape, torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_it_prints_the_prompt_and_what_the_sampler_gives(tmp_path: Path, model: Any, capsys: Any,
                                                         temperature: float) -> None:
    export_model(model, ADAPTER, letters(), tmp_path / "export", DIFFUSION)
    prompt = "hello world"
    ids = letters()(prompt)["input_ids"]
    new = generate(model, ADAPTER, ids, **DIFFUSION, eos_token_id=0, max_new_tokens=20, threshold=0.5,
                   temperature=temperature, seed=3)
    capsys.readouterr()
    for place in (tmp_path / "export", tmp_path):  # the export itself, and the run folder that holds it
        assert run_generate(GenerateConfig(model=str(place), prompt=prompt, max_new_tokens=20, threshold=0.5,
                                           temperature=temperature, seed=3, device="cpu")) == 0
        text = "".join(LETTERS[i] for i in new if i)
        assert capsys.readouterr().out == prompt + text + "\n"
    assert len(text) > 3


def test_what_cannot_generate_is_refused(tmp_path: Path, model: Any) -> None:
    export_model(model, ADAPTER, letters(), tmp_path / "ar", {})
    with pytest.raises(ConfigError, match="not a block-diffusion model"):
        run_generate(GenerateConfig(model=str(tmp_path / "ar"), prompt="a", device="cpu"))
    with pytest.raises(ConfigError, match="model="):
        run_generate(GenerateConfig(model=str(tmp_path / "nothing"), prompt="a", device="cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device='cuda'"):
            run_generate(GenerateConfig(model=str(tmp_path / "ar"), prompt="a", device="cuda"))


@pytest.mark.parametrize(("name", "value"), [
    ("block_size", "4"), ("block_size", 0), ("mask_token_id", MASK + 1), ("mask_token_id", None), ("label_shift", 1),
    ("clean_stream", "causal")])
def test_an_edited_config_json_is_refused(tmp_path: Path, model: Any, name: str, value: Any) -> None:
    export_model(model, ADAPTER, letters(), tmp_path, {**DIFFUSION, name: value})
    with pytest.raises(ConfigError, match=f"model=.*its config.json has {name}={value!r}"):
        run_generate(GenerateConfig(model=str(tmp_path), prompt="a", device="cpu"))


def test_more_tokens_than_the_model_has_positions_are_said(tmp_path: Path, model: Any, capsys: Any) -> None:
    export_model(model, ADAPTER, letters(), tmp_path, DIFFUSION)
    for length, warned in ((5, False), (130, True)):
        run_generate(GenerateConfig(model=str(tmp_path), prompt="a" * length, max_new_tokens=4, device="cpu"))
        assert ("max_position_embeddings=128" in capsys.readouterr().err) == warned

"""What ``model.shape`` and a config.json may hold: one refusal, with the field, whoever reads them first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from csbp.errors import ConfigError
from csbp.models.registry import get_adapter
from csbp.plan.shapes import model_shape

ADAPTER = get_adapter("qwen3")
SHAPE = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def build(path: Path | None, shape: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return ADAPTER.build(path, shape, torch.float32)


SIZES = [("hidden_size", -1), ("hidden_size", "wide"), ("hidden_size", True), ("hidden_size", 32.0),
         ("hidden_size", 10**12), ("num_attention_heads", 0), ("num_key_value_heads", 3), ("num_key_value_heads", 0),
         ("num_hidden_layers", 0), ("vocab_size", 0), ("vocab_size", 10**30), ("intermediate_size", 0),
         ("head_dim", 0), ("layer_types", ["full_attention"]), ("layer_types", ["full_attention", "linear"]),
         ("layer_types", 3), ("text_config", 3)]
OTHERS = [("hidden_act", "sillu"), ("head_dim", 7), ("attention_dropout", 0.1), ("rms_norm_eps", float("nan")),
          ("rms_norm_eps", "small"), ("initializer_range", -1.0), ("max_position_embeddings", 0),
          ("tie_word_embeddings", "yes"), ("pad_token_id", 320), ("rope_parameters", {"rope_type": "nope"}),
          ("rope_parameters", 3), ("rope_theta", 1e4), ("_attn_implementation", "eager")]


@pytest.mark.parametrize(("name", "value"), [case for case in SIZES if case[0] != "text_config"] + OTHERS)
def test_a_bad_field_is_refused_by_name(name: str, value: Any) -> None:
    build(None, SHAPE)
    with pytest.raises(ConfigError) as caught:
        build(None, {**SHAPE, name: value})
    assert caught.value.field == f"model.shape.{name}" and caught.value.fix


@pytest.mark.parametrize(("name", "value"), SIZES)
def test_planning_refuses_the_same_sizes(name: str, value: Any) -> None:
    model_shape(SHAPE, "block_causal")
    with pytest.raises(ConfigError) as caught:
        model_shape({**SHAPE, name: value}, "block_causal")
    assert caught.value.field == f"model.shape.{name}"


def test_windows_are_sizes_too() -> None:
    sliding = {**SHAPE, "use_sliding_window": True, "max_window_layers": 1}
    for name, value in (("sliding_window", 0), ("max_window_layers", -1), ("max_window_layers", "all")):
        for read in (lambda shape: build(None, shape), lambda shape: model_shape(shape, "block_causal")):
            with pytest.raises(ConfigError) as caught:
                read({**sliding, "sliding_window": 8, name: value})
            assert caught.value.field == f"model.shape.{name}"


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": 0}, "its config.json has num_hidden_layers=0"),
    ({"hidden_act": "sillu"}, "its config.json has hidden_act='sillu': did you mean silu?"),
    ({"head_dim": 7}, "its config.json cannot be used: ValueError: RoPE"),
    ({"tie_word_embeddings": "yes"}, "its config.json cannot be used")])
def test_a_bad_config_json_is_laid_to_its_folder(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    build(None, SHAPE).config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    good = json.loads(file.read_text())
    if "num_hidden_layers" in change:
        good.pop("layer_types")
    file.write_text(json.dumps({**good, **change}))
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, {})
    assert caught.value.field == "model.path" and said in caught.value.fix
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be used"):
        build(tmp_path, {})

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
         ("num_hidden_layers", 100_000),
         ("num_hidden_layers", 0), ("vocab_size", 0), ("vocab_size", 10**30), ("intermediate_size", 0),
         ("head_dim", 0), ("layer_types", ["full_attention"]), ("layer_types", ["full_attention", "linear"]),
         ("layer_types", 3), ("text_config", 3)]
OTHERS = [("hidden_act", "sillu"), ("head_dim", 7), ("attention_dropout", 0.1), ("rms_norm_eps", float("nan")),
          ("rms_norm_eps", "small"), ("initializer_range", -1.0), ("max_position_embeddings", 0),
          ("tie_word_embeddings", "yes"), ("pad_token_id", 320), ("rope_parameters", {"rope_type": "nope"}),
          ("rope_parameters", 3), ("rope_theta", 1e4), ("_attn_implementation", "eager"), ("rms_norm_eps", True),
          ("head_dim", 1 << 20), *[("rope_parameters", {"rope_type": "default", "rope_theta": theta, **more})
          for theta, more in ((0, {}), (-1e4, {}), (float("nan"), {}), (1e4, {"rope_type": "linear", "factor": -1}),
                              (1e4, {"rope_type": "linear", "factor": 0.0}), (1e4, {"rope_type": "linear"}),
                              (1e4, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
                              (1e4, {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}),
                              (1e4, {"rope_type": "dynamic", "factor": 2.0}))]]
# Fields of the library that say how a model is called, with values that would change what a rank gets back.
CALLS = {"return_dict": False, "output_attentions": True, "output_hidden_states": True, "use_cache": True,
         "is_encoder_decoder": True, "chunk_size_feed_forward": 3, "dtype": "float16", "architectures": ["Other"],
         "id2label": {}, "model_type": "other"}


def test_the_shape_itself_is_a_good_one() -> None:
    build(None, SHAPE)


@pytest.mark.parametrize(("name", "value"), [case for case in SIZES if case[0] != "text_config"] + OTHERS)
def test_a_bad_field_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build(None, {**SHAPE, name: value})
    assert caught.value.field == f"model.shape.{name}" and caught.value.fix


@pytest.mark.parametrize(("name", "value"), CALLS.items())
def test_how_a_model_is_called_is_no_shape(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"model.shape.{name}=.*no part of a model's shape; leave it out"):
        build(None, {**SHAPE, name: value})


def test_how_a_model_is_called_is_not_taken_from_its_folder(tmp_path: Path) -> None:
    good = build(None, SHAPE).config
    good.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **CALLS, "model_type": "qwen3", "rms_norm_eps": 0}))
    assert build(tmp_path, {}).config.to_dict() == {**good.to_dict(), "rms_norm_eps": 0.0}


@pytest.mark.parametrize("shape", [
    {"rms_norm_eps": 0}, {"initializer_range": 1}, {"rope_parameters": {"rope_theta": 1_000_000}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1e4}}])
def test_whole_numbers_do_for_floats(shape: dict[str, Any]) -> None:
    before = json.dumps(shape)
    found = build(None, {**SHAPE, **shape}).config
    for name, value in shape.items():
        kept = getattr(found, name)
        assert kept == value if name != "rope_parameters" else value.items() <= kept.items()
    assert json.dumps(shape) == before


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


def test_a_window_that_is_asked_for_is_there(tmp_path: Path) -> None:
    """Also beside a config.json that lists the layers' types, as every saved one does."""
    ADAPTER.build(None, SHAPE, torch.float32).config.save_pretrained(tmp_path)
    asked = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    kinds = ADAPTER.layer_kinds(build(tmp_path, asked), "block_causal")
    assert [kind.window for kind in kinds] == [None, 8]
    for shape in ({"sliding_window": 8}, {"use_sliding_window": True}, {**asked, "max_window_layers": 2}):
        for path in (tmp_path, None):
            with pytest.raises(ConfigError, match=r"model.shape.*sliding_window=.*no layer would have a window"):
                build(path, shape if path else SHAPE | shape)

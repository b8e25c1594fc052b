"""Qwen3's configuration, read and checked before anything is built from it."""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from csbp.attention import interface
from csbp.config.fields import nearest_name
from csbp.errors import ConfigError
from csbp.plan.asked import expect_window, shaped
from csbp.plan.shapes import model_shape

_SHAPE = "model.shape"
# What a model is built from. The library's other fields say how it is called, which is csbp's business.
_FIELDS = frozenset((
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "attention_bias", "attention_dropout", "use_sliding_window", "sliding_window",
    "max_window_layers", "layer_types", "pad_token_id", "bos_token_id", "eos_token_id"))
_FLOATS = ("rms_norm_eps", "initializer_range", "attention_dropout")
# These stretch the frequencies to the longest document at hand, of which every rank holds a part of its own.
_ROPE_OF_LENGTH = ("dynamic", "longrope")
_WIDEST_HEAD = 1 << 16


def read_settings(path: Path | None, shape: Mapping[str, Any]) -> Qwen3Config:
    """The config.json at ``path``, if any, overridden by ``shape``, with csbp's attention.

    Raises:
        ConfigError: a field is unknown or has a value that no model can be built with; named as ``model.shape.FIELD``
            where it was given there, else as ``model.path``.
    """
    known = Qwen3Config().to_dict()
    try:
        base = _read_file(path, known) if path else {}
    except Exception as error:  # no JSON, wrong types, missing keys: transformers has an exception for each
        raise ConfigError("model.path", str(path), f"its config.json cannot be used: {_reason(error)}") from error
    for name, value in shape.items():
        if name in known.keys() - _FIELDS:
            raise ConfigError(f"{_SHAPE}.{name}", value, "is no part of a model's shape; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(_FIELDS), n=1)
            raise ConfigError(f"{_SHAPE}.{name}", value, "Qwen3's configuration has no such field"
                              + (f"; did you mean {near[0]}?" if near else ""))
    fields = _with_floats(copy.deepcopy(shaped(base, shape)))  # the library adds to mappings in place
    try:
        expect_window(shape, model_shape({**known, "layer_types": None, **fields}, "token_causal").kinds)
        return _checked({**known, "layer_types": None, **fields}, fields)
    except ConfigError as error:
        raise _placed(error, path, shape) from error
    except Exception as error:  # as above
        name = _culprit(base, shape)
        field, value = (f"{_SHAPE}.{name}", shape[name]) if name else (_SHAPE, dict(shape))
        error_here = ConfigError(field, value, f"no model can be built with it: {_reason(error)}")
        raise _placed(error_here, path, shape) from error


def _read_file(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the model, and what is no field of the library's (the exporter's own notes)."""
    raw, _ = Qwen3Config.get_config_dict(path, local_files_only=True)
    found = Qwen3Config.from_dict(_with_floats(raw)).to_dict()
    return {name: value for name, value in found.items() if name in _FIELDS or name not in known}


def _with_floats(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with 0 and 1 as the floats that the library insists on."""
    return {name: float(value) if name in _FLOATS and type(value) is int else value for name, value in fields.items()}


def _checked(complete: Mapping[str, Any], fields: Mapping[str, Any]) -> Qwen3Config:
    """The configuration of ``fields``; ``complete`` holds the defaults too, but none for what follows from others."""
    model_shape(complete, "token_causal")
    act, pad, rows = complete["hidden_act"], complete["pad_token_id"], complete["vocab_size"]
    if act not in ACT2FN:
        raise ConfigError(f"{_SHAPE}.hidden_act", act, nearest_name(str(act), sorted(ACT2FN), "activations"))
    if complete["attention_dropout"]:
        raise ConfigError(f"{_SHAPE}.attention_dropout", complete["attention_dropout"], "set it to 0")
    for name in ("rms_norm_eps", "initializer_range"):
        value = complete[name]
        if not isinstance(value, float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{_SHAPE}.{name}", value, "must be a finite number, at least 0")
    positions = complete["max_position_embeddings"]
    if not isinstance(positions, int) or positions < 1:
        raise ConfigError(f"{_SHAPE}.max_position_embeddings", positions, "must be a whole number above 0")
    if isinstance(pad, int) and not -rows <= pad < rows:
        raise ConfigError(f"{_SHAPE}.pad_token_id", pad, f"the model has only {rows} embedding rows")
    if complete["head_dim"] > _WIDEST_HEAD:
        raise ConfigError(f"{_SHAPE}.head_dim", complete["head_dim"], f"must be at most {_WIDEST_HEAD:,}")
    config = Qwen3Config(**fields)
    interface.register()
    config._attn_implementation = interface.NAME
    config.use_cache = False
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types = 1, (config.layer_types or [])[:1]
    with torch.device("meta"):
        Qwen3ForCausalLM(one)
    _check_positions(config)
    return config


def _check_positions(config: Qwen3Config) -> None:
    """Whether the rotary frequencies, computed, are numbers: the library builds a model of any."""
    field, rope = f"{_SHAPE}.rope_parameters", dict(config.rope_parameters or {})
    kind = rope.get("rope_type")
    if kind in _ROPE_OF_LENGTH:
        raise ConfigError(field, rope, f"frequencies of type {kind} follow the longest document at hand, of which each "
                                       "rank sees a part; use default, linear, yarn or llama3")
    with torch.device("cpu"):  # numbers, also where the caller builds shapes alone
        rotary = Qwen3RotaryEmbedding(config)
        found, scale = rotary.inv_freq, float(rotary.attention_scaling)
        sound = bool((found.isfinite() & (found >= 0)).all()) and 0 < scale < float("inf")
    if len(found) != config.head_dim // 2:
        raise ConfigError(field, rope, f"gives {len(found)} frequencies where head_dim={config.head_dim} needs "
                                       f"{config.head_dim // 2}; leave partial_rotary_factor out")
    if not sound:
        raise ConfigError(field, rope, "gives frequencies that are negative or no numbers; rope_theta and every factor "
                                       "must be finite and above 0")


def _culprit(base: Mapping[str, Any], shape: Mapping[str, Any]) -> str:
    """The field of ``shape`` without which there is a configuration; "" if there is no such one."""
    for name in shape:
        others = {other: value for other, value in shape.items() if other != name}
        fields = _with_floats(copy.deepcopy(shaped(base, others)))
        with contextlib.suppress(Exception):
            _checked({**Qwen3Config().to_dict(), "layer_types": None, **fields}, fields)
            return name
    return ""


def _placed(error: ConfigError, path: Path | None, shape: Mapping[str, Any]) -> ConfigError:
    """The same error, laid to config.json where the field was not given beside it."""
    name = error.field.removeprefix(f"{_SHAPE}.")
    if path is None or name in shape or (name == _SHAPE and shape):
        return error
    return ConfigError("model.path", str(path), f"its config.json has {name}={error.value!r}: {error.fix}")


def _reason(error: BaseException) -> str:
    """The last line that says something, and the kind of error where that alone says little."""
    line = [line.strip() for line in f"?\n{error}".splitlines() if line.strip()][-1]
    return line if " " in line else f"{type(error).__name__} {line}"

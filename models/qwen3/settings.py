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

from csbp.attention import interface
from csbp.config.fields import nearest_name
from csbp.errors import ConfigError
from csbp.plan.shapes import model_shape

_SHAPE = "model.shape"


def read_settings(path: Path | None, shape: Mapping[str, Any]) -> Qwen3Config:
    """The config.json at ``path``, if any, overridden by ``shape``, with csbp's attention.

    Raises:
        ConfigError: a field is unknown or has a value that no model can be built with; named as ``model.shape.FIELD``
            where it was given there, else as ``model.path``.
    """
    try:
        base = Qwen3Config.from_pretrained(path, local_files_only=True).to_dict() if path else {}
    except Exception as error:  # no JSON, wrong types, missing keys: transformers has an exception for each
        raise ConfigError("model.path", str(path), f"its config.json cannot be used: {_reason(error)}") from error
    known = Qwen3Config().to_dict()
    for name, value in shape.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"{_SHAPE}.{name}", value, "Qwen3's configuration has no such field"
                              + (f"; did you mean {near[0]}?" if near else ""))
    if "num_hidden_layers" in shape:
        base.pop("layer_types", None)  # one entry a layer; derived anew
    fields = {**base, **shape}
    try:
        return _checked({**known, "layer_types": None, **fields}, fields)
    except ConfigError as error:
        raise _placed(error, path, shape) from error
    except Exception as error:  # as above
        name = _culprit(base, shape)
        field, value = (f"{_SHAPE}.{name}", shape[name]) if name else (_SHAPE, dict(shape))
        error_here = ConfigError(field, value, f"no model can be built with it: {_reason(error)}")
        raise _placed(error_here, path, shape) from error


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
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"{_SHAPE}.{name}", value, "must be a finite number, at least 0")
    positions = complete["max_position_embeddings"]
    if not isinstance(positions, int) or positions < 1:
        raise ConfigError(f"{_SHAPE}.max_position_embeddings", positions, "must be a whole number above 0")
    if isinstance(pad, int) and not -rows <= pad < rows:
        raise ConfigError(f"{_SHAPE}.pad_token_id", pad, f"the model has only {rows} embedding rows")
    config = Qwen3Config(**fields)
    interface.register()
    config._attn_implementation = interface.NAME
    config.use_cache = False
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types = 1, (config.layer_types or [])[:1]
    with torch.device("meta"):
        Qwen3ForCausalLM(one)  # what is wrong with positions, for one, shows only here
    return config


def _culprit(base: Mapping[str, Any], shape: Mapping[str, Any]) -> str:
    """The field of ``shape`` without which there is a configuration; "" if there is no such one."""
    for name in shape:
        fields = {**base, **{other: value for other, value in shape.items() if other != name}}
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

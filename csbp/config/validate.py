"""Is this run possible? Everything that can be told without torch, without data and in no time.

What needs more (does the tokenizer have a chat template, do the columns exist, are there enough GPUs) is told by
``csbp check`` or by the part that first knows it, in the same form.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from csbp.config.cad import check_cad
from csbp.config.fields import Field, fields_of, nearest_name
from csbp.config.mesh import check_mesh
from csbp.config.places import builtin_models, families, model_of_shape, planned_families, recipes
from csbp.config.schema import GenerateConfig, RunConfig
from csbp.config.sources import STDLIB, check_lengths, check_sources, named_sources
from csbp.errors import ConfigError

TRACKERS = ("wandb", "tensorboard", "trackio")
_LARGEST_INT, _LARGEST_FLOAT = 2**63 - 1, 1e38
_BUILTIN = "builtin:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def validate_run(config: RunConfig) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: the first problem found: a value out of bounds, then names, then combinations.
    """
    check_bounds(config)
    _check_names(config)
    _check_model(config)
    _check_objective(config)
    _check_numbers(config)
    _check_data(config)


def validate_plan(config: RunConfig) -> None:
    """Refuse a ``csbp plan`` that cannot work. Its family need not be trainable and its data need not be here.

    Raises:
        ConfigError: as ``validate_run``.
    """
    check_bounds(config)
    known = families() + planned_families()
    if config.model.family not in known:
        raise ConfigError("model.family", config.model.family, nearest_name(config.model.family, known, "families"))
    _check_objective(config)
    _check_numbers(config)
    check_lengths(config.data)


def validate_synthetic(config: RunConfig) -> None:
    """Refuse a run on random tokens from random weights that cannot work: no data and no tokenizer are asked for.

    Raises:
        ConfigError: as ``validate_run``.
    """
    check_bounds(config)
    _check_trainable(config)
    if config.model.path:
        _check_folder("model.path", config.model.path, [config.model.family])
    elif not config.model.shape:
        raise ConfigError("model.shape", {}, "give the sizes, model.shape={hidden_size: ..., ...}, or a model.path "
                                             "with a config.json")
    _check_objective(config)
    _check_numbers(config)


def validate_generate(config: GenerateConfig) -> None:
    """Refuse a ``csbp generate`` that cannot work. Raises ConfigError."""
    check_bounds(config)
    if not config.model:
        raise ConfigError("model", ..., "give a run folder or an exported model: model=DIR")
    _check_folder("model", config.model, families())
    if not config.prompt:
        raise ConfigError("prompt", ..., "give a text to go on from: 'prompt=def add(a, b):'")


def check_bounds(config: Any) -> None:
    """Choices, bounds and usable numbers, for every field of a configuration dataclass.

    Raises:
        ConfigError: the first field whose value does not fit its declaration.
    """
    for field, value in _values(config, ""):
        if value is None:
            continue
        if isinstance(value, str):
            _check_text(field.key, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(field.key, value, "must be a finite number")
        too_low = field.low is not None and value < field.low
        too_high = field.high is not None and value > field.high
        if field.choices and value not in field.choices:
            raise ConfigError(field.key, value, nearest_name(str(value), list(field.choices), "choices"))
        if too_low or too_high:
            raise ConfigError(field.key, value, f"must be {field.expects()}")
        _check_number(field.key, value)


def _check_text(key: str, value: str) -> None:
    """Refuse bytes that are no UTF-8, which Python hands on as lone surrogates."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(key, value, f"is not UTF-8 text (at character {error.start + 1})") from error


def _check_number(key: str, value: Any) -> None:
    """Refuse numbers that nothing here can count with, also inside a mapping or a list."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, value, "must be a finite number")
    if isinstance(value, (int, float)) and abs(value) > (_LARGEST_INT if isinstance(value, int) else _LARGEST_FLOAT):
        raise ConfigError(key, value, f"must be at most {_LARGEST_INT:,}" if isinstance(value, int) else
                          f"must be at most {_LARGEST_FLOAT:g} in size, as float32 holds it")
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _check_number(f"{key}.{name}", item)


def _values(config: Any, prefix: str) -> Iterator[tuple[Field, Any]]:
    """Every field below a dataclass with its value; entries of a list by their index."""
    kind: Any = type(config)
    own = {field.key: field for field in fields_of(kind)}
    for declared in dataclasses.fields(config):
        field, value = own[declared.name], getattr(config, declared.name)
        if field.is_section:
            yield from _values(value, f"{prefix}{declared.name}.")
        elif field.item:
            for index, entry in enumerate(value):
                yield from _values(entry, f"{prefix}{declared.name}.{index}.")
        else:
            yield dataclasses.replace(field, key=prefix + field.key), value


def _check_names(config: RunConfig) -> None:
    _check_trainable(config)
    if config.recipe not in recipes():
        raise ConfigError("recipe", config.recipe, nearest_name(config.recipe, recipes(), "recipes"))
    for tracker in config.observe.trackers:
        if tracker not in TRACKERS:
            raise ConfigError("observe.trackers", config.observe.trackers,
                              nearest_name(tracker, list(TRACKERS), "trackers"))
        if find_spec(tracker) is None:
            raise ConfigError("observe.trackers", config.observe.trackers,
                              f"{tracker} is not installed: pip install {tracker}")
    if config.run_dir == "":
        raise ConfigError("run_dir", "", "give a folder, or leave it out for runs/<experiment>-<date>")
    if config.resume == "auto" and config.run_dir is None:
        raise ConfigError("resume", "auto", "say which run: run_dir=DIR")


def _check_trainable(config: RunConfig) -> None:
    family = config.model.family
    if family in planned_families():
        raise ConfigError("model.family", family, "this family can be planned (csbp plan), but not trained yet; use "
                                                  f"{', '.join(families())}")
    if family not in families():
        raise ConfigError("model.family", family, nearest_name(family, families(), "families"))


def _check_model(config: RunConfig) -> None:
    model, family = config.model, [config.model.family]
    if model.path:
        _check_folder("model.path", model.path, family)
    elif model.init == "pretrained":
        raise ConfigError("model.path", "", "give a Hugging Face folder, or model.init=random with model.shape")
    elif not model.shape:
        raise ConfigError("model.shape", {}, "random weights need a shape: model.path=DIR for its config.json, "
                                             "or model.shape={hidden_size: ..., ...}")
    if model.init == "pretrained" and model.shape and (not _HUB_NAME.fullmatch(model.path)
                                                       or Path(model.path).is_dir()):
        if name := model_of_shape(model.shape):
            raise ConfigError("model", name, f"brings the path and the shape of weights on the hub, but model.path="
                              f"{model.path} has a shape of its own; leave out model={name} (in a file: override "
                              f"/model: {name}), or set model.path to those weights")
        raise ConfigError("model.shape", dict(model.shape), "pretrained weights have a shape; leave it out, or set "
                                                            "model.init=random")
    if config.data.tokenizer:
        _check_folder("data.tokenizer", config.data.tokenizer, family)
    elif not model.path:
        raise ConfigError("data.tokenizer", "", "without model.path there is none to take; give a folder or "
                                                "builtin:NAME")


def _check_folder(field: str, path: str, of_families: list[str]) -> None:
    """A shipped model, an existing folder, or a name on the Hugging Face hub."""
    if path.startswith(_BUILTIN):
        shipped = [_BUILTIN + name for family in of_families for name in builtin_models(family)]
        if path not in shipped:
            raise ConfigError(field, path, nearest_name(path, shipped, f"shipped with {', '.join(of_families)}"))
    elif not Path(path).expanduser().is_dir() and not _HUB_NAME.fullmatch(path):
        raise ConfigError(field, path, "no such folder; give one, builtin:NAME, or a name on the hub (owner/name)")


def _check_objective(config: RunConfig) -> None:
    objective, noise = config.objective, config.noise
    autoregressive = objective.kind == "autoregressive"
    if (autoregressive or objective.ar_weight > 0) and objective.clean_stream != "token_causal":
        raise ConfigError("objective.clean_stream", objective.clean_stream,
                          "a block-causal row sees the token it must predict, so a next-token loss leaks; use "
                          "objective.clean_stream=token_causal" + ("" if autoregressive else " or ar_weight=0"))
    if autoregressive and objective.ar_weight > 0:
        raise ConfigError("objective.ar_weight", objective.ar_weight, "the whole loss is autoregressive already; use 0")
    if autoregressive and objective.label_shift:
        raise ConfigError("objective.label_shift", True, "has no meaning without target blocks; use false")
    if noise.t_min > noise.t_max:
        raise ConfigError("noise.t_min", noise.t_min, f"must not exceed noise.t_max={noise.t_max}")
    if noise.t_max == 0 and not autoregressive:
        raise ConfigError("noise.t_max", noise.t_max, "nothing would ever be masked; use up to 1")
    if objective.weight == "inverse_t" and noise.t_min == 0 and not autoregressive:
        raise ConfigError("noise.t_min", noise.t_min, "must be above 0 with objective.weight=inverse_t, "
                                                      "e.g. 0.001: 1/t has no bound")


def _check_data(config: RunConfig) -> None:
    data = config.data
    check_sources(data)
    for field, source in named_sources(data, "train") + named_sources(data, "validation"):
        # A link to nothing is there: its reader says so.
        elsewhere = source.path == STDLIB or source.kind == "dataset" or has_magic(source.path)
        if not elsewhere and not os.path.lexists(os.path.expanduser(source.path)):
            raise ConfigError(f"{field}.path", source.path, "no such file or folder")
    longest = "document_tokens" if data.document_tokens else "seq_len"
    if getattr(data, longest) == 1 and (config.objective.kind == "autoregressive" or config.objective.label_shift):
        raise ConfigError(f"data.{longest}", 1, "a document of one token has none before it to predict it from; at "
                                                "least 2, and more to learn anything")
    if not data.validation and data.validation_fraction == 0:
        raise ConfigError("data.validation_fraction", 0.0, "nothing is held out; raise it or give data.validation")


def _check_numbers(config: RunConfig) -> None:
    optim = config.optim
    check_mesh(config.parallel)
    check_cad(config)
    for name in ("beta1", "beta2"):
        if getattr(optim, name) == 1:
            raise ConfigError(f"optim.{name}", 1.0, "must be below 1")

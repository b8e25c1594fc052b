"""From the words of the command line to a frozen configuration.

Hydra's compose API picks and merges the YAML files: the groups of ``conf/`` and one experiment. Values given on
the command line are then set one by one, so that each mistake is reported against the word that holds it:

- ``GROUP=CHOICE`` (``model=tiny_qwen3``) picks a file of ``conf/GROUP``;
- ``experiment=NAME`` picks a file of ``conf/experiment``, ``experiment=PATH.yaml`` a file of one's own, written
  in the same way (its defaults list may start from a shipped one);
- ``section.field=VALUE`` sets a field. A text field takes the rest of the word as it stands; the others are
  read by Hydra's override grammar: ``[a, b]``, ``{name: value}``, ``null``.

A value in a file may refer to another field as ``${section.field}``. Resolvers (``${name:...}``) and keys like
``_target_`` are refused: a configuration is data and runs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from csbp.config.bench import BenchAttentionConfig, BenchProfileConfig, BenchStepConfig
from csbp.config.content import check_keys, refuse_code
from csbp.config.fields import find_field, nearest_name
from csbp.config.files import OWN_FILE, place, read_mapping
from csbp.config.places import choices as choices_of
from csbp.config.places import conf_dir, experiments
from csbp.config.problems import as_config_error
from csbp.config.schema import GenerateConfig, RunConfig
from csbp.config.simulate import SimulateConfig
from csbp.config.typed import escape, open_schema, resolve
from csbp.config.words import own_file, split_words
from csbp.errors import ConfigError

T = TypeVar("T")


def compose_run(words: Sequence[str]) -> RunConfig:
    """The configuration of ``csbp train`` and ``csbp check``, typed but not yet checked: see ``validate_run``.

    Args:
        words: ``key=value`` each, as in the module's docstring.

    Raises:
        ConfigError: a word, a key, a choice or a value that cannot be used.
    """
    groups = {field.name for field in dataclasses.fields(RunConfig) if (conf_dir() / field.name).is_dir()}
    choices, values = split_words(words, RunConfig, groups)
    wanted = choices.pop("experiment", "")
    if not wanted:
        raise ConfigError("experiment", ..., f"say which: experiment=NAME ({', '.join(experiments())}) "
                                            "or experiment=FILE.yaml")
    own = Path(wanted).expanduser() if wanted.endswith((".yaml", ".yml")) else None
    if own:
        _register(own)
    for group, choice in {**choices, **({} if own else {"experiment": wanted})}.items():
        if choice not in choices_of(group):
            fix = nearest_name(choice, choices_of(group), f"choices of conf/{group}")
            fix = own_file(choice) + fix if group == "experiment" else f"{fix} (to set one field: {group}.FIELD=VALUE)"
            raise ConfigError(group, choice, fix)
    overrides = [f"{group}={choice}" for group, choice in choices.items()]
    overrides.append(f"experiment={OWN_FILE if own else wanted}")
    config = _compose("config", RunConfig, overrides, values, own or conf_dir() / "experiment" / f"{wanted}.yaml")
    return dataclasses.replace(config, experiment=own.stem if own else wanted)


def compose_generate(words: Sequence[str]) -> GenerateConfig:
    """The configuration of ``csbp generate``; see ``compose_run``."""
    return compose_flat("generate", GenerateConfig, words)


def compose_flat(name: str, cls: type[T], words: Sequence[str]) -> T:
    """The configuration of a command that has one file, ``conf/NAME.yaml``, and no groups; see ``compose_run``."""
    _, values = split_words(words, cls, set())
    return _compose(name, cls, [], values, conf_dir() / f"{name}.yaml")


def _compose(name: str, cls: type[T], overrides: list[str], values: dict[str, str], file: Path) -> T:
    """Merge the files, set the values, follow the references. ``file`` is named in messages."""
    read = {key: _read(cls, key, text) for key, text in values.items()}  # first: a slip of the keyboard answers at once
    _register_schemas()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = compose(name, overrides=overrides)
        refuse_code(OmegaConf.to_container(config, resolve=False), "")
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise as_config_error(error, cls, file) from error
    for key, value in read.items():
        _set_value(config, cls, key, value, values[key])
    try:
        return resolve(config, cls)
    except OmegaConfBaseException as error:
        raise as_config_error(error, cls, file) from error


@cache
def _register_schemas() -> None:
    """What lets Hydra refuse unknown keys and wrong types in files; named in the defaults lists."""
    for name, cls in (("config", RunConfig), ("generate", GenerateConfig), ("bench_attention", BenchAttentionConfig),
                      ("bench_step", BenchStepConfig), ("bench_profile", BenchProfileConfig),
                      ("simulate", SimulateConfig)):
        ConfigStore.instance().store(name=f"{name}_schema", node=open_schema(cls))


def _register(file: Path) -> None:
    """Give a user's file to Hydra as one of ``conf/experiment``."""
    try:
        content = read_mapping(file, "experiment")
    except (YAMLError, OmegaConfBaseException) as error:
        raise as_config_error(error, RunConfig, file) from error
    plain: Any = OmegaConf.to_container(content, resolve=False)
    if OWN_FILE in str(plain.pop("defaults", None)):
        raise ConfigError("experiment", str(file), f"its defaults list names {OWN_FILE}, which is this file itself")
    try:
        check_keys(RunConfig, plain, "")
    except ConfigError as error:
        raise ConfigError(error.field, error.value, error.fix + place(file, error.field)) from error
    ConfigStore.instance().store(group="experiment", name=OWN_FILE, node=content, package="_global_")


def _read(cls: type, key: str, text: str) -> Any:
    """The Python value of an override's text: see the module's docstring."""
    field = find_field(cls, key, text)
    if field.optional and text == "null":
        return None
    if field.type is str:
        return escape(text)
    if field.is_section and not key[-1].isdigit():
        raise ConfigError(key, text, f"a section of fields; set one as {key}.FIELD=VALUE")
    if not text.strip():
        raise ConfigError(key, text, f"has no value; it must be {field.expects()}")
    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException as error:
        raise ConfigError(key, text, f"must be {field.expects()}") from error
    if override.is_sweep_override():
        raise ConfigError(key, text, f"one run takes one value: {field.expects()}")
    parent, dot, name = key.rpartition(".")
    value = override.value()
    refuse_code({name: value}, parent)
    if field.item:
        check_keys(cls, {name: value}, parent + dot)
    return value


def _set_value(config: DictConfig, cls: type, key: str, value: Any, text: str) -> None:
    """Set one field; ``text`` is what was written, for messages."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        holder = OmegaConf.select(config, ".".join(parts[:depth]))
        if OmegaConf.is_list(holder) and not (parts[depth].isdigit() and int(parts[depth]) < len(holder)):
            raise ConfigError(key, text, f"the list has {len(holder)} entries, counted from 0")
    try:
        # A mapping given as a whole takes the place of the one that is there; a key of it joins the others.
        OmegaConf.update(config, key, value, merge=not isinstance(value, dict), force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise as_config_error(error, cls, None, key=key, value=text) from error

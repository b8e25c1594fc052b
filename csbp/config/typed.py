"""Between the frozen dataclasses and OmegaConf's typed nodes, and between both and YAML text."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from csbp.config.content import refuse_code
from csbp.config.files import read_mapping
from csbp.config.problems import as_config_error
from csbp.config.schema import RunConfig
from csbp.errors import ConfigError

T = TypeVar("T")


@cache
def open_schema(kind: Any) -> Any:
    """The same dataclass (or list of one), not frozen: OmegaConf makes frozen ones read-only, so that no file
    and no override could be merged into them."""
    if typing.get_origin(kind) is list:
        return list[open_schema(typing.get_args(kind)[0])]  # type: ignore[misc]
    if not dataclasses.is_dataclass(kind):
        return kind
    hints = typing.get_type_hints(kind)
    entries = []
    for declared in dataclasses.fields(kind):
        factory: Any = declared.default_factory
        if factory is dataclasses.MISSING:
            default = dataclasses.field(default=declared.default)
        else:
            default = dataclasses.field(default_factory=open_schema(factory))
        entries.append((declared.name, open_schema(hints[declared.name]), default))
    return dataclasses.make_dataclass(typing.cast(type, kind).__name__, entries)


def freeze(cls: type[T], values: Any) -> T:
    """A frozen dataclass from a plain, already checked mapping, sections and list entries included."""
    hints = typing.get_type_hints(cls)
    return cls(**{name: _freeze_value(hints[name], value) for name, value in values.items()})


def _freeze_value(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return freeze(typing.cast(type, kind), value)
    if typing.get_origin(kind) is list:
        return [_freeze_value(typing.get_args(kind)[0], item) for item in value]
    return value


def escape(text: str) -> str:
    """Text that OmegaConf reads back as itself: ``${`` would otherwise start an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)


def _escape_all(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {key: _escape_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_all(item) for item in value]
    return value


def resolve(config: DictConfig | ListConfig, cls: type[T]) -> T:
    """Follow the references in a composed configuration and freeze it. Raises OmegaConf's errors."""
    return freeze(cls, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def dump_config(config: Any) -> str:
    """The configuration as YAML text, every setting written out."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape_all(dataclasses.asdict(config))))


def dump_plain(value: Any) -> str:
    """A number, text, list or mapping as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def save_config(config: Any, path: str | Path) -> None:
    """Write ``dump_config`` to a file, whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(dump_config(config), encoding="utf-8")
    os.replace(partial, path)


def load_config(path: str | Path) -> RunConfig:
    """Read what ``save_config`` wrote, exactly.

    Raises:
        ConfigError: the file is missing, is no YAML, or holds an unknown key or a wrong type.
    """
    path = Path(path)
    schema = OmegaConf.structured(open_schema(RunConfig))
    if not path.exists():
        raise ConfigError("config", str(path), "no such file; is this the folder of a run?")
    try:
        read = read_mapping(path, "config")
        refuse_code(OmegaConf.to_container(read, resolve=False), "")
        return resolve(OmegaConf.merge(schema, read), RunConfig)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise as_config_error(error, RunConfig, path, holder="config") from error

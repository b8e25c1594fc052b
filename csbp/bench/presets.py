"""Presets: files of named rows, each a text of settings. ``conf/bench/COMMAND_NAME.yaml`` ship with csbp."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from csbp.config.bench import BenchAttentionConfig
from csbp.config.fields import nearest_name
from csbp.config.files import read_mapping
from csbp.config.places import choices, conf_dir
from csbp.config.problems import as_config_error
from csbp.errors import ConfigError


def rows(words: Sequence[str], command: str) -> list[list[str]]:
    """The settings of every row to measure: of a preset's rows, each followed by the words beside ``preset=``, which
    hold for all of them; without a preset just the words.

    Args:
        words: ``key=value`` each.
        command: "attention" or "step".

    Raises:
        ConfigError: a word that is none, or a preset that cannot be read.
    """
    for word in words:
        if "=" not in word:
            raise ConfigError(word, ..., "write KEY=VALUE")
    given = {key_of(word): word.partition("=")[2] for word in words}
    preset, only = given.get("preset"), given.get("only", "")
    if not preset:
        if only:
            raise ConfigError("only", only, "chooses rows of a preset; add preset=NAME, or leave it out")
        return [list(words)]
    found = read_preset(preset, command)
    kept = [[*row, f"name={name}", *words] for name, row in found.items() if only in name]
    if not kept:
        raise ConfigError("only", only, f"no row of preset={preset} has that in its name: {'; '.join(found)}")
    return kept


def key_of(word: str) -> str:
    """What a ``key=value`` sets."""
    return word.partition("=")[0].strip()


def split_settings(field: str, text: str) -> list[str]:
    """A text of settings as words, by the shell's rules of quoting.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(field, text, f"cannot be split into settings: {str(error).lower()}") from error


def read_preset(name: str, command: str) -> dict[str, list[str]]:
    """Row name -> its settings.

    Args:
        name: of a file ``conf/bench/COMMAND_NAME.yaml``, or a path that ends in .yaml.
        command: "attention" or "step".

    Raises:
        ConfigError: there is no such file, or it is no mapping of names to settings.
    """
    file = Path(name).expanduser()
    if file.suffix not in (".yaml", ".yml"):
        prefix = f"{command}_"
        shipped = [choice.removeprefix(prefix) for choice in choices("bench") if choice.startswith(prefix)]
        if name not in shipped:
            raise ConfigError("preset", name, nearest_name(name, shipped, f"presets of csbp bench {command}"))
        file = conf_dir() / "bench" / f"{prefix}{name}.yaml"
    try:
        read = OmegaConf.to_container(read_mapping(file, "preset"), resolve=False)
    except (OmegaConfBaseException, YAMLError) as error:
        raise as_config_error(error, BenchAttentionConfig, file, holder="preset") from error
    assert isinstance(read, dict)
    found = {}
    for row, words in read.items():
        if not isinstance(words, str):
            raise ConfigError("preset", str(file), f"row {row!r} must be a text of settings: KEY=VALUE KEY=VALUE")
        found[str(row)] = split_settings("preset", words)
    if not found:
        raise ConfigError("preset", str(file), "holds no rows; write NAME: KEY=VALUE KEY=VALUE")
    return found

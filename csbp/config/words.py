"""The words of a command line, told apart; and what was probably meant by one that is no ``key=value``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from csbp.config.fields import nearest_key
from csbp.config.places import experiments
from csbp.errors import ConfigError

_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def split_words(words: Sequence[str], cls: type, groups: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Group choices and values, both by key, values in the order in which they are to be set.

    A value given twice: the last one counts, as in a shell script that appends; a group chosen twice is refused.

    Args:
        words: as the user gave them.
        cls: the configuration's dataclass.
        groups: keys that choose a file.

    Raises:
        ConfigError: a word that is no ``key=value``.
    """
    choices: dict[str, str] = {}
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip().lstrip("+")  # Hydra's sign for a new key; here only mappings take new ones
        if key.startswith("~"):
            raise ConfigError(key, value if equals else ..., "settings cannot be removed; give the value that is "
                                                             "wanted")
        if not equals:
            meant = meant_by(word, "experiment" in groups)
            raise ConfigError(key, ..., f"did you mean {meant}?" if meant else
                              f"write {key}=VALUE" if _KEY.fullmatch(key) else "write KEY=VALUE")
        if not _KEY.fullmatch(key):
            raise ConfigError(key, value, f"not a key; {nearest_key(cls, key.lstrip('-'))}")
        if key not in groups:
            values.pop(key, None)
            values[key] = value
        elif choices.setdefault(key, value) != value:
            raise ConfigError(key, value, f"chosen twice, also as {choices[key]}; give one")
    return choices, values


def meant_by(word: str, run: bool) -> str:
    """The setting that a bare word probably stands for, or "".

    Args:
        word: a name, a path or a text.
        run: the settings are those of a run, not of ``csbp generate``.
    """
    if not run:
        exists = Path(word).expanduser().exists() or word.startswith("builtin:")
        return f"model={word}" if exists else f"'prompt={word}'" if " " in word else ""
    if word.endswith((".yaml", ".yml")):
        return f"experiment={word}"
    if Path(f"{word}.yaml").expanduser().is_file():
        return f"experiment={word}.yaml"
    if close := difflib.get_close_matches(word, experiments(), n=1, cutoff=0.7):
        return f"experiment={close[0]}"
    return f"run_dir={word}" if "/" in word or Path(word).expanduser().is_dir() else ""


def own_file(name: str) -> str:
    """A hint where an experiment's name is that of a file of the user's, or ""."""
    return f"did you mean experiment={name}.yaml? " if Path(f"{name}.yaml").expanduser().is_file() else ""

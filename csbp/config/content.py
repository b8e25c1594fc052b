"""What a configuration file may hold: known keys, sections where sections belong, and nothing that runs."""

from __future__ import annotations

import re
from typing import Any

from csbp.config.fields import find_field
from csbp.errors import ConfigError

_REFERENCE = re.compile(r"\\*\$\{[\w.]+\}")
_OPEN = re.compile(r"(?<!\\)(\\\\)*\$\{")  # after an even number of backslashes: not escaped


def check_keys(cls: type, value: Any, prefix: str) -> None:
    """Refuse unknown keys at any depth of a plain mapping, and a value where a section or a list belongs.

    Args:
        cls: the configuration's dataclass.
        value: what the file holds.
        prefix: key of ``value`` with a dot behind it, or "" for a whole file.

    Raises:
        ConfigError: with the full key.
    """
    if not isinstance(value, dict):
        raise ConfigError(prefix.rstrip("."), value, "must be a section of fields, {name: value}")
    for name, item in value.items():
        key = f"{prefix}{name}"
        if "." in name:
            first, _, rest = name.partition(".")
            raise ConfigError(key, item, f"a key holds no dot: nest the sections, {first}: {{{rest}: ...}}")
        field = find_field(cls, key, item)
        if field.is_section:
            check_keys(cls, item, f"{key}.")
        elif field.item and not _is_text_reference(item):
            if not isinstance(item, list):
                raise ConfigError(key, item, f"must be {field.expects()}")
            for index, entry in enumerate(item):
                check_keys(cls, entry, f"{key}.{index}.")
        elif (field.is_mapping and not isinstance(item, dict)) and not _is_text_reference(item):
            raise ConfigError(key, item, f"must be {field.expects()}")


def _is_text_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def refuse_code(value: Any, key: str) -> None:
    """Refuse what could make a configuration more than data: ``_target_``-like keys and resolvers.

    Args:
        value: plain values, references not yet followed.
        key: the key that holds them, or "".

    Raises:
        ConfigError: with the full key.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            inner = f"{key}.{name}".lstrip(".")
            if re.fullmatch(r"_\w+_", str(name)):
                raise ConfigError(inner, item, "keys like this are not used: a configuration names no code")
            refuse_code(item, inner)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_code(item, f"{key}.{index}")
    elif isinstance(value, str) and _OPEN.search(_REFERENCE.sub("", value)):
        raise ConfigError(key, value, "only references to other fields, ${section.field}, are followed")

"""What Hydra, OmegaConf and the YAML parser raise, as a ConfigError with the field, the value and the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)
from yaml import YAMLError

from csbp.config.fields import fields_of, find_field, nearest_key
from csbp.config.files import OWN_FILE, place
from csbp.errors import ConfigError

_UNKNOWN = object()


def as_config_error(error: BaseException, cls: type, file: Path | None, *, key: str = "",
                    value: object = _UNKNOWN, holder: str = "experiment") -> ConfigError:
    """Translate an exception that was raised while composing ``cls``.

    Args:
        error: what was raised; the reason is looked for in its causes.
        cls: the configuration's dataclass.
        file: the YAML file being read, or None.
        key, value: the override being applied, if one was.
        holder: the setting that names the file, for what is wrong with the file as a whole.
    """
    reason = _reason(error)
    if isinstance(reason, ConfigError):
        return reason
    if isinstance(reason, YAMLError):
        return ConfigError(holder, str(file), f"not valid YAML: {_one_line(reason)}")
    if repeated := re.search(r"Multiple values for (\w+)\.", str(error)):
        group = repeated[1]
        return ConfigError(holder, str(file or value), f"chooses {group} although a default does already; write "
                                                       f"'- override /{group}: NAME' in its defaults list")
    if not isinstance(reason, OmegaConfBaseException):
        said = _one_line(error).replace(f"'experiment/{OWN_FILE}'", "its defaults list")
        return ConfigError(key or holder, str(file) if value is _UNKNOWN else value, said)
    name = _full_name(reason, cls, key)
    if value is _UNKNOWN or name != key:
        value = _value_in(file, name, reason)
    where = place(file, name)
    if isinstance(reason, GrammarParseError):
        return ConfigError(name, value, f"has an open ${{; a reference is written ${{section.field}}, the sign as text "
                                        f"\\${{{where}")
    if isinstance(reason, InterpolationResolutionError):
        return ConfigError(name, value, f"{_one_line(reason)}; a reference is written ${{section.field}}{where}")
    if isinstance(reason, (ConfigKeyError, ConfigAttributeError)):
        return ConfigError(name, value, f"no such setting; {nearest_key(cls, name)}{where}")
    try:
        expected = find_field(cls, name, value).expects()
    except ConfigError as unknown:
        return unknown
    return ConfigError(name, value, f"must be {expected}{where}")


def _reason(error: BaseException) -> BaseException:
    """The first exception along the causes that says which field is wrong, or the first one of all."""
    step: BaseException | None = error
    while step is not None:
        if isinstance(step, (ConfigError, OmegaConfBaseException, YAMLError)):
            return step
        step = step.__cause__ or step.__context__
    return error


def _full_name(reason: OmegaConfBaseException, cls: type, key: str) -> str:
    """The dotted key. OmegaConf names a field of a list's entry without the list in front: add it."""
    name = re.sub(r"\[(\d+)\]", r".\1", str(reason.full_key or reason.key or key or "experiment"))
    owner = getattr(reason.ref_type, "__name__", "")
    if name.split(".")[0] in {field.key for field in fields_of(cls)}:
        return name
    for field in fields_of(cls):
        if field.item and field.item.__name__ == owner and (not key or key.startswith(field.key)):
            return f"{key if key.startswith(field.key + '.') else field.key + '.N'}.{name}"
    return name


def _value_in(file: Path | None, name: str, reason: BaseException) -> Any:
    """What the file gives for a key; failing that, what the message quotes."""
    try:
        value: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if file else {}
        for part in name.split("."):
            value = value[int(part) if isinstance(value, list) else part]
        return value
    except (OSError, YAMLError, OmegaConfBaseException, LookupError, TypeError, ValueError):
        quoted = re.search(r"Value '(.*)' of type", str(reason))
        return quoted[1] if quoted else None


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type", "reference_type", "See "))]
    return " ".join(kept[:3]) or type(error).__name__

"""Every dotted key of a configuration, its type and its documentation, read off the dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from csbp.errors import ConfigError

_INDEX = re.compile(r"^\d+$")


@dataclass(frozen=True)
class Field:
    """One key.

    Attributes:
        key: dotted name; ``N`` stands for a list index, e.g. ``data.sources.N.path``.
        type: its type without ``None``.
        optional: whether null is allowed.
        default: the value when nobody sets it; None for a section.
        help, choices, low, high: as given to ``schema.option``.
    """

    key: str
    type: Any
    optional: bool
    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    @property
    def is_section(self) -> bool:
        """A group of fields, not a value."""
        return dataclasses.is_dataclass(self.type)

    @property
    def is_mapping(self) -> bool:
        """A value with free keys of its own, e.g. ``model.shape``."""
        return typing.get_origin(self.type) is dict

    @property
    def item(self) -> Any:
        """The dataclass of a list's entries, or None."""
        args = typing.get_args(self.type)
        is_list = typing.get_origin(self.type) is list
        return args[0] if is_list and dataclasses.is_dataclass(args[0]) else None

    def expects(self) -> str:
        """What may stand there, in words: ``an integer, at least 1, or null``."""
        words = _type_words(self.type)
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        elif self.low is not None and self.high is not None:
            words += f" from {_number(self.low)} to {_number(self.high)}"
        elif self.low is not None:
            words += f", at least {_number(self.low)}"
        return words + (", or null" if self.optional else "")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _type_words(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", Any: "a value"}
    if typing.get_origin(kind) is list:
        return "a list, as in [a, b]"
    if typing.get_origin(kind) is dict:
        return "a mapping, as in {name: value}"
    return names.get(kind, "a section of fields")


def split_optional(hint: Any) -> tuple[Any, bool]:
    """``X | None`` gives (X, True), any other hint (hint, False)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0], True
    return hint, False


@cache
def fields_of(cls: Any, prefix: str = "") -> tuple[Field, ...]:
    """All keys below a dataclass in declaration order, sections and list entries before what they hold."""
    return tuple(_walk(cls, prefix))


def _walk(cls: Any, prefix: str) -> Iterator[Field]:
    hints = typing.get_type_hints(cls)
    for declared in dataclasses.fields(cls):
        kind, optional = split_optional(hints[declared.name])
        section = dataclasses.is_dataclass(kind)
        default = None if section else getattr(cls(), declared.name)
        found = Field(prefix + declared.name, kind, optional, default, **declared.metadata)
        yield found
        if section:
            yield from _walk(kind, f"{found.key}.")
        elif found.item:
            yield from _walk(found.item, f"{found.key}.N.")


def find_field(cls: type, key: str, value: object) -> Field:
    """The field that a dotted key names. A key inside a mapping (``model.shape.hidden_size``) gives a field
    that takes any value. ``value`` is what the user gave, for the message.

    Raises:
        ConfigError: for an unknown key, with the nearest known one.
    """
    pattern = ".".join("N" if _INDEX.match(part) else part for part in key.split("."))
    for field in fields_of(cls):
        if field.key == pattern:
            return field
        if field.is_mapping and pattern.startswith(field.key + ".") and not pattern.endswith("."):
            return Field(key, typing.get_args(field.type)[1], True, None, field.help)
        if field.item and pattern == field.key + ".N":
            return Field(key, field.item, False, None, field.help)
    raise ConfigError(key, value, f"no such setting; {nearest_key(cls, key)}")


def nearest_key(cls: type, key: str) -> str:
    """A sentence with the key that was probably meant, e.g. ``did you mean train.steps?``.

    The whole key is compared first, so that a wrong section is found as well as a wrong name; then the last
    part alone, for a key given under another section. For a key under none it is the other way round.
    """
    # Entries of a list, under the number that was given.
    number = next((part for part in key.split(".") if _INDEX.match(part)), "0")
    known = [field.key.replace(".N.", f".{number}.") for field in fields_of(cls)
             if not field.is_section or "." not in key]
    name = key.rsplit(".", 1)[-1]
    same = [other for other in known if other.rsplit(".", 1)[-1] == name][:3]
    # A long section makes any two keys alike: their names must be, too.
    near = [other for other in difflib.get_close_matches(key, known, n=1, cutoff=0.7) if _alike(key, other) >= 0.5]
    close = near or same if "." in key else same or near
    if not close:
        last = {other.rsplit(".", 1)[-1]: other for other in reversed(known)}
        close = [last[other] for other in difflib.get_close_matches(name, last, n=1, cutoff=0.75)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    section = key.split(".", 1)[0]
    inside = [other for other in known if other.startswith(section + ".") and f".{number}." not in other]
    return f"known here: {', '.join(inside or [field.key for field in fields_of(cls) if '.' not in field.key])}"


def _alike(key: str, other: str) -> float:
    """How alike the last parts of two keys are, from 0 to 1."""
    return difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], other.rsplit(".", 1)[-1]).ratio()


def nearest_name(name: str, names: list[str], what: str) -> str:
    """A sentence for a wrong name: the close ones if there are any, then all of them."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}{what}: {', '.join(names) or 'none'}"

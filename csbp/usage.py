"""What ``csbp COMMAND --help`` says of experiments and settings: names in a column, no line past ``WIDTH``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from csbp.config.fields import fields_of
from csbp.config.places import experiments
from csbp.errors import written

WIDTH = 100
_WORDS = {
    "experiment=NAME": "a run that ships with csbp, one of those above",
    "experiment=FILE.yaml": "one of your own; its 'defaults' list may start from a shipped one",
    "GROUP=CHOICE": "a file of conf/GROUP, e.g. objective=sdar",
    "section.field=VALUE": "one field, e.g. train.steps=100 data.sources.0.path=docs",
}


def columns(described: Mapping[str, str]) -> str:
    """Names and what they are, side by side."""
    width = max(map(len, described)) + 2
    return "\n".join(textwrap.fill(f"{name:<{width}}{text}", WIDTH, initial_indent="  ",
                                   subsequent_indent=" " * (width + 2), break_long_words=False,
                                   break_on_hyphens=False) for name, text in described.items())


def run_settings(example: str) -> str:
    """For a command that takes the settings of a run."""
    return (f"experiments:\n{columns(experiments())}\n\nsettings are written KEY=VALUE:\n{columns(_WORDS)}\n"
            f"All settings: docs/configuration.md. Exit code: 0 done, 2 bad configuration, 1 anything else.\n\n"
            f"example:\n  {example}")


def _shown(default: object) -> str:
    """A default as it is written."""
    return default if isinstance(default, str) else written(default)


def settings_of(command: type) -> str:
    """The settings of a command that has its own."""
    described = {}
    for field in fields_of(command):
        takes = f"; {field.expects()}; default {_shown(field.default)}" if field.default != "" else ""
        described[field.key] = f"{field.help}{takes}"
    return columns(described)

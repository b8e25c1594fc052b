"""Small helpers for the tests of configurations."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from csbp.config.compose import compose_run
from csbp.config.schema import RunConfig


@cache
def composed(*words: str) -> RunConfig:
    """The quickstart experiment with some words, composed once a session."""
    return compose_run(["experiment=quickstart", *words])


def changed(config: Any, values: dict[str, Any]) -> Any:
    """The same configuration with some fields replaced: dotted key -> value, list entries by their number."""
    for key, value in values.items():
        config = _replaced(config, key, value)
    return config


def _replaced(config: Any, key: str, value: Any) -> Any:
    head, _, rest = key.partition(".")
    if isinstance(config, list):
        index = int(head)
        return [*config[:index], _replaced(config[index], rest, value), *config[index + 1:]]
    return dataclasses.replace(config, **{head: _replaced(getattr(config, head), rest, value) if rest else value})

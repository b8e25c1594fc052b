"""Family name -> adapter. Families are the folders beside this file that have an ``adapter`` module."""

from __future__ import annotations

import importlib
from pathlib import Path

from csbp.errors import ConfigError
from csbp.models.protocol import ModelAdapter


def families() -> tuple[str, ...]:
    """Names of the families that this installation has."""
    here = Path(__file__).parent
    return tuple(sorted(p.parent.name for p in here.glob("*/adapter.py")))


def get_adapter(family: str) -> ModelAdapter:
    """The adapter of a family.

    Raises:
        ConfigError: there is no such family.
    """
    if family not in families():
        raise ConfigError("model.family", family, f"use one of {', '.join(families())}")
    return importlib.import_module(f"csbp.models.{family}.adapter").ADAPTER

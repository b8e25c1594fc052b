"""What this installation has: configuration files, experiments, families, recipes. Found without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml


@cache
def package_dir(name: str) -> Path:
    """The folder of a package of csbp."""
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def conf_dir() -> Path:
    """The installed ``conf/``."""
    return package_dir("csbp.conf")


def choices(group: str) -> list[str]:
    """Names of the files of ``conf/<group>``."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def experiments() -> dict[str, str]:
    """Name of each shipped experiment -> what it is, the second line of its file. Those that can only be planned are
    last."""
    families_planned = planned_families()
    planned = {path.stem for path in (conf_dir() / "model").glob("*.yaml") if _family(path) in families_planned}
    described: list[tuple[bool, str, str]] = []
    for name in choices("experiment"):
        text = (conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        lines = text.splitlines()
        model = re.search(r"^  - override /model: (\w+)", text, re.MULTILINE)
        described.append((model is not None and model[1] in planned, name,
                          lines[1].lstrip("# ") if len(lines) > 1 and lines[1].startswith("#") else ""))
    return {name: text for _, name, text in sorted(described)}


def families() -> list[str]:
    """Names of the model families."""
    return sorted(path.parent.name for path in package_dir("csbp.models").glob("*/adapter.py"))


def planned_families() -> list[str]:
    """Names of the families that a file of ``conf/model`` gives shapes of but that cannot be trained yet."""
    named = {_family(path) for path in (conf_dir() / "model").glob("*.yaml")}
    return sorted(named - {""} - set(families()))


def _family(model: Path) -> str:
    """The family that a file of ``conf/model`` names, or ""."""
    match = re.search(r"^family: (\w+)", model.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def model_of_shape(shape: Mapping[str, Any]) -> str:
    """The file of ``conf/model`` that a shape comes from, or ""."""
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        if shape and yaml.safe_load(path.read_text(encoding="utf-8")).get("shape") == dict(shape):
            return path.stem
    return ""


def builtin_models(family: str) -> list[str]:
    """Names of the models that ship with a family."""
    return sorted({file.parent.name for file in (package_dir("csbp.models") / family).rglob("config.json")})


def recipes() -> list[str]:
    """Names of the recipes."""
    return list(described_recipes())


def described_recipes() -> dict[str, str]:
    """Name of each recipe -> what it is, the first line of its module; nothing is imported."""
    files = sorted(path for path in package_dir("csbp.recipes").glob("*.py") if path.stem != "__init__")
    texts = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}
    return {name: text.partition("\n")[0] for name, text in texts.items()}

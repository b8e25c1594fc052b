"""Rules that import-linter cannot say: who may call collectives, where family names may stand, what loads fast."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for folder in ("csbp", "models", "recipes", "conf") for p in (ROOT / folder).rglob("*.py"))
COLLECTIVE_FOLDERS = {"comm", "parallel", "checkpoint"}


def imports(path: Path) -> set[str]:
    """Every module a file imports, names included (``from a import b`` gives a and a.b)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_only_three_folders_know_torch_distributed() -> None:
    users = {p.relative_to(ROOT).parts[1] for p in SOURCES if p.is_relative_to(ROOT / "csbp")
             and any(name.startswith("torch.distributed") for name in imports(p))}
    assert users <= COLLECTIVE_FOLDERS, users - COLLECTIVE_FOLDERS
    assert "comm" in users  # the search finds something


def test_family_names_stay_in_their_folders() -> None:
    families = [p.parent.name for p in (ROOT / "models").glob("*/adapter.py")]
    assert families
    for path in SOURCES:
        if path.is_relative_to(ROOT / "csbp"):
            text = path.read_text().lower()
            hits = [f for f in families if f'"{f}"' in text and path.name != "schema.py"]
            assert not hits, f"{path} names {hits}"


def test_every_package_is_listed_for_installation() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for top, name in (("csbp", "csbp"), ("models", "csbp.models"), ("recipes", "csbp.recipes"), ("conf", "csbp.conf")):
        for init in (ROOT / top).rglob("__init__.py"):
            found.add(".".join((name, *init.parent.relative_to(ROOT / top).parts)))
    assert found == listed


def test_files_and_functions_stay_short() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert len(text.splitlines()) <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


@pytest.mark.parametrize("modules", ["csbp.errors, csbp.config.schema, csbp.cli, csbp.launch"])
def test_the_command_line_does_not_load_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plans_and_layouts_do_not_load_torch() -> None:
    code = "import sys, csbp.plan.plan, csbp.diffusion.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_test_folder_is_collected(pytestconfig: pytest.Config) -> None:
    """pytest leaves out folders called dist unless told otherwise."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = [p.name for p in (ROOT / "tests").iterdir() if list(p.glob("test_*.py"))]
    assert "dist" in folders
    assert not [f for f in folders if any(fnmatch.fnmatch(f, pattern) for pattern in skipped)]

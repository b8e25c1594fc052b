"""Standard streams that go away do not end a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORK = """
import subprocess, sys
from pathlib import Path
from csbp.output import outlast_output
outlast_output()
outlast_output()
from rich.console import Console
for number in range(3):
    print("line", number, "▒", flush=True)
    print("error", number, file=sys.stderr, flush=True)
    Console().print("rich", number)
subprocess.run([sys.executable, "-c", "print('child')"], check=False)
with open("file", "wb") as file:
    assert file.fileno() > 2
    file.write(b"whole")
Path("done").touch()
"""


def work(folder: Path, redirect: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "work.py").write_text(WORK, encoding="utf-8")
    command = f"set -o pipefail; {sys.executable} work.py {redirect}"
    return subprocess.run(["bash", "-c", command], cwd=folder, text=True, capture_output=True,
                          env={**os.environ, **env}, check=False)


@pytest.mark.parametrize("redirect", [
    "| true", "2>&-", ">&- 2>&- <&-", "> /dev/full",
    *(pytest.param(other, marks=pytest.mark.slow) for other in ("2>&1 | true", ">&-", "2> /dev/full"))])
def test_work_goes_on_when_nobody_listens(tmp_path: Path, redirect: str) -> None:
    done = work(tmp_path, redirect)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists() and (tmp_path / "file").read_bytes() == b"whole"
    assert "Traceback" not in done.stderr
    if redirect == "2>&-":
        assert "line 2" in done.stdout and "error" not in done.stdout


def test_a_terminal_without_the_characters_gets_them_escaped(tmp_path: Path) -> None:
    done = work(tmp_path, "", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "line 2 \\u2592" in done.stdout and "error 2" in done.stderr


ENDLESS = """
import sys
from csbp.cli import guarded
from csbp.output import until_closed
@until_closed
def command(lines):
    for number in range(lines):
        print("line", number)
    return 0
code = guarded(lambda: command(int(sys.argv[1])))
print("code", code, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(("lines", "redirect", "code"), [
    (10**6, "| head -1", 1), (3, "| true", 1), (3, "| cat", 0), (3, ">&-", 0), (10**6, "> /dev/full", 1),
    (3, "> /dev/full", 1)])
def test_what_is_there_to_be_read_ends_when_nobody_reads(tmp_path: Path, lines: int, redirect: str, code: int) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS, encoding="utf-8")
    wait = "" if lines > 3 else "sleep 0.2; "  # until ``true`` has gone
    command = f"set -o pipefail; ({wait}exec {sys.executable} endless.py {lines}) {redirect}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, text=True, capture_output=True, check=False)
    full = ["csbp: standard output: cannot be written: No space left on device"] if "full" in redirect else []
    assert done.stderr.splitlines() == [*full, f"code {code}"] and done.returncode == code


def test_commands_that_print_are_of_that_kind() -> None:
    from csbp import cli

    assert all(hasattr(run, "__wrapped__") for run in (cli._check, cli._plan, cli._generate))

"""Rows of results: a table for people, a JSON list for programs, a file that keeps the newest row of each name."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from csbp import __version__
from csbp.errors import ConfigError, UserError, writing
from csbp.locks import lock_now
from csbp.observe.amounts import bytes_text
from csbp.observe.metrics import finite
from csbp.parallel.runtime import Runtime

GIB = 2**30
_LIBRARIES = ("torch", "transformers", "triton", "flash-attn-4", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_LINKS = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
_PIPED_WIDTH = 200


def short_length(tokens: int) -> str:
    """32K for 32,768; other lengths in full."""
    return f"{tokens >> 10}K" if tokens % 1024 == 0 else str(tokens)


def slow_link() -> str:
    """What the environment says against the direct link between GPUs, to stand in a row's name; "" if nothing."""
    return "".join(f", {name}={os.environ[name]}" for name in _LINKS if os.environ.get(name))


def versions() -> dict[str, str]:
    """Of csbp and of what it measures with, as far as it is installed."""
    found = {"csbp": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def check_out(out: str) -> None:
    """Refuse a file of results that cannot take rows.

    Raises:
        ConfigError: it holds something else, or its folder is not there.
    """
    if not out:
        return
    expect_place("--out", out)
    read_rows(Path(out).expanduser())


def expect_place(field: str, out: str) -> None:
    """Refuse a place where no file FILE.json can be written or replaced.

    Raises:
        ConfigError: it is none.
    """
    path = Path(out).expanduser()
    if path.suffix != ".json" or path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(field, out, "must be a file FILE.json in a folder that is there")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ConfigError(field, out, f"cannot be written: {error.strerror}; name a file in another folder") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results; none where there is no file yet.

    Raises:
        ConfigError: it holds something else.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--out", str(path), "cannot be read as JSON; name another file") from error
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise ConfigError("--out", str(path), "holds no list of rows; name another file")
    return rows


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _is_row(row: object) -> bool:
    kinds = {"name": str, "gpus": int | None, "device": str | None}
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def keep_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put rows into a file of results, each in the place of the one with its name, number of GPUs and device. The file
    is replaced as a whole, by one process at a time.

    Raises:
        UserError: it cannot be written.
    """
    with writing(path), _turn(path.absolute().parent):
        kept = {(row["name"], row.get("gpus"), row.get("device")): row for row in [*read_rows(path), *rows]}
        replace_text(path, json.dumps(list(kept.values()), indent=1, allow_nan=False) + "\n")


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Alone among processes that write rows into a folder, where its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        while lock_now(descriptor) is False:
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there.

    Raises:
        UserError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class Report:
    """Takes rows as they are measured. Only the main rank prints and writes.

    Args:
        command: "attention" or "step".
        words: its settings.
        columns: key of a row -> heading; the table shows those that some row has.
        json_only: print one JSON list at the end and nothing else to stdout.
        out: file of results, or "".
    """

    def __init__(self, command: str, words: Sequence[str], runtime: Runtime, columns: Mapping[str, str],
                 json_only: bool, out: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._unkept: list[dict[str, Any]] = []
        self._main, self._columns, self._json, self._out = runtime.main, columns, json_only, out
        links = "".join(f"{name}={os.environ[name]} " for name in _LINKS if os.environ.get(name))
        started = f"torchrun --nproc-per-node {runtime.world} $(which csbp)" if runtime.world > 1 else "csbp"
        name = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu"
        self._about = {"device": name, "command": f"{links}{started} bench {command} {shlex.join(words)}".strip(),
                       "date": time.strftime("%Y-%m-%d"), "versions": versions()}

    def progress(self, what: str) -> None:
        """Say what is being measured."""
        if self._main:
            print(f"csbp: measuring {what}", file=sys.stderr, flush=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row, and keep it at once: what comes later may fail. One with an error is shown, not kept. A file
        that cannot be written is tried again with the next row."""
        self.rows.append({name: float(f"{value:.6g}") if isinstance(value, float) else value
                          for name, value in finite({**row, **self._about}).items()})
        if self._main and self._out and "error" not in row:
            self._unkept.append(self.rows[-1])
            try:
                keep_rows(Path(self._out).expanduser(), self._unkept)
                self._unkept = []
            except UserError as error:
                print(f"csbp: {error}", file=sys.stderr, flush=True)

    def finish(self) -> int:
        """Print all rows. Returns the exit code: 1 if one has an error, or is not in the file of results."""
        failed = [row for row in self.rows if "error" in row]
        if self._main:
            if self._json:
                print(json.dumps(self.rows, allow_nan=False), flush=True)
            else:
                self._print()
            for row in failed:
                print(f"csbp: {row['name']}: {row['error']}", file=sys.stderr)
            for row in self._unkept:
                print(f"csbp: {row['name']}: not in {self._out}", file=sys.stderr)
        return int(bool(failed or self._unkept))

    def _print(self) -> None:
        console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, emoji=False)
        shown = [key for key in self._columns if any(row.get(key) is not None for row in self.rows)]
        table = Table()
        table.add_column("")
        for key in shown:
            table.add_column(self._columns[key], justify="right")
        for row in self.rows:
            table.add_row(row["name"], *(_cell(key, row.get(key)) for key in shown))
        console.print(table)
        about = self._about
        console.print(f"{about['device']}, {self.rows[0]['gpus']} rank(s), {about['date']}; "
                      + ", ".join(f"{name} {version}" for name, version in versions().items()), highlight=False,
                      soft_wrap=True)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.startswith("error"):
        return f"{value:.1e}"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

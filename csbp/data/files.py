"""The files of a source, found and sorted the same way on every machine."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from fsspec.utils import glob_translate

from csbp.config.schema import SourceConfig
from csbp.errors import ConfigError

STDLIB = "@stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}  # of that folder, but not of Python
_SUFFIXES = {"jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz"), "parquet": (".parquet",)}


@dataclass(frozen=True)
class SourceFile:
    """One file: ``name`` is its posix path relative to the source's folder."""

    name: str
    path: Path

    def stamp(self) -> tuple[str, str, int, int]:
        """What changes when the file does: name, full path, size in bytes, modification time in ns."""
        status = self.path.stat()
        return self.name, str(self.path), status.st_size, status.st_mtime_ns


def list_files(source: SourceConfig, field: str) -> list[SourceFile]:
    """The files of a ``text``, ``jsonl`` or ``parquet`` source, sorted by name.

    A folder is walked whole (links to folders are not followed); ``include`` and ``exclude`` choose among its
    files by relative path, where ``**`` stands for any number of folders. A jsonl or parquet folder gives its
    files of that suffix.

    Args:
        source: its ``path`` is a folder, a single file, a glob or '@stdlib'.
        field: dotted name of the source, for messages.

    Raises:
        ConfigError: nothing is there, or nothing is left after include and exclude.
    """
    if not source.path:
        raise ConfigError(f"{field}.path", source.path, "name a file, a folder or a glob")
    folder, found = _candidates(source, field)
    include, exclude = (_patterns(getattr(source, key), f"{field}.{key}") for key in ("include", "exclude"))
    files = []
    for path in found:
        name = path.relative_to(folder).as_posix()
        if any(p.match(name) for p in include) and not any(p.match(name) for p in exclude):
            files.append(SourceFile(name, path))
    if not files:
        seen = f"{len(found)} files are there, but include={source.include} exclude={source.exclude} leave none"
        raise ConfigError(f"{field}.path", source.path, seen if found else "no such file, or an empty folder")
    return sorted(files, key=lambda f: f.name)


def _candidates(source: SourceConfig, field: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files below it."""
    if source.path == STDLIB:
        folder = Path(sysconfig.get_paths()["stdlib"])
        return folder, [p for p in _walk(folder) if not _NOT_STDLIB & set(p.relative_to(folder).parts)]
    path = Path(source.path).expanduser().absolute()
    if path.is_dir():
        suffixes = _SUFFIXES.get(source.kind, ("",))
        return path, [p for p in _walk(path) if p.name.endswith(suffixes)]
    if path.is_file():
        return path.parent, [path]
    if glob.has_magic(source.path):
        fixed = path
        while glob.has_magic(str(fixed)):
            fixed = fixed.parent
        return fixed, [Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]
    raise ConfigError(f"{field}.path", source.path, f"there is no {path}")


def _walk(folder: Path) -> list[Path]:
    return [Path(root, name) for root, _, names in os.walk(folder) for name in names]


def _patterns(globs: list[str], field: str) -> list[re.Pattern[str]]:
    try:
        return [re.compile(glob_translate(pattern)) for pattern in globs]
    except ValueError as error:
        raise ConfigError(field, globs, f"not a glob pattern: {error}") from error

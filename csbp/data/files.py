"""The files of a source, found and sorted the same way on every machine."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fsspec.utils import glob_translate

from csbp.config.schema import SourceConfig
from csbp.config.sources import STDLIB
from csbp.data.skips import Skips
from csbp.errors import ConfigError

LINK, SPECIAL = "a link to nothing", "a pipe, a socket or a device"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}  # of that folder, but not of Python
_SUFFIXES = {"jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz"), "parquet": (".parquet",)}


@dataclass(frozen=True)
class SourceFile:
    """One file: ``name`` is its posix path relative to the source's folder, bytes that are no UTF-8 written \\xNN."""

    name: str
    path: Path

    def stamp(self) -> tuple[str, str, int, int]:
        """What changes when the file does: name, full path, size in bytes, modification time in ns.

        Raises:
            OSError: it is there no more.
        """
        status = self.path.stat()
        return self.name, str(self.path), status.st_size, status.st_mtime_ns


def unreadable(source: SourceConfig, field: str, where: object, error: Exception | str) -> ConfigError:
    """What is wrong with a source's files, by file and place.

    Args:
        where: the file, with line or row.
        error: what is wrong there, and what to do.
    """
    if isinstance(error, Exception):
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        error = f"cannot be read: {kind}{getattr(error, 'strerror', None) or error}"
    return ConfigError(f"{field}.path", source.path, f"{where}: {error}")


def list_files(source: SourceConfig, field: str, skips: Skips | None = None) -> list[SourceFile]:
    """The files of a ``text``, ``jsonl`` or ``parquet`` source, sorted by name.

    A folder is walked whole (links to folders are not followed); ``include`` and ``exclude`` choose among its
    files by relative path, where ``**`` stands for any number of folders. A jsonl or parquet folder gives its
    files of that suffix. Pipes, sockets, devices and links to nothing are never opened: in a folder of texts they
    are left out, elsewhere refused.

    Args:
        source: its ``path`` is a folder, a single file, a glob or '@stdlib'.
        field: dotted name of the source, for messages.
        skips: counts what is left out.

    Raises:
        ConfigError: nothing is there, nothing is left after include and exclude, or something cannot be read.
    """
    folder, found = _candidates(source, field)
    include, exclude = (_patterns(getattr(source, key), f"{field}.{key}") for key in ("include", "exclude"))
    files = []
    for path in found:
        name = os.fsencode(path.relative_to(folder).as_posix()).decode(errors="backslashreplace")
        if not any(p.match(name) for p in include) or any(p.match(name) for p in exclude):
            continue
        odd = _odd(path, source, field)
        if odd is None:
            files.append(SourceFile(name, path))
        elif source.kind == "text" and path != local_path(source):
            (skips or Skips()).add(odd, name)
        else:
            raise unreadable(source, field, path, f"is {odd}; give regular files, or exclude it")
    if not files:
        seen = f"{len(found)} files are there, but include={source.include} exclude={source.exclude} leave none"
        raise ConfigError(f"{field}.path", source.path, seen if found else "no such file, or an empty folder")
    return sorted(files, key=lambda f: f.name)


def _candidates(source: SourceConfig, field: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files below it."""
    def fail(error: OSError) -> None:
        raise unreadable(source, field, error.filename, error) from error

    if source.path == STDLIB:
        folder = Path(sysconfig.get_paths()["stdlib"])
        return folder, _walk(folder, fail, _NOT_STDLIB)
    path = local_path(source)
    if path.is_dir():
        suffixes = _SUFFIXES.get(source.kind, ("",))
        return path, [p for p in _walk(path, fail) if p.name.endswith(suffixes)]
    if os.path.lexists(path):
        return path.parent, [path]
    if glob.has_magic(source.path):
        fixed = path
        while glob.has_magic(str(fixed)):
            fixed = fixed.parent
        return fixed, [Path(p) for p in glob.glob(str(path), recursive=True) if not os.path.isdir(p)]
    raise ConfigError(f"{field}.path", source.path, f"there is no {path}")


def local_path(source: SourceConfig) -> Path:
    """A source's path on this machine, absolute, ``~`` expanded."""
    return Path(os.path.expanduser(source.path)).absolute()


def _walk(folder: Path, fail: Callable[[OSError], None], without: Collection[str] = ()) -> list[Path]:
    """All files below a folder, but for what is called, or lies in what is called, one of ``without``."""
    found = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in without]  # not even looked into: they can be large
        found += [Path(root, name) for name in names if name not in without]
    return found


def _odd(path: Path, source: SourceConfig, field: str) -> str | None:
    """What something is that cannot be read as a file; None for a regular one or a link to one."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return LINK
        raise unreadable(source, field, path, error) from error
    return None if regular else SPECIAL


def _patterns(globs: list[str], field: str) -> list[re.Pattern[str]]:
    try:
        return [re.compile(glob_translate(pattern)) for pattern in globs]
    except ValueError as error:
        raise ConfigError(field, globs, f"not a glob pattern: {error}") from error

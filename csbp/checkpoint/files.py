"""Files that are either whole or absent: digests, durable writes, and the manifest that lists them.

The manifest guards against accidents (a torn write, a flipped bit, a lost or edited file). It is not a
signature: somebody who may write to the folder can write a new manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder holds.

    Attributes:
        step: optimizer steps done.
        best: whether it was the best one when it was written.
        files: every file of the folder but the manifest, by name.
    """

    step: int
    best: bool
    files: dict[str, FileEntry]

    def render(self) -> str:
        """The one text of this manifest: any other is damage. Its last field is the digest of the rest."""
        body = {"format": FORMAT, **asdict(self)}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps({**body, "digest": digest}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of ``folder``.

        Raises:
            ValueError: it is not exactly what ``render`` writes.
            OSError: it cannot be read.
        """
        raw = (folder / MANIFEST).read_bytes()
        try:
            body = json.loads(raw)
            files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
            manifest = cls(body["step"], body["best"], files)
            if manifest.render().encode() == raw:
                return manifest
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise ValueError("has been altered")


def describe_files(paths: list[Path]) -> dict[str, FileEntry]:
    """Size and digest of each file, by file name. Hashing runs outside the interpreter's lock, four at a time."""

    def describe(path: Path) -> FileEntry:
        with path.open("rb") as file:
            return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

    with ThreadPoolExecutor(4) as pool:
        return {path.name: entry for path, entry in zip(paths, pool.map(describe, paths), strict=True)}


def find_damage(folder: Path, part: int = 0, parts: int = 1, *, hashed: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, beginning with the file's name, or None.

    Hidden files (.DS_Store, .nfs0001) are the system's, and neither read nor missed.

    Args:
        folder: a folder with a manifest.
        part, parts: look at every ``parts``-th file only, from number ``part`` on, so that ranks share the work.
        hashed: whether to compare digests too, which reads every byte; sizes are always compared.
    """
    try:
        manifest = Manifest.read(folder)
        names = {entry.name for entry in folder.iterdir()}
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {_reason(error)}"
    for name in sorted(names - {MANIFEST} - set(manifest.files)):
        # The reader takes every such file that is not hidden, so none may be smuggled in.
        if name.endswith(".safetensors") and not name.startswith("."):
            return f"{name}: not listed in {MANIFEST}"
    for name in sorted(manifest.files)[part::parts]:
        entry = manifest.files[name]
        try:
            if (size := (folder / name).stat().st_size) != entry.size:
                return f"{name}: {size} bytes where {entry.size} were written"
            if hashed and describe_files([folder / name])[name] != entry:
                return f"{name}: sha256 differs from what was written"
        except OSError as error:
            return f"{name}: {_reason(error)}"
    return None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def sync(path: Path) -> None:
    """Have the kernel write a file's or a folder's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part. Durable on return."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """``write_text`` of a JSON object. Floats come back bit for bit; NaN and infinities are kept (Python's JSON)."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

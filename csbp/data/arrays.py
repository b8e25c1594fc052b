"""Growing arrays on disk, published as memory-mapped .npy files with their checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

META = "meta.json"
_CHUNK = 1 << 24
_PENDING = 512  # appended arrays kept in memory; one write each would be slow for short ones


class ArrayFolder:
    """Writes one-dimensional arrays of unknown length into a folder, then ``meta.json`` that vouches for them."""

    def __init__(self, folder: Path, dtypes: dict[str, Any]) -> None:
        self.folder = folder
        self.dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self.sizes = dict.fromkeys(dtypes, 0)
        self._pending: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}
        self._raw: dict[str, BinaryIO] = {name: (folder / f"{name}.raw").open("wb") for name in dtypes}

    def append(self, name: str, values: Any) -> None:
        """Values for the end of one array."""
        array = np.asarray(values, self.dtypes[name]).reshape(-1)
        self.sizes[name] += len(array)
        pending = self._pending[name]
        pending.append(array)
        if len(pending) >= _PENDING:
            self._flush(name)

    def _flush(self, name: str) -> None:
        if self._pending[name]:
            np.concatenate(self._pending[name]).tofile(self._raw[name])
            self._pending[name].clear()

    def finish(self, meta: dict[str, Any], drop: Collection[str] = ()) -> None:
        """Turn the raw files into .npy files, without those in ``drop``, and write ``meta`` last, with each file's
        size and CRC."""
        files = {}
        for name, raw in self._raw.items():
            self._flush(name)
            raw.close()
            source, target = self.folder / f"{name}.raw", self.folder / f"{name}.npy"
            if name in drop:
                source.unlink()
                continue
            header = {"descr": npy.dtype_to_descr(self.dtypes[name]), "fortran_order": False,
                      "shape": (self.sizes[name],)}
            with source.open("rb") as data, target.open("wb") as out:
                npy.write_array_header_2_0(out, header)
                while chunk := data.read(_CHUNK):
                    out.write(chunk)
            source.unlink()
            files[target.name] = {"bytes": target.stat().st_size, "crc32": _crc(target)}
        (self.folder / META).write_text(json.dumps({**meta, "files": files}, indent=1))


def read_meta(folder: Path, *, checksums: bool) -> dict[str, Any] | None:
    """``meta.json`` of a finished folder, or None if anything of it is missing, cut short or (with ``checksums``)
    changed."""
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text())
        for name, expected in meta["files"].items():
            path = folder / name
            if path.stat().st_size != expected["bytes"] or (checksums and _crc(path) != expected["crc32"]):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return meta


def map_array(folder: Path, name: str) -> np.ndarray:
    """One array, memory-mapped read-only."""
    path = folder / f"{name}.npy"
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as data:
        while chunk := data.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value

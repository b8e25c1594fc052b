"""Folders in the making, beside the place that they will be renamed to."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from csbp.locks import lock_now

_YOUNG_SECONDS = 60.0  # its maker may not have locked it yet
_OLD_SECONDS = 3 * 86400.0  # where there are no locks, age has to do


@contextlib.contextmanager
def building_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder``, removed at the end of the context unless it has been renamed. Those of
    processes that were killed go first.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    descriptor = os.open(building, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_now(descriptor)  # ends with this process, however it ends
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(cache: Path) -> None:
    """Remove unfinished and put-aside folders that no process works on any more."""
    for pattern in ("*.building-*", "*.broken-*"):
        for path in cache.glob(pattern):
            if _abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path) -> bool:
    try:
        idle = time.time() - max(entry.stat().st_mtime for entry in [path, *path.iterdir()])
        if idle < _YOUNG_SECONDS:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # its maker has just renamed or removed it
        return False
    try:
        taken = lock_now(descriptor)
    finally:
        os.close(descriptor)
    return idle > _OLD_SECONDS if taken is None else taken

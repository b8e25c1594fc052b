"""What killed processes leave in the cache goes; what others are working on stays."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from csbp.data.building import building_folder

BUILD = """
import sys, time
from pathlib import Path
from csbp.data.building import building_folder
with building_folder(Path(sys.argv[1])) as building:
    (building / "tokens.raw").write_bytes(b"...")
    print(building, flush=True)
    time.sleep(600)
"""


def builder(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process in the middle of its work."""
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def age(folder: Path, seconds: float) -> None:
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (time.time() - seconds,) * 2)


def others(folder: Path) -> set[Path]:
    """What a new builder finds."""
    with building_folder(folder) as building:
        return set(folder.parent.iterdir()) - {building}


def test_a_folder_in_the_making(tmp_path: Path) -> None:
    with building_folder(tmp_path / "new" / "a") as building:
        (building / "x").write_text("")
        building.rename(tmp_path / "new" / "a")
    with building_folder(tmp_path / "new" / "a") as building:
        (building / "x").write_text("")
    assert list((tmp_path / "new").rglob("*")) == [tmp_path / "new" / "a", tmp_path / "new" / "a" / "x"]


def test_what_is_left_by_a_killed_builder_goes_and_a_live_ones_stays(tmp_path: Path) -> None:
    (live, work), (killed, left) = builder(tmp_path / "a"), builder(tmp_path / "b")
    try:
        killed.kill()
        killed.wait()
        assert others(tmp_path / "a") == {work, left}  # it might be about to lock it
        age(work, 300)
        age(left, 300)
        assert others(tmp_path / "c") == {work}
        assert (work / "tokens.raw").exists()
    finally:
        live.kill()
        live.wait()
    assert others(tmp_path / "c") == set()


def test_put_aside_folders_go_and_corpora_stay(tmp_path: Path) -> None:
    for name in ("0123.broken-xyz", "0123", "4567"):
        (tmp_path / name / "inner").mkdir(parents=True)
        age(tmp_path / name, 1e7)
    assert others(tmp_path / "0123") == {tmp_path / "0123", tmp_path / "4567"}


def test_without_locks_only_old_folders_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "as NFS says of folders")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for name, days in (("a.building-1", 0.9), ("a.building-2", 4.0)):
        (tmp_path / name).mkdir()
        age(tmp_path / name, days * 86400)
    assert others(tmp_path / "a") == {tmp_path / "a.building-1"}

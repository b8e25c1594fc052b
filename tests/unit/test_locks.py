"""One run at a time in a run folder, and nothing to clean up after one that was killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from config_kit import changed, composed

from csbp import locks
from csbp.config.schema import RunConfig
from csbp.errors import ConfigError, UserError
from csbp.locks import LOCK, RunLock
from csbp.rundir import CONFIG, claim_run_dir, record_start

HOLD = """
import subprocess, sys, time
from pathlib import Path
from csbp.locks import RunLock
lock = RunLock(Path(sys.argv[1]))
if sys.argv[2:]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock.descriptor])
    print(child.pid, flush=True)
print("held", flush=True)
time.sleep(600)
"""


def hold(folder: Path, *child: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A process that holds the lock, and what it said before."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *child], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = []
    while (line := process.stdout.readline().strip()) != "held":
        assert process.poll() is None, "it could not take the lock"
        said.append(line)
    return process, said


def run_in(folder: Path, resume: str = "none") -> RunConfig:
    found: RunConfig = changed(composed(), {"run_dir": str(folder), "resume": resume})
    return found


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_second_run_is_refused_and_changes_nothing(tmp_path: Path, resume: str) -> None:
    holder, _ = hold(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*")}
    try:
        with pytest.raises(ConfigError, match=f"a run is alive in this folder .process {holder.pid} on .*stop it") \
                as caught, claim_run_dir(run_in(tmp_path, resume)):
            raise AssertionError("two runs in one folder")
        assert caught.value.field == "run_dir" and caught.value.exit_code == 2
        assert {path: path.read_bytes() for path in tmp_path.rglob("*")} == before
    finally:
        holder.kill()
        holder.wait()
    with claim_run_dir(run_in(tmp_path, resume)):  # a killed run does not block
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_ranks_that_outlive_their_launcher_keep_the_folder(tmp_path: Path) -> None:
    holder, said = hold(tmp_path, "child")
    holder.kill()
    holder.wait()
    try:
        with pytest.raises(ConfigError, match="or ranks that it has started"):
            RunLock(tmp_path)
    finally:
        os.kill(int(said[0]), 9)
    while True:
        try:
            return RunLock(tmp_path).release()
        except ConfigError:
            pass  # the killed child takes a moment


def test_the_lock_goes_with_the_run(tmp_path: Path) -> None:
    with claim_run_dir(run_in(tmp_path)) as lock:
        assert lock.folder == tmp_path and (tmp_path / LOCK).exists()
        record_start(run_in(tmp_path), tmp_path)
    assert not (tmp_path / LOCK).exists() and (tmp_path / CONFIG).exists()


def test_a_folder_made_for_a_start_that_was_refused_goes_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="so sad"), claim_run_dir(run_in(tmp_path / "new")):
        assert (tmp_path / "new").is_dir()
        raise UserError("so sad")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="so sad"), claim_run_dir(run_in(tmp_path)):
        raise UserError("so sad")
    assert tmp_path.is_dir()  # it was there before


def test_a_lock_file_that_its_holder_is_removing_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened just before the holder removes it, locked just after."""
    first = RunLock(tmp_path)
    taken = locks.lock_now

    def late(descriptor: int) -> bool | None:
        monkeypatch.setattr(locks, "lock_now", taken)
        first.release()
        return taken(descriptor)

    monkeypatch.setattr(locks, "lock_now", late)
    second = RunLock(tmp_path)
    with pytest.raises(ConfigError, match="a run is alive"):
        RunLock(tmp_path)
    second.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claim_run_dir(run_in(tmp_path)):
        assert "has no locks" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(UserError, match="cannot be written to"), claim_run_dir(run_in(tmp_path)):
        raise AssertionError("there is no lock")

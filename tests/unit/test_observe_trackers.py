"""Trackers through accelerate: local, silent towards the user's terminal, one process, never fatal.

Each tracker runs in a process of its own: wandb and trackio keep global state, and accelerate's process state
would stay in this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from csbp.errors import ConfigError
from csbp.observe.trackers import Trackers, check_trackers, flatten

SCRIPT = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
# A launcher's variables and a process group of ours, as on rank 0 of two ranks.
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
os.environ.pop("OMP_NUM_THREADS", None)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
from csbp.observe.trackers import Trackers
config = {"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "run_dir": None, "resume": True}
for resumed_at in (None, 1):
    trackers = Trackers(sys.argv[2:], "csbp-test", "run-a", Path(sys.argv[1]), config, resumed_at)
    first = 1 if resumed_at is None else 2
    for step in (first, first + 1):
        trackers.log({"loss": 1.0 / step, "nothing": None, "eval": {"loss": 2.0}}, step)
    trackers.finish()
    trackers.finish()
assert dist.group.WORLD is group and torch.get_num_threads() == 1 and os.environ["WORLD_SIZE"] == "2"
print("still fine")
"""


def environment(tmp_path) -> dict[str, str]:
    """No credentials, no proxies, nothing of the caller's home."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO", "HF_"))}
    return {**kept, "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1",
            "NETRC": str(tmp_path / "none"), "TERM": "xterm"}


def run(tmp_path, *names: str) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), *names], env=environment(tmp_path), text=True,
                          capture_output=True, timeout=100, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "still fine" in done.stdout, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_tensorboard_has_every_step_once(tmp_path):
    run(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert "eval/loss" in events.Tags()["scalars"] and "nothing" not in events.Tags()["scalars"]


@pytest.mark.slow
def test_trackio_stays_local(tmp_path):
    run(tmp_path, "trackio")
    import sqlite3

    with sqlite3.connect(tmp_path / "trackio" / "csbp-test.db") as base:
        rows = base.execute("select step, metrics from metrics order by step, id").fetchall()
    losses = [(step, json.loads(values)["loss"]) for step, values in rows]
    assert (1, 1.0) in losses and (3, pytest.approx(1 / 3)) in losses


@pytest.mark.slow
def test_wandb_without_a_key_goes_offline_on_a_terminal_too(tmp_path):
    """A real terminal on all three streams, and nobody who types."""
    parent, child = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), "wandb"], env=environment(tmp_path),
                               stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    said, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([parent], [], [], 0.5)[0]:
            try:
                said += os.read(parent, 65536)
            except OSError:  # the other end has closed
                break
        elif process.poll() is not None:
            break
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(parent)
    text = said.decode(errors="replace")
    assert process.returncode == 0 and "still fine" in text, text
    assert "logging offline" in text
    runs = [p for p in (tmp_path / "wandb").iterdir() if p.name.startswith("offline-run-")]
    # offline-run-TIME-ID, and a number where two began in the same second: resumed under the same id.
    assert len({p.name.split("-")[3] for p in runs}) == 1


def test_unknown_and_missing_ones_are_configuration_errors(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"observe.trackers='tensorbord': use any of wandb, tensorboard, trackio"):
        check_trackers(["tensorbord"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else True)
    check_trackers(["wandb", "tensorboard"])
    with pytest.raises(ConfigError, match="is not installed; run: pip install trackio"):
        Trackers(["trackio"], "p", "r", tmp_path, {})


class Broken:
    def log(self, values, step):
        raise ConnectionError("gone")

    def finish(self):
        raise AssertionError("finish after it was dropped")


class Fine:
    def __init__(self) -> None:
        self.seen: list = []

    def log(self, values, step):
        self.seen.append((step, values))

    def finish(self):
        self.seen.append("finished")


def test_a_failing_tracker_is_dropped_with_one_warning(tmp_path, caplog):
    trackers, fine = Trackers([], "p", "r", tmp_path, {}), Fine()
    trackers._live = {"broken": Broken(), "fine": fine}
    for step in (1, 2):
        trackers.log({"loss": 1.0, "terms": {"ar": None, "diffusion": 2.0}}, step)
    trackers.finish()
    trackers.finish()
    values = {"loss": 1.0, "terms/diffusion": 2.0}
    assert fine.seen == [(1, values), (2, values), "finished"]
    assert caplog.text.count("is not used any more") == 1 and "broken failed" in caplog.text


def test_one_that_does_not_start_is_a_configuration_error(tmp_path, monkeypatch):
    from csbp.observe import trackers

    def refuse(run):
        raise RuntimeError("no room")

    monkeypatch.setattr(trackers, "_accelerate_state", lambda: None)
    monkeypatch.setitem(trackers._START, "tensorboard", refuse)
    with pytest.raises(ConfigError, match="did not start: no room"):
        Trackers(["tensorboard"], "p", "r", tmp_path, {})


def test_flatten():
    assert flatten({"a": {"b": {"c": 1}}, "d": [1, 2], "e": None, "f": "x"}) == {
        "a.b.c": 1, "d": "[1, 2]", "e": None, "f": "x"}

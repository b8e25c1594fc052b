"""wandb, tensorboard and trackio, through accelerate. They never ask, never stop a run, and log on rank 0 alone.

metrics.jsonl is a run's own record; these are beside it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csbp.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
FIELD = "observe.trackers"
_IDENTITY = "trackers.json"
# Where accelerate looks for other ranks.
_LAUNCH = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed. Cheap: imports none of them.

    Raises:
        ConfigError: with the command that installs the missing one.
    """
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(FIELD, name, f"use any of {', '.join(PACKAGES)}")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(FIELD, name, f"is not installed; run: pip install {PACKAGES[name]}")


class Trackers:
    """The chosen trackers of one run. Only rank 0 makes one.

    Args:
        names: of ``PACKAGES``; empty is fine and costs nothing.
        project: groups runs.
        run_name: of this run within the project.
        run_dir: where local files go (trackio keeps its own folder).
        config: the run's configuration, nested.
        resumed_at: steps done by the checkpoint that the run goes on from; None for a fresh run.

    Raises:
        ConfigError: a tracker is not installed or does not start.
    """

    def __init__(self, names: Sequence[str], project: str, run_name: str, run_dir: Path, config: Mapping[str, Any],
                 resumed_at: int | None = None) -> None:
        check_trackers(names)
        self._live: dict[str, Any] = {}
        if not names:
            return
        _accelerate_state()
        run = _Run(project, run_name, run_dir, flatten(config), resumed_at)
        for name in dict.fromkeys(names):
            try:
                self._live[name] = _START[name](run)
            except Exception as error:
                self.finish()
                raise ConfigError(FIELD, name, f"did not start: {error}") from error

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers (and short texts) under their flattened names; None is left out."""
        flat = {name: value for name, value in flatten(values, "/").items() if value is not None}
        for name in list(self._live):
            self._attempt(name, lambda tracker: tracker.log(flat, step=step))

    def finish(self) -> None:
        """Flush and close; may be called again."""
        for name in list(self._live):
            self._attempt(name, lambda tracker: tracker.finish())
        self._live.clear()

    def _attempt(self, name: str, action: Any) -> None:
        """A tracker that fails is dropped, with one warning: a run does not end because a server did."""
        try:
            action(self._live[name])
        except Exception as error:
            del self._live[name]
            log.warning("%s failed and is not used any more in this run: %s", name, error)


def flatten(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Nested mappings as one level of dotted names; lists and other things as text, numbers and None as they are."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}{separator}{inner}": v for inner, v in flatten(value, separator).items()}
        else:
            flat[str(key)] = value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    return flat


@dataclass(frozen=True)
class _Run:
    project: str
    name: str
    folder: Path
    config: dict[str, Any]
    resumed_at: int | None


def _accelerate_state() -> None:
    """accelerate's trackers and its logger need its process state; left alone it would look for other ranks,
    and set up a second process group or other thread counts. Only rank 0 logs, so it may think itself alone."""
    from accelerate import PartialState

    if PartialState._shared_state:
        return
    hidden = {name: os.environ.pop(name) for name in _LAUNCH if name in os.environ}
    try:
        PartialState(cpu=True)
    finally:
        os.environ.update(hidden)


def _start_tensorboard(run: _Run) -> Any:
    from accelerate.tracking import TensorBoardTracker

    purge = None if run.resumed_at is None else run.resumed_at + 1
    tracker = TensorBoardTracker("tensorboard", logging_dir=str(run.folder), purge_step=purge)
    tracker.start()
    if run.resumed_at is None:
        tracker.store_init_configuration({k: "null" if v is None else v for k, v in run.config.items()})
    return tracker


def _start_wandb(run: _Run) -> Any:
    import wandb
    from accelerate.tracking import WandBTracker

    def start(**mode: str) -> Any:
        tracker = WandBTracker(
            run.project, name=run.name, id=_identity(run), resume="allow", dir=str(run.folder), config=run.config,
            settings=wandb.Settings(console="off"), **mode)  # its console capture would tear the progress bar
        tracker.start()
        return tracker

    with _no_terminal():
        try:
            return start()
        except wandb.errors.UsageError as error:  # no key, and nobody to ask for one
            log.warning("wandb has no credentials (%s): logging offline into %s", error, run.folder / "wandb")
            return start(mode="offline")


def _start_trackio(run: _Run) -> Any:
    from accelerate.tracking import TrackioTracker

    resume = "never" if run.resumed_at is None else "allow"
    tracker = TrackioTracker(run.project, name=run.name, config=run.config, resume=resume, embed=False,
                             auto_log_cpu=False, auto_log_gpu=False)
    tracker.start()
    return tracker


_START = {"tensorboard": _start_tensorboard, "wandb": _start_wandb, "trackio": _start_trackio}


def _identity(run: _Run) -> str:
    """A random id, kept in the run folder, under which a resumed run goes on."""
    path = run.folder / _IDENTITY
    if run.resumed_at is None or not path.exists():
        path.write_text(json.dumps({"wandb_id": secrets.token_hex(4)}), encoding="utf-8")
    return str(json.loads(path.read_text(encoding="utf-8"))["wandb_id"])


@contextmanager
def _no_terminal() -> Iterator[None]:
    """Standard input that is no terminal, so that nothing can ask."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before

"""The run folder: which one, may it be used, and what is written into it before anything else.

    DIR/config.yaml         every setting of the run, read by its ranks
    DIR/environment.json    versions, commit, machine and command line of the latest start
    DIR/earlier/            the config.yaml of earlier starts, where a resumed run changed something
    DIR/logs/rank-N.log     what ranks other than 0 print, when csbp starts them itself
    DIR/.lock               while the run is alive: by which process, on which machine
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from csbp import __version__
from csbp.checkpoint.files import find_damage
from csbp.checkpoint.folder import list_checkpoints, step_of
from csbp.config.schema import RunConfig
from csbp.config.typed import load_config, save_config
from csbp.errors import ConfigError, UserError
from csbp.locks import LOCK, RunLock

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
# A resumed run with another of these would be another run.
_FIXED = ("recipe", "seed", "model.", "objective.", "noise.", "data.", "train.packs_per_step")
_FREE_DATA = ("data.cache_dir",)
# These may change on the way, but the curve is then not one run's: the user is told.
_NOTABLE = ("optim.", "train.steps", "train.dtype", "train.eval_packs", "train.eval_seed", "train.eval_t_min")
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy", "safetensors", "hydra-core", "omegaconf")


@contextlib.contextmanager
def claim_run_dir(config: RunConfig) -> Iterator[RunLock]:
    """Make the run folder, or check that a resumed run may go on in it, and keep every other run out of it until the
    end of the context. Enter it in one process per run. A folder made here that is still empty then goes again.

    Yields:
        The lock; its ``folder`` is the run folder, absolute.

    Raises:
        ConfigError: it cannot be made, a run is alive in it, it holds a run and ``resume`` is none, or it holds a
            different run, or one that has done more steps. Nothing in it has been changed.
        UserError: it cannot be written to.
    """
    folder, made = _make(config)
    try:
        lock = RunLock(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to: {error.strerror}") from error
    try:
        _check_free(folder, config)
        yield lock
    finally:
        lock.release()
        if made:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


def check_run_dir(config: RunConfig) -> None:
    """What ``claim_run_dir`` would refuse of a folder that is there, without making one.

    Raises:
        ConfigError: as ``claim_run_dir``.
    """
    folder = Path(config.run_dir or ".").expanduser().absolute()
    if config.run_dir is None or not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError("run_dir", config.run_dir, "is a file; give a folder")
    if (folder / LOCK).exists():
        with contextlib.suppress(OSError):  # not ours to write to: then it is not known here
            RunLock(folder).release()
    _check_free(folder, config)


def _check_free(folder: Path, config: RunConfig) -> None:
    if not holds_run(folder):
        return
    if config.resume == "none":
        raise ConfigError("run_dir", str(folder), "holds a run already; add resume=auto to go on with it, or choose "
                                                  "another folder")
    if (folder / CONFIG).exists():
        _check_same_run(folder, config)
    done, steps = newest_step(folder), config.train.steps
    if done > steps:
        raise ConfigError("train.steps", steps, f"the run in {folder} is already at step {done} of {steps}; nothing to "
                                                f"train. Ask for more than {done} steps to go on")


def record_start(config: RunConfig, folder: Path) -> None:
    """Write the first files of a run, or of its continuation, into its claimed folder.

    Raises:
        UserError: it cannot be written to.
    """
    config = dataclasses.replace(config, run_dir=str(folder))
    try:
        if (folder / CONFIG).exists() and not (holds_run(folder) and _changes(folder, config).keys() <= {"resume"}):
            _keep_config(folder)
        save_config(config, folder / CONFIG)
        (folder / ENVIRONMENT).write_text(json.dumps(describe_environment(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to: {error.strerror}") from error


def holds_run(folder: Path) -> bool:
    """Whether a run in a folder has got as far as its first step; one that was refused leaves nothing to lose."""
    metrics = folder / "metrics.jsonl"
    return any((folder / "checkpoints").glob("step-*")) or (metrics.exists() and metrics.stat().st_size > 0)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder has something to go on from: a checkpoint whose files are there, their bytes not read."""
    return any(not find_damage(path, hashed=False) for path in list_checkpoints(folder / "checkpoints"))


def newest_step(folder: Path) -> int:
    """Optimizer steps behind the newest checkpoint of a run folder; 0 if it has none."""
    return max(map(step_of, list_checkpoints(folder / "checkpoints")), default=0)


def _make(config: RunConfig) -> tuple[Path, bool]:
    """The folder asked for, or one below ``runs/`` that nobody else has; and whether it was made now."""
    wanted = Path(config.run_dir or f"runs/{config.experiment}-{time.strftime('%Y%m%d-%H%M%S')}")
    wanted = folder = wanted.expanduser().absolute()
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
            return folder, True
        except FileExistsError as error:
            if config.run_dir is not None and folder.is_dir():
                return folder, False
            if config.run_dir is not None:
                raise ConfigError("run_dir", config.run_dir, "is a file; give a folder") from error
            folder = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise ConfigError("run_dir", str(folder), f"cannot be made: {error.strerror}") from error
    raise AssertionError("unreachable")


def _check_same_run(folder: Path, config: RunConfig) -> None:
    """Compare with the configuration of the latest start; say what has changed that may."""
    changes = _changes(folder, config)
    fixed = [key for key in changes if key.startswith(_FIXED) and key not in _FREE_DATA]
    if fixed:
        before, now = changes[fixed[0]]
        more = f" ({len(fixed) - 1} more: {', '.join(fixed[1:6])})" if len(fixed) > 1 else ""
        raise ConfigError(fixed[0], now, f"the run in {folder} has {before!r}{more}; resume with the same settings, "
                                         "or start another run_dir")
    for key, (before, now) in changes.items():
        if key.startswith(_NOTABLE):
            print(f"csbp: resuming with {key}={now!r}, before {before!r}", file=sys.stderr)


def _changes(folder: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its value at the latest start, its value now; for those that differ."""
    before = _flat(load_config(folder / CONFIG))
    now = _flat(dataclasses.replace(config, run_dir=str(folder)))
    return {key: (before.get(key), value) for key, value in now.items() if before.get(key) != value}


def _keep_config(folder: Path) -> None:
    """A config.yaml that is about to be replaced stays in ``earlier/``."""
    earlier = folder / "earlier"
    earlier.mkdir(exist_ok=True)
    number = len(list(earlier.glob("config-*.yaml"))) + 1
    shutil.copyfile(folder / CONFIG, earlier / f"config-{number:03d}.yaml")


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists stay whole."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = prefix + field.name
        flat |= _flat(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: value}
    return flat


def describe_environment() -> dict[str, Any]:
    """What ran this: versions, commit, machine, command line. No environment variables: they may hold secrets."""
    return {
        "csbp": __version__, "git": _commit(), "python": platform.python_version(), "platform": platform.platform(),
        "host": platform.node(), "cpus": os.cpu_count(), "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    """A package's version; None if it is not there (a run may not need it)."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any] | None:
    """The commit of csbp's own checkout and whether files differ from it; None outside of one."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True,
                              timeout=10).stdout.strip()

    try:
        tracked = git("ls-files", "--error-unmatch", Path(__file__).name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))} if tracked else None
    except (OSError, subprocess.SubprocessError):
        return None

"""The run folder: which one, may it be used, and what is written into it before anything else.

    DIR/config.yaml         every setting of the run, read by its ranks
    DIR/environment.json    versions, commit, machine and command line of the latest start
    DIR/earlier/            the config.yaml of earlier starts, where a resumed run changed something
    DIR/logs/rank-N.log     what ranks other than 0 print, when csbp starts them itself
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from csbp import __version__
from csbp.config.schema import RunConfig
from csbp.config.typed import load_config, save_config
from csbp.errors import ConfigError, UserError

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
# A resumed run with another of these would be another run.
_FIXED = ("recipe", "seed", "model.", "objective.", "noise.", "data.", "train.packs_per_step")
_FREE_DATA = ("data.cache_dir",)
# These may change on the way, but the curve is then not one run's: the user is told.
_NOTABLE = ("optim.", "train.steps", "train.dtype", "train.eval_packs", "train.eval_seed", "train.eval_t_min")
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy", "safetensors", "hydra-core", "omegaconf")


def prepare_run_dir(config: RunConfig) -> Path:
    """Make the run folder, or check that a resumed run may go on in it, and write its first files. Call it in
    one process per run.

    Returns:
        The folder, absolute.

    Raises:
        ConfigError: it cannot be made, it holds a run and ``resume`` is none, or it holds a different run.
        UserError: it cannot be written to.
    """
    folder = _make(config)
    config = dataclasses.replace(config, run_dir=str(folder))
    if holds_run(folder):
        if config.resume == "none":
            raise ConfigError("run_dir", str(folder), "holds a run already; add resume=auto to go on with it, or "
                                                      "choose another folder")
        if (folder / CONFIG).exists():
            _check_same_run(folder, config)
    elif (folder / CONFIG).exists():
        _keep_config(folder)
    try:
        save_config(config, folder / CONFIG)
        (folder / ENVIRONMENT).write_text(json.dumps(describe_environment(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to: {error.strerror}") from error
    return folder


def holds_run(folder: Path) -> bool:
    """Whether a run in a folder has got as far as its first step; one that was refused leaves nothing to lose."""
    metrics = folder / "metrics.jsonl"
    return has_checkpoint(folder) or (metrics.exists() and metrics.stat().st_size > 0)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder has something to go on from."""
    return any((folder / "checkpoints").glob("step-*"))


def _make(config: RunConfig) -> Path:
    """The folder asked for, or one below ``runs/`` that nobody else has."""
    wanted = Path(config.run_dir or f"runs/{config.experiment}-{time.strftime('%Y%m%d-%H%M%S')}")
    wanted = folder = wanted.expanduser().absolute()
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True, exist_ok=config.run_dir is not None)
            return folder
        except FileExistsError as error:
            if config.run_dir is not None:
                raise ConfigError("run_dir", config.run_dir, "is a file; give a folder") from error
            folder = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise ConfigError("run_dir", str(folder), f"cannot be made: {error.strerror}") from error
    raise AssertionError("unreachable")


def _check_same_run(folder: Path, config: RunConfig) -> None:
    """Compare with the configuration of the latest start; keep that one if it is about to be replaced."""
    before, now = _flat(load_config(folder / CONFIG)), _flat(config)
    changed = [key for key in now if before.get(key) != now[key]]
    fixed = [key for key in changed if key.startswith(_FIXED) and key not in _FREE_DATA]
    if fixed:
        more = f" ({len(fixed) - 1} more: {', '.join(fixed[1:6])})" if len(fixed) > 1 else ""
        raise ConfigError(fixed[0], now[fixed[0]], f"the run in {folder} has {before.get(fixed[0])!r}{more}; resume "
                                                   "with the same settings, or start another run_dir")
    for key in changed:
        if key.startswith(_NOTABLE):
            print(f"csbp: resuming with {key}={now[key]!r}, before {before.get(key)!r}", file=sys.stderr)
    if set(changed) - {"resume"}:
        _keep_config(folder)


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

"""Save and resume: an FSDP-sharded model and its optimizer, bit for bit, on any number of ranks.

The tensors go through ``torch.distributed.checkpoint`` with its safetensors storage: every rank writes the
shards it owns, and a reader with another number of ranks takes the slices it needs. Nothing is pickled on
disk. ``files`` adds what that leaves open (it reads a flipped bit without complaint): a manifest of digests,
checked before anything is read. All ranks must see the run folder, and all must make the same calls.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from csbp.checkpoint import folder, ranks
from csbp.checkpoint.files import (
    MANIFEST,
    FileEntry,
    Manifest,
    describe_files,
    find_damage,
    sync,
    write_json,
    write_text,
)
from csbp.checkpoint.shards import STATE, describe_shards, read_checkpoint, write_tensors
from csbp.checkpoint.tensors import model_tensors, optimizer_tensors
from csbp.errors import UserError

log = logging.getLogger(__name__)

COPIED = ("config.yaml", "environment.json")


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        run_dir: the run folder; they lie in ``run_dir/checkpoints``.
        keep: how many of the newest stay (at least 1); the best one stays beside them.
    """

    def __init__(self, run_dir: Path, keep: int = 1) -> None:
        assert keep >= 1
        self.run_dir, self.keep = Path(run_dir), keep
        self.root = self.run_dir / "checkpoints"
        self._sound: set[Path] = set()
        self._damaged: dict[Path, str] = {}

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *,
             best: bool = False, prune: bool = True) -> Path:
        """Write the checkpoint of ``step`` and delete those that need not stay. Every rank calls it.

        Args:
            step: optimizer steps done.
            state: JSON values to get back from ``load``; rank 0's are written. "step" is added.
            best: whether this is the best model so far.
            prune: False leaves all older ones, because this one may be no good.

        Returns:
            The published folder.

        Raises:
            UserError: a file could not be written (disk full, read-only). Model, optimizer and older
                checkpoints are as before.
        """
        assert state.get("step", step) == step
        json.dumps(state)  # before anything is written: a value that JSON cannot hold is the caller's mistake
        task = f"save the checkpoint of step {step} in {self.root} (older ones are unchanged)"
        temporary = self.root / f"{folder.WRITING}{folder.step_name(step)}"
        try:
            ranks.together(task, lambda: folder.begin(self.root, step), only_first=True)
            ranks.together(task, lambda: _expect_shared(temporary))
            write_tensors(temporary, {**model_tensors(model), **optimizer_tensors(model, optimizer)}, task)
            written = ranks.together(task, lambda: describe_shards(temporary))
            entries = {name: entry for part in written if part for name, entry in part.items()}
            ranks.together(task, lambda: self._finish(temporary, step, state, best, entries), only_first=True)
        except (UserError, RuntimeError):
            if ranks.rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        path = self.root / folder.step_name(step)
        self._sound.add(path)
        if prune and ranks.rank() == 0:
            self._prune(path)
        return path

    def newest_valid(self) -> Path | None:
        """The newest undamaged checkpoint, None if there is none. Warns once of each damaged one it passes over."""
        # Rank 0's list, so that all ranks look at the same folders in the same order.
        for path in ranks.gather(folder.list_checkpoints(self.root))[0]:
            if path in self._sound:
                return path
            problem = self._problem(path)
            if problem is None:
                self._sound.add(path)
                return path
            if path not in self._damaged and ranks.rank() == 0:
                log.warning("checkpoint %s is damaged and passed over: %s", path, problem)
            self._damaged[path] = problem
        return None

    def any(self) -> bool:
        """Whether there is a checkpoint at all, sound, damaged or set aside."""
        return ranks.gather(bool(folder.list_checkpoints(self.root)) or folder.any_set_aside(self.root))[0]

    def set_aside_damaged(self) -> None:
        """Rename the checkpoints that were passed over as damaged: the run goes on without them. Every rank calls
        it."""
        for path, problem in self._damaged.items():
            if ranks.rank() == 0 and path.exists():
                try:
                    folder.set_aside(path, problem)
                except OSError as error:
                    log.warning("damaged checkpoint %s could not be renamed: %s", path, error)
        self._damaged.clear()

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Put the weights and the optimizer's state of a checkpoint in place and return its ``state``.

        Raises:
            UserError: the checkpoint is damaged, or of another model.
        """
        self._expect_sound(path)
        return read_checkpoint(path, model, optimizer, alone=not ranks.initialised())

    def load_model(self, path: Path, model: nn.Module) -> dict[str, Any]:
        """Like ``load``, without the optimizer; ``model`` may have any dtype, sharding and device."""
        self._expect_sound(path)
        return read_checkpoint(path, model, None, alone=not ranks.initialised())

    def _expect_sound(self, path: Path) -> None:
        if path not in self._sound:
            if problem := self._problem(path):
                raise UserError(f"checkpoint {path} is damaged: {problem}")
            self._sound.add(path)

    @staticmethod
    def _problem(path: Path) -> str | None:
        """The first damage that any rank finds; ranks share the hashing."""
        found = ranks.gather(find_damage(path, ranks.rank(), ranks.world_size()))
        return next((problem for problem in found if problem), None)

    def _finish(self, temporary: Path, step: int, state: Mapping[str, Any], best: bool,
                shards: dict[str, FileEntry]) -> Path:
        """Rank 0: the small files, then the manifest, then the name."""
        write_json(temporary / STATE, {"step": step, **state})
        for name in COPIED:
            if (self.run_dir / name).exists():
                shutil.copyfile(self.run_dir / name, temporary / name)
                sync(temporary / name)
        small = [temporary / name for name in (STATE, *COPIED) if (temporary / name).exists()]
        write_text(temporary / MANIFEST, Manifest(step, best, {**shards, **describe_files(small)}).render())
        return folder.publish(temporary)

    def _prune(self, newest: Path) -> None:
        try:
            folder.prune(self.root, newest, self.keep)
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self.root, error)


def _expect_shared(temporary: Path) -> None:
    if not temporary.is_dir():
        raise UserError("this rank does not see the folder that rank 0 made; run_dir must be on a shared disk")

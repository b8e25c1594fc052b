"""The folder ``RUN/checkpoints``: names, publishing, and which checkpoints stay.

    step-00000100/            a published checkpoint; nothing in it is ever changed
    .writing-step-00000200/   being written, or left by a crash
    .replaced-step-00000100/  the older one of that step, while a new one takes its place
    .deleted-step-00000050/   being deleted
    step-00000060.damaged/    was found damaged; nobody reads, counts or deletes it

A checkpoint appears by one rename, so it is whole or absent. Readers change nothing here: the run that
trains is the only writer, and it clears what a crash has left when it saves next.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from pathlib import Path

from csbp.checkpoint.files import Manifest, find_damage, sync

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
WRITING, REPLACED, DELETED = ".writing-", ".replaced-", ".deleted-"
DAMAGED = ".damaged"


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder; -1 if the name is not one."""
    match = _NAME.fullmatch(path.name.removeprefix(REPLACED))
    return int(match[1]) if match else -1


def list_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints, newest step first. One whose successor did not get its name still counts."""
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True):  # "step-" sorts after ".replaced-", so it comes first
        if step_of(path) >= 0 and path.is_dir():
            found.setdefault(step_of(path), path)
    return [found[step] for step in sorted(found, reverse=True)]


def begin(root: Path, step: int) -> Path:
    """Clear what a crash has left and make the empty folder that a new checkpoint is written into."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        final = root / path.name.removeprefix(REPLACED)
        if path.name.startswith(REPLACED) and not final.exists():
            os.rename(path, final)
        elif path.name.startswith((WRITING, REPLACED, DELETED)):
            shutil.rmtree(path, ignore_errors=True)  # a file that is still open elsewhere may stay for a while (NFS)
    temporary = root / f"{WRITING}{step_name(step)}"
    temporary.mkdir()
    return temporary


def publish(temporary: Path) -> Path:
    """Give a finished folder its name, in place of an older checkpoint of the same step if there is one."""
    final = temporary.with_name(temporary.name.removeprefix(WRITING))
    replaced = final.with_name(f"{REPLACED}{final.name}")
    sync(temporary)
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # what stays of it goes with the next save
    return final


def prune(root: Path, newest: Path, keep: int) -> None:
    """Delete all but ``newest``, the ``keep - 1`` before it, and the best one.

    Those that are plainly damaged (their bytes are not read again) are set aside, not counted and not deleted.
    ``newest`` was just written and read back, so one good checkpoint stays whatever the others are like. Steps
    beyond it belong to a continuation that was given up; left there, they would be resumed from.
    """
    for path in list_checkpoints(root):
        if path != newest and (problem := find_damage(path, hashed=False)):
            set_aside(path, problem)
    older = [path for path in list_checkpoints(root) if step_of(path) < step_of(newest)]
    stay = {newest, *older[: keep - 1]}
    if not _is_best(newest):
        stay.update([path for path in older if _is_best(path)][:1])
    for path in list_checkpoints(root):
        if path not in stay:
            delete(path)


def set_aside(path: Path, problem: str) -> Path:
    """Rename a damaged checkpoint, with a warning: whoever can repair it finds it under its new name."""
    stem = f"{path.name.removeprefix(REPLACED)}{DAMAGED}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    os.rename(path, aside)
    sync(aside.parent)
    log.warning("damaged checkpoint %s (%s) is now %s", path, problem, aside.name)
    return aside


def any_set_aside(root: Path) -> bool:
    """Whether a damaged checkpoint has been set aside here."""
    return any(root.glob(f"*{DAMAGED}*"))


def delete(path: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that a half-deleted one is never taken for a damaged one."""
    doomed = path.with_name(f"{DELETED}{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _is_best(path: Path) -> bool:
    try:
        return Manifest.read(path).best
    except (OSError, ValueError):
        return False

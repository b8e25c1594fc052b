"""What a run remembers beside its tensors, and how it goes on from a checkpoint."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from csbp.data.stream import Cursor
from csbp.errors import ConfigError, met_by_all
from csbp.train.evaluate import Evaluation
from csbp.train.session import Session

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """All that a checkpoint must hold beside tensors.

    Attributes:
        step: optimizer steps done.
        cursor: where the global sequence of packs goes on.
        skipped: updates skipped in a row because something was not finite.
        before, last: held-out numbers before training and at the latest evaluation.
        evaluated: the step of the latest evaluation.
        best, best_step: lowest held-out loss so far, and its step; -1 if there is none.
        sample_before: the shown held-out block as the untrained model filled it.
        seconds: training time of earlier sittings.
        cad_bytes: the sum of ``StepResult.cad_bytes``.
    """

    cursor: Cursor
    step: int = 0
    skipped: int = 0
    before: Evaluation | None = None
    last: Evaluation | None = None
    evaluated: int = -1
    best: float = math.inf
    best_step: int = -1
    sample_before: dict[str, Any] | None = None
    seconds: float = 0.0
    cad_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        values = asdict(self) | {"cursor": self.cursor.to_json()}
        return values | {"best": None if math.isinf(self.best) else self.best}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """From what ``to_json`` gave, now or in an earlier version. A run that goes on may skip updates anew."""
        known = {"evaluated": values["step"], **values, "skipped": 0}
        known = {field.name: known[field.name] for field in fields(cls) if field.name in known}
        for name in ("before", "last"):
            known[name] = Evaluation(**known[name]) if known[name] else None
        known["best"] = math.inf if known["best"] is None else known["best"]
        return cls(**known | {"cursor": Cursor.from_json(known["cursor"])})


def resume(session: Session) -> Progress | None:
    """Go on from the newest valid checkpoint: weights and optimizer in place; None if there is none. Collective.

    Raises:
        ConfigError: all are damaged, or the run's data are no longer those that it was trained on.
        UserError: the checkpoint is of another model.
    """
    path = session.store.newest_valid()
    if path is None and session.store.any():
        with met_by_all():
            # A refusal (exit code 2): the launcher then does not suggest to go on.
            raise ConfigError("run_dir", str(session.runtime.run_dir), "its checkpoints are all damaged (see the "
                              "warnings, and folders named *.damaged in checkpoints/); nothing was changed. Restore "
                              "one, or start in another folder")
    if path is None:
        return None
    state = session.store.load(path, session.model, session.optimizer)
    check_same_data(session, state.get("data"), path)
    session.store.set_aside_damaged()
    return Progress.from_json(state)


def data_digests(session: Session) -> dict[str, str]:
    """Split -> digest of its packs, as it stands in a checkpoint."""
    return {"train": session.train_stream.digest, "validation": session.held_out.digest}


def check_same_data(session: Session, saved: dict[str, str] | None, path: Path) -> None:
    """Refuse to go on with other data than those of a checkpoint. Collective.

    Args:
        saved: ``data_digests`` of the run that wrote the checkpoint; None if it was too old to say.
        path: of the checkpoint.

    Raises:
        ConfigError: texts, their order or their packing have changed.
    """
    def check() -> None:
        if saved is None:
            log.warning("%s does not say what data it comes from: whether they have changed is not known", path)
            return
        now, config = data_digests(session), session.config.data
        changed = [split for split in now if now[split] != saved[split]]
        if changed:
            own = changed == ["validation"] and config.validation
            sources = config.validation if own else config.sources
            what = {"train": "training", "validation": "held-out"}
            raise ConfigError("data.validation" if own else "data.sources", [source.path for source in sources],
                              f"the {' and the '.join(what[split] for split in changed)} documents are not those that "
                              f"{path} was trained with: files have been added, removed or edited. Put them back as "
                              "they were, or start another run_dir")

    session.runtime.on_main(check)

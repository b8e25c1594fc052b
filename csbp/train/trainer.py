"""The training loop: packs in, updates, metrics, evaluations and checkpoints out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from csbp.data.batch import PackedBatch
from csbp.data.stream import Cursor
from csbp.errors import UserError
from csbp.train.evaluate import Evaluation, HeldOutBlock, evaluate, fill, pick_block, show
from csbp.train.optimizer import learning_rate
from csbp.train.recorder import Recorder
from csbp.train.session import Session
from csbp.train.signals import StopRequest
from csbp.train.step import StepResult


@dataclass
class Progress:
    """All that a checkpoint must hold beside tensors.

    Attributes:
        step: optimizer steps done.
        cursor: where the global sequence of packs goes on.
        skipped: updates skipped in a row because something was not finite.
        before, last: held-out numbers before training and at the latest evaluation.
        best: lowest held-out loss so far.
        sample_before: the shown held-out block as the untrained model filled it.
        seconds: training time of earlier sittings.
    """

    cursor: Cursor
    step: int = 0
    skipped: int = 0
    before: Evaluation | None = None
    last: Evaluation | None = None
    best: float = math.inf
    sample_before: dict[str, Any] | None = None
    seconds: float = 0.0
    is_best: bool = field(default=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        values = asdict(self) | {"cursor": self.cursor.to_json()}
        return values | {"best": None if math.isinf(self.best) else self.best}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """The inverse of ``to_json``."""
        known = dict(values)
        for name in ("before", "last"):
            known[name] = Evaluation(**known[name]) if known[name] else None
        known["best"] = math.inf if known["best"] is None else known["best"]
        return cls(**known | {"cursor": Cursor.from_json(known["cursor"])})


def resume(session: Session) -> Progress | None:
    """Go on from the newest valid checkpoint: weights and optimizer in place; None if there is none. Collective."""
    path = session.store.newest_valid()
    if path is None and session.store.any():
        raise UserError(f"{session.store.root} holds checkpoints, but all are damaged (see the warnings); nothing was "
                        "changed. Restore one, or start in another run_dir")
    return None if path is None else Progress.from_json(session.store.load(path, session.model, session.optimizer))


class Trainer:
    """Drives a session to its last step. The same on every rank; rank 0 also writes."""

    def __init__(self, session: Session, held_out: list[PackedBatch], recorder: Recorder,
                 progress: Progress | None = None) -> None:
        self.session, self.held_out, self.recorder = session, held_out, recorder
        self.progress = progress or Progress(session.train_stream.first())
        generative = session.config.objective.kind == "block_diffusion"
        self.block: HeldOutBlock | None = pick_block(session, held_out) if generative else None

    def train(self) -> bool:
        """Train to train.steps. Returns False if it was asked to stop early; the state is then saved."""
        session, progress, stop = self.session, self.progress, StopRequest().install()
        config = session.config
        if progress.before is None:
            progress.before = self.evaluate()
            progress.sample_before = self.sample()
        while progress.step < config.train.steps:
            result = self._step(stop)
            done = progress.step >= config.train.steps
            if self._due(config.train.eval_every) and not done:
                self.evaluate()
            if self._due(config.train.sample_every) and not done:
                self.sample()
            if result.stop and not done:
                self._save()
                return False
            if (self._due(config.checkpoint.every) or progress.is_best) and not done:
                self._save()
        self.evaluate()
        self._save()
        return True

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _step(self, stop: StopRequest) -> StepResult:
        session, progress = self.session, self.progress
        config, runner = session.config, session.runner
        packs, cursor = session.train_stream.take(progress.cursor, config.train.packs_per_step)
        rate = learning_rate(progress.step, config.optim, config.train.steps)
        for group in session.optimizer.param_groups:
            group["lr"] = rate
        works = runner.prepare(packs, session.training, progress.step)
        result = runner.run(works, train=True, stop=bool(stop))
        result = runner.update(result, session.optimizer, config.optim.clip_norm)
        progress.step, progress.cursor = progress.step + 1, cursor
        progress.skipped = 0 if result.updated else progress.skipped + 1
        self.recorder.step(progress.step, result, rate, session.train_stream.epoch_progress(cursor))
        if progress.skipped >= config.train.nonfinite_limit:
            raise UserError(f"step {progress.step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite "
                            f"{progress.skipped} times in a row. No weights were changed by these steps; resume "
                            "from the last checkpoint with a lower optim.lr")
        return result

    def evaluate(self) -> Evaluation:
        """Held-out numbers now; remembers the best. Collective."""
        with self.recorder.paused():
            found = evaluate(self.session, self.held_out)
        progress = self.progress
        # "Best" is among trained states: a pretrained start does not count.
        progress.is_best = progress.step > 0 and found.loss < progress.best
        if progress.is_best:
            progress.best = found.loss
        progress.last = found
        self.recorder.evaluation(progress.step, found)
        return found

    def sample(self) -> dict[str, Any] | None:
        """The shown held-out block as the model fills it now. Collective."""
        if self.block is None:
            return None
        with self.recorder.paused():
            shown = show(self.session, self.block, fill(self.session, self.block))
        self.recorder.sample(self.progress.step, shown)
        return shown

    def _save(self) -> None:
        session, progress = self.session, self.progress
        best, progress.is_best = progress.is_best, False
        progress.seconds = self.recorder.seconds()
        with self.recorder.paused():
            session.store.save(progress.step, session.model, session.optimizer, progress.to_json(), best=best)

"""The training loop: packs in, updates, metrics, evaluations and checkpoints out."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from csbp.data.batch import PackedBatch
from csbp.data.stream import Cursor
from csbp.errors import UserError, met_by_all
from csbp.plan.cad import Cad, saving_text
from csbp.train.evaluate import Evaluation, HeldOutBlock, evaluate, fill, pick_block, show
from csbp.train.optimizer import learning_rate
from csbp.train.progress import Progress, data_digests
from csbp.train.recorder import Recorder
from csbp.train.session import Session
from csbp.train.signals import StopAsked, StopRequest
from csbp.train.step import StepResult, Work


class Trainer:
    """Drives a session to its last step. The same on every rank; rank 0 also writes."""

    def __init__(self, session: Session, held_out: list[PackedBatch], recorder: Recorder,
                 progress: Progress | None = None) -> None:
        self.session, self.held_out, self.recorder = session, held_out, recorder
        self.progress = progress or Progress(session.train_stream.first())
        self.sample_after: dict[str, Any] | None = None
        self.stop, self._data = StopRequest(), data_digests(session)
        self._ahead: tuple[int, tuple[list[Work], Cursor]] | None = None  # a step, and what it needs
        self._foretold = session.runner.cad is None
        generative = session.config.objective.kind == "block_diffusion"
        self.block: HeldOutBlock | None = pick_block(session, held_out) if generative else None

    def train(self) -> bool:
        """Train to train.steps. Returns False if it was asked to stop early; what steps it has done are then saved."""
        self.stop.install()
        try:
            self._train()
        except StopAsked:
            if self.progress.step:
                self._save()
            return False
        return True

    def _train(self) -> None:
        config, progress = self.session.config, self.progress
        if progress.before is None:
            progress.before = self.evaluate()
            progress.sample_before = self.sample()
        elif self._evaluate_if_due():  # the last sitting was stopped before it came to it
            self._save()
        if progress.step >= config.train.steps:
            self.recorder.note(f"already at step {progress.step} of {config.train.steps}; nothing to train")
        owed = False
        while progress.step < config.train.steps:
            if self._step().stop:
                raise StopAsked
            if progress.step == config.train.steps:
                break
            best = self._evaluate_if_due()
            if self._due(config.train.sample_every):
                self.sample()
            # While updates are being skipped the weights may be beyond help: then the last checkpoint stays the last.
            owed |= self._due(config.checkpoint.every)
            if best or (owed and not progress.skipped):
                self._save()
                owed = False
        self.evaluate()
        self._save()
        self.sample_after = self.sample()

    def _evaluate_if_due(self) -> bool:
        """Evaluate, unless that was done at this step. Returns whether this is the best state so far."""
        progress = self.progress
        if self._due(self.session.config.train.eval_every) and progress.evaluated < progress.step:
            self.evaluate()
            return progress.best_step == progress.step
        return False

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _step(self) -> StepResult:
        session, progress = self.session, self.progress
        config, runner = session.config, session.runner
        works, cursor = self._works(progress.step, progress.cursor)
        if not self._foretold and runner.cad:
            self._foretell(runner.cad, works)
        rate = learning_rate(progress.step, config.optim, config.train.steps)
        for group in session.optimizer.param_groups:
            group["lr"] = rate
        result = runner.run(works, train=True, stop=bool(self.stop),
                            meanwhile=lambda: self._look_ahead(progress.step + 1, cursor))
        result = runner.update(result, session.optimizer, config.optim.clip_norm)
        progress.step, progress.cursor = progress.step + 1, cursor
        progress.cad_bytes += result.cad_bytes
        progress.skipped = 0 if result.updated else progress.skipped + 1
        self.recorder.step(progress.step, result, rate, session.train_stream.epoch_progress(cursor))
        if progress.skipped >= config.train.nonfinite_limit:
            with met_by_all():
                raise UserError(f"step {progress.step}: loss {result.loss}, gradient norm {result.grad_norm}: not "
                                f"finite {progress.skipped} times in a row. No weights were changed by these steps; "
                                "resume from the last checkpoint with a lower optim.lr")
        return result

    def _foretell(self, cad: Cad, works: list[Work]) -> None:
        """Say what disaggregation is predicted to save of the step to come, over all replicas. Collective."""
        saved, total = self.session.runtime.total(cad.saved([work.whole for work in works if work.whole]))
        step = self.progress.step + 1
        said = saving_text(saved, total, "the first step" if step == 1 else f"step {step}")
        self.recorder.note(f"core attention disaggregation: {said}. Later steps differ: cad_bytes in metrics.jsonl")
        self._foretold = True

    def _works(self, step: int, cursor: Cursor) -> tuple[list[Work], Cursor]:
        """What this rank does in a step whose packs begin at a cursor, and where the next step's begin."""
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1]
        session = self.session
        packs, after = session.train_stream.take(cursor, session.config.train.packs_per_step)
        return session.runner.prepare(packs, session.training, step), after

    def _look_ahead(self, step: int, cursor: Cursor) -> None:
        """Read, plan and bring to the device what the next step needs, while the device is at this one."""
        self._ahead = None
        if step < self.session.config.train.steps:
            # What is wrong with the next packs is said when they are due: this step is still to be finished.
            with suppress(Exception):
                self._ahead = step, self._works(step, cursor)

    def evaluate(self) -> Evaluation:
        """Held-out numbers now; remembers the best. Collective.

        Raises:
            StopAsked: on every rank, if one was asked to stop before the end.
        """
        def before_each(done: int, count: int) -> None:
            self._heed_stop()
            self.recorder.evaluating(done, count)

        with self.recorder.paused():
            found = evaluate(self.session, self.held_out, before_each)
        self.recorder.evaluating(1, 1)
        progress = self.progress
        # "Best" is among trained states: a pretrained start does not count.
        if progress.step > 0 and found.loss < progress.best:
            progress.best, progress.best_step = found.loss, progress.step
        progress.last, progress.evaluated = found, progress.step
        self.recorder.evaluation(progress.step, found)
        return found

    def sample(self) -> dict[str, Any] | None:
        """The shown held-out block as the model fills it now. Collective.

        Raises:
            StopAsked: as ``evaluate``.
        """
        if self.block is None:
            return None
        with self.recorder.paused():
            shown = show(self.session, self.block, fill(self.session, self.block, self._heed_stop))
        self.recorder.sample(self.progress.step, shown)
        return shown

    def _heed_stop(self) -> None:
        if self.session.runtime.total([float(bool(self.stop))])[0] > 0:
            raise StopAsked

    def _save(self) -> None:
        """Save. Nothing older is deleted while updates are being skipped."""
        session, progress = self.session, self.progress
        progress.seconds = self.recorder.seconds()
        with self.recorder.paused():
            session.store.save(progress.step, session.model, session.optimizer,
                               {**progress.to_json(), "data": self._data},
                               best=progress.best_step == progress.step, prune=progress.skipped == 0)

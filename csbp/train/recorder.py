"""What a run shows and writes while it trains: one object, silent on every rank but the first."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from csbp.config.schema import RunConfig
from csbp.observe.curve import plot_losses
from csbp.observe.metrics import MetricsWriter
from csbp.observe.progress import ProgressReporter
from csbp.observe.summary import number, percent, print_report, result_lines
from csbp.observe.throughput import ThroughputMeter
from csbp.observe.trackers import Trackers
from csbp.train.evaluate import Evaluation
from csbp.train.step import StepResult

log = logging.getLogger(__name__)


class Recorder:
    """metrics.jsonl, progress, trackers, loss curve and summary of one run.

    Args:
        config: of the run.
        run_dir: of the run.
        main: whether this rank writes; on the others every method only keeps time.
        resumed_at: steps done by the checkpoint that the run goes on from; None for a fresh run.
        earlier: training seconds before that.
    """

    def __init__(self, config: RunConfig, run_dir: Path, *, main: bool, resumed_at: int | None = None,
                 earlier: float = 0.0) -> None:
        self.config, self.run_dir, self.main = config, run_dir, main
        self.meter = ThroughputMeter(earlier=earlier)
        if not main:
            return
        self.writer = MetricsWriter(run_dir, resumed_at)
        self.trackers = Trackers(config.observe.trackers, config.observe.project, run_dir.name, run_dir,
                                 dataclasses.asdict(config), resumed_at)
        self.progress = ProgressReporter(config.observe.progress, config.train.steps, resumed_at or 0)
        if resumed_at is not None:
            self.progress.note(f"resumed from {run_dir / 'checkpoints'} at step {resumed_at}")

    def note(self, text: str) -> None:
        """A line for whoever watches."""
        if self.main:
            self.progress.note(text)

    def step(self, step: int, result: StepResult, rate: float, epoch: float | None) -> None:
        """Record optimizer step ``step`` (from 1)."""
        pace = self.meter.step(result.clean_tokens)
        if not self.main:
            return
        values: dict[str, Any] = {
            "loss": result.loss, "grad_norm": result.grad_norm, "lr": rate, "tokens_per_second": pace,
            "supervised_tokens": result.supervised, "masked_accuracy": result.accuracy, "updated": result.updated,
            "clean_tokens": result.clean_tokens, "epoch": epoch, "wire_bytes": result.wire_bytes,
            "exposed_seconds": result.exposed_seconds,
            "model_flops_per_second": result.model_flops * pace / max(result.clean_tokens, 1)}
        if self.config.cad.enabled:
            values["cad_bytes"] = result.cad_bytes
        if len(result.terms) > 1:
            values |= {f"loss_{name}": value for name, value in result.terms.items()}
        self.writer.step(step, values)
        self.trackers.log({k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}, step)
        self.progress.update(step, result.loss, self.meter.average())
        if not result.updated:
            self.progress.tell(f"step {step}: loss or gradient is not finite; no weights were changed")

    def evaluating(self, done: int, count: int) -> None:
        """Show how far an evaluation is: ``done`` of ``count`` micro-batches."""
        if self.main:
            self.progress.waiting("evaluating", done, count)

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Record a held-out evaluation after ``step`` steps."""
        if self.main:
            values = dataclasses.asdict(found)
            self.writer.evaluation(step, values)
            self.trackers.log({f"held_out_{k}": v for k, v in values.items() if math.isfinite(v)}, step)
            self.note(f"step {step}: held-out loss {number(found.loss)} nats per token, "
                      f"{number(found.bits_per_byte, 3)} bits per byte, accuracy {percent(found.masked_accuracy, 1)}")

    def sample(self, step: int, shown: Mapping[str, Any]) -> None:
        """Record a held-out block as filled in after ``step`` steps."""
        if self.main:
            self.writer.sample(step, shown)
            self.trackers.log({"sample": f"{shown['noised']!r} -> {shown['filled']!r}"}, step)
            self.note(f"step {step}: {shown['noised']!r} filled in: {shown['filled']!r}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is no training time."""
        with self.meter.paused():
            yield

    def seconds(self) -> float:
        """Training seconds, those of earlier sittings included."""
        return self.meter.seconds()

    def finish(self, summary: Mapping[str, Any], before: Mapping[str, Any] | None,
               after: Mapping[str, Any] | None) -> None:
        """Draw the loss curve and print the report, or the result alone where progress is off. A picture that cannot
        be drawn is told, and costs nothing else."""
        if not self.main:
            return
        if self.config.observe.plot:
            references = {"unigram": summary["eval_loss_unigram"], "random start": summary["eval_loss_random_start"]}
            try:
                plot_losses(self.run_dir, references, title=self.config.experiment)
            except Exception as error:  # a full disk, a broken font, whatever the drawing library meets
                log.warning("%s could not be drawn: %s", self.run_dir / "loss.png", error)
        self.progress.close()
        if self.config.observe.progress != "off":
            print_report(summary, before, after, console=self.progress.console)
            return
        for line in result_lines(summary):
            self.progress.tell(line)

    def close(self) -> None:
        """Close files, trackers and the bar; may be called again."""
        if self.main:
            self.progress.close()
            self.trackers.finish()
            self.writer.close()

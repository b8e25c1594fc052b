"""loss.png: how the loss went, beside what it has to beat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from csbp.observe.metrics import EVALUATIONS, METRICS, read_records

FILE = "loss.png"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it."""
    sums, total = [], 0.0
    for place, value in enumerate(values):
        total += value
        if place >= window:
            total -= values[place - window]
        sums.append(total / min(place + 1, window))
    return sums


def plot_losses(run_dir: Path, references: Mapping[str, float | None] | None = None, *, title: str = "") -> Path | None:
    """Draw training loss, its running mean, held-out losses and reference lines into ``run_dir/loss.png``.

    Training loss may be weighted otherwise than the held-out loss; the two are named apart.

    Args:
        references: name -> held-out loss to draw as a horizontal line; None values are left out.

    Returns:
        The picture, or None if nothing was recorded.
    """
    steps = [(r["step"], r["loss"]) for r in read_records(run_dir / METRICS) if r.get("loss") is not None]
    held_out = [(r["step"], r["loss"]) for r in read_records(run_dir / EVALUATIONS) if r.get("loss") is not None]
    if not steps and not held_out:
        return None
    # The object interface: no pyplot, no display, no state shared with the caller's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if steps:
        x, y = zip(*steps, strict=True)
        window = max(1, len(y) // 20)
        axes.plot(x, y, color="C0", alpha=0.35, linewidth=1, label="training loss")
        if window > 1:
            axes.plot(x, smooth(y, window), color="C0", linewidth=2, label=f"training loss, mean of {window} steps")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="C1", marker="o", label="held-out loss")
    for number, (name, value) in enumerate((references or {}).items()):
        if value is not None and math.isfinite(value):
            axes.axhline(value, color=f"C{2 + number}", linestyle="--", linewidth=1, label=f"held-out, {name}")
    axes.set(xlabel="optimizer step", ylabel="loss (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / FILE
    figure.savefig(path, dpi=120)
    return path

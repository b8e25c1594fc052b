"""The plan as a picture: ranks from top to bottom, the pack from left to right.

Each rank has two stripes, its view of the clean rows above that of the noised rows. A column stands for an equal part
of the stream, however many blocks that is; where a part is mixed, so is its colour.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from csbp.plan.counts import count_plan
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.runs import Runs, union

_COLUMNS = 720
_MOST_LINES = 80  # document borders drawn
_COLOURS = {"idle": (0.94, 0.94, 0.94), "own": (0.12, 0.33, 0.62), "again": (0.53, 0.66, 0.84),
            "arrives": (0.95, 0.60, 0.20), "block": (0.18, 0.55, 0.34)}
_WORDS = {"own": "clean rows owned", "again": "clean rows computed here too", "arrives": "rows read here, received",
          "block": "noised blocks owned", "idle": "not read here"}


def shares(runs: Runs, start: int, end: int) -> np.ndarray:
    """float64 [columns], how much of each equal part of the rows [start, end) lies in the runs."""
    columns = max(min(_COLUMNS, end - start), 1)
    edges = np.linspace(start, end, columns + 1).astype(np.int64)
    return np.diff(runs.below(edges)) / np.maximum(np.diff(edges), 1)


def stripes(plan: PackPlan, kind: LayerKind) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name of ``_COLOURS`` -> shares of the clean and of the noised stream, float64 [world, columns] each."""
    holding, clean, total = plan.holding, plan.geometry.num_clean, plan.geometry.num_clean + plan.geometry.num_noised
    found: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for rank in range(plan.world):
        blocks, own, computed = holding.blocks.of(rank), holding.own_clean(rank), holding.clean_runs[rank]
        noised = union(clean + blocks.start, clean + blocks.end)
        arriving = plan.travel[kind.name].arriving(rank)
        for name, runs, more in (("own", own, None), ("again", computed, own), ("arrives", arriving, None),
                                 ("block", noised, None)):
            upper, lower = found.setdefault(name, ([], []))
            upper.append(shares(runs, 0, clean) - (shares(more, 0, clean) if more else 0.0))
            lower.append(shares(runs, clean, total))
    return {name: (np.stack(upper), np.stack(lower)) for name, (upper, lower) in found.items()}


def draw_plan(plan: PackPlan, path: Path, *, title: str = "") -> None:
    """Draw a plan, a panel for each kind of layer and bars of each rank's pairs and received rows.

    Args:
        plan: any scheme.
        path: the file, .svg or .png.
        title: above the picture.
    """
    height = 1.8 + max(0.26 * plan.world, 2.0)
    figure = Figure(figsize=(7.5 * len(plan.kinds) + 3.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(plan.kinds) + 1, sharey=True, width_ratios=[7.5] * len(plan.kinds) + [2.5],
                           squeeze=False)[0]
    used = {"idle"}
    for axes, kind in zip(grid, plan.kinds, strict=False):
        used |= _panel(axes, plan, kind)
    _bars(grid[-1], plan)
    grid[0].set_yticks(np.arange(plan.world), [f"rank {rank}" for rank in range(plan.world)])
    grid[0].tick_params(axis="y", labelsize=9 if plan.world <= 32 else 7)
    handles = [Patch(facecolor=_COLOURS[name], label=words) for name, words in _WORDS.items() if name in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, and the same plan gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "csbp"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Axes, plan: PackPlan, kind: LayerKind) -> set[str]:
    """Draw one kind of layer; returns the colours in use."""
    found = stripes(plan, kind)
    image = np.full((2 * plan.world, _COLUMNS, 3), _COLOURS["idle"])
    for stream in (0, 1):
        view = image[stream::2]
        for name, parts in found.items():
            share = np.clip(_stretch(parts[stream]), 0.0, 1.0)[..., None]
            view += share * (np.array(_COLOURS[name]) - np.array(_COLOURS["idle"]))
    axes.imshow(np.clip(image, 0.0, 1.0), aspect="auto", interpolation="nearest",
                extent=(0.0, 1.0, plan.world - 0.5, -0.5))
    for border in np.arange(plan.world - 1) + 0.5:
        axes.axhline(border, color="white", linewidth=2.0 if plan.world <= 32 else 1.0)
    geometry = plan.geometry
    if len(geometry.document_starts) - 2 <= _MOST_LINES:
        for start in geometry.document_starts[1:-1]:
            axes.axvline(start / max(geometry.num_clean, 1), color="black", linewidth=0.6, alpha=0.5)
    window = f", window {kind.window}" if kind.window is not None else ""
    axes.set_title(f"{kind.name} layers{window}", fontsize=10)
    axes.set_xticks(np.linspace(0, 1, 5), [f"{round(geometry.num_clean * part):,}" for part in np.linspace(0, 1, 5)])
    axes.set_xlabel("tokens of the pack", fontsize=9)
    return {name for name, parts in found.items() if max(part.max(initial=0.0) for part in parts) > 0}


def _stretch(share: np.ndarray) -> np.ndarray:
    """[world, any columns] -> [world, _COLUMNS]."""
    return share[:, np.arange(_COLUMNS) * share.shape[1] // _COLUMNS]


def _bars(axes: Axes, plan: PackPlan) -> None:
    """Pairs and received rows of each rank, over the mean of pairs and over the pack's rows."""
    counts, rank = count_plan(plan), np.arange(plan.world)
    pairs = np.stack([part.pairs for part in counts.kinds.values()]).sum(0)
    rows = plan.geometry.num_clean + plan.geometry.num_noised
    received = np.stack([part.received for part in counts.kinds.values()]).max(0)
    axes.barh(rank - 0.2, pairs / max(pairs.mean(), 1), 0.36, color="0.35", label="pairs / mean")
    axes.barh(rank + 0.2, received / max(rows, 1), 0.36, color=_COLOURS["arrives"], label="received / all rows")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25 / plan.world - 0.04), frameon=False)
    axes.set_title("load", fontsize=10)

"""The plan as a picture: ranks from top to bottom, the pack from left to right.

Each rank has two stripes, its view of the clean rows above that of the noised rows. A column stands for an equal part
of the stream, however many blocks that is; where a part is mixed, so is its colour. Query rows that other ranks than
their owner attend have colours of their own, at both.
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
from csbp.plan.runs import Runs, expand, union

_COLUMNS = 720
_MOST_LINES = 80  # document borders drawn
_COLOURS = {"idle": (0.94, 0.94, 0.94), "own": (0.12, 0.33, 0.62), "again": (0.53, 0.66, 0.84),
            "arrives": (0.97, 0.78, 0.50), "block": (0.18, 0.55, 0.34), "lent": (0.55, 0.27, 0.68),
            "guests": (0.84, 0.15, 0.24)}
_WORDS = {"own": "clean rows owned", "again": "clean rows computed here too", "arrives": "rows read here, received",
          "block": "noised blocks owned", "lent": "own queries, attended elsewhere (all or part of their keys)",
          "guests": "queries of others, attended here", "idle": "not read here"}


def shares(runs: Runs, start: int, end: int) -> np.ndarray:
    """float64 [columns], how much of each equal part of the rows [start, end) lies in the runs."""
    columns = max(min(_COLUMNS, end - start), 1)
    edges = np.linspace(start, end, columns + 1).astype(np.int64)
    return np.diff(runs.below(edges)) / np.maximum(np.diff(edges), 1)


def stripes(plan: PackPlan, kind: LayerKind) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name of ``_COLOURS`` -> shares of the clean and of the noised stream, float64 [world, columns] each. A row that
    is lent is not counted as owned too."""
    holding, clean, total = plan.holding, plan.geometry.num_clean, plan.geometry.num_clean + plan.geometry.num_noised
    found: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for rank in range(plan.world):
        blocks, own, computed = holding.blocks.of(rank), holding.own_clean(rank), holding.clean_runs[rank]
        noised = union(clean + blocks.start, clean + blocks.end)
        arriving = plan.travel[kind.name].arriving(rank)
        lent, guests = _moved(plan, kind, rank)
        for name, runs, more in (("own", own, lent), ("again", computed, own), ("arrives", arriving, None),
                                 ("block", noised, lent), ("lent", lent, None), ("guests", guests, None)):
            upper, lower = found.setdefault(name, ([], []))
            # What is taken off lies within the runs, but for what is lent of the other stream.
            upper.append(np.maximum(shares(runs, 0, clean) - (shares(more, 0, clean) if more else 0.0), 0.0))
            lower.append(np.maximum(shares(runs, clean, total) - (shares(more, clean, total) if more else 0.0), 0.0))
    return {name: (np.stack(upper), np.stack(lower)) for name, (upper, lower) in found.items()}


def _moved(plan: PackPlan, kind: LayerKind, rank: int) -> tuple[Runs, Runs]:
    """Rows over both streams that others attend for a rank, and that it attends for others, in all or in part."""
    served, none = plan.served.get(kind.name), np.zeros(0, np.int64)
    if served is None:
        return Runs(none, none), Runs(none, none)
    piece = served.moves.piece
    owner, server = served.pieces.owner[piece], served.moves.server
    found = []
    for mine in (owner == rank, server == rank):
        count = served.pieces.rows[piece[mine]]
        rows = served.rows.rows(np.repeat(owner[mine], count), expand(served.pieces.first[piece[mine]], count))
        found.append(union(rows, rows + 1))
    return found[0], found[1]


def draw_plan(plan: PackPlan, path: Path, *, title: str = "", ranks: int | None = None,
              attention: tuple[np.ndarray, np.ndarray] | None = None) -> None:
    """Draw a plan, a panel for each kind of layer and bars of each rank's work and received rows.

    Args:
        plan: any scheme.
        path: the file, .svg or .png.
        title: above the picture.
        ranks: of a replica, where several are planned together.
        attention: seconds of each rank without and with moves, [world] each; None: pairs are drawn.
    """
    height = 1.9 + max(0.26 * plan.world, 2.0)
    figure = Figure(figsize=(7.5 * len(plan.kinds) + 3.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(plan.kinds) + 1, sharey=True, width_ratios=[7.5] * len(plan.kinds) + [2.5],
                           squeeze=False)[0]
    used = {"idle"}
    for axes, kind in zip(grid, plan.kinds, strict=False):
        used |= _panel(axes, plan, kind)
    handles = [Patch(facecolor=_COLOURS[name], label=words) for name, words in _WORDS.items() if name in used]
    handles += _bars(grid[-1], plan, attention)
    for axes in grid:
        for border in np.arange(ranks or plan.world, plan.world, ranks or plan.world) - 0.5:
            axes.axhline(border, color="black", linewidth=1.2)
    grid[0].set_yticks(np.arange(plan.world), [f"rank {rank}" for rank in range(plan.world)])
    grid[0].tick_params(axis="y", labelsize=9 if plan.world <= 32 else 7)
    # Legends are filled column by column.
    figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // (2 + (len(handles) > 8))),
                  frameon=False, fontsize=9)
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
        view, room = image[stream::2], np.ones((plan.world, _COLUMNS, 1))
        # Of rows that are several things here, the later ones in the list are seen.
        for name in reversed(found):
            share = np.minimum(_stretch(found[name][stream])[..., None], room)
            view += share * (np.array(_COLOURS[name]) - np.array(_COLOURS["idle"]))
            room -= share
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


def _bars(axes: Axes, plan: PackPlan, attention: tuple[np.ndarray, np.ndarray] | None) -> list[Patch]:
    """Work of each rank over the mean, and received rows over the pack's; returns what the legend says of them."""
    counts, rank = count_plan(plan), np.arange(plan.world)
    rows = plan.geometry.num_clean + plan.geometry.num_noised
    received = np.stack([part.received for part in counts.kinds.values()]).max(0)
    pairs = np.stack([part.pairs for part in counts.kinds.values()]).sum(0)
    words, work = ("pairs / mean", pairs) if attention is None else ("attention time / mean", attention[1])
    axes.barh(rank - 0.2, work / max(work.mean(), 1e-300), 0.36, color="0.35")
    axes.barh(rank + 0.2, received / max(rows, 1), 0.36, color=_COLOURS["arrives"])
    handles = [Patch(facecolor="0.35", label=words)]
    if attention is not None:
        axes.barh(rank - 0.2, attention[0] / max(attention[0].mean(), 1e-300), 0.36, fill=False, edgecolor="black",
                  linewidth=0.9)
        handles.append(Patch(fill=False, edgecolor="black", label="the same without disaggregation"))
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_title("load", fontsize=10)
    return [*handles, Patch(facecolor=_COLOURS["arrives"], label="received / all rows")]

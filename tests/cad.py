"""Packs for tests of moved attention. D documents, T clean rows, N ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from csbp.plan.cost import PassCost
from csbp.plan.disaggregate import CadSettings
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import Ownership, assign_owners
from csbp.plan.shapes import AttentionLayers
from csbp.plan.work import StepBytes


def dear_profile(folder: Path) -> Path:
    """A file of attention so dear that whatever travels is hidden."""
    cost = {"tile": 10**9, "segment": 0, "pair": 10**9}
    (folder / "dear.json").write_text(json.dumps({"format": 1, "name": "dear", "heads": 1, "kv_heads": 1, "head_dim": 8,
                                                  "fit": {"forward": cost, "backward": cost, "launch": 0}}))
    return folder / "dear.json"


def packed(lengths: Sequence[int], block: int) -> Geometry:
    """Every block of every document is a target."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cells = np.concatenate([*(np.arange(a, b, block) for a, b in zip(edges[:-1], edges[1:], strict=True)), edges[-1:]])
    document = np.searchsorted(edges, cells[:-1], "right") - 1
    return Geometry(edges, cells, document, np.arange(len(document)), cells[:-1], cells)


def anchored(lengths: Sequence[int], block: int, share: float, seed: int) -> Geometry:
    """Blocks anywhere in the text, a ``share`` of as many as fill it."""
    random, edges = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ends = np.sort(random.integers(1, edges[-1] + 1, int(edges[-1] * share / block)))
    return Geometry(edges, np.unique(np.append(np.arange(0, edges[-1], block), edges)),
                    np.searchsorted(edges, ends) - 1, np.full(len(ends), -1), ends, np.arange(len(ends) + 1) * block)


def head_tail(geometry: Geometry, world: int) -> Ownership:
    """The whole pack in 2N runs of cells, run i together with run 2N-1-i; blocks lie with their text."""
    run = np.arange(len(geometry.cell_starts) - 1) * 2 * world // (len(geometry.cell_starts) - 1)
    ranks = np.minimum(run, 2 * world - 1 - run)
    return Ownership(ranks, ranks[geometry.block_cell])


def replicas(lengths: Sequence[Sequence[int]], block: int, ranks: int) -> tuple[Geometry, Ownership]:
    """Packs of several replicas laid end to end, each owned by its own ``ranks`` ranks."""
    geometry = packed([n for part in lengths for n in part], block)
    cells, blocks = [], []
    for number, part in enumerate(lengths):
        owners = assign_owners(packed(part, block), (LayerKind(),), ranks)
        cells.append(owners.cell_rank + number * ranks)
        blocks.append(owners.block_rank + number * ranks)
    return geometry, Ownership(np.concatenate(cells), np.concatenate(blocks))


PAIRS = PassCost(0, 0, 1)  # time is pairs alone
LEVEL = CadSettings(tolerance=0.01, min_gain=0.0)


def sizes_of(heads: int = 32, kv_heads: int = 8, head_dim: int = 128, itemsize: int = 2) -> StepBytes:
    """Of a layer of these heads."""
    return StepBytes.of(AttentionLayers(LayerKind(), 1, heads, kv_heads, head_dim), itemsize)

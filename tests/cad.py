"""Packs for tests of moved attention. D documents, T clean rows, N ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csbp.plan.cost import PassCost
from csbp.plan.disaggregate import CadSettings
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.shapes import AttentionLayers
from csbp.plan.work import RowBytes


def packed(lengths: Sequence[int], block: int) -> Geometry:
    """Every block of every document is a target."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cells = np.concatenate([*(np.arange(a, b, block) for a, b in zip(edges[:-1], edges[1:], strict=True)), edges[-1:]])
    document = np.searchsorted(edges, cells[:-1], "right") - 1
    return Geometry(edges, cells, document, np.arange(len(document)), cells[:-1], cells)


PAIRS = PassCost(0, 0, 1)  # time is pairs alone
LEVEL = CadSettings(tolerance=0.01, min_gain=0.0)


def sizes_of(heads: int = 32, kv_heads: int = 8, head_dim: int = 128, itemsize: int = 2) -> RowBytes:
    """Of a layer of these heads."""
    return RowBytes.of(AttentionLayers(LayerKind(), 1, heads, kv_heads, head_dim), itemsize)

"""Packs for tests of moved attention. D documents, T clean rows, N ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csbp.plan.geometry import Geometry


def packed(lengths: Sequence[int], block: int) -> Geometry:
    """Every block of every document is a target."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cells = np.concatenate([*(np.arange(a, b, block) for a, b in zip(edges[:-1], edges[1:], strict=True)), edges[-1:]])
    document = np.searchsorted(edges, cells[:-1], "right") - 1
    return Geometry(edges, cells, document, np.arange(len(document)), cells[:-1], cells)

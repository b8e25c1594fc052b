"""Which keys each query row sees, as two ranges of global rows (the table of DESIGN section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind


@dataclass(frozen=True)
class RowRanges:
    """Ranges of R query rows: clean rows [prefix_start, prefix_end) and noised rows [block_start, block_end).

    All int64 [R]. Clean rows are numbered 0..T-1, noised rows 0..M-1. A row that sees nothing of a stream has
    an empty range there.
    """

    prefix_start: np.ndarray
    prefix_end: np.ndarray
    block_start: np.ndarray
    block_end: np.ndarray

    def take(self, rows: np.ndarray) -> RowRanges:
        """The ranges of some rows; row -1 (a dummy) sees nothing."""
        real, safe = rows >= 0, np.maximum(rows, 0)
        if len(self.prefix_start) == 0:
            none = np.zeros(len(rows), np.int64)
            return RowRanges(none, none, none, none)
        return RowRanges(*(np.where(real, a[safe], 0) for a in
                           (self.prefix_start, self.prefix_end, self.block_start, self.block_end)))

    @property
    def pairs(self) -> np.ndarray:
        """int64 [R], keys that each row sees."""
        return (np.maximum(self.prefix_end - self.prefix_start, 0)
                + np.maximum(self.block_end - self.block_start, 0))


def join(first: RowRanges, second: RowRanges) -> RowRanges:
    """The ranges of the first rows, then those of the second."""
    return RowRanges(np.concatenate([first.prefix_start, second.prefix_start]),
                     np.concatenate([first.prefix_end, second.prefix_end]),
                     np.concatenate([first.block_start, second.block_start]),
                     np.concatenate([first.block_end, second.block_end]))


def document_of_rows(geometry: Geometry) -> np.ndarray:
    """int64 [T], the document of each clean row."""
    lengths = np.diff(geometry.document_starts)
    return np.repeat(np.arange(len(lengths)), lengths)


def clean_ranges(geometry: Geometry, kind: LayerKind) -> RowRanges:
    """Ranges of the T clean query rows; none of them sees a noised row.

    Raises:
        ValueError: for a kind without clean queries or with an unknown clean stream.
    """
    row = np.arange(geometry.num_clean)
    start = geometry.document_starts[:-1][document_of_rows(geometry)]
    if kind.clean == "token_causal":
        end = row + 1
    elif kind.clean == "block_causal":
        end = np.repeat(geometry.cell_starts[1:], np.diff(geometry.cell_starts))
    else:
        raise ValueError(f"layer kind {kind.name!r}: clean={kind.clean!r} has no clean query rows")
    if kind.window is not None:
        start = np.maximum(start, row - kind.window + 1)
    none = np.zeros_like(row)
    return RowRanges(start, end, none, none)


def noised_ranges(geometry: Geometry, kind: LayerKind) -> RowRanges:
    """Ranges of the M noised query rows: their document's clean prefix and their own block."""
    rows_of_block = np.diff(geometry.block_starts)
    block = np.repeat(np.arange(geometry.num_blocks), rows_of_block)
    row = np.arange(geometry.num_noised)
    slot = row - geometry.block_starts[:-1][block]
    start = geometry.document_starts[:-1][geometry.block_document[block]]
    end = geometry.block_prefix_end[block]
    if kind.window is not None:
        # The window counts back from the block's first row, or from the row itself. A row in slot k
        # stands at text position prefix_end + k whether or not that text exists in the clean stream.
        reach = end + (slot if kind.window_anchor == "row" else 0)
        start = np.minimum(np.maximum(start, reach - kind.window + 1), end)
    own_end = geometry.block_starts[1:][block] if kind.in_block == "bidirectional" else row + 1
    return RowRanges(start, end, geometry.block_starts[:-1][block], own_end)


def covered(starts: np.ndarray, ends: np.ndarray, size: int) -> np.ndarray:
    """bool [size], True where any of the half-open ranges lies."""
    live = ends > starts
    edges = np.zeros(size + 1, np.int64)
    np.add.at(edges, starts[live], 1)
    np.add.at(edges, ends[live], -1)
    return np.cumsum(edges[:-1]) > 0

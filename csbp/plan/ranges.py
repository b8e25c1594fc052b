"""Which keys each query row sees, as two ranges of global rows (the table of docs/attention.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.runs import Runs


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


def index_of(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64 [R], which of the adjoining ranges that begin at ``starts`` each row lies in."""
    return starts.searchsorted(rows, "right") - 1


def meet(queries: RowRanges, kept: Runs, clean: int, places: np.ndarray | None) -> RowRanges:
    """The queries' ranges met with a subset of all rows.

    Args:
        kept: the subset over both streams; no run crosses from the one to the other.
        clean: T.
        places: where the kept noised runs lie locally; None: all in ascending order. The kept rows of one block
            must lie together and in order.
    """
    start = kept.below(queries.prefix_start)
    end = kept.below(np.maximum(queries.prefix_end, queries.prefix_start))
    if not len(kept.end) or kept.end[-1] <= clean:
        none = np.zeros_like(start)
        return RowRanges(start, end, none, none)
    first = kept.below(clean + queries.block_start)
    length = kept.below(clean + np.maximum(queries.block_end, queries.block_start)) - first
    if places is not None and len(places):
        runs = len(kept.start) - len(places)
        run = np.maximum(index_of(kept.before[runs:-1], first), 0)
        first = places[run] + first - kept.before[runs + run]
    first = np.where(length > 0, first, 0)
    return RowRanges(start, end, first, first + length)


def clean_ranges(geometry: Geometry, kind: LayerKind, rows: np.ndarray | None = None,
                 documents: np.ndarray | None = None, cells: np.ndarray | None = None) -> RowRanges:
    """Ranges of clean query rows, all T by default; none of them sees a noised row.

    Within a document ``prefix_start`` and ``prefix_end`` never fall from row to row. ``documents``, ``cells``: which
    one each row lies in, where that is known.

    Raises:
        ValueError: for a kind without clean queries or with an unknown clean stream.
    """
    row = np.arange(geometry.num_clean) if rows is None else rows
    start = geometry.document_starts[index_of(geometry.document_starts, row) if documents is None else documents]
    if kind.clean == "token_causal":
        end = row + 1
    elif kind.clean == "block_causal":
        end = geometry.cell_starts[(index_of(geometry.cell_starts, row) if cells is None else cells) + 1]
    else:
        raise ValueError(f"layer kind {kind.name!r}: clean={kind.clean!r} has no clean query rows")
    if kind.window is not None:
        start = np.maximum(start, row - kind.window + 1)
    none = np.zeros_like(row)
    return RowRanges(start, end, none, none)


def noised_ranges(geometry: Geometry, kind: LayerKind, rows: np.ndarray | None = None,
                  blocks: np.ndarray | None = None) -> RowRanges:
    """Ranges of noised query rows, all M by default: their document's clean prefix and their own block.

    Within a block no bound ever falls from row to row. ``blocks``: which block each row lies in, where that is known.
    """
    row = np.arange(geometry.num_noised) if rows is None else rows
    block = index_of(geometry.block_starts, row) if blocks is None else blocks
    own_start = geometry.block_starts[block]
    start = geometry.document_starts[geometry.block_document[block]]
    end = geometry.block_prefix_end[block]
    if kind.window is not None:
        # The window counts back from the block's first row, or from the row itself. A row in slot k
        # stands at text position prefix_end + k whether or not that text exists in the clean stream.
        reach = end + (row - own_start if kind.window_anchor == "row" else 0)
        start = np.minimum(np.maximum(start, reach - kind.window + 1), end)
    own_end = geometry.block_starts[block + 1] if kind.in_block == "bidirectional" else row + 1
    return RowRanges(start, end, own_start, own_end)


def sum_at_least(first: np.ndarray, count: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Sum of max(floor, first + i) over i < count."""
    low = np.minimum(np.maximum(floor - first, 0), count)
    rest = count - low
    return low * floor + rest * (first + low) + rest * (rest - 1) // 2


def clean_pairs(geometry: Geometry, kind: LayerKind, cell: np.ndarray, start: np.ndarray, end: np.ndarray,
                documents: np.ndarray | None = None) -> np.ndarray:
    """int64, keys seen by the clean rows [start, end) of a cell together; in closed form, one entry a range.
    ``documents``: which one each range lies in, where that is known."""
    if kind.clean == "absent":
        return np.zeros_like(start)
    known = index_of(geometry.document_starts, start) if documents is None else documents
    rows, document = end - start, geometry.document_starts[known]
    if kind.clean == "token_causal":
        ends = rows * (start + 1) + rows * (rows - 1) // 2
    else:
        ends = rows * geometry.cell_starts[cell + 1]
    starts = rows * document if kind.window is None else sum_at_least(start - kind.window + 1, rows, document)
    return ends - starts


def noised_pairs(geometry: Geometry, kind: LayerKind, block: np.ndarray, start: np.ndarray,
                 end: np.ndarray) -> np.ndarray:
    """int64, keys seen by the noised rows [start, end) of a block together; in closed form, one entry a range."""
    if not kind.noised:
        return np.zeros_like(start)
    rows, slot = end - start, start - geometry.block_starts[block]
    document, prefix_end = geometry.document_starts[geometry.block_document[block]], geometry.block_prefix_end[block]
    prefix = rows * (prefix_end - document)
    if kind.window is not None and kind.window_anchor == "block":
        prefix = rows * np.minimum(prefix_end - document, kind.window - 1)
    elif kind.window is not None:
        near = np.clip(kind.window - slot, 0, rows)  # further slots see no clean row at all
        prefix = near * prefix_end - sum_at_least(prefix_end + slot - kind.window + 1, near, document)
    if kind.in_block == "bidirectional":
        return prefix + rows * (geometry.block_starts[block + 1] - geometry.block_starts[block])
    return prefix + rows * (slot + 1) + rows * (rows - 1) // 2


def cell_pairs(geometry: Geometry, kind: LayerKind, documents: np.ndarray | None = None) -> np.ndarray:
    """int64 [C], keys seen by the clean rows of each cell together. ``documents``: of the cells, where known."""
    edges = geometry.cell_starts
    return clean_pairs(geometry, kind, np.arange(len(edges) - 1), edges[:-1], edges[1:], documents)


def block_pairs(geometry: Geometry, kind: LayerKind) -> np.ndarray:
    """int64 [NB], keys seen by the noised rows of each block together."""
    edges = geometry.block_starts
    return noised_pairs(geometry, kind, np.arange(geometry.num_blocks), edges[:-1], edges[1:])

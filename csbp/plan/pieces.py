"""Finding the pieces of a plan: all ranks' at once, from stretches of rows, never row by row.

A *fragment* is rows of one stretch (a document's clean rows on one rank, or a block) within one tile of query rows;
neighbouring fragments make a piece. F fragments, P pieces, N ranks. All arrays are int64 but ``noised``.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.holding import Segments
from csbp.plan.plan import PackPlan
from csbp.plan.ranges import clean_ranges, index_of, noised_ranges, sum_at_least
from csbp.plan.runs import expand
from csbp.plan.tasks import TILE, Pieces


class _Fragments(NamedTuple):
    """[F] each: owner and document, first query row of the owner, rows, ranges of the first and of the last row, and
    the sums of all rows' starts and ends."""

    owner: np.ndarray
    document: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    first_low: np.ndarray
    first_high: np.ndarray
    last_low: np.ndarray
    last_high: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Cuts:
    """Where tiles of query rows cut the stretches of a plan, found once for all layer kinds: of each fragment which
    stretch, first query row of the owner, rows, first global row; [F] each."""

    def __init__(self, plan: PackPlan) -> None:
        self._holding, self._blocks = plan.holding, dict[bool, tuple[np.ndarray, ...]]()

    @cached_property
    def texts(self) -> tuple[np.ndarray, ...]:
        """Of the clean stream."""
        return _tiles(self._holding.texts, np.zeros(self._holding.world, np.int64))

    @cached_property
    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """The cells of the first and of the last row of each of these."""
        _, _, rows, start = self.texts
        edges = self._holding.geometry.cell_starts
        return index_of(edges, start), index_of(edges, start + rows - 1)

    def blocks(self, kind: LayerKind) -> tuple[np.ndarray, ...]:
        """Of the noised stream, whose query rows come after the clean ones, where the kind has any."""
        texts, absent = self._holding.texts, kind.clean == "absent"
        if absent not in self._blocks:
            held = np.zeros(self._holding.world, np.int64)
            np.add.at(held, texts.owner, (texts.end - texts.start) * (not absent))
            self._blocks[absent] = _tiles(self._holding.blocks, held)
        return self._blocks[absent]


def find_pieces(plan: PackPlan, kind: LayerKind, cuts: Cuts | None = None) -> Pieces:
    """All movable work of one layer kind.

    Args:
        plan: of the "csbp" scheme, where blocks are whole and every clean row is on one rank.
        kind: one of the plan's.
        cuts: the plan's, if they are there.
    """
    assert plan.scheme == "csbp", "elsewhere rows are replicated, or keys of blocks travel"
    found, cuts = [], cuts or Cuts(plan)
    if kind.clean != "absent":
        found.append(_join(_clean_fragments(plan.geometry, kind, plan.holding.texts, cuts), noised=False))
    if kind.noised:
        found.append(_join(_noised_fragments(plan.geometry, kind, plan.holding.blocks, cuts.blocks(kind)), noised=True))
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Pieces(*(column[order] for column in columns))


def own_work(plan: PackPlan, kind: LayerKind, cuts: Cuts | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What stays at home whatever moves, noised rows over their own blocks: int64 [N] each of tiles, segments, pairs.

    A tile of query rows visits all keys from the first to the last block that it has rows of. ``cuts``: the plan's.
    """
    blocks = plan.holding.blocks
    tiles, segments, pairs = (np.zeros(plan.world, np.int64) for _ in range(3))
    if not kind.noised or not len(blocks.unit):
        return tiles, segments, pairs
    size = blocks.end - blocks.start
    after = np.cumsum(size)  # blocks lie one after another, rank after rank
    stretch, first, _, _ = (cuts or Cuts(plan)).blocks(kind)
    tile = first // TILE
    opens = np.flatnonzero(np.append(True, (np.diff(blocks.owner[stretch]) != 0) | (np.diff(tile) != 0)))
    last = np.append(opens[1:], len(stretch)) - 1
    owner, keys = blocks.owner[stretch[opens]], after[stretch[last]] - (after - size)[stretch[opens]]
    np.add.at(tiles, owner, -(-keys // TILE))
    np.add.at(segments, owner, 1)
    np.add.at(pairs, blocks.owner, size * size if kind.in_block == "bidirectional" else size * (size + 1) // 2)
    return tiles, segments, pairs


def _tiles(stretches: Segments, held: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut stretches wherever the number of a query row is a multiple of ``TILE``; ``held`` query rows [N] of each
    owner come before its first stretch.

    Returns:
        [F] each: which stretch, first query row of the owner, rows, first global row.
    """
    owner, count = stretches.owner, stretches.end - stretches.start
    before = np.cumsum(count) - count
    local = before + (held - np.append(before, 0)[owner.searchsorted(np.arange(len(held)))])[owner]
    tile = local // TILE
    parts = (local + count - 1) // TILE - tile + 1
    stretch = np.repeat(np.arange(len(owner)), parts)
    edge = expand(tile, parts) * TILE
    first = np.maximum(local[stretch], edge)
    rows = np.minimum((local + count)[stretch], edge + TILE) - first
    return stretch, first, rows, stretches.start[stretch] + first - local[stretch]


def _clean_fragments(geometry: Geometry, kind: LayerKind, texts: Segments, cuts: Cuts) -> _Fragments:
    stretch, first, rows, start = cuts.texts
    document = texts.unit[stretch]
    low, high = (clean_ranges(geometry, kind, row, document, cell)
                 for row, cell in zip((start, start + rows - 1), cuts.cells, strict=True))
    floor = geometry.document_starts[document]
    starts = rows * floor if kind.window is None else sum_at_least(start - kind.window + 1, rows, floor)
    ends = rows * (start + 1) + rows * (rows - 1) // 2
    if kind.clean == "block_causal":
        edges = geometry.cell_starts
        before = np.concatenate([[0], np.cumsum(np.diff(edges) * edges[1:])])  # ends of all rows before each cell
        low_ends, high_ends = (before[cell] + (row - edges[cell]) * edges[cell + 1]
                               for row, cell in zip((start, start + rows), cuts.cells, strict=True))
        ends = high_ends - low_ends
    return _Fragments(texts.owner[stretch], document, first, rows, low.prefix_start, low.prefix_end,
                      high.prefix_start, high.prefix_end, starts, ends)


def _noised_fragments(geometry: Geometry, kind: LayerKind, blocks: Segments, cut: tuple[np.ndarray, ...]) -> _Fragments:
    stretch, first, rows, start = cut
    block = blocks.unit[stretch]
    slot, end = start - geometry.block_starts[block], geometry.block_prefix_end[block]
    by_row = kind.window is not None and kind.window_anchor == "row"
    if kind.window is not None and by_row:  # further slots see no clean row
        rows = np.minimum(rows, kind.window - 1 - slot)
    low = noised_ranges(geometry, kind, start, block).prefix_start
    live = ((rows > 0) & (low < end)).nonzero()[0]
    stretch, first, rows, start, block, slot, end, low = (
        part[live] for part in (stretch, first, rows, start, block, slot, end, low))
    high, starts = low, rows * low
    if kind.window is not None and by_row:
        high = noised_ranges(geometry, kind, start + rows - 1, block).prefix_start
        floor = geometry.document_starts[geometry.block_document[block]]
        starts = sum_at_least(end + slot - kind.window + 1, rows, floor)
    return _Fragments(blocks.owner[stretch], geometry.block_document[block], first, rows, low, end, high, end, starts,
                      rows * end)


def _join(parts: _Fragments, *, noised: bool) -> tuple[np.ndarray, ...]:
    """The columns of ``Pieces`` of one stream. Fragments of a document come in the order of their ranges' ends, so a
    range that begins behind the end of the one before it touches none before."""
    after, tile = parts.first + parts.rows, parts.first // TILE
    opens = np.ones(len(tile), bool)
    opens[1:] = ((parts.owner[1:] != parts.owner[:-1]) | (tile[1:] != tile[:-1])
                 | (parts.document[1:] != parts.document[:-1]) | (parts.first[1:] != after[:-1])
                 | (parts.first_low[1:] > parts.last_high[:-1]))
    at = np.flatnonzero(opens)

    def over(how: np.ufunc, values: np.ndarray) -> np.ndarray:
        return how.reduceat(values, at) if len(at) else values

    rows, starts = over(np.add, parts.rows), over(np.add, parts.starts)
    dense_low, dense_high = over(np.maximum, parts.last_low), over(np.minimum, parts.first_high)
    return (parts.owner[at], parts.first[at], rows, np.full(len(at), noised), over(np.minimum, parts.first_low),
            over(np.maximum, parts.last_high), dense_low, dense_high, over(np.add, parts.ends) - starts,
            np.where(dense_high > dense_low, rows * dense_low - starts, 0))

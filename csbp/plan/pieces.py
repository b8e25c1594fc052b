"""Finding the pieces of a plan: all ranks' at once, from stretches of rows, never row by row.

A *fragment* is rows of one stretch (a document's clean rows on one rank, or a block) within one tile of query rows;
neighbouring fragments make a piece. F fragments, P pieces, N ranks. All arrays are int64 but ``noised``.
"""

from __future__ import annotations

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


def find_pieces(plan: PackPlan, kind: LayerKind) -> Pieces:
    """All movable work of one layer kind.

    Args:
        plan: of the "csbp" scheme, where blocks are whole and every clean row is on one rank.
        kind: one of the plan's.
    """
    assert plan.scheme == "csbp", "elsewhere rows are replicated, or keys of blocks travel"
    texts, blocks = plan.holding.texts, plan.holding.blocks
    found, held = [], np.zeros(plan.world, np.int64)
    if kind.clean != "absent":
        found.append(_join(_clean_fragments(plan.geometry, kind, texts, held), noised=False))
        held = clean_queries(plan, kind)
    if kind.noised:
        found.append(_join(_noised_fragments(plan.geometry, kind, blocks, held), noised=True))
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Pieces(*(column[order] for column in columns))


def clean_queries(plan: PackPlan, kind: LayerKind) -> np.ndarray:
    """int64 [N], clean query rows of each rank, which come before its noised ones."""
    found, texts = np.zeros(plan.world, np.int64), plan.holding.texts
    if kind.clean != "absent":
        np.add.at(found, texts.owner, texts.end - texts.start)
    return found


def own_work(plan: PackPlan, kind: LayerKind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What stays at home whatever moves, noised rows over their own blocks: int64 [N] each of tiles, segments, pairs.

    A tile of query rows visits all keys from the first to the last block that it has rows of.
    """
    blocks = plan.holding.blocks
    tiles, segments, pairs = (np.zeros(plan.world, np.int64) for _ in range(3))
    if not kind.noised or not len(blocks.unit):
        return tiles, segments, pairs
    size = blocks.end - blocks.start
    after = np.cumsum(size)  # blocks lie one after another, rank after rank
    stretch, first, _, _ = _tiles(blocks, clean_queries(plan, kind))
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
    local = before - before[np.searchsorted(owner, owner)] + held[owner]
    tile = local // TILE
    parts = (local + count - 1) // TILE - tile + 1
    stretch = np.repeat(np.arange(len(owner)), parts)
    edge = expand(tile, parts) * TILE
    first = np.maximum(local[stretch], edge)
    rows = np.minimum((local + count)[stretch], edge + TILE) - first
    return stretch, first, rows, stretches.start[stretch] + first - local[stretch]


def _clean_fragments(geometry: Geometry, kind: LayerKind, texts: Segments, held: np.ndarray) -> _Fragments:
    stretch, first, rows, start = _tiles(texts, held)
    low, high = (clean_ranges(geometry, kind, row) for row in (start, start + rows - 1))
    document = texts.unit[stretch]
    floor = geometry.document_starts[document]
    starts = rows * floor if kind.window is None else sum_at_least(start - kind.window + 1, rows, floor)
    ends = rows * (start + 1) + rows * (rows - 1) // 2
    if kind.clean == "block_causal":
        edges = geometry.cell_starts
        before = np.concatenate([[0], np.cumsum(np.diff(edges) * edges[1:])])
        ends = _ends_before(edges, before, start + rows) - _ends_before(edges, before, start)
    return _Fragments(texts.owner[stretch], document, first, rows, low.prefix_start, low.prefix_end,
                      high.prefix_start, high.prefix_end, starts, ends)


def _ends_before(edges: np.ndarray, before: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The sum of the ends of the cells of all rows before each of these; ``before`` has it for whole cells."""
    cell = np.minimum(index_of(edges, row), len(edges) - 2)
    return before[cell] + (row - edges[cell]) * edges[cell + 1]


def _noised_fragments(geometry: Geometry, kind: LayerKind, blocks: Segments, held: np.ndarray) -> _Fragments:
    stretch, first, rows, start = _tiles(blocks, held)
    block = blocks.unit[stretch]
    slot, end = start - geometry.block_starts[block], geometry.block_prefix_end[block]
    if kind.window is not None and kind.window_anchor == "row":  # further slots see no clean row
        rows = np.minimum(rows, kind.window - 1 - slot)
    live = (rows > 0) & (noised_ranges(geometry, kind, start, block).prefix_start < end)
    stretch, first, rows, start, block, slot, end = (
        part[live] for part in (stretch, first, rows, start, block, slot, end))
    low, high = (noised_ranges(geometry, kind, row, block) for row in (start, start + rows - 1))
    starts = rows * low.prefix_start
    if kind.window is not None and kind.window_anchor == "row":
        floor = geometry.document_starts[geometry.block_document[block]]
        starts = sum_at_least(end + slot - kind.window + 1, rows, floor)
    return _Fragments(blocks.owner[stretch], geometry.block_document[block], first, rows, low.prefix_start, end,
                      high.prefix_start, end, starts, rows * end)


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

"""Who owns which rows: one deterministic map from rows of a pack to ranks.

A *unit* is what is never cut: a grid cell of clean rows with the target block over the same text, or a block
that covers no text (an anchor, an EOS fill). The units of a document, in order of prefix length, are cut
into an even number of contiguous runs and run i is paired with run n-1-i, so that a rank holds an early
(cheap) and a late (dear) part of the document. The pairs of all documents then go to ranks by
longest processing time. Costs are exact integers, ties go to the lower number.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ranges import clean_ranges, document_of_rows, noised_ranges

# A token-wise row (projections, MLP) weighs as much as this many attended pairs. For the dense models that
# csbp is made for, a row's linear layers cost about as much as attention over a few thousand keys.
PAIRS_PER_ROW = 4096
# A document is cut into at most this many pairs per rank's fair share of the pack, so that short
# documents stay whole and long ones spread over every rank.
PAIRS_PER_SHARE = 4


@dataclass(frozen=True)
class Ownership:
    """Owner rank of every cell and of every block (a block over a cell has that cell's owner)."""

    cell_rank: np.ndarray
    block_rank: np.ndarray


@dataclass(frozen=True)
class _Units:
    document: np.ndarray
    prefix: np.ndarray
    cost: np.ndarray
    cell: np.ndarray
    block: np.ndarray


def _sum_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int64)
    np.add.at(out, index, values)
    return out


def _units(geometry: Geometry, kinds: tuple[LayerKind, ...]) -> _Units:
    cells, blocks = len(geometry.cell_starts) - 1, geometry.num_blocks
    cell_rows, block_rows = np.diff(geometry.cell_starts), np.diff(geometry.block_starts)
    cell_of_row = np.repeat(np.arange(cells), cell_rows)
    block_of_row = np.repeat(np.arange(blocks), block_rows)
    cell_cost, block_cost = cell_rows * PAIRS_PER_ROW, block_rows * PAIRS_PER_ROW
    for kind in kinds:
        if kind.clean != "absent":
            cell_cost = cell_cost + _sum_by(cell_of_row, clean_ranges(geometry, kind).pairs, cells)
        if kind.noised:
            block_cost = block_cost + _sum_by(block_of_row, noised_ranges(geometry, kind).pairs, blocks)
    loose = np.flatnonzero(geometry.block_cell < 0)
    over = np.flatnonzero(geometry.block_cell >= 0)
    cost = cell_cost + _sum_by(geometry.block_cell[over], block_cost[over], cells)
    cell_document = (document_of_rows(geometry)[geometry.cell_starts[:-1]] if cells
                     else np.zeros(0, np.int64))
    return _Units(
        document=np.concatenate([cell_document, geometry.block_document[loose]]),
        prefix=np.concatenate([geometry.cell_starts[:-1], geometry.block_prefix_end[loose]]),
        cost=np.concatenate([cost, block_cost[loose]]),
        cell=np.concatenate([np.arange(cells), np.full(len(loose), -1)]),
        block=np.concatenate([np.full(cells, -1), loose]),
    )


def _pairs(costs: np.ndarray, share: int, world: int) -> list[np.ndarray]:
    """Cut one document's units (in prefix order) into pairs of an early and a late run."""
    count = len(costs)
    wanted = -(-int(costs.sum()) * PAIRS_PER_SHARE // max(share, 1)) if world > 1 else 1
    pairs = max(1, min(wanted, world, (count + 1) // 2))
    bounds = np.linspace(0, count, 2 * pairs + 1).astype(np.int64)
    runs = [np.arange(bounds[i], bounds[i + 1]) for i in range(2 * pairs)]
    return [np.concatenate([runs[i], runs[-1 - i]]) for i in range(pairs)]


def assign_owners(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int) -> Ownership:
    """Give every cell and block of a pack to one of ``world`` ranks.

    Any pack is legal: empty ones, fewer units than ranks (some ranks then own nothing), ragged cells.
    """
    units = _units(geometry, kinds)
    owner = np.zeros(len(units.cost), np.int64)
    if world > 1 and len(owner):
        order = np.lexsort((np.arange(len(owner)), units.prefix, units.document))
        share = -(-int(units.cost.sum()) // world)
        items: list[tuple[int, int, np.ndarray]] = []
        edges = np.flatnonzero(np.diff(units.document[order])) + 1
        for members in np.split(order, edges):
            for pair in _pairs(units.cost[members], share, world):
                chosen = members[pair]
                items.append((-int(units.cost[chosen].sum()), len(items), chosen))
        loads = [(0, rank) for rank in range(world)]
        for negative_cost, _, chosen in sorted(items, key=lambda item: item[:2]):
            load, rank = heapq.heappop(loads)
            owner[chosen] = rank
            heapq.heappush(loads, (load - negative_cost, rank))
    cells = len(geometry.cell_starts) - 1
    cell_rank = owner[:cells]
    block_rank = np.zeros(geometry.num_blocks, np.int64)
    over = geometry.block_cell >= 0
    block_rank[over] = cell_rank[geometry.block_cell[over]]
    block_rank[units.block[cells:]] = owner[cells:]
    return Ownership(cell_rank, block_rank)

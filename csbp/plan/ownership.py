"""Who owns which rows: one deterministic map from rows of a pack to ranks.

A *unit* is what is never cut: a grid cell of clean rows with the target block over the same text, or a block
that covers no text (an anchor, an EOS fill). Three steps, each cutting no more than balance needs:

1. The units of a long document, in order of prefix length, are cut into an even number of contiguous runs and
   run i goes together with run n-1-i, so that a rank holds an early (cheap) and a late (dear) part. Short
   documents stay whole, very short neighbours stay together.
2. These items go to ranks by longest processing time, under a cap on rows (memory).
3. Runs are moved from the fullest rank to emptier ones, swapped, and cut only where that does not suffice,
   until the fullest rank is within ``CLOSE`` of the lower bound or nothing improves.

Costs are exact integers, ties go to the lower number, nothing depends on the rank that asks.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass

import numpy as np

from csbp.plan.balance import lower_bound, rebalance
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ranges import block_pairs, cell_pairs, index_of
from csbp.plan.runs import expand

# A token-wise row (projections, MLP) weighs as much as this many attended pairs in every layer where it is a query, if
# the model's sizes are not known (``ModelShape.row_pairs``).
PAIRS_PER_ROW = 4096
# A clean row that is never a query still has its keys and values computed.
PAIRS_PER_KEY_ROW = 512
# A document is cut into this many pairs for each fair share of cost (a rank's, of the whole pack) that it has, so
# that short documents stay whole and long ones spread over every rank.
PAIRS_PER_SHARE = 4
# And into at least this many for each fair share of rows, so that parts of long but cheap documents find room.
PAIRS_PER_ROOM = 2
# Neighbouring whole documents form one item up to about this part of a rank's fair share of cost or of rows.
GRAINS_PER_SHARE = 32
# No rank gets more than this multiple of the mean of clean and noised rows (or than the mean and one unit more,
# where units are large).
ROWS_CAP = 1.25


@dataclass(frozen=True)
class Ownership:
    """Owner rank of every cell and of every block (a block over a cell has that cell's owner)."""

    cell_rank: np.ndarray
    block_rank: np.ndarray


@dataclass(frozen=True)
class Units:
    """The U units of a pack, by document and then prefix. All int64 [U].

    Attributes:
        document: of the unit.
        cost: attended pairs of all kinds, each times its weight, and token-wise rows, in pairs.
        rows: clean and noised rows.
        cell: the unit's cell, -1 for a block without text.
        block: that block, -1 for a cell.
    """

    document: np.ndarray
    cost: np.ndarray
    rows: np.ndarray
    cell: np.ndarray
    block: np.ndarray


def row_costs(kinds: tuple[LayerKind, ...], weights: tuple[int, ...], row_pairs: int) -> tuple[int, int]:
    """Cost of one clean and of one noised row apart from attention, over all layers, in pairs."""
    clean = sum(weight for kind, weight in zip(kinds, weights, strict=True) if kind.clean != "absent")
    noised = sum(weight for kind, weight in zip(kinds, weights, strict=True) if kind.noised)
    return row_pairs * clean if clean else PAIRS_PER_KEY_ROW * sum(weights), row_pairs * noised


def make_units(geometry: Geometry, kinds: tuple[LayerKind, ...], weights: tuple[int, ...] | None = None,
               row_pairs: int = PAIRS_PER_ROW) -> Units:
    """The units of a pack.

    Args:
        geometry: the pack.
        kinds: of the model's attention layers.
        weights: what a pair costs in all layers of each kind; 1 each by default.
        row_pairs: pairs that a token-wise row weighs.
    """
    weights = weights or (1,) * len(kinds)
    cell_edges, block_edges = geometry.cell_starts, geometry.block_starts
    cells = len(cell_edges) - 1
    cell_rows, block_rows = np.diff(cell_edges), np.diff(block_edges)
    per_clean, per_noised = row_costs(kinds, weights, row_pairs)
    cell_cost, block_cost = cell_rows * per_clean, block_rows * per_noised
    cell_document = index_of(geometry.document_starts, cell_edges[:-1])
    for kind, weight in zip(kinds, weights, strict=True):
        cell_cost = cell_cost + weight * cell_pairs(geometry, kind, cell_document)
        block_cost = block_cost + weight * block_pairs(geometry, kind)
    over = np.flatnonzero(geometry.block_cell >= 0)
    loose = np.flatnonzero(geometry.block_cell < 0)
    np.add.at(cell_cost, geometry.block_cell[over], block_cost[over])
    np.add.at(cell_rows, geometry.block_cell[over], block_rows[over])
    document = np.concatenate([cell_document, geometry.block_document[loose]])
    prefix = np.concatenate([cell_edges[:-1], geometry.block_prefix_end[loose]])
    order = np.lexsort((prefix, document))
    return Units(document[order], np.concatenate([cell_cost, block_cost[loose]])[order],
                 np.concatenate([cell_rows, block_rows[loose]])[order],
                 np.concatenate([np.arange(cells), np.full(len(loose), -1)])[order],
                 np.concatenate([np.full(cells, -1), loose])[order])


def _items(units: Units, world: int) -> tuple[np.ndarray, np.ndarray]:
    """What is dealt out first, pairs of runs of long documents, and short documents, whole: the units, item after item,
    and how many each has."""
    edges = np.flatnonzero(np.diff(units.document, prepend=-1))
    last = np.append(edges[1:], len(units.cost))
    costs, rows = (np.add.reduceat(values, edges) for values in (units.cost, units.rows))
    share, room = (max(-(-int(values.sum()) // world), 1) for values in (costs, rows))
    wanted = np.maximum(-(-costs * PAIRS_PER_SHARE // share), rows * PAIRS_PER_ROOM // room)
    wanted = np.minimum(np.minimum(wanted, world), (last - edges + 1) // 2)
    whole = wanted <= 1
    # Whole neighbours within one grain of the running cost, and of the running rows, make one item.
    grains = [np.cumsum(np.where(whole, values, 0)) * GRAINS_PER_SHARE // fair
              for values, fair in ((costs, share), (rows, room))]
    opens = np.flatnonzero(~whole | np.append(True, ~whole[:-1]) | (np.diff(grains, prepend=-1) > 0).any(0))
    pairs = np.maximum(wanted[opens], 1)
    group, pair = np.repeat(np.arange(len(opens)), pairs), expand(np.zeros_like(pairs), pairs)
    first, end, runs = edges[opens][group], np.append(edges[opens[1:]], last[-1])[group], 2 * pairs[group]

    def bound(run: np.ndarray) -> np.ndarray:
        """Where a run of a group begins."""
        return np.where(run < runs, (run * ((end - first) / runs) + first).astype(np.int64), end)

    starts, ends = (np.stack([bound(pair + more), bound(runs - 1 - pair + more)], 1) for more in (0, 1))
    return expand(starts.ravel(), (ends - starts).ravel()), (ends - starts).sum(1)


def _deal(order: np.ndarray, sizes: np.ndarray, units: Units, world: int, cap: int) -> np.ndarray:
    """Longest processing time: the dearest item goes to the least loaded rank that has room for its rows.

    An item for which no rank has room is dealt in halves; one unit always finds room, because ``cap`` is at least
    the mean and one unit more. ``order`` has the units, item after item, of ``sizes`` units each.
    """
    end = np.cumsum(sizes)
    before, rows_before = (np.append(0, np.cumsum(values[order])) for values in (units.cost, units.rows))
    first = end - sizes
    amounts = (values[end] - values[first] for values in (before, rows_before))
    columns = [part.tolist() for part in (*amounts, first, end)]
    # By cost, then by number; the last one comes next.
    queue = sorted(zip(columns[0], range(0, -len(sizes), -1), *columns[1:], strict=True))
    loads = [(0, 0, rank) for rank in range(world)]  # cost, rows, rank
    dealt, serial = [], len(sizes)
    while queue:
        cost, _, rows, start, stop = queue.pop()
        full = []
        while loads and loads[0][1] + rows > cap:
            full.append(heapq.heappop(loads))
        if loads:
            load, held, rank = loads[0]
            heapq.heapreplace(loads, (load + cost, held + rows, rank))
            dealt.append((start, rank))
        else:
            middle = (start + stop + 1) // 2
            for a, b in ((start, middle), (middle, stop)):
                half = int(before[b] - before[a]), -serial, int(rows_before[b] - rows_before[a]), a, b
                bisect.insort(queue, half)
                serial += 1
        for entry in full:
            heapq.heappush(loads, entry)
    starts, ranks = np.array(sorted(dealt)).T
    owner = np.empty(len(order), np.int64)
    owner[order] = np.repeat(ranks, np.diff(starts, append=len(order)))
    return owner


def rows_cap(units: Units, world: int, multiple: float = ROWS_CAP) -> int:
    """Most rows that a rank may get."""
    total, largest = int(units.rows.sum()), int(units.rows.max(initial=0))
    return max(int(multiple * total / world), -(-total // world) + largest)


def assign_units(units: Units, world: int, cap: int) -> np.ndarray:
    """int64 [U], each unit's rank."""
    if world == 1 or len(units.cost) == 0:
        return np.zeros(len(units.cost), np.int64)

    # Dealing fills ranks only part of the way, so that moving costs afterwards still finds room for their rows.
    soft = min(cap, rows_cap(units, world, (1 + ROWS_CAP) / 2))

    def spread(sizes: np.ndarray) -> tuple[int, np.ndarray]:
        owner = rebalance(_deal(order, sizes, units, world, soft), units.document, units.cost, units.rows, world, cap)
        load = np.zeros(world, np.int64)
        np.add.at(load, owner, units.cost)
        return int(load.max()), owner

    (order, sizes), bound = _items(units, world), lower_bound(units.cost, world)
    fullest, owner = spread(sizes)
    if fullest * 20 > bound * 21:
        # Some units are large: dealt one by one they keep the bounds of longest processing time.
        fine = np.add.reduceat(units.cost[order], np.cumsum(sizes) - sizes) * GRAINS_PER_SHARE > bound
        other, single = spread(np.repeat(np.where(fine, 1, sizes), np.where(fine, sizes, 1)))
        owner = single if other < fullest else owner
    return owner


def assign_owners(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int,
                  weights: tuple[int, ...] | None = None, row_pairs: int = PAIRS_PER_ROW) -> Ownership:
    """Give every cell and block of a pack to one of ``world`` ranks.

    Any pack is legal: empty ones, fewer units than ranks (some ranks then own nothing), ragged cells.

    Args:
        geometry: the pack.
        kinds: of the model's attention layers.
        world: number of ranks.
        weights: what a pair costs in all layers of each kind; 1 each by default.
        row_pairs: pairs that a token-wise row weighs.
    """
    units = make_units(geometry, kinds, weights, row_pairs)
    owner = assign_units(units, world, rows_cap(units, world))
    cell_rank = np.zeros(len(geometry.cell_starts) - 1, np.int64)
    block_rank = np.zeros(geometry.num_blocks, np.int64)
    in_cell = units.cell >= 0
    cell_rank[units.cell[in_cell]] = owner[in_cell]
    block_rank[units.block[~in_cell]] = owner[~in_cell]
    over = geometry.block_cell >= 0
    block_rank[over] = cell_rank[geometry.block_cell[over]]
    return Ownership(cell_rank, block_rank)

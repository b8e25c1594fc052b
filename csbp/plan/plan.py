"""The plan of one pack: a pure function of its geometry, the layer kinds and the number of ranks.

Every rank computes the same plan without communication. It says which rows each rank holds, which clean
rows it must receive from whom, and what each query row sees of the keys that are *here* (own clean rows
and own noised blocks) and of those that *arrive*. Both are interval masks: a range of all rows meets a
subset that is kept in global order in a range of the subset (closure, DESIGN section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import Ownership, assign_owners
from csbp.plan.ranges import RowRanges, clean_ranges, covered, noised_ranges


@dataclass(frozen=True)
class RankRows:
    """Rows of one rank, in the order in which it holds them.

    Attributes:
        clean: int64 [Sc], global clean rows, ascending.
        noised: int64 [Sn], global noised rows, whole blocks, sorted by (document, prefix end). A rank that
            would otherwise have no query row holds one dummy row -1: stock models reject zero rows.
    """

    clean: np.ndarray
    noised: np.ndarray


@dataclass(frozen=True)
class Exchange:
    """One rank's part in moving clean rows, for one layer kind.

    Attributes:
        send: int64, local clean rows to send, grouped by destination rank, ascending within each.
        send_counts, receive_counts: rows per peer rank, one tuple entry a rank.
        to_global: int64 [R], order that puts the received rows (owner after owner) into global order.
    """

    send: np.ndarray
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    to_global: np.ndarray


@dataclass(frozen=True)
class KindPlan:
    """What one rank does in a layer of one kind: S query rows, R received rows.

    Attributes:
        kind: the layer kind.
        here: ranges into [own clean rows | own noised rows], int64 [S] each.
        arrived: ranges into the received rows in global order (block ranges empty), int64 [S] each.
        exchange: the clean rows that travel.
        pairs: attended (query, key) pairs of this rank.
    """

    kind: LayerKind
    here: RowRanges
    arrived: RowRanges
    exchange: Exchange
    pairs: int


@dataclass(frozen=True)
class RankPlan:
    """All that one rank needs to know."""

    rank: int
    world: int
    rows: RankRows
    kinds: dict[str, KindPlan]


def rank_rows(geometry: Geometry, owners: Ownership, rank: int, *, dummy_without_noised: bool) -> RankRows:
    """The rows of one rank (see ``RankRows`` for their order)."""
    cell_of_row = np.repeat(np.arange(len(geometry.cell_starts) - 1), np.diff(geometry.cell_starts))
    clean = np.flatnonzero(owners.cell_rank[cell_of_row] == rank)
    blocks = np.flatnonzero(owners.block_rank == rank)
    blocks = blocks[np.lexsort((blocks, geometry.block_prefix_end[blocks], geometry.block_document[blocks]))]
    sizes = np.diff(geometry.block_starts)[blocks]
    offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    noised = np.repeat(geometry.block_starts[:-1][blocks], sizes) + offsets
    if len(noised) == 0 and (len(clean) == 0 or dummy_without_noised):
        noised = np.full(1, -1)
    return RankRows(clean, noised)


def _queries(geometry: Geometry, kind: LayerKind, rows: RankRows) -> RowRanges:
    """Global ranges of one rank's query rows: its clean rows, then its noised rows, as the kind has them."""
    if not kind.noised:
        return clean_ranges(geometry, kind).take(rows.clean)
    noised = noised_ranges(geometry, kind).take(rows.noised)
    if kind.clean == "absent":
        return noised
    clean = clean_ranges(geometry, kind).take(rows.clean)
    return RowRanges(*(np.concatenate(pair) for pair in zip(
        (clean.prefix_start, clean.prefix_end, clean.block_start, clean.block_end),
        (noised.prefix_start, noised.prefix_end, noised.block_start, noised.block_end), strict=True)))


def _missing(geometry: Geometry, queries: RowRanges, rows: RankRows) -> np.ndarray:
    """Global clean rows that the queries see and the rank does not own, ascending."""
    needed = covered(queries.prefix_start, queries.prefix_end, geometry.num_clean)
    needed[rows.clean] = False
    return np.flatnonzero(needed)


def _within(queries: RowRanges, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prefix ranges met with an ascending subset of the clean rows: two binary searches."""
    start = np.searchsorted(kept, queries.prefix_start)
    end = np.searchsorted(kept, np.maximum(queries.prefix_end, queries.prefix_start))
    return start, end


def _own_blocks(queries: RowRanges, rows: RankRows) -> tuple[np.ndarray, np.ndarray]:
    """Own-block ranges as ranges of [own clean rows | own noised rows]."""
    # A rank's noised rows are whole blocks, so a block is contiguous in them: shift by its first row.
    real = rows.noised >= 0
    place = np.zeros(int(rows.noised.max(initial=-1)) + 2, np.int64)
    place[rows.noised[real]] = np.flatnonzero(real)
    length = np.maximum(queries.block_end - queries.block_start, 0)
    start = len(rows.clean) + place[np.where(length > 0, queries.block_start, -1)]
    start = np.where(length > 0, start, 0)
    return start, start + length


def plan_rank(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int, rank: int,
              owners: Ownership | None = None) -> RankPlan:
    """One rank's plan of a pack.

    Args:
        geometry: the pack.
        kinds: every kind of attention layer in the model; names must differ.
        world: size of the sequence axis.
        rank: which of its ranks.
        owners: the ownership to use; by default ``assign_owners``.
    """
    owners = owners or assign_owners(geometry, kinds, world)
    only_noised = any(kind.clean == "absent" for kind in kinds)
    everyone = [rank_rows(geometry, owners, r, dummy_without_noised=only_noised) for r in range(world)]
    rows = everyone[rank]
    place = np.full(geometry.num_clean, -1)
    place[rows.clean] = np.arange(len(rows.clean))
    cell_of_row = np.repeat(np.arange(len(geometry.cell_starts) - 1), np.diff(geometry.cell_starts))
    clean_owner = owners.cell_rank[cell_of_row]
    plans = {}
    for kind in kinds:
        queries = [_queries(geometry, kind, r) for r in everyone]
        wanted = [_missing(geometry, q, r) for q, r in zip(queries, everyone, strict=True)]
        arriving = wanted[rank]
        by_owner = np.argsort(clean_owner[arriving], kind="stable")
        sends = [place[w[clean_owner[w] == rank]] for w in wanted]
        exchange = Exchange(
            send=np.concatenate(sends) if world > 1 else np.zeros(0, np.int64),
            send_counts=tuple(len(s) for s in sends),
            receive_counts=tuple(int(np.sum(clean_owner[arriving] == r)) for r in range(world)),
            to_global=np.argsort(by_owner, kind="stable"),
        )
        mine = queries[rank]
        none = np.zeros(len(mine.prefix_start), np.int64)
        plans[kind.name] = KindPlan(
            kind=kind,
            here=RowRanges(*_within(mine, rows.clean), *_own_blocks(mine, rows)),
            arrived=RowRanges(*_within(mine, arriving), none, none),
            exchange=exchange,
            pairs=int(mine.pairs.sum()),
        )
    assert len(plans) == len(kinds), "layer kinds must have different names"
    return RankPlan(rank, world, rows, plans)

"""The plan of one pack: a pure function of its geometry, the layer kinds and the number of ranks.

Every rank computes the same plan without communication. It says which rows each rank holds, which rows it
must receive from whom, and what each query row sees of the keys that are *here* (own clean and own noised rows)
and of those that *arrive*. Both are interval masks: a range of all rows meets a subset that is kept in global
order in a range of the subset (closure, DESIGN section 2).

Three schemes share all of it: "csbp" (blocks whole on a rank, clean rows sharded, clean keys travel), "context"
(both streams sharded zig-zag, keys of both travel) and "block" (blocks whole on a rank, the clean rows that they
see computed there too, nothing travels).

Rows are numbered globally over [clean 0..T-1 | noised T..T+M-1] where one number covers both streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import Ownership, assign_owners
from csbp.plan.ranges import RowRanges, clean_ranges, covered, join, noised_ranges

SCHEMES = ("csbp", "context", "block")
EXCHANGES = ("exact", "all_gather")


@dataclass(frozen=True)
class RankRows:
    """Rows of one rank, in the order in which it holds them.

    Attributes:
        clean: int64 [Sc], global clean rows, ascending.
        noised: int64 [Sn], noised rows 0..M-1, sorted by (document, prefix end), whole blocks except in the
            "context" scheme. A rank that would otherwise have no query row holds one dummy row -1: stock
            models reject zero rows.
        answers: bool [Sc], clean rows whose loss this rank counts; all of them unless rows are replicated.
    """

    clean: np.ndarray
    noised: np.ndarray
    answers: np.ndarray


@dataclass(frozen=True)
class Exchange:
    """One rank's part in moving rows, for one layer kind.

    Attributes:
        send: int64, local rows of [own clean | own noised] to send, grouped by destination, ascending globally
            within each.
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
        arrived: ranges into the received rows in global order, int64 [S] each.
        exchange: the rows that travel.
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
    scheme: str
    rows: RankRows
    kinds: dict[str, KindPlan]


@dataclass(frozen=True)
class PackPlan:
    """The plan of one pack for all ranks; ``rank_plan`` gives one rank's part.

    Attributes:
        geometry: the pack.
        kinds: every kind of attention layer in the model; names differ.
        world: size of the sequence axis.
        scheme: one of ``SCHEMES``.
        exchange: "exact": a rank receives just the rows that its queries see; "all_gather": every row of the
            streams that travel. In the "context" scheme layers without a window always gather.
        owners: who owns which cell and block; unused in the "context" scheme.
    """

    geometry: Geometry
    kinds: tuple[LayerKind, ...]
    world: int
    scheme: str = "csbp"
    exchange: str = "exact"
    owners: Ownership | None = None

    def __post_init__(self) -> None:
        assert self.scheme in SCHEMES and self.exchange in EXCHANGES
        assert len({kind.name for kind in self.kinds}) == len(self.kinds), "layer kinds must have different names"

    @cached_property
    def ownership(self) -> Ownership:
        """Owner of every cell and block."""
        return self.owners or assign_owners(self.geometry, self.kinds, self.world)

    @cached_property
    def row_owner(self) -> np.ndarray:
        """int64 [T + M], the rank that owns each row (of replicated rows: the one that counts their loss)."""
        geometry = self.geometry
        if self.scheme == "context":
            return np.concatenate([_zigzag(n, self.world) for n in (geometry.num_clean, geometry.num_noised)])
        return np.concatenate([np.repeat(self.ownership.cell_rank, np.diff(geometry.cell_starts)),
                               np.repeat(self.ownership.block_rank, np.diff(geometry.block_starts))])

    @cached_property
    def rows(self) -> tuple[RankRows, ...]:
        """Every rank's rows."""
        return tuple(self._rank_rows(rank) for rank in range(self.world))

    @cached_property
    def _ranges(self) -> dict[str, tuple[RowRanges | None, RowRanges | None]]:
        """Layer kind -> ranges of all clean and all noised query rows, None where the kind asks none."""
        return {kind.name: (None if kind.clean == "absent" else clean_ranges(self.geometry, kind),
                            noised_ranges(self.geometry, kind) if kind.noised else None) for kind in self.kinds}

    @cached_property
    def _wanted(self) -> dict[str, list[np.ndarray]]:
        """Layer kind -> for each rank the rows that it receives, ascending in the numbering over both streams."""
        return {kind.name: [self._missing(kind, rank) for rank in range(self.world)] for kind in self.kinds}

    def rank_plan(self, rank: int) -> RankPlan:
        """One rank's part."""
        kinds = {kind.name: self._kind(kind, rank) for kind in self.kinds}
        return RankPlan(rank, self.world, self.scheme, self.rows[rank], kinds)

    def queries(self, kind: LayerKind, rank: int) -> RowRanges:
        """Global ranges of a rank's query rows: its clean rows, then its noised rows, as the kind has them."""
        clean, noised = self._ranges[kind.name]
        rows = self.rows[rank]
        parts = [ranges.take(mine) for ranges, mine in ((clean, rows.clean), (noised, rows.noised)) if ranges]
        return parts[0] if len(parts) == 1 else join(*parts)

    def _rank_rows(self, rank: int) -> RankRows:
        geometry, clean_rows = self.geometry, self.geometry.num_clean
        clean = np.flatnonzero(self.row_owner[:clean_rows] == rank)
        noised = np.flatnonzero(self.row_owner[clean_rows:] == rank)
        if self.scheme != "context":
            block = np.repeat(np.arange(geometry.num_blocks), np.diff(geometry.block_starts))[noised]
            noised = noised[np.lexsort((noised, geometry.block_prefix_end[block], geometry.block_document[block]))]
        answers = np.ones(len(clean), bool)
        if self.scheme == "block" and self.world > 1:
            owned, clean = clean, self._prefix_closure(clean, noised)
            answers = np.isin(clean, owned)
        only_noised = any(kind.clean == "absent" for kind in self.kinds)
        if len(noised) == 0 and (len(clean) == 0 or only_noised):
            noised = np.full(1, -1)
        return RankRows(clean, noised, answers)

    def _prefix_closure(self, clean: np.ndarray, noised: np.ndarray) -> np.ndarray:
        """The clean rows that a rank computes itself in the "block" scheme: its own (if their loss counts or
        they are keys), all that its blocks see, and all that those see in turn, over any number of layers."""
        geometry = self.geometry
        cells_end = geometry.cell_starts[1:][np.searchsorted(geometry.cell_starts, clean, "right") - 1]
        block = np.repeat(np.arange(geometry.num_blocks), np.diff(geometry.block_starts))[noised]
        ends = np.concatenate([cells_end, geometry.block_prefix_end[block]])
        document = np.concatenate([np.searchsorted(geometry.document_starts, clean, "right") - 1,
                                   geometry.block_document[block]])
        return np.flatnonzero(covered(geometry.document_starts[document], ends, geometry.num_clean))

    def _missing(self, kind: LayerKind, rank: int) -> np.ndarray:
        geometry, rows = self.geometry, self.rows[rank]
        if self.scheme == "block" or self.world == 1:
            return np.zeros(0, np.int64)
        clean, noised = geometry.num_clean, geometry.num_noised
        context = self.scheme == "context"
        if self.exchange == "all_gather" or (context and kind.window is None):
            needed = np.ones(clean + noised, bool)
            needed[clean:] = context and kind.noised
        else:
            queries = self.queries(kind, rank)
            needed = np.concatenate([covered(queries.prefix_start, queries.prefix_end, clean),
                                     covered(queries.block_start, queries.block_end, noised)])
        needed[rows.clean] = False
        needed[clean + rows.noised[rows.noised >= 0]] = False
        return np.flatnonzero(needed)

    def _kind(self, kind: LayerKind, rank: int) -> KindPlan:
        rows, clean, wanted = self.rows[rank], self.geometry.num_clean, self._wanted[kind.name]
        place = np.full(clean + self.geometry.num_noised, -1)
        place[rows.clean] = np.arange(len(rows.clean))
        real = rows.noised >= 0
        place[clean + rows.noised[real]] = len(rows.clean) + np.flatnonzero(real)
        arriving = wanted[rank]
        owners = self.row_owner[arriving]
        sends = [place[w[self.row_owner[w] == rank]] for w in wanted]
        exchange = Exchange(
            send=np.concatenate(sends), send_counts=tuple(len(s) for s in sends),
            receive_counts=tuple(np.bincount(owners, minlength=self.world).tolist()),
            to_global=np.argsort(np.argsort(owners, kind="stable"), kind="stable"))
        mine = self.queries(kind, rank)
        held = np.concatenate([rows.clean, clean + np.sort(rows.noised[real])])
        return KindPlan(kind=kind, here=_meet(mine, held, clean, place), arrived=_meet(mine, arriving, clean, None),
                        exchange=exchange, pairs=int(mine.pairs.sum()))


def plan_rank(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int, rank: int, *, scheme: str = "csbp",
              exchange: str = "exact") -> RankPlan:
    """One rank's plan of a pack; see ``PackPlan`` for the arguments."""
    return PackPlan(geometry, kinds, world, scheme, exchange).rank_plan(rank)


def _zigzag(count: int, world: int) -> np.ndarray:
    """int64 [count], owner of each row: 2 * world equal runs, run i and run 2 * world - 1 - i to one rank."""
    bounds = np.linspace(0, count, 2 * world + 1).astype(np.int64)
    run = np.repeat(np.arange(2 * world), np.diff(bounds))
    return np.minimum(run, 2 * world - 1 - run)


def _meet(queries: RowRanges, kept: np.ndarray, clean: int, place: np.ndarray | None) -> RowRanges:
    """The queries' ranges met with a subset of all rows.

    Args:
        kept: the subset, ascending over both streams.
        clean: T.
        place: where each row lies locally; None: in the order of ``kept``. The kept rows of one block must lie
            together and in order.
    """
    prefix_end = np.maximum(queries.prefix_end, queries.prefix_start)
    start, end = np.searchsorted(kept, queries.prefix_start), np.searchsorted(kept, prefix_end)
    block_end = np.maximum(queries.block_end, queries.block_start)
    first, last = np.searchsorted(kept, clean + queries.block_start), np.searchsorted(kept, clean + block_end)
    length = last - first
    if place is not None and len(kept):
        first = place[kept[np.minimum(first, len(kept) - 1)]]
    first = np.where(length > 0, first, 0)
    return RowRanges(start, end, first, first + length)

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
from csbp.plan.ranges import RowRanges, clean_ranges, index_of, join, noised_ranges
from csbp.plan.runs import Runs, cut, expand, union

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
class _Segments:
    """Rows [start, end) of one cell (clean rows) or one block (noised rows) and of one owner, owner after owner."""

    unit: np.ndarray
    owner: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def by(self, *keys: np.ndarray) -> _Segments:
        """The same, sorted by the last key first."""
        order = np.lexsort((self.start, *keys))
        return _Segments(self.unit[order], self.owner[order], self.start[order], self.end[order])

    def of(self, rank: int) -> _Segments:
        """One owner's segments."""
        part = slice(*np.searchsorted(self.owner, [rank, rank + 1]))
        return _Segments(self.unit[part], self.owner[part], self.start[part], self.end[part])


@dataclass(frozen=True)
class _Pieces:
    """Rows [start, end), over both streams, that go from an owner to a destination, by destination and ascending."""

    dest: np.ndarray
    owner: np.ndarray
    start: np.ndarray
    end: np.ndarray


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
        owners: who owns which cell and block, if not for the planner to choose; unused in the "context" scheme.
        weights: how many layers there are of each kind; 1 each by default.
    """

    geometry: Geometry
    kinds: tuple[LayerKind, ...]
    world: int
    scheme: str = "csbp"
    exchange: str = "exact"
    owners: Ownership | None = None
    weights: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.scheme in SCHEMES and self.exchange in EXCHANGES
        assert len({kind.name for kind in self.kinds}) == len(self.kinds), "layer kinds must have different names"

    @cached_property
    def ownership(self) -> Ownership:
        """Owner of every cell and block."""
        return self.owners or assign_owners(self.geometry, self.kinds, self.world, self.weights)

    @property
    def row_owner(self) -> np.ndarray:
        """int64 [T + M], the rank that owns each row (of replicated rows: the one that counts their loss)."""
        runs, owner = self._owned
        return np.repeat(owner, runs.end - runs.start)

    @cached_property
    def rows(self) -> tuple[RankRows, ...]:
        """Every rank's rows."""
        return tuple(self._rank_rows(rank) for rank in range(self.world))

    @cached_property
    def traffic(self) -> dict[str, np.ndarray]:
        """Layer kind -> int64 [world, world], rows that go from each owner to each rank."""
        found = {}
        for name, pieces in self._pieces.items():
            found[name] = np.zeros((self.world, self.world), np.int64)
            np.add.at(found[name], (pieces.owner, pieces.dest), pieces.end - pieces.start)
        return found

    def rank_plan(self, rank: int) -> RankPlan:
        """One rank's part."""
        rows = self._rank_rows(rank)
        kinds = {kind.name: self._kind(kind, rank, rows) for kind in self.kinds}
        return RankPlan(rank, self.world, self.scheme, rows, kinds)

    def queries(self, kind: LayerKind, rows: RankRows) -> RowRanges:
        """Global ranges of a rank's query rows: its clean rows, then its noised rows, as the kind has them."""
        parts = [] if kind.clean == "absent" else [clean_ranges(self.geometry, kind, rows.clean)]
        if kind.noised and len(rows.noised) and rows.noised[0] < 0:
            parts.append(RowRanges(*(np.zeros(1, np.int64),) * 4))
        elif kind.noised:
            parts.append(noised_ranges(self.geometry, kind, rows.noised))
        return parts[0] if len(parts) == 1 else join(*parts)

    @cached_property
    def _owned(self) -> tuple[Runs, np.ndarray]:
        """The rows of both streams as runs of one owner each, and their owners."""
        geometry, clean = self.geometry, self.geometry.num_clean
        if self.scheme == "context":
            edges = [np.linspace(0, n, 2 * self.world + 1).astype(np.int64) for n in (clean, geometry.num_noised)]
            zigzag = np.minimum(np.arange(2 * self.world), 2 * self.world - 1 - np.arange(2 * self.world))
            owners = [zigzag, zigzag]
        else:
            edges = [geometry.cell_starts, geometry.block_starts]
            owners = [self.ownership.cell_rank, self.ownership.block_rank]
        start, owner = np.concatenate([edges[0][:-1], clean + edges[1][:-1]]), np.concatenate(owners)
        filled = np.concatenate([np.diff(e) for e in edges]) > 0
        start, owner = start[filled], owner[filled]
        opens = np.flatnonzero(np.diff(owner, prepend=-1))
        return Runs(start[opens], np.append(start[opens[1:]], clean + geometry.num_noised)[:len(opens)]), owner[opens]

    @cached_property
    def _segments(self) -> tuple[_Segments, _Segments]:
        """Cells and blocks, cut where the owner changes."""
        geometry, (runs, owner) = self.geometry, self._owned
        cell, run, start, end = cut(geometry.cell_starts[:-1], geometry.cell_starts[1:], runs)
        clean = _Segments(cell, owner[run], start, end).by(owner[run])
        base = geometry.num_clean
        block, run, start, end = cut(base + geometry.block_starts[:-1], base + geometry.block_starts[1:], runs)
        keys = [] if self.scheme == "context" else [geometry.block_prefix_end[block], geometry.block_document[block]]
        return clean, _Segments(block, owner[run], start - base, end - base).by(*keys, owner[run])

    @cached_property
    def _clean_runs(self) -> tuple[Runs, ...]:
        """The clean rows that each rank computes: its own and, in the "block" scheme, all that its blocks see and all
        that those see in turn, over any number of layers."""
        geometry, (clean, noised) = self.geometry, self._segments
        runs, document = [], index_of(geometry.document_starts, geometry.cell_starts[:-1])
        to_cell_end = any(kind.clean == "block_causal" for kind in self.kinds)
        for rank in range(self.world):
            cells, blocks = clean.of(rank), noised.of(rank)
            if self.scheme != "block" or self.world == 1:
                runs.append(union(cells.start, cells.end))
                continue
            ends = geometry.block_prefix_end[blocks.unit]
            if to_cell_end:
                ends = geometry.cell_starts[np.searchsorted(geometry.cell_starts, ends)]
            documents = np.concatenate([document[cells.unit], geometry.block_document[blocks.unit]])
            runs.append(union(geometry.document_starts[documents], np.concatenate([cells.end, ends])))
        return tuple(runs)

    def _rank_rows(self, rank: int) -> RankRows:
        runs, owned, blocks = self._clean_runs[rank], self._segments[0].of(rank), self._segments[1].of(rank)
        clean, noised = runs.rows(), expand(blocks.start, blocks.end - blocks.start)
        answers = np.ones(len(clean), bool)
        if self.scheme == "block" and self.world > 1:
            mine = union(owned.start, owned.end)
            answers = mine.below(clean + 1) > mine.below(clean)
        only_noised = any(kind.clean == "absent" for kind in self.kinds)
        if len(noised) == 0 and (len(clean) == 0 or only_noised):
            noised = np.full(1, -1)
        return RankRows(clean, noised, answers)

    @cached_property
    def _pieces(self) -> dict[str, _Pieces]:
        """Layer kind -> every stretch of rows that travels."""
        return {kind.name: self._missing(kind) for kind in self.kinds}

    def _missing(self, kind: LayerKind) -> _Pieces:
        """What each rank's queries see and it does not own, by rank and ascending.

        The rows of a segment see overlapping or adjoining ranges, so together they see all from the first row's
        start to the last row's end. All ranks' needs are united at once, on one line with a stretch for each rank.
        """
        geometry, (runs, owner) = self.geometry, self._owned
        clean, noised = geometry.num_clean, geometry.num_noised
        size, ranks, context = clean + noised + 1, np.arange(self.world), self.scheme == "context"
        dest, start, end = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        if self.scheme != "block" and self.world > 1:
            if self.exchange == "all_gather" or (context and kind.window is None):
                last = clean + (noised if context and kind.noised else 0)
                dest, start, end = [ranks], [np.zeros(self.world, np.int64)], [np.full(self.world, last)]
            else:
                streams = zip(self._segments, (clean_ranges, noised_ranges), (kind.clean != "absent", kind.noised),
                              strict=True)
                for segments, ranges_of, asks in streams:
                    if not asks:
                        continue
                    low = ranges_of(geometry, kind, segments.start)
                    high = ranges_of(geometry, kind, segments.end - 1)
                    dest.append(segments.owner)
                    start.append(low.prefix_start)
                    end.append(high.prefix_end)
                    if context and ranges_of is noised_ranges:
                        dest.append(segments.owner)
                        start.append(clean + low.block_start)
                        end.append(clean + high.block_end)
        line = np.concatenate(dest) * size
        needed = union(line + np.concatenate(start), line + np.concatenate(end))
        to = needed.start // size
        stretch, run, first, last_ = cut(needed.start - to * size, needed.end - to * size, runs)
        travels = to[stretch] != owner[run]
        return _Pieces(to[stretch][travels], owner[run][travels], first[travels], last_[travels])

    def _kind(self, kind: LayerKind, rank: int, rows: RankRows) -> KindPlan:
        clean, pieces, blocks = self.geometry.num_clean, self._pieces[kind.name], self._segments[1].of(rank)
        count = pieces.end - pieces.start
        ascending = np.argsort(blocks.start, kind="stable")
        held = Runs(*(np.concatenate([a, clean + b[ascending]]) for a, b in (
            (self._clean_runs[rank].start, blocks.start), (self._clean_runs[rank].end, blocks.end))))
        # Local places of the held rows: clean runs as they are, blocks in the order in which the rank holds them.
        lengths = blocks.end - blocks.start
        places = len(rows.clean) + np.cumsum(lengths) - lengths
        arrive, leave = pieces.dest == rank, pieces.owner == rank
        counts = [np.zeros(self.world, np.int64), np.zeros(self.world, np.int64)]
        np.add.at(counts[0], pieces.dest[leave], count[leave])
        np.add.at(counts[1], pieces.owner[arrive], count[arrive])
        # Received rows lie owner after owner: where does each stretch of the global order lie?
        by_owner = np.argsort(pieces.owner[arrive], kind="stable")
        length, offset = count[arrive], np.zeros(int(arrive.sum()), np.int64)
        offset[by_owner] = np.cumsum(length[by_owner]) - length[by_owner]
        exchange = Exchange(send=expand(held.below(pieces.start[leave]), count[leave]),
                            send_counts=tuple(counts[0].tolist()), receive_counts=tuple(counts[1].tolist()),
                            to_global=expand(offset, length))
        mine = self.queries(kind, rows)
        arriving = Runs(pieces.start[arrive], pieces.end[arrive])
        return KindPlan(kind=kind, here=_meet(mine, held, clean, places[ascending]),
                        arrived=_meet(mine, arriving, clean, None), exchange=exchange, pairs=int(mine.pairs.sum()))


def plan_rank(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int, rank: int, *, scheme: str = "csbp",
              exchange: str = "exact") -> RankPlan:
    """One rank's plan of a pack; see ``PackPlan`` for the arguments."""
    return PackPlan(geometry, kinds, world, scheme, exchange).rank_plan(rank)


def _meet(queries: RowRanges, kept: Runs, clean: int, places: np.ndarray | None) -> RowRanges:
    """The queries' ranges met with a subset of all rows.

    Args:
        kept: the subset over both streams; no run crosses from the one to the other.
        clean: T.
        places: where the kept noised runs lie locally; None: all in ascending order. The kept rows of one block
            must lie together and in order.
    """
    start = kept.below(queries.prefix_start)
    end = kept.below(np.maximum(queries.prefix_end, queries.prefix_start))
    first = kept.below(clean + queries.block_start)
    length = kept.below(clean + np.maximum(queries.block_end, queries.block_start)) - first
    if places is not None and len(places):
        runs = len(kept.start) - len(places)
        run = np.clip(index_of(kept.before[runs:-1], first), 0, len(places) - 1)
        first = places[run] + first - kept.before[runs + run]
    first = np.where(length > 0, first, 0)
    return RowRanges(start, end, first, first + length)

"""Which rows each rank holds, and in which order: runs, segments and at last rows.

Rows are numbered globally over [clean 0..T-1 | noised T..T+M-1] where one number covers both streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csbp.plan.geometry import Geometry
from csbp.plan.ownership import Ownership
from csbp.plan.runs import Runs, cut, expand, sums, union, unions


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
class Segments:
    """Rows [start, end) of one unit (a document's clean rows or a block's noised rows) and one owner, by owner."""

    unit: np.ndarray
    owner: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def by(self, *keys: np.ndarray) -> Segments:
        """The same, sorted by the last key first and otherwise in the order that they have."""
        order = np.lexsort(keys)
        return Segments(self.unit[order], self.owner[order], self.start[order], self.end[order])

    def of(self, rank: int) -> Segments:
        """One owner's segments."""
        part = slice(*np.searchsorted(self.owner, [rank, rank + 1]))
        return Segments(self.unit[part], self.owner[part], self.start[part], self.end[part])


@dataclass(frozen=True)
class Holding:
    """What every rank holds.

    Attributes:
        geometry: the pack.
        world: number of ranks.
        owners: of cells and blocks; None: both streams are dealt zig-zag, row by row ("context").
        replicated: ranks compute all clean rows that their blocks see ("block").
        to_cell_end: clean rows see to the end of their cell.
    """

    geometry: Geometry
    world: int
    owners: Ownership | None
    replicated: bool
    to_cell_end: bool

    @cached_property
    def owned(self) -> tuple[Runs, np.ndarray]:
        """The rows of both streams as runs of one owner each, and their owners int64 [K]."""
        geometry, clean = self.geometry, self.geometry.num_clean
        if self.owners is None:
            edges = [np.linspace(0, n, 2 * self.world + 1).astype(np.int64) for n in (clean, geometry.num_noised)]
            run = np.arange(2 * self.world)
            owners = [np.minimum(run, 2 * self.world - 1 - run)] * 2
        else:
            edges = [geometry.cell_starts, geometry.block_starts]
            owners = [self.owners.cell_rank, self.owners.block_rank]
        filled = np.concatenate([np.diff(e) for e in edges]) > 0
        start = np.concatenate([edges[0][:-1], clean + edges[1][:-1]])[filled]
        owner = np.concatenate(owners)[filled]
        opens = np.flatnonzero(np.diff(owner, prepend=-1))
        end = np.append(start[opens[1:]], clean + geometry.num_noised)[:len(opens)]
        return Runs(start[opens], end), owner[opens]

    @cached_property
    def texts(self) -> Segments:
        """The clean rows by document, in the order in which their owners hold them."""
        edges, (runs, owner) = self.geometry.document_starts, self.owned
        document, run, start, end = cut(edges[:-1], edges[1:], runs)
        return Segments(document, owner[run], start, end).by(owner[run])

    @cached_property
    def blocks(self) -> Segments:
        """The noised rows, in the order in which their owners hold them: by (document, prefix end) if blocks are
        whole."""
        geometry, (runs, owner) = self.geometry, self.owned
        base = geometry.num_clean
        block, run, start, end = cut(base + geometry.block_starts[:-1], base + geometry.block_starts[1:], runs)
        keys = [] if self.owners is None else [geometry.block_prefix_end[block], geometry.block_document[block]]
        return Segments(block, owner[run], start - base, end - base).by(*keys, owner[run])

    @cached_property
    def clean_runs(self) -> tuple[Runs, ...]:
        """The clean rows that each rank computes: its own and, if rows are replicated, all that its blocks see and all
        that those see in turn, over any number of layers."""
        geometry, texts, blocks = self.geometry, self.texts, self.blocks
        if not self.replicated:
            return unions(texts.owner, texts.start, texts.end, self.world)
        ends = geometry.block_prefix_end[blocks.unit]
        if self.to_cell_end:
            ends = geometry.cell_starts[np.searchsorted(geometry.cell_starts, ends)]
        documents = np.concatenate([texts.unit, geometry.block_document[blocks.unit]])
        return unions(np.concatenate([texts.owner, blocks.owner]), geometry.document_starts[documents],
                      np.concatenate([texts.end, ends]), self.world)

    def own_clean(self, rank: int) -> Runs:
        """The clean rows that a rank owns."""
        texts = self.texts.of(rank)
        return union(texts.start, texts.end)

    @cached_property
    def row_counts(self) -> np.ndarray:
        """int64 [world], rows of both streams that each rank computes."""
        texts, blocks = self.texts, self.blocks
        (noised,) = sums(blocks.owner, self.world, blocks.end - blocks.start)
        if self.replicated:
            return noised + [int(runs.before[-1]) for runs in self.clean_runs]
        return noised + sums(texts.owner, self.world, texts.end - texts.start)[0]

    def rank_rows(self, rank: int, needs_noised: bool) -> RankRows:
        """One rank's rows; ``needs_noised`` if some layer kind has no clean query rows."""
        blocks, clean = self.blocks.of(rank), self.clean_runs[rank].rows()
        noised, answers = expand(blocks.start, blocks.end - blocks.start), np.ones(len(clean), bool)
        if self.replicated:
            mine = self.own_clean(rank)
            answers = mine.below(clean + 1) > mine.below(clean)
        if len(noised) == 0 and (len(clean) == 0 or needs_noised):
            noised = np.full(1, -1)
        return RankRows(clean, noised, answers)

    def held(self, rank: int) -> tuple[Runs, np.ndarray]:
        """A rank's rows over both streams, ascending, and where the rows of each of the noised runs, which come last,
        begin in the order in which the rank holds them."""
        clean, blocks = self.clean_runs[rank], self.blocks.of(rank)
        length = blocks.end - blocks.start
        place = int(clean.before[-1]) + np.cumsum(length) - length
        order, base = np.argsort(blocks.start, kind="stable"), self.geometry.num_clean
        runs = Runs(np.concatenate([clean.start, base + blocks.start[order]]),
                    np.concatenate([clean.end, base + blocks.end[order]]))
        return runs, place[order]

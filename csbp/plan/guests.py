"""Query rows that other ranks than their owners attend, whole or in part: who sends which, and what they see there.

Everything follows from pieces and moves (see ``tasks``). By the closure (docs/attention.md) a task's keys are one range
of the rows that its server receives and one range of the clean rows that it owns: two ranges, one mask. F guest rows of
a rank, K tasks, R received rows, Sc own clean rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.holding import Holding
from csbp.plan.ranges import RowRanges, clean_ranges, noised_ranges
from csbp.plan.runs import Runs, expand
from csbp.plan.tasks import TILE, Moves, Pieces
from csbp.plan.travel import Needs


@dataclass(frozen=True)
class Guests:
    """One rank's part in moving query rows, for one layer kind.

    Attributes:
        send: int64, local query rows that others attend for this rank, grouped by server; a row may go to several.
        send_counts, receive_counts: rows per peer rank, one tuple entry a rank.
        received, own: whether the keys that guests see are the received rows, this rank's clean rows, or both.
        order: int64 [F], the order in which the guest rows are attended, of that in which they come: owner after
            owner, as each sends them. Whole tiles stand first, so that none is cut by a smaller piece before it.
        ranges: of the F guest rows in that order. Prefix ranges lie in the R received rows in global order, block
            ranges in the own clean rows, which come after them (if there are both, they begin at R).
    """

    send: np.ndarray
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    received: bool
    own: bool
    order: np.ndarray
    ranges: RowRanges

    @property
    def pairs(self) -> int:
        """(query, key) pairs of the guest rows."""
        return int(self.ranges.pairs.sum())

    @cached_property
    def rounds(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """What comes back, in rounds in which no row comes twice: (places in ``send``, the rows there), both int64.

        A row's parts are in rank order: its first one is in the first round.
        """
        order = np.argsort(self.send, kind="stable")
        rows = self.send[order]
        first = np.searchsorted(rows, rows)
        turn = np.empty_like(order)
        turn[order] = np.arange(len(rows)) - first
        places = [np.flatnonzero(turn == n) for n in range(int(turn.max(initial=-1)) + 1)]
        return tuple((place, self.send[place]) for place in places)


@dataclass(frozen=True)
class QueryRows:
    """The query rows of all ranks of a layer kind by owner and local number: clean rows, then noised rows."""

    holding: Holding
    kind: LayerKind

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of both streams at which runs start, rows of all ranks before each run, and before each rank."""
        geometry, texts, blocks = self.holding.geometry, self.holding.texts, self.holding.blocks
        parts = [(texts, 0)] * (self.kind.clean != "absent") + [(blocks, geometry.num_clean)] * self.kind.noised
        owner, start, count = (np.concatenate(column) for column in zip(
            *((part.owner, base + part.start, part.end - part.start) for part, base in parts), strict=True))
        order = np.argsort(owner, kind="stable")
        owner, start, count = owner[order], start[order], count[order]
        before = np.cumsum(count) - count
        ranks = np.zeros(self.holding.world, np.int64)
        np.add.at(ranks, owner, count)
        return start, before, np.cumsum(ranks) - ranks

    def rows(self, owner: np.ndarray, local: np.ndarray) -> np.ndarray:
        """int64, numbers over both streams of rows that their owners call ``local``."""
        start, before, ranks = self._runs
        place = ranks[owner] + local
        run = np.searchsorted(before, place, "right") - 1
        return start[run] + place - before[run]

    def prefixes(self, owner: np.ndarray, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 each, the clean rows [start, end) that such rows see."""
        geometry: Geometry = self.holding.geometry
        rows = self.rows(owner, local)
        low, high = np.zeros((2, len(rows)), np.int64)
        noised = rows >= geometry.num_clean
        for mine, of, base in ((~noised, clean_ranges, 0), (noised, noised_ranges, geometry.num_clean)):
            if mine.any():
                found = of(geometry, self.kind, rows[mine] - base)
                low[mine], high[mine] = found.prefix_start, found.prefix_end
        return low, high


@dataclass(frozen=True)
class Served:
    """All query rows that move in a layer kind.

    Attributes:
        rows: the ranks' query rows.
        pieces, moves: what can move, and what does.
    """

    rows: QueryRows
    pieces: Pieces
    moves: Moves

    @cached_property
    def matrix(self) -> np.ndarray:
        """int64 [world, world], rows that go from each owner to each server."""
        world = self.rows.holding.world
        found = np.zeros((world, world), np.int64)
        np.add.at(found, (self.pieces.owner[self.moves.piece], self.moves.server), self.pieces.rows[self.moves.piece])
        return found

    @cached_property
    def pairs(self) -> np.ndarray:
        """int64 [K], (query, key) pairs of each task."""
        return self.pieces.pairs_within(self.moves.piece, self.moves.low, self.moves.high)

    def balance(self) -> np.ndarray:
        """int64 [world], pairs that each rank takes over, less those that it gives away."""
        found = np.zeros(self.rows.holding.world, np.int64)
        np.add.at(found, self.moves.server, self.pairs)
        np.subtract.at(found, self.pieces.owner[self.moves.piece], self.pairs)
        return found

    def needs(self) -> Needs:
        """What ranks' query rows see at home and as guests; of clean rows alone."""
        pieces, moves = self.pieces, self.moves
        low, high = pieces.low[moves.piece], pieces.high[moves.piece]
        return (np.concatenate([pieces.owner, moves.server]),
                np.concatenate([np.maximum(pieces.low, moves.home_low), np.maximum(low, moves.low)]),
                np.concatenate([np.minimum(pieces.high, moves.home_high), np.minimum(high, moves.high)]))

    def at_home(self, rank: int, queries: RowRanges) -> RowRanges:
        """What a rank's query rows still see there, of all that they see."""
        mine = self.pieces.owner == rank
        count = self.pieces.rows[mine]
        rows = expand(self.pieces.first[mine], count)
        low, high = queries.prefix_start.copy(), queries.prefix_end.copy()
        low[rows] = np.maximum(low[rows], np.repeat(self.moves.home_low[mine], count))
        high[rows] = np.minimum(high[rows], np.repeat(self.moves.home_high[mine], count))
        return RowRanges(low, np.maximum(low, high), queries.block_start, queries.block_end)

    def guests(self, rank: int, arriving: Runs, own: Runs) -> Guests:
        """One rank's part; ``arriving`` and ``own`` are the clean rows that it receives and that it owns."""
        owner, count = self.pieces.owner[self.moves.piece], self.pieces.rows[self.moves.piece]
        leaves, mine = owner == rank, np.flatnonzero(self.moves.server == rank)
        place = np.cumsum(count[mine]) - count[mine]
        order = np.lexsort((self.moves.high[mine], self.moves.low[mine], count[mine] < TILE))
        low, high = self._seen(mine[order])
        far, near = _meet(arriving, low, high), _meet(own, low, high)
        received, home = (bool((part[1] > part[0]).any()) for part in (far, near))
        offset = np.where(near[1] > near[0], int(arriving.before[-1]) if received else 0, 0)
        return Guests(expand(self.pieces.first[self.moves.piece][leaves], count[leaves]),
                      tuple(self.matrix[rank].tolist()), tuple(self.matrix[:, rank].tolist()), received, home,
                      expand(place[order], count[mine][order]), RowRanges(*far, near[0] + offset, near[1] + offset))

    def _seen(self, task: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Clean rows [low, high) that the query rows of tasks see in their task, row after row."""
        piece = self.moves.piece[task]
        count = self.pieces.rows[piece]
        low, high = self.rows.prefixes(np.repeat(self.pieces.owner[piece], count),
                                       expand(self.pieces.first[piece], count))
        low = np.maximum(low, np.repeat(self.moves.low[task], count))
        return low, np.maximum(low, np.minimum(high, np.repeat(self.moves.high[task], count)))


def _meet(kept: Runs, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of clean rows met with a subset of them, 0 to 0 where they do not meet."""
    start, end = kept.below(low), kept.below(high)
    return np.where(end > start, start, 0), np.where(end > start, end, 0)

"""Levelling ranks' attention times by moving pieces, whole or cut, from the fullest ranks to emptier ones.

A rank above the ceiling gives, a rank below the mean takes and is never filled above it. What is moved first is what
saves most time for each byte that is missing where it goes. Whole femtoseconds, ties to the lower number; quotients are
of whole numbers and only compared. N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from csbp.plan.remains import Items, Remains
from csbp.plan.tasks import TILE, Moves
from csbp.plan.work import MovedBytes

GLANCE = 4  # dearest pieces of a giver by which takers are compared
SAMPLE = 16  # pieces that are tried for the last cut
GROWTH = 8  # of the number of pieces that bring keys, each time their neighbours are looked at again
MISSES = 3  # takers that could take nothing, after which a giver gives up
TAKERS = 8  # emptiest ranks that are tried in the end
_ANY = 1 << 62  # above all loads
CRUMB = 1024  # a rank with less room than this part of the mean, or than a quarter of the tolerance, takes no more


class Limits(NamedTuple):
    """Most bytes that moves may add to each rank: int64 [3, N], sent, received and buffered."""

    most: np.ndarray

    def hold(self, moved: MovedBytes) -> bool:
        """Whether no rank is above one."""
        return bool((moved.all <= self.most).all())

    def rows(self, moved: MovedBytes, rank: int) -> int:
        """How many more query rows a rank may give away."""
        each = (moved.sizes.lent, moved.sizes.returned, moved.sizes.buffered_query)
        return int(((self.most[:, rank] - moved.all[:, rank]) // each).min())

    def shut(self, moved: MovedBytes, rank: int) -> bool:
        """Whether a rank has no room for a piece, given or taken."""
        sizes = moved.sizes
        each = max(sizes.lent, sizes.returned)
        return bool((self.most[:, rank] - moved.all[:, rank] < (TILE * each, TILE * each,
                                                                TILE * sizes.buffered_query)).any())


class Levels:
    """Loads of all ranks while pieces move.

    Attributes:
        load: int64 [N], attention time of each rank.
        moved: bytes that the moves so far add.
        limited: whether a limit forbade something.

    Args:
        load: int64 [N], at the start.
        remains: all pieces, as they are.
        moved: nothing yet. limits: of ``moved``.
    """

    def __init__(self, load: np.ndarray, remains: Remains, moved: MovedBytes, limits: Limits) -> None:
        self.load, self.remains, self.moved, self.limits = load.copy(), remains, moved, limits
        self.limited, self._crumb = False, 0
        self._stuck: set[int] = set()  # ranks that found nobody who could take anything

    def fill(self, tolerance: float, stages: int = 1, least: int = _ANY,
             worse: Callable[[Moves], bool] | None = None) -> bool:
        """Move until no rank is above the mean by more than ``tolerance`` of it, or nothing more can be done.

        Args:
            stages: lower the ceiling in so many steps. Where limits forbid to reach the last one, ranks then are level
                at a higher one; it takes more moves.
            least: nothing more is done where limits keep a rank at this load or above it.
            worse: whether moves are worse than none: asked after the second giver, the fourth, the eighth and so on.

        Returns:
            Whether ``worse`` never said so; else nothing more was done.
        """
        mean, top = int(self.load.sum()) // len(self.load), int(self.load.max())
        floor = mean + int(mean * tolerance)
        self._crumb = max(mean // CRUMB, (floor - mean) // 4)
        takes, givers = self.load < mean - self._crumb, 0
        for stage in range(1, stages + 1):
            ceiling = top - (top - floor) * stage // stages
            for giver in np.argsort(-self.load, kind="stable").tolist():
                if self.load[giver] <= ceiling:
                    break
                if giver in self._stuck:
                    continue
                self._empty(giver, mean, ceiling, takes)
                givers += 1
                if worse is not None and givers > 1 and not givers & (givers - 1) and worse(self.remains.moves()):
                    return False
                if self.load[giver] > ceiling:  # then nobody need come below what limits leave to this one
                    floor = max(floor, self._least(giver))
                    ceiling = max(ceiling, floor)
                    if floor >= least:
                        return True
        self._crumb = 0
        for _ in range(2 * len(self.load)):
            if not self._level(floor):
                break
        return True

    def _level(self, ceiling: int) -> bool:
        """Move something from the fullest rank to an emptier one that stays below it: what no rank had room for below
        the mean. Whether that went."""
        giver = int(self.load.argmax())
        if self._least(giver) == self.load[giver]:
            return False
        for taker in np.argsort(self.load, kind="stable")[:TAKERS]:
            need, gap = int(self.load[giver]) - ceiling, int(self.load[giver]) - int(self.load[taker])
            if need <= 0 or gap <= 1:
                return False
            if self._give(giver, int(taker), min(need, gap // 2), gap - 1):
                return True
        return False

    def _empty(self, giver: int, mean: int, ceiling: int, takes: np.ndarray) -> None:
        """Give away what a rank has above the ceiling, best takers first."""
        missed = 0
        for taker in self._takers(giver, np.flatnonzero(takes), mean, ceiling):
            if self.load[giver] <= ceiling:
                return
            if missed == MISSES or self._shut(giver):
                break
            if not self._give(giver, int(taker), int(self.load[giver]) - ceiling, mean - int(self.load[taker])):
                missed += 1
            if mean - self.load[taker] <= self._crumb or self._shut(taker):
                takes[taker] = False
        self._stuck.add(giver)

    def _shut(self, rank: int) -> bool:
        found = self.limits.shut(self.moved, rank)
        self.limited |= found
        return found

    def _least(self, rank: int) -> int:
        """What a rank's load cannot come below within its limits, whoever takes."""
        return int(self.load[rank]) - self.remains.most(rank, self.limits.rows(self.moved, rank))

    def _takers(self, giver: int, takers: np.ndarray, mean: int, ceiling: int) -> np.ndarray:
        """Takers by what they take for each byte, most first; guessed from the giver's dearest pieces."""
        low, high, query = self.remains.heaviest(giver, GLANCE)
        if not len(low):
            return takers[:0]
        missing = np.maximum(self.remains.resident.guess(takers, low, high), 0).max(1)
        amount, sizes = np.minimum(mean - self.load[takers], self.load[giver] - ceiling), self.moved.sizes
        # One piece more for the last cut: so few large takers come before many small ones.
        size = amount * query + TILE * sizes.query_row + missing * sizes.key_row
        return takers[np.argsort(-amount / size, kind="stable")]

    def _give(self, giver: int, taker: int, need: int, room: int) -> bool:
        """Move until ``need`` is saved at the giver or ``room`` is filled at the taker; whether anything moved."""
        most, moved = 1, False
        items: Items | None = None
        while need > 0 and room > self._crumb:
            if items is None:
                items = self.remains.dearest(taker, self.remains.candidates(giver, taker), min(need, room))
            some = self.remains.fitting(items, need, room, most)
            if not len(some.piece):
                some = self.remains.last(taker, items.piece[:SAMPLE], need, room)
                items = None
            taken = self._admit(giver, taker, some)
            moved |= bool(len(taken.piece))
            if not len(some.piece) or len(taken.piece) < len(some.piece):
                break  # nothing fits, or a limit is reached
            # Where no keys were missing, the rest costs what it did.
            items = None if items is None or taken.missing.any() else items.at(slice(len(taken.piece), None))
            need, room, most = need - int(taken.saved.sum()), room - int(taken.time.sum()), GROWTH * most
        return moved

    def _admit(self, giver: int, taker: int, items: Items) -> Items:
        """Move as many of these, from the first on, as the limits allow; returns what moved."""
        resident, rows = self.remains.resident, self.remains.pieces.rows
        none = np.zeros(0, np.int64)
        while len(items.piece):
            queries, (owner, start, end) = int(rows[items.piece].sum()), (none,) * 3
            if items.missing.any():
                owner, start, end = resident.missing(taker, items.low, items.high)
            self.moved.add(giver, taker, queries, owner, end - start)
            if self.limits.hold(self.moved):
                self.remains.take(taker, items)
                self.load[giver] -= int(items.saved.sum())
                self.load[taker] += int(items.time.sum())
                if len(start):
                    resident.bring(taker, start, end)
                break
            self.limited = True
            self.moved.add(giver, taker, -queries, owner, start - end)
            items = items.at(slice(len(items.piece) // 3))
        return items

"""Levelling ranks' attention times by moving pieces, whole or cut, from the fullest ranks to emptier ones.

A rank above the ceiling gives, a rank below the mean takes and is never filled above it. What is moved first is what
saves most time for each byte that is missing where it goes. Whole femtoseconds, ties to the lower number; quotients are
of whole numbers and only compared. N ranks, P pieces; C candidates of one giver.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from csbp.plan.cost import PassCost
from csbp.plan.resident import Resident
from csbp.plan.tasks import TILE, Moves, Pieces
from csbp.plan.work import MovedBytes, task_times

SAMPLE = 16  # dearest pieces of a giver by which takers are compared, and pieces that are tried for the last cut
GROWTH = 8  # of the number of pieces that bring keys, each time their neighbours are looked at again
CRUMB = 1024  # a rank with less room than this part of the mean takes no more


class Limits(NamedTuple):
    """Most bytes that moves may add to each rank; int64 [N] each."""

    sent: np.ndarray
    received: np.ndarray
    buffered: np.ndarray

    def hold(self, moved: MovedBytes) -> bool:
        """Whether no rank is above one."""
        return bool((moved.sent <= self.sent).all() and (moved.received <= self.received).all()
                    and (moved.buffered <= self.buffered).all())

    def shut(self, moved: MovedBytes, rank: int) -> bool:
        """Whether a rank has no room for a piece, given or taken."""
        sizes = moved.sizes
        most = TILE * max(sizes.lent, sizes.returned)
        return bool(min(self.sent[rank] - moved.sent[rank], self.received[rank] - moved.received[rank]) < most
                    or self.buffered[rank] - moved.buffered[rank] < TILE * sizes.buffered_query)


class _Items(NamedTuple):
    """[C] what could move from a giver to a taker: piece, keys, what they take there, what they save at home, keys that
    are missing there, and all bytes."""

    piece: np.ndarray
    low: np.ndarray
    high: np.ndarray
    time: np.ndarray
    saved: np.ndarray
    missing: np.ndarray
    bytes: np.ndarray

    def at(self, which: np.ndarray | slice) -> _Items:
        return _Items(*(column[which] for column in self))


class Levels:
    """Loads of all ranks while pieces move.

    Attributes:
        load: int64 [N], attention time of each rank.
        moved: bytes that the moves so far add.

    Args:
        pieces: all of a layer kind. movable: bool [P].
        rates: femtoseconds of one layer.
        load: int64 [N], at the start.
        resident: the clean rows on every rank. moved: nothing yet. limits: of ``moved``.
    """

    def __init__(self, pieces: Pieces, movable: np.ndarray, rates: PassCost, load: np.ndarray, resident: Resident,
                 moved: MovedBytes, limits: Limits) -> None:
        self.pieces, self.movable, self.rates, self.load = pieces, movable, rates, load.copy()
        self.resident, self.moved, self.limits = resident, moved, limits
        self._low, self._high = pieces.low.copy(), pieces.high.copy()
        self._time = task_times(pieces, rates, np.arange(len(pieces)), pieces.low, pieces.high)
        self._tasks: list[tuple[np.ndarray, ...]] = []
        self._cut: dict[int, list[int]] = {}  # server -> pieces that it has a part of
        self._first = np.searchsorted(pieces.owner, np.arange(len(load) + 1))

    def fill(self, tolerance: float) -> None:
        """Move until no rank is above the mean by more than ``tolerance`` of it, or nothing more can be done."""
        mean = int(self.load.sum()) // len(self.load)
        ceiling = mean + int(mean * tolerance)
        takes = self.load < mean
        for giver in np.argsort(-self.load, kind="stable"):
            if self.load[giver] <= ceiling:
                break
            self._empty(int(giver), mean, ceiling, takes)
        for _ in range(2 * len(self.load)):  # what no rank had room for below the mean
            giver, taker = int(self.load.argmax()), int(self.load.argmin())
            need, gap = int(self.load[giver]) - ceiling, int(self.load[giver]) - int(self.load[taker])
            if need <= 0 or not self._give(giver, taker, min(need, gap // 2), gap // 2):
                break

    def moves(self) -> Moves:
        """All tasks so far."""
        none = np.zeros(0, np.int64)
        piece, server, low, high = (np.concatenate([none, *parts]) for parts in zip(*self._tasks, strict=True)
                                    ) if self._tasks else (none,) * 4
        order = np.lexsort((piece, server))
        return Moves(piece[order], server[order], low[order], high[order], self._low, self._high)

    def _empty(self, giver: int, mean: int, ceiling: int, takes: np.ndarray) -> None:
        """Give away what a rank has above the ceiling, best takers first."""
        left = takes.copy()
        while self.load[giver] > ceiling and left.any() and not self.limits.shut(self.moved, giver):
            need = int(self.load[giver]) - ceiling
            taker = self._choose(giver, np.flatnonzero(left), mean, need)
            if taker < 0:
                return
            self._give(giver, taker, need, mean - int(self.load[taker]))
            left[taker] = False
            if (mean - self.load[taker]) * CRUMB < mean or self.limits.shut(self.moved, taker):
                takes[taker] = False

    def _candidates(self, giver: int, taker: int = -1) -> np.ndarray:
        """Pieces of which something is left at the giver and the taker has no part yet."""
        part = slice(self._first[giver], self._first[giver + 1])
        left = self.movable[part] & (self._high[part] > self._low[part])
        for piece in self._cut.get(taker, []):
            if part.start <= piece < part.stop:
                left[piece - part.start] = False
        return part.start + np.flatnonzero(left)

    def _choose(self, giver: int, takers: np.ndarray, mean: int, need: int) -> int:
        """The taker that takes most for each byte, guessed from the giver's dearest pieces; -1 if it has none."""
        index = self._candidates(giver)
        if not len(index):
            return -1
        each = self._time[index] / self.pieces.rows[index]
        index = index[np.argsort(-each, kind="stable")[:SAMPLE]]
        missing = np.maximum(self.resident.guess(takers, self._low[index], self._high[index]), 0).max(1)
        amount = np.minimum(mean - self.load[takers], need)
        sizes = self.moved.sizes
        query = sizes.query_row * (self.pieces.rows[index].sum() / self._time[index].sum())
        return int(takers[np.argmax(amount / (amount * query + missing * sizes.key_row))])

    def _give(self, giver: int, taker: int, need: int, room: int) -> bool:
        """Move until ``need`` is saved at the giver or ``room`` is filled at the taker; whether anything moved."""
        moved, most, crumb = False, 1, room // CRUMB
        items = None
        while need > 0 and room > crumb:
            if items is None:
                items = self._dearest(taker, self._candidates(giver, taker), min(need, room))
            taken = self._admit(giver, taker, _fitting(items, need, room, most))
            if not len(taken.piece):
                taken = self._admit(giver, taker, self._last(taker, items.piece[:SAMPLE], need, room))
                if not len(taken.piece):
                    break
                items = None
            elif not taken.missing.any():
                items = items.at(slice(len(taken.piece), None))
            else:
                items = None
            moved, most = True, GROWTH * most
            need, room = need - int(taken.saved.sum()), room - int(taken.time.sum())
        return moved

    def _items(self, taker: int, piece: np.ndarray, low: np.ndarray, high: np.ndarray, time: np.ndarray,
               saved: np.ndarray) -> _Items:
        here, sizes = self.resident.of(taker), self.moved.sizes
        missing = high - low - (here.below(high) - here.below(low))
        return _Items(piece, low, high, time, saved, missing, self.pieces.rows[piece] * sizes.query_row
                      + missing * sizes.key_row)

    def _parts(self, taker: int, piece: np.ndarray, low: np.ndarray, high: np.ndarray) -> _Items:
        """Fronts or backs of what is left of pieces."""
        front = low == self._low[piece]
        rest = task_times(self.pieces, self.rates, piece, np.where(front, high, self._low[piece]),
                          np.where(front, self._high[piece], low))
        return self._items(taker, piece, low, high, task_times(self.pieces, self.rates, piece, low, high),
                           self._time[piece] - rest)

    def _dearest(self, taker: int, piece: np.ndarray, amount: int) -> _Items:
        """Of each piece all that is left, or its front as far as the taker has its keys; best first.

        Missing keys are shared by as many such pieces as make up ``amount``.
        """
        low, high, time, here = self._low[piece], self._high[piece], self._time[piece], self.resident.of(taker)
        items = self._items(taker, piece, low, high, time, time.copy())
        score = self._score(items, amount)
        if len(here.start) and items.missing.any():
            run = np.maximum(np.searchsorted(here.start, low, "right") - 1, 0)
            front = np.minimum(np.minimum(here.end[run], high - 1), self.pieces.dense_high[piece]) // TILE * TILE
            cuts = np.flatnonzero((items.missing > 0) & (here.start[run] <= low) & (front > low)
                                  & (front >= self.pieces.dense_low[piece]))
            if len(cuts):
                part = self._parts(taker, piece[cuts], low[cuts], front[cuts])
                better = self._score(part, amount) > score[cuts]
                for column, new in zip(items, part, strict=True):
                    column[cuts[better]] = new[better]
                score = self._score(items, amount)
        return items.at(np.argsort(-score, kind="stable"))

    def _score(self, items: _Items, amount: int) -> np.ndarray:
        sizes = self.moved.sizes
        keys = items.missing * sizes.key_row * np.minimum(items.time / amount, 1)
        return items.saved / (self.pieces.rows[items.piece] * sizes.query_row + keys)

    def _last(self, taker: int, piece: np.ndarray, need: int, room: int) -> _Items:
        """The best one of some pieces, whole or cut so that it fits; none if nothing does."""
        pieces, low, high = self.pieces, self._low[piece], self._high[piece]
        dense_low, dense_high = pieces.dense_low[piece], pieces.dense_high[piece]
        first = -(-np.maximum(dense_low, low + 1) // TILE) * TILE
        last = np.minimum(dense_high, high - 1) // TILE * TILE
        cuts = (first <= last) & (dense_low < dense_high)
        piece, low, high, first, last = (np.concatenate([part, part[cuts], part[cuts]])
                                         for part in (piece, low, high, first, last))
        kind = np.repeat([0, 1, 2], [len(cuts), cuts.sum(), cuts.sum()])  # whole, front, back
        start, end = np.where(kind == 2, last, low), np.where(kind == 1, first, high)
        least = task_times(pieces, self.rates, piece, start, end)
        step = np.maximum(self.rates.of(np.int64(1), np.int64(0), TILE * pieces.rows[piece]), 1)
        steps = np.minimum((room - least) // step, np.maximum(-(-(need + self.rates.segment - least) // step), 0))
        steps = TILE * np.minimum(np.maximum(steps, 0), (last - first) // TILE)
        items = self._parts(taker, piece, np.where(kind == 2, last - steps, low),
                            np.where(kind == 1, first + steps, high))
        items = items.at(np.flatnonzero((items.time <= room) & (items.saved > 0)))
        value = np.minimum(items.saved, need)
        items = items.at(2 * value >= value.max(initial=0))
        if not len(items.piece):
            return items
        best = int(np.argmax(np.minimum(items.saved, need) / items.bytes))
        return items.at(slice(best, best + 1))

    def _admit(self, giver: int, taker: int, items: _Items) -> _Items:
        """Move as many of these, from the first on, as the limits allow; returns what moved."""
        while len(items.piece):
            queries = int(self.pieces.rows[items.piece].sum())
            owner, start, end = self.resident.missing(taker, items.low, items.high)
            self.moved.add(giver, taker, queries, owner, end - start)
            if self.limits.hold(self.moved):
                self._take(giver, taker, items)
                self.resident.bring(taker, start, end)
                break
            self.moved.add(giver, taker, -queries, owner, start - end)
            items = items.at(slice(len(items.piece) // 2))
        return items

    def _take(self, giver: int, taker: int, items: _Items) -> None:
        piece, low, high = items.piece, items.low, items.high
        self._tasks.append((piece, np.full(len(piece), taker), low, high))
        front = low == self._low[piece]
        whole = front & (high == self._high[piece])
        self._cut.setdefault(taker, []).extend(piece[~whole].tolist())
        self._high[piece] = np.where(front, self._high[piece], low)
        self._low[piece] = np.where(front, high, self._low[piece])
        self._time[piece] -= items.saved
        self.load[giver] -= int(items.saved.sum())
        self.load[taker] += int(items.time.sum())


def _fitting(items: _Items, need: int, room: int, most: int) -> _Items:
    """As many of the first items as fit; at most ``most`` of those of which keys are missing, which may be the same."""
    fits = (np.cumsum(items.time) <= room) & (np.cumsum(items.saved) <= need)
    fits &= np.cumsum(items.missing > 0) <= most
    return items.at(slice(len(fits) if fits.all() else int(np.argmin(fits))))

"""What is left of every piece at its owner, and what of it could go to one rank. C candidates, P pieces.

Times are whole femtoseconds. Ties go to the lower number; quotients are of whole numbers and only compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from csbp.plan.cost import PassCost, key_tiles
from csbp.plan.resident import Resident
from csbp.plan.tasks import TILE, Moves, Pieces
from csbp.plan.work import StepBytes

SHORT = 16 * TILE  # keys of which it makes no sense to take a part, unless it is the last to fit


class Items(NamedTuple):
    """[C] what could move from a giver to a taker: piece, keys, pairs, time that it takes there, time that it saves at
    home, and keys that are missing there."""

    piece: np.ndarray
    low: np.ndarray
    high: np.ndarray
    pairs: np.ndarray
    time: np.ndarray
    saved: np.ndarray
    missing: np.ndarray

    def at(self, which: np.ndarray | slice) -> Items:
        """Some of them."""
        return Items(*(column[which] for column in self))


class Remains:
    """What owners still compute of their pieces.

    Args:
        pieces: all of a layer kind. movable: bool [P].
        rates, sizes: of one layer.
        resident: the clean rows on every rank.
        world: number of ranks.
    """

    def __init__(self, pieces: Pieces, movable: np.ndarray, rates: PassCost, sizes: StepBytes, resident: Resident,
                 world: int) -> None:
        self.pieces, self.resident, self._rates, self._movable = pieces, resident, rates, movable
        self._low, self._high = pieces.low.copy(), pieces.high.copy()
        self._pairs = pieces.pairs.copy()
        # Pairs of what is left before a key where it may be cut: this and the rows times the key.
        self._offset = pieces.low_pairs - pieces.rows * pieces.dense_low
        self._time = rates.of(key_tiles(pieces.low, pieces.high), np.int64(1), pieces.pairs)
        self._query, self._key_row = pieces.rows * sizes.query_row, sizes.key_row
        self._first = np.searchsorted(pieces.owner, np.arange(world + 1))
        self._tasks: list[tuple[np.ndarray, ...]] = []
        self._cut: dict[int, set[int]] = {}  # server -> pieces that it has a part of
        # Who has the part before what is left of each piece, and the part behind it; -1: nobody.
        self._front, self._back = np.full((2, len(pieces)), -1)

    def candidates(self, giver: int, taker: int = -1) -> np.ndarray:
        """Pieces of which something is left at the giver that could go to the taker: it has none of the piece yet, or
        what lies beside that, so that it keeps one task of a piece."""
        part = slice(self._first[giver], self._first[giver + 1])
        left = self._movable[part] & (self._high[part] > self._low[part])
        for piece in self._cut.get(taker, ()):
            if part.start <= piece < part.stop and taker not in (self._front[piece], self._back[piece]):
                left[piece - part.start] = False
        return part.start + left.nonzero()[0]

    def heaviest(self, giver: int, most: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Keys [low, high) of the giver's pieces that take longest for their rows, and their bytes of query rows for
        each femtosecond."""
        index = self.candidates(giver)
        index = index[np.argsort(-(self._time[index] / self.pieces.rows[index]), kind="stable")[:most]]
        each = float(self._query[index].sum() / self._time[index].sum()) if len(index) else 0.0
        return self._low[index], self._high[index], each

    def most(self, giver: int, rows: int) -> int:
        """Time that so many query rows of a giver save at most."""
        index = self.candidates(giver)
        index = index[self.pieces.rows[index] <= rows]
        time, size = self._time[index], self.pieces.rows[index]
        order = (-(time / size)).argsort(kind="stable")
        return int(time[order][size[order].cumsum() - size[order] < rows].sum())

    def dearest(self, taker: int, piece: np.ndarray, amount: int) -> Items:
        """Of each piece all that is left, or as much of its front as costs fewer bytes; best first.

        Missing keys are shared by as many such pieces as make up ``amount``.
        """
        low, high, time = self._low[piece], self._high[piece], self._time[piece]
        missing = high - low - self.resident.of(taker).within(low, high)
        items = Items(piece, low, high, self._pairs[piece], time, time.copy(), missing)
        query, keys = self._query[piece], self._keys(items, amount)
        score = time / (query + keys)
        # Where keys are few, nothing is better than all that is left.
        dear = ((2 * keys > query) & (high - low > SHORT)).nonzero()[0]
        if len(dear):
            cut, end = self._fronts(taker, items.at(dear), score[dear], amount)
            cut = dear[cut]
            part = self._parts(taker, piece[cut], low[cut], end, self._pairs_before(piece[cut], end))
            other = part.saved / (query[cut] + self._keys(part, amount))
            better = (other > score[cut]).nonzero()[0]
            cut = cut[better]
            for column, new in zip((*items, score), (*part, other), strict=True):
                column[cut] = new[better]
        return items.at((-score).argsort(kind="stable"))

    def fitting(self, items: Items, need: int, room: int, most: int) -> Items:
        """As many of the first items as save ``need`` and fit into ``room``; at most ``most`` of those that need more
        bytes of keys than of query rows, which may be the same keys."""
        dear = items.missing * self._key_row > self._query[items.piece]
        counts = [int(values.cumsum().searchsorted(limit, "right")) for values, limit in
                  ((items.time, room), (items.saved, need), (dear, most))]
        return items.at(slice(min(counts)))

    def _keys(self, items: Items, amount: int) -> np.ndarray:
        """Bytes of missing keys that each item has to bear."""
        return items.missing * self._key_row * np.minimum(items.time / amount, 1)

    def _fronts(self, taker: int, items: Items, score: np.ndarray, amount: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of some items could be better in front alone, and where that front ends: where the keys end that the
        taker has, or where ``amount`` takes as many bytes of keys as of query rows."""
        piece, low, high, _, time = items[:5]
        here, query = self.resident.of(taker), self._query[piece]
        square = np.sqrt(amount * ((high - low) / time) * (query / self._key_row))
        end = low + square.astype(np.int64)
        if len(here.start):
            run = here.start.searchsorted(low, "right") - 1
            end = np.maximum(end, np.where(here.start[run] <= low, here.end[run], 0))
        end = np.minimum(np.minimum(end, high - 1), self.pieces.dense_high[piece]) // TILE * TILE
        most = time * ((end - low) / (high - low)) / query
        cut = ((end > low) & (end >= self.pieces.dense_low[piece]) & (most > score)
               & (self._back[piece] != taker)).nonzero()[0]
        return cut, end[cut]

    def _pairs_before(self, piece: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Pairs of what is left of pieces with keys before one where they may be cut."""
        return self._offset[piece] + self.pieces.rows[piece] * key

    def _parts(self, taker: int, piece: np.ndarray, low: np.ndarray, high: np.ndarray, pairs: np.ndarray) -> Items:
        """Fronts or backs of what is left of pieces, with so many pairs."""
        length, one = high - low, np.int64(1)
        rest = self._high[piece] - self._low[piece] - length
        left = self._rates.of(-(-rest // TILE), one, self._pairs[piece] - pairs)
        return Items(piece, low, high, pairs, self._rates.of(key_tiles(low, high), one, pairs),
                     self._time[piece] - left * (rest > 0), length - self.resident.of(taker).within(low, high))

    def last(self, taker: int, piece: np.ndarray, need: int, room: int) -> Items:
        """The first of some pieces of which a part that fits does much, whole, or cut at the end of which the taker has
        more; else the one that does most. None if nothing fits."""
        best, most = Items(*(np.zeros(0, np.int64),) * 7), 0
        for one in piece.tolist():
            for low, high, pairs in self._ways(taker, one, need, room):
                items = self._parts(taker, *(np.array([value]) for value in (one, low, high, pairs)))
                done = min(int(items.saved[0]), need)
                if done > most:
                    best, most = items, done
            if 2 * most >= min(need, room):
                break
        return best

    def _ways(self, taker: int, piece: int, need: int, room: int) -> list[tuple[int, int, int]]:
        """Keys [low, high) and pairs of one piece that fit: its front or its back, else all of it."""
        pieces, low, high = self.pieces, int(self._low[piece]), int(self._high[piece])
        dense_low, dense_high = int(pieces.dense_low[piece]), int(pieces.dense_high[piece])
        first, last = -(-max(dense_low, low + 1) // TILE) * TILE, min(dense_high, high - 1) // TILE * TILE
        found, all_pairs = [], int(self._pairs[piece])
        if first <= last and dense_low < dense_high:
            rates, rows, offset = self._rates, int(pieces.rows[piece]), int(self._offset[piece])
            step = max(rates.tile + rates.pair * TILE * rows, 1)
            for front, beside in ((True, self._back[piece]), (False, self._front[piece])):
                pairs = offset + rows * first if front else all_pairs - offset - rows * last
                tiles = -(-first // TILE) - low // TILE if front else -(-high // TILE) - last // TILE
                least = rates.tile * tiles + rates.segment + rates.pair * pairs
                steps = max(min(-(-(need + rates.segment - least) // step), (room - least) // step,
                                (last - first) // TILE), 0)
                if least + steps * step <= room and beside != taker:
                    pairs += steps * TILE * rows
                    found.append((low, first + steps * TILE, pairs) if front else (last - steps * TILE, high, pairs))
        if len(found) == 2:
            start, end, _ = np.array(found).T
            missing = end - start - self.resident.of(taker).within(start, end)
            return [found[int(missing[1] < missing[0])]]
        return found or [(low, high, all_pairs)] * (int(self._time[piece]) <= room)

    def take(self, taker: int, items: Items) -> None:
        """They are the taker's from now on."""
        piece, low, high = items.piece, items.low, items.high
        self._tasks.append((piece, np.full(len(piece), taker), low, high))
        front = low == self._low[piece]
        whole = front & (high == self._high[piece])
        self._cut.setdefault(taker, set()).update(piece[~whole].tolist())
        self._offset[piece] -= items.pairs * front
        self._front[piece[front]] = taker
        self._back[piece[~front]] = taker
        self._high[piece] = np.where(front, self._high[piece], low)
        self._low[piece] = np.where(front, high, self._low[piece])
        self._time[piece] -= items.saved
        self._pairs[piece] -= items.pairs

    def moves(self) -> Moves:
        """All tasks so far."""
        none = np.zeros(0, np.int64)
        piece, server, low, high = (np.concatenate([none, *parts]) for parts in zip(*self._tasks, strict=True)
                                    ) if self._tasks else (none,) * 4
        order = np.lexsort((low, piece, server))
        piece, server, low, high = piece[order], server[order], low[order], high[order]
        opens = np.ones(len(order), bool)  # what a server has of a piece adjoins
        opens[1:] = (piece[1:] != piece[:-1]) | (server[1:] != server[:-1])
        last = np.append(np.flatnonzero(opens)[1:], len(order)) - 1
        return Moves(piece[opens], server[opens], low[opens], high[last[:opens.sum()]], self._low, self._high)

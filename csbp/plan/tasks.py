"""CA-tasks: pieces of core attention that another rank than their owner may compute (docs/cad.md).

A query row's prefix range (clean keys) may be computed anywhere, in parts; its own noised block stays at home. Rows
are moved in pieces of at most ``TILE`` neighbours, keys in ranges. P pieces, K tasks. All arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TILE = 128  # query rows, and the grid of the keys: what kernels work on at once


@dataclass(frozen=True)
class Pieces:
    """All movable work of one layer kind, by owner and local query row. [P] each.

    A piece is query rows of one rank, one stream and one document that follow each other, cross no multiple of
    ``TILE`` (counted as the rank holds its query rows), and whose prefix ranges overlap or adjoin, so that together
    they cover one range of clean rows. Rows with an empty prefix are in no piece.

    Attributes:
        owner: rank that owns the rows.
        first, rows: query rows [first, first + rows) of that rank: its clean query rows, then its noised ones.
        noised: bool, which stream they are of.
        low, high: global clean rows that their prefix ranges cover together.
        dense_low, dense_high: those that every one of them sees. Only there a piece may be cut; none if
            dense_high <= dense_low.
        pairs: (query, key) pairs of the prefix ranges.
        low_pairs: of these, pairs with keys below ``dense_low``; 0 where the piece may not be cut.
    """

    owner: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    noised: np.ndarray
    low: np.ndarray
    high: np.ndarray
    dense_low: np.ndarray
    dense_high: np.ndarray
    pairs: np.ndarray
    low_pairs: np.ndarray

    def __len__(self) -> int:
        return len(self.owner)

    def pairs_within(self, index: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """int64, pairs of the pieces ``index`` with keys in [low, high).

        Exact if each bound lies in the dense zone or not inside the piece's range at all.
        """
        return np.maximum(self._pairs_below(index, high) - self._pairs_below(index, low), 0)

    def _pairs_below(self, index: np.ndarray, key: np.ndarray) -> np.ndarray:
        inside = self.low_pairs[index] + self.rows[index] * (key - self.dense_low[index])
        return np.where(key <= self.low[index], 0, np.where(key >= self.high[index], self.pairs[index], inside))


@dataclass(frozen=True)
class Moves:
    """What other ranks than the owners compute of one layer kind.

    A task is a piece's rows times the clean rows [low, high), of each row those that it sees. Tasks of a piece do not
    overlap, lie at the two ends of what the piece sees, and each is on another server; what is left is one range.

    Attributes:
        piece, server, low, high: [K], by server, then piece.
        home_low, home_high: [P], what each piece's owner still computes; empty where home_high <= home_low.
    """

    piece: np.ndarray
    server: np.ndarray
    low: np.ndarray
    high: np.ndarray
    home_low: np.ndarray
    home_high: np.ndarray

    def __len__(self) -> int:
        return len(self.piece)

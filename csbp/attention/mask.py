"""The one mask type of the project: at most two contiguous key ranges per query row (DESIGN section 2)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# Small tiles waste least; a GPU is kept busier by fewer, larger ones.
TILE_ROWS = {"cpu": 128, "cuda": 512}


@dataclass(frozen=True)
class Tile:
    """Up to TILE_ROWS query rows with similar ranges, and the hull of those ranges.

    Attributes:
        rows: the query rows, a slice where they are contiguous.
        prefix, block: half-open hulls of the rows' ranges; empty hulls are (0, 0).
        full: every row sees all of both hulls, so no mask is needed.
    """

    rows: slice | Tensor
    prefix: tuple[int, int]
    block: tuple[int, int]
    full: bool


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """Row i sees keys [prefix_start[i], prefix_end[i]) and [block_start[i], block_end[i]).

    All four are int32 [S], half-open indices into the T rows of the key tensor. An empty range has end <=
    start. The two ranges of a row must not overlap. A row with two empty ranges sees nothing.
    """

    prefix_start: Tensor
    prefix_end: Tensor
    block_start: Tensor
    block_end: Tensor

    def __len__(self) -> int:
        return len(self.prefix_start)

    @classmethod
    def from_arrays(cls, prefix_start: np.ndarray, prefix_end: np.ndarray, block_start: np.ndarray,
                    block_end: np.ndarray, device: torch.device | str = "cpu") -> IntervalMask:
        """The mask of four integer arrays [S]."""
        return cls(*(torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device)
                     for a in (prefix_start, prefix_end, block_start, block_end)))

    def to(self, device: torch.device | str) -> IntervalMask:
        """The same mask on another device."""
        return IntervalMask(*(getattr(self, f.name).to(device) for f in fields(self)))

    def dense(self, num_keys: int) -> Tensor:
        """bool [S, T], for small inputs and tests."""
        key = torch.arange(num_keys, device=self.prefix_start.device)
        low, high, own, end = (getattr(self, f.name)[:, None] for f in fields(self))
        return (key >= low) & (key < high) | (key >= own) & (key < end)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The rows that see something, grouped for the reference backend. Computed once per mask."""
        low, high, own, end = (getattr(self, f.name).cpu().numpy().astype(np.int64) for f in fields(self))
        return _tiles(low, high, own, end, self.prefix_start.device)


def _hull(start: np.ndarray, end: np.ndarray) -> tuple[int, int]:
    live = end > start
    return (int(start[live].min()), int(end[live].max())) if live.any() else (0, 0)


def _tiles(low: np.ndarray, high: np.ndarray, own: np.ndarray, end: np.ndarray,
           device: torch.device) -> tuple[Tile, ...]:
    rows = np.flatnonzero((high > low) | (end > own))
    order = rows[np.lexsort((rows, own[rows], high[rows], low[rows]))]
    # A row whose prefix lies beyond every earlier one (the next document) opens a tile: a hull over both
    # would be mostly masked.
    reach = np.maximum.accumulate(np.concatenate([[0], high[order]]))[:-1]
    opens = (low[order] >= reach) & (high[order] > low[order]) & (reach > 0)
    tiles, size = [], TILE_ROWS.get(device.type, 128)
    for group in np.split(order, np.flatnonzero(opens)):
        for first in range(0, len(group), size):
            tile = group[first:first + size]
            prefix, block = _hull(low[tile], high[tile]), _hull(own[tile], end[tile])
            width = (prefix[1] - prefix[0]) + (block[1] - block[0])
            seen = np.maximum(high[tile] - low[tile], 0) + np.maximum(end[tile] - own[tile], 0)
            contiguous = tile[-1] - tile[0] == len(tile) - 1 and bool(np.all(np.diff(tile) == 1))
            index = slice(int(tile[0]), int(tile[-1]) + 1) if contiguous \
                else torch.from_numpy(tile).to(device)
            tiles.append(Tile(index, prefix, block, bool(np.all(seen == width))))
    return tuple(tiles)

"""The one mask type of the project: at most two contiguous key ranges per query row (docs/attention.md)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csbp.comm.upload import upload

# Per device: the most rows of a tile, the scores per head that a tile may hold beyond the fewest rows, and the
# wasted scores that cost less than one more tile. A GPU is kept busier by fewer, larger tiles.
TILING = {"cpu": (128, 1 << 20, 1 << 14), "cuda": (2048, 1 << 22, 1 << 22)}
FEWEST_ROWS = 128

Ranges = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Tile:
    """Some query rows with similar ranges, and the hull of those ranges.

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
        arrays = tuple(np.ascontiguousarray(a, np.int32) for a in (prefix_start, prefix_end, block_start, block_end))
        mask = cls(*(upload(a, device) for a in arrays))
        mask.__dict__["host"] = arrays  # where they came from: nothing need wait for the device to read them
        return mask

    def to(self, device: torch.device | str) -> IntervalMask:
        """The same mask on another device."""
        return IntervalMask(*(getattr(self, f.name).to(device) for f in fields(self)))

    def dense(self, num_keys: int) -> Tensor:
        """bool [S, T], for small inputs and tests."""
        key = torch.arange(num_keys, device=self.prefix_start.device)
        low, high, own, end = (getattr(self, f.name)[:, None] for f in fields(self))
        return (key >= low) & (key < high) | (key >= own) & (key < end)

    @cached_property
    def host(self) -> Ranges:
        """The four ranges as arrays, int32 [S] each."""
        return (self.prefix_start.cpu().numpy(), self.prefix_end.cpu().numpy(), self.block_start.cpu().numpy(),
                self.block_end.cpu().numpy())

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The rows that see something, grouped for the reference backend. Computed once per mask."""
        low, high, own, end = (a.astype(np.int64) for a in self.host)
        return _tiles(low, high, own, end, self.prefix_start.device)

    def remembered(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What a backend has made of this mask, made once."""
        kept = self.__dict__.setdefault("_made", {})
        if name not in kept:
            kept[name] = make()
        return kept[name]


def _hull(start: np.ndarray, end: np.ndarray) -> tuple[int, int]:
    live = end > start
    return (int(start[live].min()), int(end[live].max())) if live.any() else (0, 0)


def _tiles(low: np.ndarray, high: np.ndarray, own: np.ndarray, end: np.ndarray,
           device: torch.device) -> tuple[Tile, ...]:
    def hulls(rows: np.ndarray) -> tuple[tuple[int, int], tuple[int, int], int]:
        prefix, block = _hull(low[rows], high[rows]), _hull(own[rows], end[rows])
        return prefix, block, prefix[1] - prefix[0] + block[1] - block[0]

    def tile(rows: np.ndarray) -> Tile:
        prefix, block, width = hulls(rows)
        seen = np.maximum(high[rows] - low[rows], 0) + np.maximum(end[rows] - own[rows], 0)
        together = bool(np.all(np.diff(rows) == 1))
        index = slice(int(rows[0]), int(rows[-1]) + 1) if together else upload(rows, device)
        return Tile(index, prefix, block, bool(np.all(seen == width)))

    most, scores, slack = TILING.get(device.type, TILING["cpu"])
    rows = np.flatnonzero((high > low) | (end > own))
    order = rows[np.lexsort((rows, own[rows], high[rows], low[rows]))]
    # A row whose prefix lies beyond every earlier one (the next document) opens a group: a hull over both would
    # be mostly masked. Small groups are put together again where that wastes little.
    reach = np.maximum.accumulate(np.concatenate([[0], high[order]]))[:-1]
    opens = (low[order] >= reach) & (high[order] > low[order]) & (reach > 0)
    tiles: list[np.ndarray] = []
    area = 0
    for group in np.split(order, np.flatnonzero(opens)):
        size = int(np.clip(scores // max(hulls(group)[2], 1), FEWEST_ROWS, most))
        for first in range(0, len(group), size):
            part = group[first:first + size]
            alone = len(part) * hulls(part)[2]
            if tiles and first == 0 and len(tiles[-1]) + len(part) <= most:
                both = np.concatenate([tiles[-1], part])
                if len(both) * hulls(both)[2] <= area + alone + slack:
                    tiles[-1], area = both, area + alone
                    continue
            tiles.append(part)
            area = alone
    return tuple(tile(rows) for rows in tiles if len(rows))

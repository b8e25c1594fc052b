"""Which key tiles each tile of query rows must visit, and the other way round, as runs of tiles.

A tile is *full* where every row sees every key (the kernel skips the mask), *partial* where it must look. Ranges of
rows in order make both sets few runs, in both directions, so that what a kernel is told is linear in rows and keys
and never lists tiles. All of it is found on the host, where a plan's ranges are. Legend: S rows, T keys, M row tiles,
C key tiles, X tiles of either side, R runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.attention.mask import Ranges

_NEVER = 1 << 30


@dataclass(frozen=True)
class Runs:
    """Up to R runs [start, end) of tiles for each of X tiles: int64 [X, R] each, ascending and disjoint; empty ones
    have end == start."""

    start: np.ndarray
    end: np.ndarray

    @property
    def count(self) -> np.ndarray:
        """int64 [X], tiles in the runs of each."""
        return (self.end - self.start).sum(1)

    def table(self) -> np.ndarray:
        """int32 [X, 2R - 1], from which the i-th tile of a row's runs follows without a search.

        A row holds (a, place_1, jump_1, place_2, jump_2, ...): tile i is i + a + the jumps of all places <= i.
        """
        length = self.end - self.start
        place = np.cumsum(length, 1) - length
        base = self.start - place
        live = length > 0
        # The offset that holds before each run is that of the last run that is not empty.
        last = np.maximum.accumulate(np.where(live, np.arange(live.shape[1]), -1), 1)
        held = np.where(last >= 0, np.take_along_axis(base, np.maximum(last, 0), 1), 0)
        out = np.zeros((len(live), 2 * live.shape[1] - 1), np.int32)
        out[:, 0] = held[:, 0]
        out[:, 1::2] = np.where(live[:, 1:], place[:, 1:], _NEVER)
        out[:, 2::2] = np.diff(held, axis=1)
        return out


@dataclass(frozen=True)
class Visits:
    """What each tile of one side visits on the other: every tile is in one of the two, or nobody there is seen."""

    partial: Runs
    full: Runs


def row_visits(ranges: Ranges, num_keys: int, tile: tuple[int, int]) -> Visits:
    """The key tiles that each row tile visits: at most two full runs and four partial ones.

    Args:
        ranges: of an ``IntervalMask``, integer [S] each.
        num_keys: T. Its last tile may be ragged; that one is never called full.
        tile: rows and keys of a tile.
    """
    prefix_start, prefix_end, block_start, block_end = (bound.astype(np.int64) for bound in ranges)
    if not len(prefix_start):
        none = np.zeros((0, 4), np.int64)
        return Visits(Runs(none, none), Runs(none[:, :2], none[:, :2]))
    a0, a1, a2, a3 = _reach(prefix_start, prefix_end, num_keys, tile)
    b0, b1, b2, b3 = _reach(block_start, block_end, num_keys, tile)
    # Two runs may share a tile (where clean keys end and noised ones begin): the first keeps it. Elsewhere than at an
    # edge they meet only in masks that no plan makes; they become one run that is partial all over.
    meet = (a3 > a0) & (b3 > b0) & (b0 < a3) & (a0 < b3)
    edge = meet & (b0 >= a0) & (b3 >= a3) & (a2 <= b0)
    b0 = np.where(edge, a3, b0)
    b1, b2 = np.maximum(b1, b0), np.maximum(b2, np.maximum(b1, b0))
    mixed = meet & ~edge
    low, high = np.minimum(a0, b0), np.maximum(a3, b3)
    a0, a3 = np.where(mixed, low, a0), np.where(mixed, high, a3)
    a1, a2 = np.where(mixed, a0, a1), np.where(mixed, a0, a2)
    b0, b1, b2, b3 = (np.where(mixed, high, x) for x in (b0, b1, b2, b3))
    swap = (b3 > b0) & (b0 < a0) | (a3 <= a0)
    a, b = np.stack([a0, a1, a2, a3], 1), np.stack([b0, b1, b2, b3], 1)
    first, second = np.where(swap[:, None], b, a), np.where(swap[:, None], a, b)
    both = np.concatenate([first, second], 1)
    return Visits(Runs(both[:, [0, 2, 4, 6]], both[:, [1, 3, 5, 7]]), Runs(both[:, [1, 5]], both[:, [2, 6]]))


def _reach(start: np.ndarray, end: np.ndarray, num_keys: int, tile: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Of each row tile, int64 [M] each: where its run of key tiles begins, where those that all of its rows see wholly
    begin and end, and where the run ends."""
    rows, keys = tile
    at, far = np.arange(0, len(start), rows), np.iinfo(np.int64).max
    live = end > start
    low, high = np.where(live, start, far), np.where(live, end, 0)
    outer_low, outer_high = np.minimum.reduceat(low, at), np.maximum.reduceat(high, at)
    inner_low, inner_high = np.maximum.reduceat(low, at), np.minimum.reduceat(high, at)
    seen = outer_high > 0
    first, last = np.where(seen, outer_low // keys, 0), np.where(seen, -(-outer_high // keys), 0)
    together = inner_high > 0
    full_first = np.clip(np.where(together, -(-np.minimum(inner_low, num_keys) // keys), first), first, last)
    full_last = np.minimum(np.where(together, inner_high // keys, first), num_keys // keys)
    return first, full_first, np.clip(full_last, full_first, last), last


def key_visits(rows: Visits, num_tiles: int, partial_runs: int, full_runs: int) -> Visits:
    """The row tiles that visit each key tile.

    A key tile with more runs than a kernel can be told has all row tiles from its first visitor to its last as one
    partial run: more than need be, which the mask makes good.

    Args:
        rows: of ``row_visits``.
        num_tiles: C.
        partial_runs, full_runs: the most runs of a tile, R.
    """
    partial, p_count, p_first, p_last = _turn(rows.partial, num_tiles, partial_runs)
    full, f_count, f_first, f_last = _turn(rows.full, num_tiles, full_runs)
    many = np.flatnonzero((p_count > partial_runs) | (f_count > full_runs))
    if len(many):
        full.start[many] = full.end[many] = 0
        first, last = np.minimum(p_first, f_first)[many], np.maximum(p_last, f_last)[many]
        partial.start[many], partial.end[many] = last[:, None], last[:, None]
        partial.start[many, 0] = first
    return Visits(partial, full)


def _turn(runs: Runs, num_tiles: int, most: int) -> tuple[Runs, np.ndarray, np.ndarray, np.ndarray]:
    """The transpose of runs, [C, ``most``]; how many runs each tile really has (those beyond ``most`` are left out);
    and the first visitor and the end of the last run, int64 [C] each."""
    opened, open_at = _fresh(runs, np.arange(len(runs.start)))
    closed, close_at = _fresh(Runs(runs.start[::-1], runs.end[::-1]), np.arange(len(runs.start), 0, -1))
    # Of each tile, starts and ends in ascending order belong together.
    by_open, by_close = np.lexsort((open_at, opened)), np.lexsort((close_at, closed))
    opened, open_at, close_at = opened[by_open], open_at[by_open], close_at[by_close]
    found = np.bincount(opened, minlength=num_tiles)
    place = np.arange(len(opened)) - np.repeat(np.cumsum(found) - found, found)
    first, last = np.full(num_tiles, _NEVER), np.zeros(num_tiles, np.int64)
    np.minimum.at(first, opened, open_at)
    np.maximum.at(last, opened, close_at)
    start, end = np.zeros((num_tiles, most), np.int64), np.zeros((num_tiles, most), np.int64)
    kept = place < most
    start[opened[kept], place[kept]], end[opened[kept], place[kept]] = open_at[kept], close_at[kept]
    empty, reached = np.arange(most) >= found[:, None], np.maximum.accumulate(end, 1)
    return Runs(np.where(empty, reached, start), np.where(empty, reached, end)), found, first, last


def _fresh(runs: Runs, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tile, name of the row) wherever a tile is in a row's runs and not in those of the row before."""
    if not len(runs.start):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    reach = np.maximum.accumulate(runs.end, 1)
    start = np.where(runs.end > runs.start, runs.start, reach)  # empty runs in their place
    end = np.maximum(runs.end, start)
    # What the row before leaves free: before its first run, between its runs, after its last.
    free_start = np.concatenate([np.zeros((len(end), 1), np.int64), end], 1)
    free_end = np.concatenate([start, np.full((len(start), 1), _NEVER)], 1)
    free_start = np.concatenate([np.zeros_like(free_start[:1]), free_start[:-1]])
    free_end = np.concatenate([np.full_like(free_end[:1], _NEVER), free_end[:-1]])
    free_start[0, 1:] = _NEVER  # before the first row all is free, once
    low = np.maximum(start[:, :, None], free_start[:, None, :]).reshape(len(start), -1)
    high = np.minimum(end[:, :, None], free_end[:, None, :]).reshape(len(start), -1)
    count = np.maximum(high - low, 0).ravel()
    low = low.ravel()
    total = np.cumsum(count)
    tiles = np.arange(total[-1]) + np.repeat(low - (total - count), count)
    return tiles, np.repeat(np.repeat(names, start.shape[1] * free_start.shape[1]), count)

"""Which tiles of scores the wide backend computes together, found on the host (numpy).

Row tiles are taken in groups, and what a group visits in *chunks* by key tiles, so that the scores of a chunk fit into
a workspace of one size whatever the length. Each visited tile of a chunk is a slot. Legend: V visits of all chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.attention.mask import Ranges
from csbp.attention.tiles import row_visits


@dataclass(frozen=True)
class Chunk:
    """One rectangle of row tiles and key tiles.

    Attributes:
        row_tile, row_tiles: its first row tile, and how many.
        row_base, key_base, slot_base: where its lines begin in ``Chunks``' tables.
        key_tiles, slots: how many lines it has there.
        first, last: whether it is the first, the last of its row tiles.
    """

    row_tile: int
    row_tiles: int
    row_base: int
    key_base: int
    key_tiles: int
    slot_base: int
    slots: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Chunks:
    """All chunks, in order, and their tables, int32.

    Attributes:
        visits: [V, 3], each slot's row tile, key tile, and 1 if every row sees every key there. A row tile's slots lie
            together, key tiles ascending or in two ascending runs.
        row_table: [row tiles of all chunks, 5], first slot, slots, key tile of the first slot; slot s from the
            ``turn``-th on has key tile first + s + ``jump``.
        key_table: [key tiles of all chunks, 3], key tile, first line of ``entries``, lines.
        entries: [V, 2], slot and row tile, by key tile.
        capacity: slots of the largest chunk.
    """

    chunks: tuple[Chunk, ...]
    visits: np.ndarray
    row_table: np.ndarray
    key_table: np.ndarray
    entries: np.ndarray
    capacity: int


def chunks_of(ranges: Ranges, num_keys: int, tile: tuple[int, int], least_rows: int, most_slots: int) -> Chunks:
    """Chunks of a mask.

    Args:
        ranges: of an ``IntervalMask``, integer [S] each, S > 0.
        num_keys: T > 0.
        tile: rows and keys of a tile.
        least_rows: row tiles that a chunk has at least, where there are so many.
        most_slots: slots after which no more row tiles join a group; chunks have about so many at most.
    """
    seen = row_visits(ranges, num_keys, tile)
    start, end = seen.partial.start[:, [0, 2]], seen.partial.end[:, [1, 3]]
    counts = (end - start).sum(1)
    chunks: list[Chunk] = []
    visits: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    entries: list[np.ndarray] = []
    row_base = key_base = slot_base = 0
    for low, high in _groups(counts, least_rows, most_slots):
        visit = _visits(start[low:high], end[low:high], seen.full.start[low:high], seen.full.end[low:high], low)
        parts = max(1, -(-len(visit) // most_slots))
        for i, mine in enumerate(_parts(visit, parts)):
            row_table, (key_table, entry) = _row_table(mine, low, high), _key_table(mine)
            chunks.append(Chunk(low, high - low, row_base, key_base, len(key_table), slot_base, len(mine), i == 0,
                                i == parts - 1))
            for lines, new in ((visits, mine), (rows, row_table), (keys, key_table), (entries, entry)):
                lines.append(new.astype(np.int32))
            row_base, key_base, slot_base = row_base + high - low, key_base + len(key_table), slot_base + len(mine)
    return Chunks(tuple(chunks), np.concatenate(visits), np.concatenate(rows), np.concatenate(keys),
                  np.concatenate(entries), max(chunk.slots for chunk in chunks))


def _groups(counts: np.ndarray, least: int, most: int) -> list[tuple[int, int]]:
    groups, low, held = [], 0, 0
    for at, count in enumerate(counts.tolist()):
        if at - low >= least and held + count > most:
            groups.append((low, at))
            low, held = at, 0
        held += count
    return [*groups, (low, len(counts))]


def _visits(start: np.ndarray, end: np.ndarray, full_start: np.ndarray, full_end: np.ndarray, low: int) -> np.ndarray:
    """int64 [visits, 3] of a group whose first row tile is ``low``; the ranges are [row tiles, 2]."""
    length = end - start
    flat, per_row = length.ravel(), length.sum(1)
    key = np.arange(flat.sum()) + np.repeat(start.ravel() - (np.cumsum(flat) - flat), flat)
    row = np.repeat(np.arange(len(length)), per_row)
    full = ((key[:, None] >= full_start[row]) & (key[:, None] < full_end[row])).any(1)
    return np.stack([row + low, key, full], 1)


def _parts(visit: np.ndarray, parts: int) -> list[np.ndarray]:
    """The visits by key tiles, whole ones, in about equal parts; in each in the order they had."""
    if parts == 1:
        return [visit]
    visitors = np.bincount(visit[:, 1])
    part = ((np.cumsum(visitors) - visitors) * parts // len(visit)).astype(np.min_scalar_type(parts))[visit[:, 1]]
    return np.split(visit[np.argsort(part, kind="stable")], np.cumsum(np.bincount(part, minlength=parts))[:-1])


def _row_table(visit: np.ndarray, low: int, high: int) -> np.ndarray:
    count = np.bincount(visit[:, 0] - low, minlength=high - low)
    first = np.cumsum(count) - count
    table = np.zeros((high - low, 5), np.int64)
    table[:, 0], table[:, 1], table[:, 3] = first, count, count
    live = count > 0
    table[live, 2] = visit[first[live], 1]
    turns = 1 + np.flatnonzero((np.diff(visit[:, 0]) == 0) & (np.diff(visit[:, 1]) != 1))
    row = visit[turns, 0] - low
    assert len(np.unique(row)) == len(row), "a row tile visits at most two runs of key tiles"
    table[row, 3] = turns - first[row]
    table[row, 4] = visit[turns, 1] - table[row, 2] - table[row, 3]
    return table


def _key_table(visit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(visit):
        return np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64)
    low = visit[:, 1].min()
    count = np.bincount(visit[:, 1] - low)
    key = np.flatnonzero(count)
    # Of 16 bits where they suffice: numpy sorts those in linear time.
    order = np.argsort((visit[:, 1] - low).astype(np.min_scalar_type(len(count))), kind="stable")
    return (np.stack([key + low, (np.cumsum(count) - count)[key], count[key]], 1),
            np.stack([order, visit[order, 0]], 1))

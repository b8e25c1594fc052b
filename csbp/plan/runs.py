"""Sets of rows as runs: a rank's rows of a pack of a million are a few hundred half-open ranges.

K runs, R rows. All arrays are int64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_LONG = 32  # rows of a run in the mean, from which steps between rows are summed faster than rows are looked up


@dataclass(frozen=True)
class Runs:
    """Rows [start, end) of each run, ascending and disjoint, none empty; int64 [K] each."""

    start: np.ndarray
    end: np.ndarray

    @cached_property
    def before(self) -> np.ndarray:
        """int64 [K + 1], rows in the runs before each one, then rows in all."""
        return _after_zero((self.end - self.start).cumsum())

    @cached_property
    def _end_before(self) -> np.ndarray:
        """int64 [K + 1], end of the run before each one, 0 before the first."""
        return _after_zero(self.end)

    def rows(self) -> np.ndarray:
        """int64 [R], every row, ascending."""
        return expand(self.start, self.end - self.start)

    def below(self, rows: np.ndarray) -> np.ndarray:
        """How many of the set's rows are smaller than each given row; the place of a row that is in the set."""
        run = self.start.searchsorted(rows)
        return self.before[run] - np.maximum(self._end_before[run] - rows, 0)

    def within(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """How many of the set's rows lie in each range [start, end)."""
        found = self.below(np.concatenate([start, end]))
        return found[len(start):] - found[:len(start)]


def _after_zero(values: np.ndarray) -> np.ndarray:
    found = np.zeros(len(values) + 1, np.int64)
    found[1:] = values
    return found


def expand(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """int64, the ``count[i]`` numbers from ``start[i]`` on, for one i after another."""
    end = count.cumsum()
    size = int(end[-1]) if len(end) else 0
    if size < _LONG * len(end):
        return np.arange(size) + np.repeat(start - (end - count), count)
    live = (count > 0).nonzero()[0]
    start, last, found = start[live], start[live] + count[live] - 1, np.ones(size, np.int64)
    found[:1] = start[:1]
    found[end[live[:-1]]] = start[1:] - last[:-1]
    return found.cumsum(out=found)


def sums(rank: np.ndarray, world: int, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    """int64 [world] each, sums of values by rank, where ranks ascend."""
    edges = rank.searchsorted(np.arange(world + 1))
    return tuple(np.diff(_after_zero(value.cumsum())[edges]) for value in values)


def union(start: np.ndarray, end: np.ndarray) -> Runs:
    """The rows of any ranges, which may overlap, be empty and come in any order."""
    live = end > start
    start, end = start[live], end[live]
    order = start.argsort(kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    last = (start[1:] > reach[:-1]).nonzero()[0]
    return Runs(np.concatenate((start[:1], start[last + 1])), np.concatenate((reach[last], reach[-1:])))


def unions(rank: np.ndarray, start: np.ndarray, end: np.ndarray, world: int) -> tuple[Runs, ...]:
    """The rows of each rank's ranges."""
    size = int(end.max(initial=0)) + 1
    line = union(rank * size + start, rank * size + end)  # all at once, on one line with a stretch for each rank
    edges = line.start.searchsorted(np.arange(world + 1) * size).tolist()
    return tuple(Runs(line.start[a:b] - number * size, line.end[a:b] - number * size)
                 for number, (a, b) in enumerate(itertools.pairwise(edges)))


def cut(start: np.ndarray, end: np.ndarray, at: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut ranges where runs begin and end; what lies outside every run is dropped.

    Returns:
        Of each piece: the range it is of, the run it lies in, its first row and its end. Range after range,
        ascending within each.
    """
    first, last = at.end.searchsorted(start, "right"), at.start.searchsorted(end)
    count = np.maximum(last - first, 0) * (end > start)
    piece = np.arange(len(start)).repeat(count)
    run = np.arange(len(piece)) + (first - count.cumsum() + count)[piece]
    return piece, run, np.maximum(start[piece], at.start[run]), np.minimum(end[piece], at.end[run])

"""Sets of rows as runs: a rank's rows of a pack of a million are a few hundred half-open ranges.

K runs, R rows. All arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Runs:
    """Rows [start, end) of each run, ascending and disjoint, none empty; int64 [K] each."""

    start: np.ndarray
    end: np.ndarray

    @cached_property
    def before(self) -> np.ndarray:
        """int64 [K + 1], rows in the runs before each one, then rows in all."""
        return np.concatenate([[0], np.cumsum(self.end - self.start)])

    def rows(self) -> np.ndarray:
        """int64 [R], every row, ascending."""
        return expand(self.start, self.end - self.start)

    def below(self, rows: np.ndarray) -> np.ndarray:
        """How many of the set's rows are smaller than each given row; the place of a row that is in the set."""
        run = np.searchsorted(self.start, rows)
        end = np.concatenate([[0], self.end])
        return self.before[run] - np.where(run > 0, np.maximum(end[run] - rows, 0), 0)

    def within(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """How many of the set's rows lie in each range [start, end)."""
        found = self.below(np.concatenate([start, end]))
        return found[len(start):] - found[:len(start)]


def expand(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """int64, the ``count[i]`` numbers from ``start[i]`` on, for one i after another."""
    total = np.cumsum(count)
    return np.arange(total[-1] if len(total) else 0) + np.repeat(start - (total - count), count)


def union(start: np.ndarray, end: np.ndarray) -> Runs:
    """The rows of any ranges, which may overlap, be empty and come in any order."""
    live = end > start
    start, end = start[live], end[live]
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.flatnonzero(np.concatenate([np.ones(min(len(start), 1), bool), start[1:] > reach[:-1]]))
    return Runs(start[opens], reach[np.append(opens[1:], len(start))[:len(opens)] - 1])


def cut(start: np.ndarray, end: np.ndarray, at: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut ranges where runs begin and end; what lies outside every run is dropped.

    Returns:
        Of each piece: the range it is of, the run it lies in, its first row and its end. Range after range,
        ascending within each.
    """
    first, last = np.searchsorted(at.end, start, "right"), np.searchsorted(at.start, end)
    count = np.where(end > start, np.maximum(last - first, 0), 0)
    piece, run = np.repeat(np.arange(len(start)), count), expand(first, count)
    return piece, run, np.maximum(start[piece], at.start[run]), np.minimum(end[piece], at.end[run])

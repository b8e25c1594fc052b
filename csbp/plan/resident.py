"""Which clean rows every rank has anyway, for its own queries or for tasks that it has taken.

N ranks, T clean rows, G chunks of them.
"""

from __future__ import annotations

import numpy as np

from csbp.plan.plan import PackPlan
from csbp.plan.runs import Runs, cut, union

CHUNKS = 512  # into which all clean rows are cut where a guess suffices


class Resident:
    """Clean rows that are on each rank, as tasks bring more.

    Args:
        plan: without moves.
        name: of a layer kind.
    """

    def __init__(self, plan: PackPlan, name: str) -> None:
        runs, owner = plan.holding.owned
        clean, travel = plan.geometry.num_clean, plan.travel[name]
        mine = runs.start < clean
        self._size = clean
        self._owned = Runs(runs.start[mine], np.minimum(runs.end[mine], clean))
        self._owner = owner[mine]
        self._rank = np.concatenate([self._owner, travel.dest])
        order = np.argsort(self._rank, kind="stable")
        self._rank = self._rank[order]
        self._start = np.concatenate([self._owned.start, travel.start])[order]
        self._end = np.concatenate([self._owned.end, travel.end])[order]
        self._runs: dict[int, Runs] = {}
        self._edges = np.linspace(0, clean, CHUNKS + 1).astype(np.int64)
        self._before = self._all_before(plan.world)
        self._changed: set[int] = set()  # ranks of which that is out of date

    def of(self, rank: int) -> Runs:
        """The rows on a rank."""
        if rank not in self._runs:
            part = slice(*np.searchsorted(self._rank, [rank, rank + 1]))
            self._runs[rank] = union(self._start[part], self._end[part])
        return self._runs[rank]

    def missing(self, rank: int, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of any ranges that are not on a rank: (owners, starts, ends) of stretches that do not overlap."""
        here, wanted = self.of(rank), union(low, high)
        gap_start, gap_end = np.concatenate(([0], here.end)), np.concatenate((here.start, [self._size]))
        gaps = gap_end > gap_start
        _, _, start, end = cut(wanted.start, wanted.end, Runs(gap_start[gaps], gap_end[gaps]))
        _, run, start, end = cut(start, end, self._owned)
        return self._owner[run], start, end

    def bring(self, rank: int, start: np.ndarray, end: np.ndarray) -> None:
        """From now on these rows are on a rank too."""
        here = self.of(rank)
        self._runs[rank] = union(np.concatenate((here.start, start)), np.concatenate((here.end, end)))
        self._changed.add(rank)

    def guess(self, ranks: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """int64 [ranks, ranges], about how many rows of each range are not on each rank."""
        for rank in self._changed:
            self._before[rank] = self._runs[rank].below(self._edges)
        self._changed.clear()
        return high - low - (self._below(ranks, high) - self._below(ranks, low))

    def _below(self, ranks: np.ndarray, row: np.ndarray) -> np.ndarray:
        chunk = np.minimum(self._edges.searchsorted(row, "right") - 1, CHUNKS - 1)
        first, whole = self._edges[chunk], np.maximum(self._edges[chunk + 1] - self._edges[chunk], 1)
        before = self._before[ranks[:, None], chunk]
        return before + (self._before[ranks[:, None], chunk + 1] - before) * (row - first) // whole

    def _all_before(self, world: int) -> np.ndarray:
        """int64 [N, G + 1], rows of each rank before each edge: as many times the edge as runs are open there, and what
        they began and ended with."""
        opened, rows = np.zeros((2, world, CHUNKS + 1), np.int64)
        for row, sign in ((self._start, 1), (self._end, -1)):
            at = self._rank, self._edges.searchsorted(row)
            np.add.at(opened, at, sign)
            np.add.at(rows, at, -sign * row)
        return opened.cumsum(1) * self._edges + rows.cumsum(1)

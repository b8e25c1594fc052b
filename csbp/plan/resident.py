"""Which clean rows every rank has anyway, for its own queries or for tasks that it has taken.

N ranks, T clean rows, G chunks of them.
"""

from __future__ import annotations

import numpy as np

from csbp.plan.plan import PackPlan
from csbp.plan.runs import Runs, cut, union
from csbp.plan.tasks import TILE

CHUNKS = 2048  # into which all clean rows are cut where a guess suffices


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
        self._chunk = max(-(-clean // (CHUNKS * TILE)), 1) * TILE
        self._counts, self._before = self._rough(plan.world)

    def of(self, rank: int) -> Runs:
        """The rows on a rank."""
        if rank not in self._runs:
            part = slice(*np.searchsorted(self._rank, [rank, rank + 1]))
            self._runs[rank] = union(self._start[part], self._end[part])
        return self._runs[rank]

    def missing(self, rank: int, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of any ranges that are not on a rank: (owners, starts, ends) of stretches that do not overlap."""
        here, wanted = self.of(rank), union(low, high)
        gap_start, gap_end = np.append(0, here.end), np.append(here.start, self._size)
        gaps = Runs(gap_start[gap_end > gap_start], gap_end[gap_end > gap_start])
        _, _, start, end = cut(wanted.start, wanted.end, gaps)
        _, run, start, end = cut(start, end, self._owned)
        return self._owner[run], start, end

    def bring(self, rank: int, start: np.ndarray, end: np.ndarray) -> None:
        """From now on these rows are on a rank too."""
        here = self.of(rank)
        self._runs[rank] = union(np.append(here.start, start), np.append(here.end, end))
        self._mark(self._counts[rank:rank + 1], np.zeros(len(start), np.int64), start, end)
        np.cumsum(self._counts[rank], out=self._before[rank, 1:])

    def guess(self, ranks: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """int64 [ranks, ranges], about how many rows of each range are not on each rank."""
        return high - low - (self._below(ranks, high) - self._below(ranks, low))

    def _below(self, ranks: np.ndarray, row: np.ndarray) -> np.ndarray:
        chunk = np.minimum(row // self._chunk, self._counts.shape[1] - 1)
        part = self._counts[ranks[:, None], chunk] * (row - chunk * self._chunk) // self._chunk
        return self._before[ranks[:, None], chunk] + part

    def _rough(self, world: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each chunk on each rank, int64 [N, G], and of all chunks before each, [N, G + 1]."""
        counts = np.zeros((world, max(-(-self._size // self._chunk), 1)), np.int64)
        self._mark(counts, self._rank, self._start, self._end)
        before = np.zeros((world, counts.shape[1] + 1), np.int64)
        np.cumsum(counts, 1, out=before[:, 1:])
        return counts, before

    def _mark(self, counts: np.ndarray, rank: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Add rows to the chunks that they lie in: whole chunks first, then less of the first and the last one."""
        first, last = start // self._chunk, (end - 1) // self._chunk
        change = np.zeros((counts.shape[0], counts.shape[1] + 1), np.int64)
        np.add.at(change, (rank, first), self._chunk)
        np.subtract.at(change, (rank, last + 1), self._chunk)
        whole = np.cumsum(change, 1)[:, :-1]
        np.subtract.at(whole, (rank, first), start - first * self._chunk)
        np.subtract.at(whole, (rank, last), (last + 1) * self._chunk - end)
        counts += whole

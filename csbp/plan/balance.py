"""Moving, swapping and cutting runs of units between ranks until the fullest rank is close to the lower bound.

U units in order of document and prefix. A *run* is a stretch of units of one document on one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Refining stops when the fullest rank is within this part (one 64th) of the lower bound: cutting on
# would cost exchanged rows and gain nothing that can be measured.
CLOSE = 64
# Each step at least makes the fullest rank less full; this many per rank were never needed on any pack tried.
STEPS_PER_RANK = 32
# Ranks, from the emptiest, that the fullest tries to give something to.
RECEIVERS = 8


class _Runs(NamedTuple):
    """Runs of one rank: first unit, end, cost and rows of each."""

    first: np.ndarray
    end: np.ndarray
    cost: np.ndarray
    rows: np.ndarray


def lower_bound(cost: np.ndarray, world: int) -> int:
    """No assignment's fullest rank is below the larger of the mean and the dearest unit."""
    return max(-(-int(cost.sum()) // world), int(cost.max(initial=0)))


def _runs(mine: np.ndarray, document: np.ndarray, before: np.ndarray, rows_before: np.ndarray) -> _Runs:
    theirs = document[mine]
    closes = ((mine[1:] > mine[:-1] + 1) | (theirs[1:] != theirs[:-1])).nonzero()[0]
    first, end = np.concatenate([mine[:1], mine[closes + 1]]), np.concatenate([mine[closes], mine[-1:]]) + 1
    return _Runs(first, end, before[end] - before[first], rows_before[end] - rows_before[first])


def _best(change: np.ndarray, gap: int, fits: np.ndarray) -> int | None:
    """Of the changes that fit, the index of that which leaves the two ranks closest; None if none helps."""
    left = np.where(fits & (change > 0) & (change < gap), np.abs(gap - 2 * change), gap)
    best = int(left.argmin()) if len(left) else 0
    return best if len(left) and left[best] < gap else None


def _whole(full: _Runs, other: _Runs, gap: int, room: int, slack: int) -> tuple[int, list[slice], list[slice]] | None:
    """The best move of a whole run to the other rank, or swap of two: its cost, what goes and what comes."""
    cost, rows = np.concatenate((other.cost, [0])), np.concatenate((other.rows, [0]))
    # Of the runs that could come back, only the nearest in cost to what is wanted matter.
    order = cost.argsort(kind="stable")
    at = cost[order].searchsorted(full.cost - gap // 2)
    near = np.minimum(np.maximum(at[:, None] + np.arange(-4, 4), 0), len(order) - 1)
    back = np.concatenate([np.full((len(at), 1), len(order) - 1), order[near]], 1)
    change, grows = full.cost[:, None] - cost[back], full.rows[:, None] - rows[back]
    best = _best(change.ravel(), gap, ((grows <= room) & (-grows <= slack)).ravel())
    if best is None:
        return None
    i, j = best // back.shape[1], int(back.ravel()[best])
    comes = [slice(int(other.first[j]), int(other.end[j]))] if j < len(other.cost) else []
    return int(change.ravel()[best]), [slice(int(full.first[i]), int(full.end[i]))], comes


def _part(full: _Runs, cost: np.ndarray, rows: np.ndarray, gap: int, room: int) -> tuple[int, list[slice]] | None:
    """The best move of the front or the back of a run, or of any one unit."""
    count = full.end - full.first
    unit = np.arange(count.sum()) + np.repeat(full.first - (np.cumsum(count) - count), count)
    first, end = np.repeat(full.first, count), np.repeat(full.end, count)

    def three(values: np.ndarray, per_run: np.ndarray) -> np.ndarray:
        mine = values[unit]
        forward = np.cumsum(mine) - np.repeat(np.cumsum(per_run) - per_run, count)
        return np.concatenate([forward, np.repeat(per_run, count) - forward + mine, mine])

    change = three(cost, full.cost)
    best = _best(change, gap, three(rows, full.rows) <= room)
    if best is None:
        return None
    starts, ends = np.concatenate([first, unit, unit]), np.concatenate([unit + 1, end, unit + 1])
    return int(change[best]), [slice(int(starts[best]), int(ends[best]))]


def rebalance(owner: np.ndarray, document: np.ndarray, cost: np.ndarray, rows: np.ndarray, world: int,
              cap: int) -> np.ndarray:
    """int64 [U], owners after moves from the fullest rank, whole runs first.

    If it stops before the fullest rank is ``CLOSE``, then no move of one unit from there to the emptiest rank would
    help, unless the cap on rows forbids it: the fullest rank is then at most the mean and the cheapest of its own
    units above it.

    Args:
        owner, document, cost, rows: int64 [U], of each unit.
        world: number of ranks.
        cap: most rows that a rank may have.
    """
    owner = owner.copy()
    load, held = np.zeros(world, np.int64), np.zeros(world, np.int64)
    np.add.at(load, owner, cost)
    np.add.at(held, owner, rows)
    bound = lower_bound(cost, world)
    close = bound + bound // CLOSE
    before, rows_before = (np.concatenate([[0], np.cumsum(values)]) for values in (cost, rows))

    def runs_of(rank: int) -> _Runs:
        return _runs((owner == rank).nonzero()[0], document, before, rows_before)

    def improve(rank: int, full: _Runs) -> bool:
        for other in np.argsort(load, kind="stable")[:min(RECEIVERS, world - 1)]:
            gap, room, slack = int(load[rank] - load[other]), int(cap - held[other]), int(cap - held[rank])
            move = _whole(full, runs_of(other), gap, room, slack)
            if move is None or max(load[rank] - move[0], load[other] + move[0]) > close:
                part = _part(full, cost, rows, gap, room)
                if part is not None and (move is None or abs(gap - 2 * part[0]) < abs(gap - 2 * move[0])):
                    move = (*part, [])
            if move is None:
                continue
            for units, target, source in [(u, other, rank) for u in move[1]] + [(u, rank, other) for u in move[2]]:
                owner[units] = target
                for total, values in ((load, cost), (held, rows)):
                    amount = values[units].sum()
                    total[source] -= amount
                    total[target] += amount
            return True
        return False

    for _ in range(STEPS_PER_RANK * world):
        rank = int(load.argmax())
        if load[rank] <= close or not improve(rank, runs_of(rank)):
            break
    return owner

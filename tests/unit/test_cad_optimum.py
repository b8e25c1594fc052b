"""Moves of small packs against the best that there is, as a mixed-integer program finds it.

The program may give every grid cell of a piece to any rank, whichever cells lie beside it: no moves are better.
"""

from __future__ import annotations

import numpy as np
import pytest
from cad import PAIRS, packed, sizes_of
from scipy.optimize import Bounds, LinearConstraint, milp

from csbp.plan.cost import PassCost
from csbp.plan.disaggregate import CadSettings, disaggregate
from csbp.plan.geometry import LayerKind
from csbp.plan.ownership import Ownership
from csbp.plan.pieces import find_pieces, own_work
from csbp.plan.plan import PackPlan
from csbp.plan.tasks import TILE, Pieces
from csbp.plan.work import home_times, task_times

KINDS = [LayerKind(), LayerKind("token", clean="token_causal"), LayerKind("draft", clean="absent"),
         LayerKind("window", clean="token_causal", window=700)]


def cells(pieces: Pieces, rates: PassCost) -> list[list[tuple[int, int]]]:
    """Of each piece, its cells as (how many of a kind, time of one) without the segment that they share."""
    found = []
    for i in range(len(pieces)):
        low, high = int(pieces.low[i]), int(pieces.high[i])
        dense = (max(int(pieces.dense_low[i]), low + 1), min(int(pieces.dense_high[i]), high - 1))
        edges = [low, *range(-(-dense[0] // TILE) * TILE, dense[1] + 1, TILE), high]
        if pieces.dense_low[i] >= pieces.dense_high[i]:
            edges = [low, high]
        edges_ = np.array(edges)
        times = task_times(pieces, rates, np.full(len(edges) - 1, i), edges_[:-1], edges_[1:]) - rates.segment
        values, counts = np.unique(times, return_counts=True)
        found.append(list(zip(counts.tolist(), values.tolist(), strict=True)))
    return found


def optimum(fixed: np.ndarray, parts: list[list[tuple[int, int]]], segment: int) -> float:
    """A bound that no moves can beat, close to the fullest rank's time in the best ones."""
    world, scale = len(fixed), float(fixed.sum() + sum(c * t for part in parts for c, t in part))
    kinds = [(piece, count, time) for piece, part in enumerate(parts) for count, time in part]
    cell_vars, uses = len(kinds) * world, len(parts) * world
    total = 1 + cell_vars + uses
    upper = np.concatenate([[np.inf], np.repeat([count for _, count, _ in kinds], world), np.ones(uses)])
    rows, low, high = [], [], []
    for rank in range(world):  # load - T <= -fixed
        row = np.zeros(total)
        row[0] = -1
        row[1 + rank:1 + cell_vars:world] = [time / scale for _, _, time in kinds]
        row[1 + cell_vars + rank::world] = segment / scale
        rows.append(row)
        low.append(-np.inf)
        high.append(-fixed[rank] / scale)
    for index, (piece, count, _) in enumerate(kinds):
        row = np.zeros(total)
        row[1 + index * world:1 + (index + 1) * world] = 1
        rows.append(row)
        low.append(count)
        high.append(count)
        for rank in range(world if segment else 0):
            row = np.zeros(total)
            row[1 + index * world + rank], row[1 + cell_vars + piece * world + rank] = 1, -count
            rows.append(row)
            low.append(-np.inf)
            high.append(0)
    cost = np.zeros(total)
    cost[0] = 1
    found = milp(cost, constraints=LinearConstraint(np.array(rows), low, high), bounds=Bounds(0, upper),
                 integrality=np.append(0, np.ones(total - 1)), options={"mip_rel_gap": 0.01, "time_limit": 10})
    return found.mip_dual_bound * scale


def check(seed: int) -> None:
    random = np.random.default_rng(seed)
    kind, rates = KINDS[seed % len(KINDS)], (PAIRS, PassCost(16384, 4000, 1))[seed // 4 % 2]
    world, block = int(random.integers(2, 5)), int(2 ** random.integers(5, 9))
    geometry = packed(random.integers(800, 4000, random.integers(1, 4)).tolist(), block)
    ranks = (random.integers(0, world, len(geometry.cell_starts) - 1),
             np.zeros(len(geometry.cell_starts) - 1, np.int64),
             np.arange(len(geometry.cell_starts) - 1) * world // len(geometry.cell_starts))[seed % 3]
    plan = PackPlan(geometry, (kind,), world, owners=Ownership(ranks, ranks[geometry.block_cell]))
    pieces = find_pieces(plan, kind)
    moves = disaggregate(plan, kind, pieces, rates, sizes_of(), CadSettings(tolerance=0.0, min_gain=0.0))
    best = optimum(rates.of(*own_work(plan, kind)), cells(pieces, rates), rates.segment)
    assert home_times(plan, kind, pieces, rates, moves).max() <= 1.05 * best


@pytest.mark.parametrize("seed", range(8))
def test_within_a_twentieth_of_the_optimum(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 120))
def test_within_a_twentieth_at_length(seed: int) -> None:
    check(seed)

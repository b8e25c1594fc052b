"""How much every rank of a plan holds, attends and moves, counted without building any rank's index arrays.

The numbers equal those of ``PackPlan.rank_plan``. N ranks, D documents, T clean rows, M noised rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.balance import lower_bound
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import make_units, row_costs
from csbp.plan.plan import PackPlan
from csbp.plan.ranges import block_pairs, cell_pairs, clean_pairs, index_of, noised_pairs
from csbp.plan.runs import sums


@dataclass(frozen=True)
class KindCounts:
    """One kind of layer. All int64 [N].

    Attributes:
        pairs: (query, key) pairs that each rank attends, as a server of others too.
        received, sent: rows whose keys and values each rank gets from others and gives to others.
        guests, lent: query rows that each rank attends for others, and that others attend for it; a row that goes to
            two servers counts twice.
    """

    pairs: np.ndarray
    received: np.ndarray
    sent: np.ndarray
    guests: np.ndarray
    lent: np.ndarray


@dataclass(frozen=True)
class PlanCounts:
    """All ranks. int64 [N]; a dummy row counts as none.

    Attributes:
        clean, noised: rows that each rank computes, replicated ones included.
        answered: clean rows whose loss each rank counts; they add up to T.
        blocks: target blocks that each rank owns (of which it owns the first row).
        kinds: by name of the layer kind.
        cost: what ownership balances: pairs of all layers, and token-wise rows in pairs.
        bound: no ownership of whole blocks has a rank of less than this cost as its fullest.
    """

    clean: np.ndarray
    noised: np.ndarray
    answered: np.ndarray
    blocks: np.ndarray
    kinds: dict[str, KindCounts]
    cost: np.ndarray
    bound: int

    @property
    def rows(self) -> np.ndarray:
        """Rows of both streams."""
        return self.clean + self.noised


def count_plan(plan: PackPlan) -> PlanCounts:
    """Count a plan of any scheme."""
    geometry, holding, world = plan.geometry, plan.holding, plan.world
    clean, answered, noised, blocks = (np.zeros(world, np.int64) for _ in range(4))
    texts, parts = holding.texts, holding.blocks
    np.add.at(answered, texts.owner, texts.end - texts.start)
    np.add.at(noised, parts.owner, parts.end - parts.start)
    np.add.at(blocks, parts.owner, parts.start == geometry.block_starts[parts.unit])
    clean += holding.row_counts - noised
    kinds = {kind.name: kind_counts(plan, kind) for kind in plan.kinds}
    per_clean, per_noised = row_costs(plan.kinds, plan.pair_weights, plan.row_pairs)
    cost = clean * per_clean + noised * per_noised
    for kind, weight in zip(plan.kinds, plan.pair_weights, strict=True):
        cost = cost + weight * kinds[kind.name].pairs
    bound = lower_bound(make_units(geometry, plan.kinds, plan.pair_weights, plan.row_pairs).cost, world)
    return PlanCounts(clean, noised, answered, blocks, kinds, cost, bound)


def kind_counts(plan: PackPlan, kind: LayerKind) -> KindCounts:
    """Of one of a plan's kinds."""
    matrix, served, pairs = plan.traffic[kind.name], plan.served.get(kind.name), _pairs(plan, kind)
    moved = np.zeros_like(matrix) if served is None else served.matrix
    return KindCounts(pairs if served is None else pairs + served.balance(), matrix.sum(0), matrix.sum(1),
                      moved.sum(0), moved.sum(1))


def attended_pairs(geometry: Geometry, kind: LayerKind) -> int:
    """(query, key) pairs of a whole pack in one layer, both streams."""
    return int(cell_pairs(geometry, kind).sum() + block_pairs(geometry, kind).sum())


def _pairs(plan: PackPlan, kind: LayerKind) -> np.ndarray:
    """int64 [N], pairs that each rank attends of its own rows."""
    geometry, blocks, total = plan.geometry, plan.holding.blocks, np.zeros(plan.world, np.int64)
    if "pieces" in vars(plan):  # then they hold all pairs but those within blocks
        pieces = plan.pieces[kind.name]
        return plan.own_work[kind.name][2] + sums(pieces.owner, plan.world, pieces.pairs)[0]
    np.add.at(total, blocks.owner, noised_pairs(geometry, kind, blocks.unit, blocks.start, blocks.end))
    before = np.concatenate([[0], np.cumsum(cell_pairs(geometry, kind))])

    def before_rows(rows: np.ndarray) -> np.ndarray:
        """Pairs of all clean rows before each of these."""
        cell = np.minimum(index_of(geometry.cell_starts, rows), len(before) - 2)
        return before[cell] + clean_pairs(geometry, kind, cell, geometry.cell_starts[cell], rows)

    runs = plan.holding.clean_runs
    start, end = (np.concatenate(parts) for parts in zip(*((part.start, part.end) for part in runs), strict=True))
    np.add.at(total, np.repeat(np.arange(plan.world), [len(part.start) for part in runs]),
              before_rows(end) - before_rows(start))
    return total

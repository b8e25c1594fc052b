"""How much every rank of a plan holds, attends and moves, counted without building any rank's index arrays.

The numbers equal those of ``PackPlan.rank_plan``. N ranks, D documents, T clean rows, M noised rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.ranges import clean_pairs, index_of, noised_pairs
from csbp.plan.runs import expand


@dataclass(frozen=True)
class KindCounts:
    """One kind of layer. All int64 [N].

    Attributes:
        pairs: (query, key) pairs that each rank attends.
        received, sent: rows whose keys and values each rank gets from others and gives to others.
    """

    pairs: np.ndarray
    received: np.ndarray
    sent: np.ndarray


@dataclass(frozen=True)
class PlanCounts:
    """All ranks. int64 [N]; a dummy row counts as none.

    Attributes:
        clean, noised: rows that each rank computes, replicated ones included.
        answered: clean rows whose loss each rank counts; they add up to T.
        blocks: target blocks that each rank owns (of which it owns the first row).
        kinds: by name of the layer kind.
    """

    clean: np.ndarray
    noised: np.ndarray
    answered: np.ndarray
    blocks: np.ndarray
    kinds: dict[str, KindCounts]

    @property
    def rows(self) -> np.ndarray:
        """Rows of both streams."""
        return self.clean + self.noised


def count_plan(plan: PackPlan) -> PlanCounts:
    """Count a plan of any scheme."""
    geometry, world, owner = plan.geometry, plan.world, plan.row_owner
    owned = np.bincount(owner[:geometry.num_clean], minlength=world)
    noised = np.bincount(owner[geometry.num_clean:], minlength=world)
    first_rows = geometry.num_clean + geometry.block_starts[:-1]
    ends = _closure_ends(plan) if plan.scheme == "block" and world > 1 else None
    clean = owned if ends is None else (ends - geometry.document_starts[:-1]).sum(1)
    kinds = {}
    for kind in plan.kinds:
        moved = plan.traffic[kind.name]
        kinds[kind.name] = KindCounts(_pairs(plan, kind, ends), moved.sum(0), moved.sum(1))
    return PlanCounts(clean, noised, owned, np.bincount(owner[first_rows], minlength=world), kinds)


def attended_pairs(geometry: Geometry, kind: LayerKind) -> int:
    """(query, key) pairs of a whole pack in one layer, both streams."""
    cells, blocks = geometry.cell_starts, geometry.block_starts
    return int(clean_pairs(geometry, kind, cells[:-1], cells[1:]).sum()
               + noised_pairs(geometry, kind, blocks[:-1], blocks[1:]).sum())


def _closure_ends(plan: PackPlan) -> np.ndarray:
    """int64 [N, D], up to where each rank computes each document in the "block" scheme."""
    geometry, owners = plan.geometry, plan.ownership
    ends = np.tile(geometry.document_starts[:-1], (plan.world, 1))
    prefix = geometry.block_prefix_end
    if any(kind.clean == "block_causal" for kind in plan.kinds):  # a row sees to the end of its cell
        prefix = geometry.cell_starts[np.searchsorted(geometry.cell_starts, prefix)]
    document = index_of(geometry.document_starts, geometry.cell_starts[:-1])
    np.maximum.at(ends, (owners.cell_rank, document), geometry.cell_starts[1:])
    np.maximum.at(ends, (owners.block_rank, geometry.block_document), prefix)
    return ends


def _pairs(plan: PackPlan, kind: LayerKind, closure: np.ndarray | None) -> np.ndarray:
    """int64 [N]; sums of whole numbers in float64 are exact below 2**53, far above any pack."""
    geometry, clean = plan.geometry, plan.geometry.num_clean
    start, end, owner = _segments(geometry.block_starts, plan.row_owner[clean:])
    pairs = np.bincount(owner, noised_pairs(geometry, kind, start, end), plan.world)
    if closure is None:
        start, end, owner = _segments(geometry.cell_starts, plan.row_owner[:clean])
    else:
        rank, document = np.nonzero(closure > geometry.document_starts[:-1])
        start, end, owner = _cells_of(geometry, geometry.document_starts[document], closure[rank, document], rank)
    return (pairs + np.bincount(owner, clean_pairs(geometry, kind, start, end), plan.world)).astype(np.int64)


def _segments(grid: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows [start, end) within one cell or block and of one owner: (start, end, owner)."""
    bounds = np.unique(np.concatenate([grid, np.flatnonzero(np.diff(owner)) + 1]))
    return bounds[:-1], bounds[1:], owner[bounds[:-1]]


def _cells_of(geometry: Geometry, start: np.ndarray, end: np.ndarray,
              rank: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row ranges of ranks, cut at the cells: (start, end, rank) of each piece."""
    first = index_of(geometry.cell_starts, start)
    count = np.searchsorted(geometry.cell_starts, end) - first
    cell = expand(first, count)
    piece = np.repeat(np.arange(len(start)), count)
    return (np.maximum(geometry.cell_starts[cell], start[piece]),
            np.minimum(geometry.cell_starts[cell + 1], end[piece]), rank[piece])

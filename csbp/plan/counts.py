"""How much every rank of a plan holds, attends and moves, counted without building any rank's index arrays.

The numbers equal those of ``PackPlan.rank_plan``, at a cost that does not grow with the number of ranks. The key is
that neighbouring rows see overlapping ranges: the rows of a *segment* (consecutive rows of one owner within a
document, or within a block) see one range together, from its first row's start to its last row's end.

N ranks, T clean rows, M noised rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.ranges import RowRanges, clean_ranges, noised_ranges


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


Ranges = dict[str, tuple["RowRanges | None", "RowRanges | None"]]


def all_ranges(geometry: Geometry, kinds: tuple[LayerKind, ...]) -> Ranges:
    """Ranges of all clean and all noised rows by layer kind; shared by the plans of one pack."""
    return {kind.name: (None if kind.clean == "absent" else clean_ranges(geometry, kind),
                        noised_ranges(geometry, kind) if kind.noised else None) for kind in kinds}


def count_plan(plan: PackPlan, ranges: Ranges | None = None) -> PlanCounts:
    """Count a plan of any scheme.

    Args:
        plan: the pack's plan.
        ranges: ``all_ranges`` of the same geometry and kinds, where several plans are counted.
    """
    geometry, world = plan.geometry, plan.world
    ranges = ranges or all_ranges(geometry, plan.kinds)
    owner = plan.row_owner
    owned = np.bincount(owner[:geometry.num_clean], minlength=world)
    noised = np.bincount(owner[geometry.num_clean:], minlength=world)
    first_rows = geometry.num_clean + geometry.block_starts[:-1]
    closure = _closure_ends(plan) if plan.scheme == "block" and world > 1 else None
    clean = owned if closure is None else (closure - geometry.document_starts[:-1]).sum(1)
    kinds = {}
    for kind in plan.kinds:
        pairs = _pairs(plan, ranges[kind.name], closure)
        received, sent = _moved(plan, kind, ranges[kind.name], owned, noised)
        kinds[kind.name] = KindCounts(pairs, received, sent)
    return PlanCounts(clean, noised, owned, np.bincount(owner[first_rows], minlength=world), kinds)


def _closure_ends(plan: PackPlan) -> np.ndarray:
    """int64 [N, D], up to where each rank computes each document in the "block" scheme."""
    geometry = plan.geometry
    ends = np.tile(geometry.document_starts[:-1], (plan.world, 1))
    document = np.searchsorted(geometry.document_starts, geometry.cell_starts[:-1], "right") - 1
    np.maximum.at(ends, (plan.ownership.cell_rank, document), geometry.cell_starts[1:])
    np.maximum.at(ends, (plan.ownership.block_rank, geometry.block_document), geometry.block_prefix_end)
    return ends


def _pairs(plan: PackPlan, ranges: tuple[RowRanges | None, RowRanges | None],
           closure: np.ndarray | None) -> np.ndarray:
    geometry, total = plan.geometry, np.zeros(plan.world, np.int64)
    parts = np.split(plan.row_owner, [geometry.num_clean])
    for stream, (part, owner) in enumerate(zip(ranges, parts, strict=True)):
        if part is None:
            continue
        if stream == 0 and closure is not None:
            before = np.concatenate([[0], np.cumsum(part.pairs)])
            total += (before[closure] - before[geometry.document_starts[:-1]]).sum(1)
        else:
            # float64 sums of whole numbers are exact below 2**53 pairs, far above any pack.
            total += np.bincount(owner, part.pairs, plan.world).astype(np.int64)
    return total


def _moved(plan: PackPlan, kind: LayerKind, ranges: tuple[RowRanges | None, RowRanges | None], clean: np.ndarray,
           noised: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows received and sent by each rank, int64 [N] each."""
    world, context = plan.world, plan.scheme == "context"
    if world == 1 or plan.scheme == "block":
        return np.zeros(world, np.int64), np.zeros(world, np.int64)
    if plan.exchange == "all_gather" or (context and kind.window is None):
        own = clean + noised if context and kind.noised else clean
        return own.sum() - own, own * (world - 1)
    owner, size = plan.row_owner, len(plan.row_owner)
    starts, ends, ranks = _intervals(plan, ranges)
    # One number line for all ranks: rank r's rows lie at r * (size + 1).
    line = ranks * (size + 1)
    order = np.argsort(starts + line, kind="stable")
    starts, ends, ranks, line = starts[order], ends[order], ranks[order], line[order]
    reach = np.concatenate([[0], np.maximum.accumulate(ends + line)[:-1]])
    fresh = np.maximum(starts, reach - line)
    new = np.maximum(ends - fresh, 0)
    received = np.bincount(ranks, new, world).astype(np.int64) - np.bincount(owner, minlength=world)
    edges = np.zeros(size + 1, np.int64)
    np.add.at(edges, fresh[new > 0], 1)
    np.add.at(edges, ends[new > 0], -1)
    readers = np.cumsum(edges[:-1]) - 1  # without the owner
    return received, np.bincount(owner, readers, world).astype(np.int64)


def _intervals(plan: PackPlan, ranges: tuple[RowRanges | None, RowRanges | None]) -> tuple[np.ndarray, ...]:
    """What each segment sees, and the segment itself: (starts, ends, ranks) over both streams' rows."""
    geometry, owner, clean = plan.geometry, plan.row_owner, plan.geometry.num_clean
    parts = []
    for stream, (shift, grid) in enumerate(((0, geometry.cell_starts), (clean, geometry.block_starts))):
        bounds = np.unique(np.concatenate([grid, np.flatnonzero(np.diff(owner[shift:shift + grid[-1]])) + 1]))
        first, last = bounds[:-1], bounds[1:] - 1
        rank = owner[shift + first]
        parts.append((shift + first, shift + last + 1, rank))
        seen = ranges[stream]
        if seen is not None:
            parts.append((seen.prefix_start[first], seen.prefix_end[last], rank))
            parts.append((clean + seen.block_start[first], clean + seen.block_end[last], rank))
    starts, ends, ranks = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    live = ends > starts
    return starts[live], ends[live], ranks[live]

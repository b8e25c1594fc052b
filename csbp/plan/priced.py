"""Attention of a plan in seconds, by what it costs as measured, and how fast the plan's rows travel.

N ranks. Seconds are those of one rank of a tp axis, which has its share of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from csbp.plan.cost import FEMTO
from csbp.plan.counts import PlanCounts, kind_counts
from csbp.plan.estimate import Device
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.seconds import Pace, Passes, again_seconds, exposed_seconds
from csbp.plan.shapes import AttentionLayers
from csbp.plan.stages import Stages
from csbp.plan.work import home_work, layer_rates, task_times, time_unit

if TYPE_CHECKING:
    from csbp.plan.cad import Cad


@dataclass(frozen=True)
class KindSeconds:
    """Of all layers of a kind in a training step, float64 [N]: attending, and waiting for what travels."""

    busy: np.ndarray
    waits: np.ndarray

    def levelled(self, tolerance: float = 0.0) -> KindSeconds:
        """At best: no rank attends longer than the mean, and whoever did, by more than a part, waits for nothing."""
        mean = math.fsum(self.busy) / len(self.busy)
        return KindSeconds(np.minimum(self.busy, mean), self.waits * (self.busy <= mean * (1 + tolerance)))


def kind_seconds(plan: PackPlan, cad: Cad, part: AttentionLayers) -> KindSeconds:
    """Of a plan of the "csbp" scheme, with what moves."""
    time, pace = _passes(plan, cad, part), _pace(plan, part.kind, cad.device, cad.tp)
    rows, counts = plan.holding.row_counts, kind_counts(plan, part.kind)
    stages = Stages.choose(cad.stages, plan.world * cad.tp, cad.device.node)
    once, again = exposed_seconds(part, rows, counts, time, pace, cad.itemsize, cad.gradient_itemsize, stages)
    over = again_seconds(part, rows, counts, cad.device, cad.itemsize, stages)
    return KindSeconds(part.count * (cad.forwards * (time.forward + over) + time.backward + over),
                       part.count * (cad.forwards * once + again))


def attention_passes(plan: PackPlan, cad: Cad) -> dict[str, Passes]:
    """Seconds of every rank in one layer of each kind; of a plan of the "csbp" scheme, with what moves."""
    return {part.kind.name: _passes(plan, cad, part) for part in cad.shape.attention}


def _passes(plan: PackPlan, cad: Cad, part: AttentionLayers) -> Passes:
    kind, pieces, cost = part.kind, plan.pieces[part.kind.name], cad.cost.for_heads(part.head_dim)
    work, both = home_work(plan, kind, pieces, (plan.moves or {}).get(kind.name)), (cost.forward, cost.backward)
    units = [time_unit(plan, kind, pieces, rates.times(part.heads)) for rates in both]
    return Passes(*(FEMTO * unit * rates.times(part.heads / unit).of(*work)
                    for unit, rates in zip(units, both, strict=True)))


def similar_passes(counts: PlanCounts, known: PlanCounts, times: Mapping[str, Passes]) -> dict[str, Passes]:
    """The same of a plan of any scheme, where a pair costs what it does in the mean of a plan that is ``known``."""
    found = {}
    for name, kind in counts.kinds.items():
        pairs = max(int(known.kinds[name].pairs.sum()), 1)
        found[name] = Passes(*(kind.pairs * (time.sum() / pairs)
                               for time in (times[name].forward, times[name].backward)))
    return found


def kept_seconds(plan: PackPlan, cad: Cad) -> dict[str, np.ndarray]:
    """Layer kind -> float64 [N], seconds of one layer in a training step that no move takes from a rank: those of its
    own noised blocks, and of all its noised rows where they may not move."""
    found = {}
    for part in cad.shape.attention:
        rates, pieces = layer_rates(cad.cost, part, cad.forwards), plan.pieces[part.kind.name]
        unit = time_unit(plan, part.kind, pieces, rates)
        rates = rates.times(1 / unit)
        times = rates.of(*plan.own_work[part.kind.name])
        if not cad.settings.ship_queries:
            index = np.flatnonzero(pieces.noised)
            np.add.at(times, pieces.owner[index],
                      task_times(pieces, rates, index, pieces.low[index], pieces.high[index]))
        found[part.kind.name] = FEMTO * unit * times
    return found


def row_pace(plan: PackPlan, device: Device, tp: int) -> dict[str, Pace]:
    """By how much of it stays within nodes; ranks of a plan are neighbours, ``tp`` devices each."""
    return {kind.name: _pace(plan, kind, device, tp) for kind in plan.kinds}


def _pace(plan: PackPlan, kind: LayerKind, device: Device, tp: int) -> Pace:
    node, served = np.arange(plan.world) * tp // device.node, plan.served.get(kind.name)
    return Pace(*(_mean_pace(table, node[:, None] != node, device)
                  for table in (plan.traffic[kind.name], None if served is None else served.matrix)))


def _mean_pace(table: np.ndarray | None, apart: np.ndarray, device: Device) -> np.ndarray | float:
    """Seconds a byte of the rows that reach or leave a rank, [N], whichever takes longer."""
    if table is None:
        return 0.0
    far = table * apart
    seconds = (table - far) / device.near_link + far / device.far_link
    return np.maximum(*(seconds.sum(axis) / np.maximum(table.sum(axis), 1) for axis in (0, 1)))

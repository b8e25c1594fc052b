"""Attention of a plan in seconds, by what it costs as measured, and how fast the plan's rows travel.

N ranks. Seconds are those of one rank of a tp axis, which has its share of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from csbp.plan.cost import FEMTO
from csbp.plan.counts import PlanCounts
from csbp.plan.estimate import Device
from csbp.plan.plan import PackPlan
from csbp.plan.seconds import Pace, Passes
from csbp.plan.work import home_times, layer_rates, task_times, time_unit

if TYPE_CHECKING:
    from csbp.plan.cad import Cad


def attention_passes(plan: PackPlan, cad: Cad) -> dict[str, Passes]:
    """Seconds of every rank in one layer of each kind; of a plan of the "csbp" scheme, with what moves."""
    found = {}
    for part in cad.shape.attention:
        kind, moves = part.kind, (plan.moves or {}).get(part.kind.name)
        pieces, cost = plan.pieces[kind.name], cad.cost.for_heads(part.head_dim)
        units = [time_unit(plan, kind, pieces, rates.times(part.heads)) for rates in (cost.forward, cost.backward)]
        found[kind.name] = Passes(*(FEMTO * unit * home_times(plan, kind, pieces, rates.times(part.heads / unit), moves)
                                    for unit, rates in zip(units, (cost.forward, cost.backward), strict=True)))
    return found


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
    node = np.arange(plan.world) * tp // device.node
    apart = node[:, None] != node
    found = {}
    for kind in plan.kinds:
        served = plan.served.get(kind.name)
        tables = [plan.traffic[kind.name], None if served is None else served.matrix]
        found[kind.name] = Pace(*(_mean_pace(table, apart, device) for table in tables))
    return found


def _mean_pace(table: np.ndarray | None, apart: np.ndarray, device: Device) -> np.ndarray | float:
    """Seconds a byte of the rows that reach or leave a rank, [N], whichever takes longer."""
    if table is None:
        return 0.0
    far = table * apart
    seconds = (table - far) / device.near_link + far / device.far_link
    return np.maximum(*(seconds.sum(axis) / np.maximum(table.sum(axis), 1) for axis in (0, 1)))

"""A run with core attention disaggregation beside the same run without it: times, bytes, and what could have moved.

N ranks. Seconds and bytes are those of all that is planned together, one pack a replica, in one training step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from csbp.plan.cad import Cad
from csbp.plan.counts import PlanCounts, count_plan
from csbp.plan.estimate import Device, Settings
from csbp.plan.forecast import Case, Forecast, plan_case, price
from csbp.plan.plan import PackPlan
from csbp.plan.priced import attention_passes, kept_seconds, row_pace, similar_passes
from csbp.plan.seconds import Passes
from csbp.plan.wire import layer_bytes, received_rows

ALL = "all"  # layers, beside the names of their kinds
_KEYS = ("keys", "gradients")  # labels of what travels of keys; the others are of query rows


@dataclass(frozen=True)
class Balance:
    """Attention of some layers.

    Attributes:
        seconds: float64 [N].
        bound: seconds that the fullest rank cannot be below: the mean, and what no move takes from a rank.
    """

    seconds: np.ndarray
    bound: float

    @property
    def over_mean(self) -> float:
        """The fullest rank's time over the mean."""
        return float(self.seconds.max() / max(self.seconds.mean(), 1e-300))

    @property
    def over_bound(self) -> float:
        """The fullest rank's time over the lower bound."""
        return float(self.seconds.max() / max(self.bound, 1e-300))


@dataclass(frozen=True)
class Added:
    """Bytes that moves add to what comes into each rank, float64 [N]; below 0 where a rank then needs less.

    Attributes:
        queries: query rows, and all that is made of them.
        keys: keys, values and their gradients.
    """

    queries: np.ndarray
    keys: np.ndarray

    @property
    def both(self) -> np.ndarray:
        """Of a rank, float64 [N]."""
        return self.queries + self.keys


@dataclass(frozen=True)
class Levelled:
    """What disaggregation changes.

    Attributes:
        cad: what may move.
        without: the packs as they are, one a replica, where each rank attends its own rows.
        with_moves: as the run trains them.
        before, after: layer kind -> attention of the two; ``ALL`` for all layers together.
        home: the same with the owners of ``after`` and no moves: what sharing documents out leaves.
        added: layer kind -> bytes, beside the same owners without moves; ``ALL``.
        missed: kinds of which nothing moves -> the part of the slowest rank's time that could have been saved, had
            ``cad.min_gain`` been 0.
    """

    cad: Cad
    without: Forecast
    with_moves: Forecast
    before: dict[str, Balance]
    after: dict[str, Balance]
    home: dict[str, Balance]
    added: dict[str, Added]
    missed: dict[str, float]

    @property
    def bytes_moved(self) -> float:
        """Into all ranks together, those of a tp axis too."""
        return self.cad.tp * float(self.added[ALL].both.sum())


def level(case: Case, kind: str, ranks: int, settings: Settings, device: Device, exchange: str, cad: Cad) -> Levelled:
    """Plan and price a case with and without moves, attention by the measured costs.

    Args:
        kind: "csbp" or "data".
        ranks, exchange: as ``plan_case`` has them.
    """
    apart = plan_case(case, kind, ranks, exchange, share=False)
    home = plan_case(case, kind, ranks, exchange) if case.packs else apart
    moved = cad.moved(home)
    passes = [attention_passes(plan, cad) for plan in (apart, moved)]
    without, with_moves = (
        price(case, kind, plan, settings, device, attention=times, pace=row_pace(plan, device, settings.tp))
        for plan, times in zip((apart, moved), passes, strict=True))
    added = _added(cad, with_moves.counts, without.counts if home is apart else count_plan(home))
    before = _balances(apart, cad, passes[0])
    at_home = before if home is apart else _balances(home, cad, attention_passes(home, cad))
    return Levelled(cad, without, with_moves, before, _balances(home, cad, passes[1]), at_home, added,
                    _missed(home, moved, cad))


def price_beside(case: Case, kind: str, ranks: int, settings: Settings, device: Device, exchange: str,
                 known: Levelled) -> Forecast:
    """Another way of training, with attention at the costs of the one that is known."""
    plan = plan_case(case, kind, ranks, exchange)
    counts = count_plan(plan)
    times = (attention_passes(plan, known.cad) if plan.scheme == "csbp"
             else similar_passes(counts, known.without.counts, attention_passes(known.without.plan, known.cad)))
    return price(case, kind, plan, settings, device, counts=counts, attention=times,
                 pace=row_pace(plan, device, settings.tp))


def _balances(plan: PackPlan, cad: Cad, passes: Mapping[str, Passes]) -> dict[str, Balance]:
    """By layer kind and for all; ``plan`` has the owners, ``passes`` the times."""
    kept, found = kept_seconds(plan, cad), {}
    total, floor = np.zeros(plan.world), np.zeros(plan.world)
    for part in cad.shape.attention:
        name = part.kind.name
        seconds = part.count * (cad.forwards * passes[name].forward + passes[name].backward)
        found[name] = Balance(seconds, max(float(seconds.mean()), float(part.count * kept[name].max())))
        total, floor = total + seconds, floor + part.count * kept[name]
    return found | {ALL: Balance(total, max(float(total.mean()), float(floor.max())))}


def _added(cad: Cad, after: PlanCounts, before: PlanCounts) -> dict[str, Added]:
    found, size = {}, len(after.clean)
    every = Added(np.zeros(size), np.zeros(size))
    for part in cad.shape.attention:
        name = part.kind.name
        sums = []
        for counts in (after, before):
            forward, backward = layer_bytes(received_rows(counts.kinds[name]), part, cad.itemsize,
                                            cad.gradient_itemsize)
            parts = [(label, cad.forwards * rows) for label, rows in forward.items()] + list(backward.items())
            sums.append([part.count * np.sum([rows for label, rows in parts if (label in _KEYS) == keys], 0, float)
                         for keys in (False, True)])
        found[name] = Added(sums[0][0] - sums[1][0], sums[0][1] - sums[1][1])
        every = Added(every.queries + found[name].queries, every.keys + found[name].keys)
    return found | {ALL: every}


def _missed(home: PackPlan, moved: PackPlan, cad: Cad) -> dict[str, float]:
    """See ``Levelled``."""
    still = [part for part in cad.shape.attention if not len((moved.moves or {}).get(part.kind.name, ()))]
    if len(still) < len(cad.shape.attention) or home.world == 1:
        return {part.kind.name: 0.0 for part in still}
    tried = replace(cad, settings=replace(cad.settings, min_gain=0.0)).moved(home)
    return {part.kind.name: 1 - cad.step_seconds(tried) / cad.step_seconds(home) for part in still}

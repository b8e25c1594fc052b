"""Steps of a whole cluster, predicted: the same documents trained in several ways, each rank's time and bytes.

A simulation: nothing is computed but plans. Plans, counts, costs and rates are those of ``csbp plan``. The cluster has
N = replicas x ranks; a replica's ranks are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from csbp.plan.cad import Cad
from csbp.plan.counts import PlanCounts, count_plan
from csbp.plan.estimate import Device, Settings
from csbp.plan.forecast import Case, Forecast, plan_case, price, whole_pack
from csbp.plan.ownership import Ownership
from csbp.plan.plan import PackPlan
from csbp.plan.priced import attention_passes, row_pace, similar_passes
from csbp.plan.ranges import index_of
from csbp.plan.seconds import Passes, Seconds, key_trips, product_runs
from csbp.plan.wire import layer_bytes, received_rows

# csbp with core attention disaggregation; csbp; both streams zig-zag over a replica's ranks; whole documents on ranks.
WAYS = ("csbp+cad", "csbp", "context", "data")


@dataclass(frozen=True)
class Cluster:
    """What a step runs on, and how.

    Attributes:
        replicas, ranks: sequence axes, and ranks of each.
        device: links and rates of a rank.
        settings: of the run.
        cad: what may move, and what attention costs.
        pooled: ranks attend for those of other replicas too.
        exchange: as ``parallel.exchange``.
    """

    replicas: int
    ranks: int
    device: Device
    settings: Settings
    cad: Cad
    pooled: bool
    exchange: str = "exact"


@dataclass(frozen=True)
class Outcome:
    """One step in one way.

    Attributes:
        seconds: of every rank.
        received: float64 [N], bytes into every rank: keys, query rows, and what comes back of them.
        memory: float64 [N], bytes that every rank needs.
        fits: they are there.
    """

    seconds: Seconds
    received: np.ndarray
    memory: np.ndarray
    fits: bool

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        return 1 - float(self.seconds.busy.mean()) / self.seconds.step

    @property
    def imbalance(self) -> float:
        """The fullest rank's attention time over the mean."""
        return float(self.seconds.attention.max() / max(self.seconds.attention.mean(), 1e-300))


def simulate_step(case: Case, lengths: Sequence[Sequence[int]], block_size: int,
                  cluster: Cluster) -> dict[str, Outcome]:
    """A step in all ``WAYS``. Documents are shared out among replicas first, for all of them alike.

    Args:
        case: whose geometry only says whether there are target blocks.
        lengths: tokens of the documents of each replica's pack, as they were packed.
        block_size: of the target blocks.
    """
    def packed(documents: Sequence[int], packs: tuple[int, ...] = ()) -> Case:
        noised = case.geometry.num_noised > 0
        return replace(case, geometry=whole_pack(documents, block_size, noised=noised), packs=packs)

    whole = packed([length for pack in lengths for length in pack], tuple(len(pack) for pack in lengths))
    plan = plan_case(whole, "csbp", cluster.ranks, cluster.exchange)
    starts = whole.geometry.document_starts
    replica = plan.ownership.cell_rank[index_of(whole.geometry.cell_starts, starts[:-1])] // cluster.ranks
    apart = [packed(np.diff(starts)[replica == number].tolist()) for number in range(cluster.replicas)]
    owned = [plan_case(part, "csbp", cluster.ranks, cluster.exchange) for part in apart]
    counts = [count_plan(part) for part in owned]
    zigzag = [replace(part, scheme="context") for part in owned]
    if cluster.pooled:
        moved = [_price(whole, cluster.cad.moved(plan), cluster)]
    else:
        moved = [_price(part, cluster.cad.moved(one), cluster) for part, one in zip(apart, owned, strict=True)]
    return {"csbp+cad": _outcome(moved, cluster), "csbp": _outcome([_price(whole, plan, cluster)], cluster),
            "context": _outcome([_price(part, one, cluster, known) for part, one, known in zip(
                apart, zigzag, zip(owned, counts, strict=True), strict=True)], cluster),
            "data": _outcome([_price(whole, replace(plan, owners=_whole_documents(plan, cluster)), cluster)], cluster)}


def _price(case: Case, plan: PackPlan, cluster: Cluster, known: tuple[PackPlan, PlanCounts] | None = None) -> Forecast:
    """A plan by the measured costs; of another scheme than "csbp" a pair costs what it does in the mean of a plan of
    the same pack that is ``known``."""
    counts = count_plan(plan)
    times = (attention_passes(plan, cluster.cad) if known is None else
             similar_passes(counts, known[1], attention_passes(known[0], cluster.cad)))
    return price(case, plan.scheme, plan, cluster.settings, cluster.device, counts=counts, attention=times,
                 pace=row_pace(plan, cluster.device, cluster.settings.tp))


def _whole_documents(plan: PackPlan, cluster: Cluster) -> Ownership:
    """Every document on one of all ranks, by longest processing time of its predicted seconds, whatever memory that
    takes."""
    geometry, shape, settings = plan.geometry, cluster.cad.shape, cluster.settings
    tokens, cells = np.diff(geometry.document_starts), index_of(geometry.document_starts, geometry.cell_starts[:-1])
    # As if each document had a rank of its own.
    times = attention_passes(replace(plan, world=len(tokens), owners=Ownership(cells, geometry.block_document)),
                             cluster.cad)
    rows = tokens + np.bincount(geometry.block_document, np.diff(geometry.block_starts), len(tokens))
    seconds = rows * float(shape.row_flops) * product_runs(settings.checkpointing) / cluster.device.linear
    for part in shape.attention:
        time: Passes = times[part.kind.name]
        seconds += part.count * ((key_trips(settings.checkpointing) - 1) * time.forward + time.backward)
    load, owner = np.zeros(plan.world), np.zeros(len(tokens), np.int64)
    for document in np.argsort(-seconds, kind="stable").tolist():
        owner[document] = rank = int(load.argmin())
        load[rank] += seconds[document]
    return Ownership(owner[cells], owner[geometry.block_document])


def _outcome(parts: Sequence[Forecast], cluster: Cluster) -> Outcome:
    """Of plans that have nothing to do with each other, side by side."""
    def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)

    seconds = Seconds(*(join([getattr(part.seconds, name) for part in parts])
                        for name in ("attention", "linear", "exposed")))
    return Outcome(seconds, join([_received(part.counts, cluster) for part in parts]),
                   join([part.memory.total for part in parts]), all(part.fits for part in parts))


def _received(counts: PlanCounts, cluster: Cluster) -> np.ndarray:
    """float64 [N], bytes into every rank in all layers."""
    settings, total = cluster.settings, np.zeros(len(counts.clean))
    for part in cluster.cad.shape.attention:
        forward, backward = layer_bytes(received_rows(counts.kinds[part.kind.name]), part, settings.itemsize,
                                        settings.gradient_itemsize)
        forwards = key_trips(settings.checkpointing) - 1
        total += part.count * (forwards * sum(forward.values()) + sum(backward.values()))
    return total

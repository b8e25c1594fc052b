"""A pack of given document lengths, or one of each replica, planned and priced for one way of training it.

N ranks of the sequence axis, or of all replicas that are planned together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from csbp.config.schema import RunConfig
from csbp.plan.counts import PlanCounts, count_plan
from csbp.plan.estimate import Device, Memory, Settings, predict_memory
from csbp.plan.geometry import Geometry
from csbp.plan.ownership import Ownership
from csbp.plan.plan import PackPlan
from csbp.plan.pool import pack_of, pool_owners, share_documents
from csbp.plan.seconds import Pace, Passes, Seconds, predict_seconds
from csbp.plan.shapes import ModelShape


@dataclass(frozen=True)
class Case:
    """What is trained, whatever the ranks.

    Attributes:
        shape: the model.
        geometry: the pack, or packs end to end.
        hidden: share of the noised rows that have a loss (their token is hidden).
        next_token: clean rows have a loss too.
        packs: documents of each of several packs, one a replica, that are planned together; empty: it is one pack.
    """

    shape: ModelShape
    geometry: Geometry
    hidden: float
    next_token: bool
    packs: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape, geometry: Geometry, packs: tuple[int, ...] = ()) -> Case:
        """What a run trains."""
        noise, diffusion = config.noise, config.objective.kind == "block_diffusion"
        return cls(shape, geometry, (noise.t_min + noise.t_max) / 2 if diffusion else 0.0,
                   not diffusion or config.objective.ar_weight > 0, packs)

    @property
    def together(self) -> int:
        """Replicas whose packs these are."""
        return len(self.packs) or 1

    def loss_rows(self, counts: PlanCounts) -> np.ndarray:
        """float64 [N], rows whose logits each rank needs."""
        return self.hidden * counts.noised + (counts.answered if self.next_token else 0.0)


@dataclass(frozen=True)
class Forecast:
    """One way of training a case.

    Attributes:
        kind: "csbp", "context", "block" or "data".
        plan, counts: of the N ranks of one sequence axis (one rank for "data"), or of all whose packs are planned
            together.
        replicas: sequence axes beside each other, each with a pack of its own.
        loss_rows: float64 [N].
        seconds: of what is planned. memory: of each rank.
        fits: the dearest rank's memory is there.
        together: replicas that are planned together.
    """

    kind: str
    plan: PackPlan
    counts: PlanCounts
    replicas: int
    loss_rows: np.ndarray
    seconds: Seconds
    memory: Memory
    fits: bool
    together: int = 1

    @property
    def ranks(self) -> int:
        """Of one sequence axis."""
        return self.plan.world // self.together


def whole_pack(lengths: Sequence[int], block_size: int, *, noised: bool) -> Geometry:
    """The geometry of a pack whose every block is a target (or, for an autoregressive model, none)."""
    rows = np.asarray(lengths, np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
    cells = -(-rows // block_size)
    document = np.repeat(np.arange(len(rows)), cells)
    index = np.arange(len(document)) - np.repeat(np.cumsum(cells) - cells, cells)
    begins = starts[document] + index * block_size
    grid = np.append(begins, starts[-1])
    if not noised:
        none = np.zeros(0, np.int64)
        return Geometry(starts, grid, none, none, none, np.zeros(1, np.int64))
    return Geometry(starts, grid, document, np.arange(len(document)), begins, grid)


def plan_case(case: Case, kind: str, ranks: int, exchange: str = "exact", *, share: bool = True) -> PackPlan:
    """Plan a case as training does, without moves.

    Args:
        kind: as ``parallel.kind``.
        ranks: size of the sequence axis; not used for "data".
        exchange: as ``parallel.exchange``.
        share: of several packs, documents go to the replica that has most room; False: packs stay as they are.
    """
    ranks, scheme = (1, "csbp") if kind == "data" else (ranks, kind)
    kinds, owners = case.shape.kinds, None
    weights = case.shape.weights(kinds)
    if case.packs:
        replica = pack_of(case.packs)
        if share:
            replica = share_documents(case.geometry, kinds, weights, replica, case.together,
                                      case.shape.row_pairs)
        owners = pool_owners(case.geometry, kinds, weights, replica, case.together, ranks,
                             case.shape.row_pairs)
    return PackPlan(case.geometry, kinds, ranks * case.together, scheme, exchange, owners, weights,
                    row_pairs=case.shape.row_pairs)


def price(case: Case, kind: str, plan: PackPlan, settings: Settings, device: Device, *,
          counts: PlanCounts | None = None, attention: Mapping[str, Passes] | None = None,
          pace: Mapping[str, Pace] | None = None) -> Forecast:
    """What a plan of a case will take.

    Args:
        settings: of the run; its world counts all replicas.
        counts: of the plan, if they are known.
        attention, pace: as ``predict_seconds`` has them.
    """
    counts = counts or count_plan(plan)
    loss_rows = case.loss_rows(counts)
    seconds = predict_seconds(case.shape, counts, loss_rows, device, settings, attention=attention, pace=pace)
    memory = predict_memory(case.shape, counts, loss_rows, settings)
    return Forecast(kind, plan, counts, settings.world // settings.tp * case.together // plan.world, loss_rows,
                    seconds, memory, bool(memory.total.max() <= device.memory), case.together)


def forecast(case: Case, kind: str, ranks: int, settings: Settings, device: Device,
             exchange: str = "exact") -> Forecast:
    """Plan and price a case, attention by pairs; the arguments are those of ``plan_case`` and ``price``."""
    return price(case, kind, plan_case(case, kind, ranks, exchange), settings, device)


def layer_pairs(shape: ModelShape, counts: PlanCounts) -> np.ndarray:
    """int64 [N], pairs of all layers."""
    return np.stack([part.count * counts.kinds[part.kind.name].pairs for part in shape.attention]).sum(0)


def max_over_mean_pairs(shape: ModelShape, counts: PlanCounts) -> float:
    """Imbalance of attention: 1 is perfect."""
    pairs = layer_pairs(shape, counts)
    return float(pairs.max() / pairs.mean())


def contiguous(plan: PackPlan) -> PackPlan:
    """The same clean rows with target blocks dealt out in order, each rank an equal stretch: what pairing avoids."""
    blocks = plan.geometry.num_blocks
    owners = Ownership(plan.ownership.cell_rank, np.arange(blocks) * plan.world // max(blocks, 1))
    return replace(plan, owners=owners, moves=None)

"""Core attention disaggregation as a run asks for it: a plan, and the same plan with what moves."""

from __future__ import annotations

from dataclasses import dataclass

from csbp.config.mesh import axis_sizes
from csbp.config.schema import RunConfig
from csbp.plan.cost import CostModel
from csbp.plan.disaggregate import CadSettings, disaggregate
from csbp.plan.estimate import DEVICES
from csbp.plan.plan import PackPlan
from csbp.plan.profiles import load_profile
from csbp.plan.shapes import ModelShape
from csbp.plan.split import split_shape
from csbp.plan.work import StepBytes, layer_rates


@dataclass(frozen=True)
class Cad:
    """All that decides what moves, beside the plan: the same on every rank.

    Attributes:
        settings: what may move.
        cost: of attention on these devices.
        shape: of the model, one rank's heads.
        itemsize, gradient_itemsize: bytes of a number that travels, and of one of a gradient's.
        forwards: how often a layer's forward runs, 2 with full checkpointing.
        bytes_per_second: that a rank sends and receives.
    """

    settings: CadSettings
    cost: CostModel
    shape: ModelShape
    itemsize: int
    gradient_itemsize: int
    forwards: int
    bytes_per_second: float

    def moved(self, plan: PackPlan) -> PackPlan:
        """The plan with the moves of every layer kind."""
        if plan.world == 1:
            return plan
        parts = {part.kind.name: part for part in self.shape.attention}
        moves = {}
        for kind in plan.kinds:
            part = parts[kind.name]
            moves[kind.name] = disaggregate(
                plan, kind, plan.pieces[kind.name], layer_rates(self.cost, part, self.forwards),
                StepBytes.of(part, self.itemsize, self.gradient_itemsize, self.forwards), self.settings,
                bytes_per_second=self.bytes_per_second)
        return plan.with_moves(moves)


def cad_of(config: RunConfig, shape: ModelShape, device: str) -> Cad | None:
    """What a run asks for; None where it asks for nothing.

    Args:
        shape: the whole model.
        device: name in ``DEVICES`` of what its ranks compute on.

    Raises:
        ConfigError: ``cad.profile`` cannot be read.
    """
    cad, parallel = config.cad, config.parallel
    if not cad.enabled:
        return None
    replicas, ranks, tp = axis_sizes(parallel)
    pool = ranks * (replicas if cad.pool == "dp" else 1) * tp
    speeds, item = DEVICES[device], 2 if config.train.dtype == "bfloat16" else 4
    cost = load_profile(device if cad.profile == "auto" else cad.profile, "cad.profile")
    most = [None if mib is None else mib << 20 for mib in (cad.max_send_mib, cad.max_receive_mib, cad.max_buffer_mib)]
    return Cad(CadSettings(cad.tolerance, cad.min_gain, cad.ship_queries, *most), cost, split_shape(shape, tp), item,
               4 if parallel.gradient_wire == "float32" else item, 1 + (parallel.checkpointing == "full"),
               speeds.near_link if pool <= speeds.node else speeds.far_link)

"""Core attention disaggregation as a run asks for it: a plan, and the same plan with what moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from csbp.config.mesh import axis_sizes
from csbp.config.schema import RunConfig
from csbp.plan.cost import FEMTO, CostModel
from csbp.plan.disaggregate import CadSettings, base_bytes, disaggregate
from csbp.plan.estimate import DEVICES, Device
from csbp.plan.plan import PackPlan
from csbp.plan.priced import KindSeconds, kind_seconds
from csbp.plan.profiles import load_profile
from csbp.plan.seconds import key_trips, product_runs
from csbp.plan.shapes import AttentionLayers, ModelShape
from csbp.plan.split import split_shape
from csbp.plan.tasks import Moves
from csbp.plan.work import StepBytes, layer_rates

_ALIKE = 0.01  # part by which ranks' rows may differ and still take as long


class _Priced(NamedTuple):
    """A plan, its layers, and seconds of the slowest rank in a step."""

    plan: PackPlan
    layers: dict[AttentionLayers, KindSeconds]
    step: float


@dataclass(frozen=True)
class Cad:
    """All that decides what moves, beside the plan: the same on every rank.

    Attributes:
        settings: what may move.
        cost: of attention on these devices.
        shape: of the model, one rank's heads.
        itemsize, gradient_itemsize: bytes of a number that travels, and of one of a gradient's.
        forwards: how often a layer's forward runs, 2 with full checkpointing.
        device: what ranks compute on, for its links. tp: ranks that share the heads of the same rows.
        row_seconds: of one row in all that is no attention, over all layers of a step.
        stages: as ``parallel.exchange_stages``.
    """

    settings: CadSettings
    cost: CostModel
    shape: ModelShape
    itemsize: int
    gradient_itemsize: int
    forwards: int
    device: Device
    tp: int = 1
    row_seconds: float = 0.0
    stages: int | None = None

    def moved(self, plan: PackPlan) -> PackPlan:
        """The plan with what moves in every layer kind: by attention alone or by all that a rank computes, whichever
        has the shorter step by prediction; unchanged where neither saves ``min_gain`` of it."""
        if plan.world == 1:
            return plan
        home, rows = self._priced(plan), plan.holding.row_counts
        best, least = home, home.step * (1 - self.settings.min_gain)
        apart = bool(rows.max() - rows.min() > _ALIKE * rows.max())  # else there is but one way
        for together in [False] + [True] * apart:
            tried = self._tried(home, together, least)
            if tried.step < least:
                best, least = tried, tried.step
        return best.plan

    def step_seconds(self, plan: PackPlan) -> float:
        """Of the slowest rank: all layers of a step, without the head."""
        return self._priced(plan).step

    def saved(self, plans: Sequence[PackPlan]) -> tuple[float, float]:
        """``step_seconds`` of plans together: what their moves save, 0 where nothing moves, and all without moves."""
        home = [self.step_seconds(plan.home) for plan in plans]
        saved = [time - self.step_seconds(plan) if plan.served else 0.0
                 for plan, time in zip(plans, home, strict=True)]
        return math.fsum(saved), math.fsum(home)

    def home_bytes(self, plan: PackPlan) -> np.ndarray:
        """Bytes that each rank would send in a training step if nothing of a plan moved, int64 [N]."""
        total = np.zeros(plan.world, np.int64)
        for part in self.shape.attention:
            if part.kind in plan.kinds:
                total += part.count * base_bytes(plan.home, part.kind, self._sizes(part))[0]
        return total

    def _tried(self, home: _Priced, together: bool, least: float) -> _Priced:
        """Moves of one kind after another, those of most attention first, where they make the step shorter."""
        best, left = home, sorted(home.layers, key=lambda part: -math.fsum(home.layers[part].busy))
        for number, part in enumerate(left):
            at_best = best.layers | {other: home.layers[other].levelled() for other in left[number:]}
            if not together and self._step(home.plan, at_best) >= least:
                break

            def worse(moves: Moves, best: _Priced = best, part: AttentionLayers = part) -> bool:
                found = self._with(best, part, moves)  # who has not given yet may still wait less, but nobody else
                layers = found.layers | {part: found.layers[part].levelled(self.settings.tolerance)}
                return self._step(found.plan, layers) > best.step

            moves = self._moves(home.plan, part, together, worse)
            if len(moves):
                found = self._with(best, part, moves)
                if together and found.step >= best.step:
                    break  # kinds of less attention can even out no more of the same work
                best = min(best, found, key=lambda one: one.step)
        return best

    def _priced(self, plan: PackPlan) -> _Priced:
        layers = {part: kind_seconds(plan, self, part) for part in self.shape.attention if part.kind in plan.kinds}
        return _Priced(plan, layers, self._step(plan, layers))

    def _with(self, known: _Priced, part: AttentionLayers, moves: Moves) -> _Priced:
        plan = known.plan.with_moves({**(known.plan.moves or {}), part.kind.name: moves})
        layers = known.layers | {part: kind_seconds(plan, self, part)}
        return _Priced(plan, layers, self._step(plan, layers))

    def _step(self, plan: PackPlan, layers: dict[AttentionLayers, KindSeconds]) -> float:
        return float(sum((times.busy + times.waits for times in layers.values()),
                         plan.holding.row_counts * self.row_seconds).max())

    def _sizes(self, part: AttentionLayers) -> StepBytes:
        return StepBytes.of(part, self.itemsize, self.gradient_itemsize, self.forwards)

    def _moves(self, plan: PackPlan, part: AttentionLayers, together: bool, worse: Callable[[Moves], bool]) -> Moves:
        near = plan.world * self.tp <= self.device.node
        beside = plan.holding.row_counts * (self.row_seconds / self.shape.layers / FEMTO)
        return disaggregate(
            plan, part.kind, plan.pieces[part.kind.name], layer_rates(self.cost, part, self.forwards),
            self._sizes(part), replace(self.settings, min_gain=0.0), beside=beside if together else None,
            bytes_per_second=self.device.near_link if near else self.device.far_link, worse=worse)


def saving_text(saved: float, total: float, where: str) -> str:
    """What disaggregation is predicted to do in some packs, by ``Cad.saved``."""
    if not saved:
        return f"nothing moves in {where}; csbp plan can say why"
    return f"by prediction, what moves saves {saved / total:.1%} of the time of the layers in {where}"


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
    (_, _, tp), speeds = axis_sizes(parallel), DEVICES[device]
    item, own = 2 if config.train.dtype == "bfloat16" else 4, split_shape(shape, tp)
    cost = load_profile(device if cad.profile == "auto" else cad.profile, "cad.profile")
    most = [None if mib is None else mib << 20 for mib in (cad.max_send_mib, cad.max_receive_mib, cad.max_buffer_mib)]
    return Cad(CadSettings(cad.tolerance, cad.min_gain, cad.ship_queries, *most), cost, own, item,
               4 if parallel.gradient_wire == "float32" else item, key_trips(parallel.checkpointing) - 1, speeds, tp,
               own.row_flops * product_runs(parallel.checkpointing) / speeds.linear, parallel.exchange_stages)

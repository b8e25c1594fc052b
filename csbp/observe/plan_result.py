"""A run's forecast beside those of the other ways of training it: what ``csbp plan`` says, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from csbp.config.schema import CHECKPOINTING
from csbp.observe.accounting import exact_bytes, formula_bytes, model_flops, utilisation
from csbp.plan.counts import attended_pairs
from csbp.plan.estimate import Device, Settings
from csbp.plan.forecast import Case, Forecast, price
from csbp.plan.lengths import Filled
from csbp.plan.levelled import Levelled
from csbp.plan.seconds import Seconds, shares_of
from csbp.plan.shapes import ModelShape
from csbp.plan.split import split_bytes, split_shape
from csbp.plan.stages import Stages


@dataclass(frozen=True)
class PlanResult:
    """A run's forecast, and those of the other ways of training it.

    Attributes:
        experiment: its name.
        device_name, device: what a rank computes on.
        case: what is planned together: a pack, or one of each replica.
        settings: how it is trained.
        kind: the run's ``parallel.kind``.
        found: kind -> forecast; holds ``kind``.
        packs_per_step: of the run.
        documents: what is planned, and where it is from.
        levelled: the run with and without disaggregation; None where it asks for none.
    """

    experiment: str
    device_name: str
    device: Device
    case: Case
    settings: Settings
    kind: str
    found: dict[str, Forecast]
    packs_per_step: int
    documents: Filled
    levelled: Levelled | None = None

    @property
    def packs(self) -> int:
        """That are planned together; a replica may be one short."""
        return sum(count > 0 for count in self.case.packs) or 1

    @property
    def shape(self) -> ModelShape:
        """What a rank has of the model: its heads."""
        return split_shape(self.case.shape, self.settings.tp)

    @property
    def told(self) -> np.ndarray:
        """Bytes that the run's tp axis brings into each rank for what is planned, float64 [N]."""
        chosen, settings = self.chosen, self.settings
        return split_bytes(self.case.shape, chosen.counts.rows, chosen.loss_rows, tp=settings.tp,
                           checkpointing=settings.checkpointing, itemsize=settings.itemsize)

    @property
    def chosen(self) -> Forecast:
        """The run's own."""
        return self.found[self.kind]

    @property
    def stages(self) -> int:
        """The most stages in which keys come in any layer of the run."""
        counts, settings = self.chosen.counts, self.settings
        stages = Stages.choose(settings.stages, len(counts.clean) * settings.tp, self.device.node)
        return max((shares_of(kind, counts.rows, stages) for kind in counts.kinds.values()), default=1)

    def at_once(self) -> Seconds:
        """The run's own if keys came in one stage; without disaggregation."""
        chosen, one = self.chosen, replace(self.settings, stages=1)
        return price(self.case, self.kind, chosen.plan, one, self.device, counts=chosen.counts).seconds

    @property
    def policies(self) -> dict[str, Forecast]:
        """The run's own under each ``parallel.checkpointing``; {} with disaggregation, where other rows would move."""
        chosen = self.chosen
        return {} if self.levelled else {policy: price(
            self.case, self.kind, chosen.plan, replace(self.settings, checkpointing=policy), self.device,
            counts=chosen.counts) for policy in CHECKPOINTING}

    def step_seconds(self, forecast: Forecast) -> float:
        """One optimizer step: replicas take their packs in rounds."""
        return -(-self.packs_per_step // forecast.replicas) * forecast.seconds.step

    def tokens_per_second(self, forecast: Forecast, packs: int | None = None) -> float:
        """Clean tokens over a step of ``packs`` packs, by default the run's own number."""
        packs = packs or self.packs_per_step
        rounds = -(-packs // forecast.replicas)
        return packs * self.case.geometry.num_clean / self.packs / (rounds * forecast.seconds.step)

    def received(self, forecast: Forecast) -> np.ndarray:
        """Bytes into each rank for what is planned, float64 [N]."""
        parts = exact_bytes(self.shape, forecast.counts, checkpointing=self.settings.checkpointing,
                            itemsize=self.settings.itemsize,
                            gradient_itemsize=self.settings.gradient_itemsize)
        return np.stack([part.received for part in parts.values()]).sum(0)

    def sent(self, forecast: Forecast) -> np.ndarray:
        """Bytes out of each rank for what is planned, float64 [N]."""
        parts = exact_bytes(self.shape, forecast.counts, checkpointing=self.settings.checkpointing,
                            itemsize=self.settings.itemsize,
                            gradient_itemsize=self.settings.gradient_itemsize)
        return np.stack([part.sent for part in parts.values()]).sum(0)

    def formula(self, kind: str) -> float:
        """Bytes received by the published formula, mean over ranks."""
        geometry, packs = self.case.geometry, self.packs
        return formula_bytes(self.shape, geometry.num_clean // packs, geometry.num_noised // packs, self.chosen.ranks,
                             kind)

    @property
    def flops(self) -> float:
        """Model FLOPs of what is planned."""
        case, geometry = self.case, self.case.geometry
        pairs = {kind.name: attended_pairs(geometry, kind) for kind in case.shape.kinds}
        loss_rows = round(self.chosen.loss_rows.sum())
        return model_flops(case.shape, pairs, geometry.num_clean + geometry.num_noised, loss_rows)

    @property
    def mfu(self) -> float | None:
        """Predicted utilisation of the device's peak; None where it has none to be held against."""
        chosen = self.chosen
        found = utilisation(self.flops, chosen.seconds.step, chosen.plan.world * self.settings.tp, self.device.peak)
        return None if np.isnan(found) else found

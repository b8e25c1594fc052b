"""One optimizer step and one evaluation: from packs to losses and gradients, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from csbp.attention.operator import BoundPlan
from csbp.config.schema import NoiseConfig, ObjectiveConfig
from csbp.data.batch import PackedBatch, empty_batch
from csbp.diffusion.build import build_layout
from csbp.diffusion.layout import StreamLayout
from csbp.diffusion.loss import denominator, term_sums
from csbp.models.protocol import LocalBatch, ModelAdapter
from csbp.observe.accounting import model_flops
from csbp.parallel.gradients import clip, global_norm
from csbp.parallel.runtime import Runtime
from csbp.plan.counts import attended_pairs
from csbp.plan.plan import plan_rank
from csbp.plan.shapes import ModelShape
from csbp.train.scatter import scatter


@dataclass(frozen=True)
class Noising:
    """What turns a pack into streams: the same values give the same noise anywhere."""

    objective: ObjectiveConfig
    noise: NoiseConfig
    mask_token_id: int
    seed: int

    def layout(self, pack: PackedBatch, step: int) -> StreamLayout:
        """The streams of a pack at an optimizer step."""
        return build_layout(pack, self.objective, self.noise, mask_token_id=self.mask_token_id, seed=self.seed,
                            step=step)


@dataclass(frozen=True)
class Work:
    """One micro-batch of one rank."""

    layout: StreamLayout
    batch: LocalBatch
    plan: BoundPlan


@dataclass(frozen=True)
class StepResult:
    """Global numbers of one step, equal on every rank.

    Attributes:
        loss: the objective in nats, terms weighted and divided by their global counts.
        terms: name -> that term alone, before its factor.
        accuracy: share of hidden tokens whose most likely token is right; NaN where none was hidden.
        clean_tokens, supervised: tokens of the packs, and how many of them are supervised.
        grad_norm: before clipping; NaN in an evaluation.
        updated: False where a loss or gradient was not finite and no rank changed its weights.
        stop: some rank was asked to stop.
        model_flops: what the objective asks for (see ``observe.accounting``), the same on any topology.
        wire_bytes: bytes of keys and their gradients that all ranks sent.
        exposed_seconds: mean over ranks of the time that the host waited for rows (on the CPU: exposed communication).
    """

    loss: float
    terms: dict[str, float]
    accuracy: float
    clean_tokens: int
    supervised: int
    grad_norm: float = math.nan
    updated: bool = False
    stop: bool = False
    model_flops: float = 0.0
    wire_bytes: int = 0
    exposed_seconds: float = 0.0


class StepRunner:
    """Runs packs through a model. Holds no state that a checkpoint would need."""

    def __init__(self, model: nn.Module, adapter: ModelAdapter, runtime: Runtime, backend: str,
                 shape: ModelShape | None = None) -> None:
        self.model, self.adapter, self.runtime, self.backend = model, adapter, runtime, backend
        self.shape = shape  # for balancing kinds of layers and counting FLOPs; None: kinds weigh alike, not counted

    def prepare(self, packs: Sequence[PackedBatch], noising: Noising, step: int) -> list[Work]:
        """This rank's micro-batches of a step's packs: pack i goes to replica i mod dp.

        Replicas that are a pack short get an empty one, so that every rank runs as many collectives.
        """
        runtime = self.runtime
        kinds = self.adapter.layer_kinds(self.model, noising.objective.clean_stream)
        weights = self.shape.weights(kinds) if self.shape else None
        rounds = -(-len(packs) // runtime.dp)
        mine = list(packs[runtime.dp_rank::runtime.dp])
        mine += [empty_batch()] * (rounds - len(mine))
        works = []
        for pack in mine:
            layout = noising.layout(pack, step)
            plan = plan_rank(layout.geometry, kinds, runtime.csbp, runtime.csbp_rank, scheme=runtime.scheme,
                             exchange=runtime.exchange, weights=weights)
            works.append(Work(layout, scatter(layout, plan.rows, runtime.device),
                              BoundPlan(plan, runtime.transport, runtime.device, self.backend, runtime.gradient_wire)))
        return works

    def counts(self, works: Sequence[Work], stop: bool = False) -> tuple[dict[str, float], int, int, bool]:
        """Global denominators of the terms, clean tokens, supervised tokens, and whether any rank must stop."""
        names = [term.name for term in works[0].layout.terms]
        local = [0.0] * (len(names) + 2)
        if self.runtime.first_of_replica:  # all its ranks know the same pack: count it once
            for work in works:
                for place, term in enumerate(work.layout.terms):
                    local[place] += term.count
                local[-2] += work.layout.geometry.num_clean
                local[-1] += work.layout.supervised
        *totals, tokens, supervised, stops = self.runtime.total([*local, float(stop)])
        return dict(zip(names, totals, strict=True)), int(tokens), int(supervised), stops > 0

    def run(self, works: Sequence[Work], *, train: bool, stop: bool = False,
            before_each: Callable[[int], None] = lambda done: None) -> StepResult:
        """Losses of the packs; with ``train`` also gradients, summed over ranks and micro-batches.

        ``before_each`` is called with the number of micro-batches done; what it raises, it raises on every rank.
        """
        counts, tokens, supervised, stopping = self.counts(works, stop)
        transport = self.runtime.transport
        sent, waited = sum(transport.sent_bytes.values()), transport.waited_seconds
        sums = dict.fromkeys(counts, 0.0)
        correct = hidden = 0.0
        for done, work in enumerate(works):
            before_each(done)
            with torch.set_grad_enabled(train):
                found = term_sums(self.adapter.forward(self.model, work.batch, work.plan), work.batch)
                parts: list[Tensor] = []
                for term in work.batch.terms:
                    # Divided before the backward, by the whole step's count: gradients then only add.
                    parts.append(found[term.name].loss * (term.scale / denominator(counts[term.name])))
                if train:
                    torch.stack(parts).sum().backward()
            for name, term_sum in found.items():
                sums[name] += float(term_sum.loss.detach())
                if name == works[0].layout.terms[0].name:
                    correct += float(term_sum.correct)
                    hidden += float(term_sum.hidden)
        sent, waited = sum(transport.sent_bytes.values()) - sent, transport.waited_seconds - waited
        once = float(self.runtime.tp_rank == 0)  # the ranks of a tp axis have the same rows; 0 x NaN is NaN
        *totals, correct, hidden, flops, sent_all, waited_all = self.runtime.total(
            [*(once * value for value in (*sums.values(), correct, hidden)), self._flops(works), float(sent), waited])
        scales = {term.name: term.scale for term in works[0].layout.terms}
        terms = {name: total / denominator(counts[name]) for name, total in zip(sums, totals, strict=True)}
        return StepResult(loss=sum(scales[name] * value for name, value in terms.items()), terms=terms,
                          accuracy=correct / hidden if hidden else math.nan, clean_tokens=tokens,
                          supervised=supervised, stop=stopping, model_flops=flops, wire_bytes=int(sent_all),
                          exposed_seconds=waited_all / self.runtime.world)

    def _flops(self, works: Sequence[Work]) -> float:
        """Model FLOPs of this replica's packs, counted on its first rank."""
        if self.shape is None or not self.runtime.first_of_replica:
            return 0.0
        total = 0.0
        for work in works:
            geometry = work.layout.geometry
            pairs = {part.kind.name: attended_pairs(geometry, part.kind) for part in self.shape.attention}
            asked = np.unique(np.concatenate([term.rows for term in work.layout.terms])).size
            total += model_flops(self.shape, pairs, geometry.num_clean + geometry.num_noised, asked)
        return total

    def update(self, result: StepResult, optimizer: torch.optim.Optimizer, clip_norm: float) -> StepResult:
        """Clip and apply the gradients, unless anything is not finite anywhere; then no rank changes."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = global_norm(parameters)
        fine = math.isfinite(result.loss) and math.isfinite(norm)
        if fine:
            clip(parameters, norm, clip_norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(**{**result.__dict__, "grad_norm": norm, "updated": fine})

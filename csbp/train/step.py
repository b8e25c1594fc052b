"""One optimizer step and one evaluation: from packs to losses and gradients, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from csbp.attention.operator import BoundPlan
from csbp.config.schema import NoiseConfig, ObjectiveConfig
from csbp.data.batch import PackedBatch, empty_batch, join
from csbp.diffusion.build import build_layout
from csbp.diffusion.layout import StreamLayout
from csbp.diffusion.loss import denominators, linear_cross_entropy
from csbp.models.protocol import LocalBatch, ModelAdapter
from csbp.observe.accounting import model_flops
from csbp.parallel.gradients import clip, global_norm
from csbp.parallel.runtime import Runtime
from csbp.parallel.tensor import enter_head
from csbp.plan.cad import Cad
from csbp.plan.counts import attended_pairs
from csbp.plan.geometry import Geometry
from csbp.plan.ownership import PAIRS_PER_ROW
from csbp.plan.plan import PackPlan
from csbp.plan.pool import pack_of, pool_owners, share_documents
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
    """One micro-batch of one rank.

    Attributes:
        layout, batch, plan: the pack, and this rank's part of it.
        home_bytes: bytes that this rank would send in a training step if no attention moved.
        whole: the plan of all ranks, where attention may move.
    """

    layout: StreamLayout
    batch: LocalBatch
    plan: BoundPlan
    home_bytes: int = 0
    whole: PackPlan | None = None


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
        wire_bytes: bytes of keys, of query rows that move, and of what is made of both, that all ranks sent.
        cad_bytes: those of them that moves have added, beside the same owners where nothing moves; may be below 0.
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
    cad_bytes: int = 0
    exposed_seconds: float = 0.0


class StepRunner:
    """Runs packs through a model. Holds no state that a checkpoint would need.

    The host only waits for the device at the end of ``run``, once, to read the numbers of the whole step.
    """

    def __init__(self, model: nn.Module, adapter: ModelAdapter, runtime: Runtime, backend: str,
                 shape: ModelShape | None = None, logit_rows: int | None = None, native: bool = False,
                 cad: Cad | None = None, overlap: bool = True) -> None:
        self.model, self.adapter, self.runtime, self.backend = model, adapter, runtime, backend
        self.native, self.overlap = native, overlap  # see BoundPlan
        self.cad = cad  # what attention may move to other ranks; None: nothing
        self.logit_rows = logit_rows  # rows whose logits exist at once; None: by their bytes
        self.shape = shape  # for balancing kinds of layers and counting FLOPs; None: kinds weigh alike, not counted

    def prepare(self, packs: Sequence[PackedBatch], noising: Noising, step: int) -> list[Work]:
        """This rank's micro-batches of a step's packs: pack i goes to replica i mod dp, or, where the packs of all
        replicas are planned as one, each document to the replica that has most room for it.

        Replicas that are a pack short get an empty one, so that every rank runs as many collectives.
        """
        works = []
        for group in self._groups(packs):
            layout = noising.layout(join(group), step)
            whole = self._plan(layout.geometry, [len(pack.sample_ids) for pack in group],
                               noising.objective.clean_stream)
            rank, cad = self.runtime.plan_rank, self.cad
            plan = whole.rank_plan(rank)
            works.append(Work(layout, scatter(layout, plan.rows, self.runtime.device),
                              BoundPlan(plan, self.runtime.transport, self.runtime.device, self.backend,
                                        self.runtime.gradient_wire, self.native, self.overlap, self.runtime.stages),
                              *((int(cad.home_bytes(whole)[rank]), whole) if cad else ())))
        return works

    def _groups(self, packs: Sequence[PackedBatch]) -> list[Sequence[PackedBatch]]:
        """The packs of each of this rank's micro-batches: one, or one of each replica where they are planned as one."""
        dp, rounds = self.runtime.dp, range(-(-len(packs) // self.runtime.dp))
        filled = [*packs, *[empty_batch()] * (len(rounds) * dp - len(packs))]
        together: list[Sequence[PackedBatch]] = [filled[dp * turn:dp * (turn + 1)] for turn in rounds]
        return together if self.runtime.pooled else [[group[self.runtime.dp_rank]] for group in together]

    def _plan(self, geometry: Geometry, documents: Sequence[int], clean_stream: str) -> PackPlan:
        """The plan of a micro-batch's packs, which have so many documents each."""
        runtime, kinds = self.runtime, self.adapter.layer_kinds(self.model, clean_stream)
        weights, owners = self.shape.weights(kinds) if self.shape else None, None
        row_pairs = self.shape.row_pairs if self.shape else PAIRS_PER_ROW
        if runtime.pooled:
            replica = share_documents(geometry, kinds, weights, pack_of(documents), runtime.dp,
                                      row_pairs)
            owners = pool_owners(geometry, kinds, weights, replica, runtime.dp, runtime.csbp, row_pairs)
        plan = PackPlan(geometry, kinds, runtime.plan_ranks, runtime.scheme, runtime.exchange, owners, weights,
                        row_pairs=row_pairs)
        return self.cad.moved(plan) if self.cad else plan

    def counts(self, works: Sequence[Work], stop: bool = False) -> Tensor:
        """Global denominators of the T terms, clean tokens, supervised tokens, and how many ranks must stop.

        float64 [T + 3] on the device, summed over the ranks; the host has not waited for them.
        """
        local = [0.0] * (len(works[0].layout.terms) + 2)
        if self.runtime.first_of_pack:  # all its ranks know the same pack: count it once
            for work in works:
                for place, term in enumerate(work.layout.terms):
                    local[place] += term.count
                local[-2] += work.layout.geometry.num_clean
                local[-1] += work.layout.supervised
        return self.runtime.summed(self.runtime.upload([*local, float(stop)]))

    def run(self, works: Sequence[Work], *, train: bool, stop: bool = False,
            before_each: Callable[[int], None] = lambda done: None,
            meanwhile: Callable[[], None] = lambda: None) -> StepResult:
        """Losses of the packs; with ``train`` also gradients, summed over ranks and micro-batches.

        ``before_each`` is called with the number of micro-batches done; what it raises, it raises on every rank.
        ``meanwhile`` is called when the device has all of the step to do and the host nothing.
        """
        runtime, terms = self.runtime, works[0].layout.terms
        transport = runtime.transport
        sent, waited = sum(transport.sent_bytes.values()), transport.waited_seconds
        counts = self.counts(works, stop)
        divisors_T = denominators(counts[:len(terms)])
        # Divided before the backward, by the whole step's count: gradients then only add.
        factors_T = runtime.upload([term.scale for term in terms]) / divisors_T
        numbers = torch.zeros(len(terms), 3, dtype=torch.float64, device=runtime.device)
        for done, work in enumerate(works):
            before_each(done)
            numbers += self._micro_batch(work, factors_T, train)
        sent, waited = sum(transport.sent_bytes.values()) - sent, transport.waited_seconds - waited
        moved = sent - sum(work.home_bytes for work in works) if self.cad and train else 0
        once = float(runtime.tp_rank == 0)  # the ranks of a tp axis have the same rows; 0 x NaN is NaN
        summed = runtime.summed(torch.cat([once * numbers.flatten(),
                                           runtime.upload([self._flops(works), float(sent), float(moved), waited])]))
        norm = global_norm(self.model.parameters()) if train else torch.tensor(math.nan)
        meanwhile()
        values = torch.cat([summed[:-4].view(-1, 3)[:, 0] / divisors_T, summed[1:3], summed[-4:],
                            counts[len(terms):], norm.to(counts)[None]]).tolist()
        means, (correct, hidden, flops, sent_all, moved_all, waited_all, tokens, supervised, stops, norm_now) = (
            values[:len(terms)], values[len(terms):])
        return StepResult(loss=sum(term.scale * value for term, value in zip(terms, means, strict=True)),
                          terms={term.name: value for term, value in zip(terms, means, strict=True)},
                          accuracy=correct / hidden if hidden else math.nan, clean_tokens=int(tokens),
                          supervised=int(supervised), grad_norm=norm_now, stop=stops > 0, model_flops=flops,
                          wire_bytes=int(sent_all), cad_bytes=int(moved_all),
                          exposed_seconds=waited_all / runtime.world)

    def _micro_batch(self, work: Work, factors_T: Tensor, train: bool) -> Tensor:
        """Forward and, to train, backward of one pack. Returns its ``Losses.numbers``."""
        found: list[Tensor] = []

        def read(rows: Tensor, head: nn.Linear) -> Tensor:
            total, numbers = linear_cross_entropy(*enter_head(rows, head), work.batch.terms, factors_T,
                                                  self.logit_rows)
            found.append(numbers)
            return total

        with torch.set_grad_enabled(train):
            total = self.adapter.forward(self.model, work.batch, work.plan, read)
            if train:
                total.backward()
        return found[0]

    def _flops(self, works: Sequence[Work]) -> float:
        """Model FLOPs of this replica's packs, counted on its first rank."""
        if self.shape is None or not self.runtime.first_of_pack:
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
        fine = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        if fine:
            clip(self.model.parameters(), result.grad_norm, clip_norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return replace(result, updated=fine)

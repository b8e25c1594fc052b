"""The real training step on the ranks of the pool, and how to hold it against the oracle.

Everything that trains is csbp's own: layout, plan, scatter, adapter, FSDP2, step. The model is the oracle's
tiny one, in float64. Shapes: S local rows of a rank, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from oracle import Answer, exact_norms, oracle, tiny_model
from packs import MASK
from torch import Tensor, nn

from csbp.attention import interface
from csbp.attention.operator import BoundPlan
from csbp.checkpoint.huggingface import whole_tensor
from csbp.comm.transport import LocalTransport
from csbp.config.cad import pooled
from csbp.config.schema import CadConfig, NoiseConfig, ObjectiveConfig, ParallelConfig, RunConfig
from csbp.data.batch import PackedBatch
from csbp.diffusion.build import build_layout
from csbp.diffusion.layout import StreamLayout
from csbp.diffusion.loss import Head, linear_cross_entropy
from csbp.models.registry import get_adapter
from csbp.parallel.apply import parallelize
from csbp.parallel.runtime import start_runtime
from csbp.plan.cad import cad_of
from csbp.plan.counts import kind_counts
from csbp.plan.plan import PackPlan, plan_rank
from csbp.plan.shapes import ModelShape, model_shape
from csbp.plan.split import split_shape
from csbp.plan.wire import row_bytes, sent_rows
from csbp.train.scatter import scatter
from csbp.train.step import Noising, StepRunner, Work

EXACT = {"rtol": 0.0, "atol": 1e-10}


def noising(block_size: int, *, seed: int = 0, t_min: float = 0.3, t_max: float = 1.0, scope: str = "block",
            **objective: Any) -> Noising:
    """Noise and objective of a test; ``objective`` overrides fields of ``ObjectiveConfig``."""
    return Noising(ObjectiveConfig(block_size=block_size, **objective),
                   NoiseConfig(t_min=t_min, t_max=t_max, scope=scope), MASK, seed)


def layouts(packs: Sequence[PackedBatch], how: Noising, step: int = 0) -> list[StreamLayout]:
    """The packs' streams, as every rank lays them out."""
    return [build_layout(pack, how.objective, how.noise, mask_token_id=how.mask_token_id, seed=how.seed, step=step)
            for pack in packs]


def csbp_model(**shape: Any) -> nn.Module:
    """The oracle's model with csbp's attention."""
    interface.register()
    return tiny_model(attention=interface.NAME, **shape)


@dataclass(frozen=True)
class Share:
    """What one rank has after a step.

    Attributes:
        loss, terms, supervised: as logged, equal on every rank.
        grads: full gradients by parameter name; on rank 0 only.
        rows: for each of its micro-batches, numbers of its rows in [clean | noised]; -1 for a dummy.
        logits: [S, V] of those rows.
        asked: rows with a loss, over all micro-batches.
        sent_rows, sent_bytes: by label, of the step alone.
        plans: of its micro-batches, for all ranks that share them.
        planned_rows, planned_bytes: what it sends according to them.
        grad_norm: as logged.
    """

    loss: float
    terms: dict[str, float]
    supervised: int
    grads: dict[str, Tensor]
    rows: list[np.ndarray]
    logits: list[Tensor]
    asked: int
    sent_rows: dict[str, int]
    sent_bytes: dict[str, int]
    plans: list[PackPlan]
    planned_rows: Counter[str]
    planned_bytes: Counter[str]
    grad_norm: float


def only_document(layout: StreamLayout, document: int) -> StreamLayout:
    """The same rows with the losses of one document only."""
    geometry = layout.geometry
    lengths, block_rows = np.diff(geometry.document_starts), np.diff(geometry.block_starts)
    of_row = np.concatenate([np.repeat(np.arange(len(lengths)), lengths),
                             np.repeat(geometry.block_document, block_rows)])
    terms = []
    for term in layout.terms:
        kept = of_row[term.rows] == document
        terms.append(replace(term, rows=term.rows[kept], labels=term.labels[kept], weights=term.weights[kept],
                             masked=term.masked[kept], count=float(kept.sum())))
    return replace(layout, terms=tuple(terms))


def step_here(model: nn.Module, streams: Sequence[StreamLayout], clean: str) -> tuple[Tensor, list[Tensor]]:
    """The packed pass of every pack in this process, one rank: the total loss, and the logits of all rows."""
    adapter, total, logits = get_adapter("qwen3"), torch.zeros((), dtype=torch.float64), []
    counts = {term.name: sum(s.terms[i].count for s in streams) for i, term in enumerate(streams[0].terms)}
    with exact_norms():
        for layout in streams:
            plan = plan_rank(layout.geometry, adapter.layer_kinds(model, clean), 1, 0)
            work = Work(layout, scatter(layout, plan.rows), BoundPlan(plan, LocalTransport()))
            factors = torch.tensor([term.scale / max(counts[term.name], 1) for term in layout.terms],
                                   dtype=torch.float64)
            total = total + adapter.forward(
                model, work.batch, work.plan, lambda rows, head, batch=work.batch, factors=factors:
                linear_cross_entropy(rows[0], Head(head.weight), batch.terms, factors).total)
            rows = torch.from_numpy(held_rows(work))
            logits.append(every_row(adapter, model, work)[torch.argsort(rows)])
    return total, logits


def step_on_ranks(packs: Sequence[PackedBatch], how: Noising, csbp: int | None = None,
                  document: int | None = None, parallel: Mapping[str, Any] | None = None,
                  shape: Mapping[str, Any] | None = None, cad: Mapping[str, Any] | None = None) -> Share:
    """One step without the update, on the ranks of the current process group (run it through ``ranks``).

    Args:
        packs, how: the step's input.
        csbp: size of the sequence axis, by default all ranks.
        document: if given, only this document of every pack has a loss.
        parallel: further fields of ``ParallelConfig``.
        shape: fields of the model's configuration.
        cad: fields of ``CadConfig``; moves are then free of charge, so that even small packs have some.
    """
    config = ParallelConfig(nproc=dist.get_world_size(), csbp=csbp, device="cpu", **parallel or {})
    run = RunConfig(parallel=config, cad=CadConfig(enabled=cad is not None, **cad or {}))
    runtime = start_runtime(config, lambda: Path("unused"), pooled=pooled(run))
    adapter, model = get_adapter("qwen3"), csbp_model(**shape or {})
    parallelize(model, adapter.units(model), config, runtime, torch.float64, adapter.tp_plan(model))
    sizes = model_shape(adapter.export_config(model, {}), how.objective.clean_stream)
    moving = cad_of(run, sizes, "cpu")
    if moving is not None:
        moving = replace(moving, device=replace(moving.device, near_link=1e18, far_link=1e18), itemsize=8,
                         gradient_itemsize=8)
    runner = StepRunner(model, adapter, runtime, "reference", sizes if moving else None, cad=moving,
                        overlap=run.cad.overlap != "none")
    plans, works = kept_plans(runner), runner.prepare(packs, how, step=0)
    if document is not None:
        alone = [only_document(work.layout, document) for work in works]
        works = [replace(work, layout=layout, batch=scatter(layout, work.plan.rank_plan.rows))
                 for work, layout in zip(works, alone, strict=True)]
    with exact_norms():
        result = runner.run(works, train=True)
        sent = dict(runtime.transport.sent_rows), dict(runtime.transport.sent_bytes)
        grads = {name: whole_tensor(p.grad) for name, p in model.named_parameters()}
        logits = [every_row(adapter, model, work) for work in works]
    return Share(result.loss, result.terms, result.supervised, grads if runtime.main else {},
                 [held_rows(work) for work in works], logits,
                 sum(len(work.batch.loss_rows) for work in works), *sent, plans,
                 *planned(plans, runtime.plan_rank, split_shape(sizes, runtime.tp), config.checkpointing),
                 result.grad_norm)


def every_row(adapter: Any, model: nn.Module, work: Work) -> Tensor:
    """Logits [S, V] of all local rows, not only of those with a loss."""
    batch = replace(work.batch, loss_rows=torch.arange(len(work.batch.tokens)))
    with torch.no_grad():
        return adapter.forward(model, batch, work.plan)


def held_rows(work: Work) -> np.ndarray:
    """Numbers of a rank's rows in [clean | noised] of the pack, -1 for a dummy."""
    rows = work.plan.rank_plan.rows
    return np.concatenate([rows.clean, np.where(rows.noised < 0, -1, work.layout.geometry.num_clean + rows.noised)])


def kept_plans(runner: StepRunner) -> list[PackPlan]:
    """A list that the runner's plans are put into as it makes them, one for each micro-batch."""
    made, plan = [], runner._plan

    def kept(*args: Any) -> PackPlan:
        made.append(plan(*args))
        return made[-1]

    runner._plan = kept
    return made


def planned(plans: Sequence[PackPlan], rank: int, shape: ModelShape,
            checkpointing: str = "none") -> tuple[Counter[str], Counter[str]]:
    """Rows and bytes in float64, by label, that a rank sends in a step as ``csbp plan`` counts them, all layers of
    every kind together. ``shape``: of one rank's heads."""
    rows, sizes = Counter[str](), Counter[str]()
    for plan, part in itertools.product(plans, shape.attention):
        sent = sent_rows(kind_counts(plan, part.kind))
        width = row_bytes(part.heads, part.kv_heads, part.head_dim, part.head_dim, 8)
        for side, times in ((width.forward, 1 + (checkpointing == "full")), (width.backward, 1)):
            for label, size in side.items():
                number = times * part.count * int(sent[label][rank])
                rows[label] += number
                sizes[label] += number * size
    return rows, sizes


def assert_sent_as_planned(shares: Sequence[Share]) -> None:
    """Each rank sent the rows and bytes of its plans and no others."""
    for share in shares:
        assert Counter(share.sent_rows) == share.planned_rows  # what is not there is 0
        assert Counter(share.sent_bytes) == share.planned_bytes


def expected(packs: Sequence[PackedBatch], how: Noising, **shape: Any) -> Answer:
    """The oracle's answer to the same step; ``shape`` overrides fields of the model's configuration."""
    with exact_norms():
        return oracle(tiny_model(**shape), layouts(packs, how), how.objective.block_size, how.objective.clean_stream)


def assert_same_grads(found: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    """Every parameter's gradient, by name."""
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, **(tolerance or EXACT),
                                   msg=lambda text, name=name: f"gradient of {name}: {text}")


def assert_exact(shares: Sequence[Share], answer: Answer, packs_of_rank: Sequence[Sequence[int]]) -> None:
    """Loss, terms, all logits and all gradients to 1e-10.

    Args:
        shares: by rank.
        answer: the oracle's.
        packs_of_rank: for each rank, the pack of each of its micro-batches, -1 for an empty one.
    """
    for share in shares:
        assert abs(share.loss - answer.loss) <= 1e-10
        assert share.terms.keys() == answer.terms.keys()
        assert all(abs(share.terms[name] - value) <= 1e-10 for name, value in answer.terms.items())
    assert_same_grads(shares[0].grads, answer.grads)
    held: dict[int, list[np.ndarray]] = {pack: [] for pack in range(len(answer.logits))}
    for share, packs in zip(shares, packs_of_rank, strict=True):
        for pack, rows, logits in zip(packs, share.rows, share.logits, strict=True):
            real = rows >= 0
            if pack < 0:
                assert not real.any()
                continue
            torch.testing.assert_close(logits[real], answer.logits[pack][rows[real]], **EXACT)
            held[pack].append(rows[real])
    for pack, rows in held.items():  # each row on exactly one rank
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(len(answer.logits[pack])))

"""Whole models on simulated ranks: csbp's own training step, one thread a rank, no processes.

Every rank has a copy of the model, unsharded; their gradients are added afterwards, as FSDP would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exact import Share, csbp_model, every_row, held_rows, kept_plans, planned
from oracle import exact_norms
from torch import Tensor, nn

from csbp.comm.loopback import LoopbackTransport, LoopbackWorld, run_threads
from csbp.data.batch import PackedBatch
from csbp.models.registry import get_adapter
from csbp.parallel.runtime import Runtime
from csbp.plan.shapes import model_shape
from csbp.train.step import Noising, StepRunner


class LoopbackRuntime(Runtime):
    """A simulated rank's place in a run whose ranks all lie on the sequence axis."""

    transport: LoopbackTransport

    def __init__(self, transport: LoopbackTransport, scheme: str = "csbp", exchange: str = "exact") -> None:
        none: Any = None  # nothing is sharded
        super().__init__(rank=transport.rank, world=transport.world, local_rank=transport.rank,
                         device=torch.device("cpu"), dp=1, csbp=transport.world, shard_mesh=none,
                         transport=transport, run_dir=Path("unused"), scheme=scheme, exchange=exchange)

    def summed(self, values: Tensor) -> Tensor:
        """Sums over all ranks, in rank order."""
        return torch.stack(self.transport.gather(values, "a sum")).sum(0)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.transport.gather(value, "a broadcast")[0]


@dataclass(frozen=True)
class SimulatedShare(Share):
    """What one rank has after a step; its gradients are its own part of the sum.

    Attributes:
        counts: for each micro-batch, bool by row: the row's loss counts here.
    """

    counts: list[np.ndarray]


def step_on_threads(world: int, packs: Sequence[PackedBatch], how: Noising, scheme: str = "csbp",
                    exchange: str = "exact", model: Callable[[], nn.Module] = csbp_model) -> list[SimulatedShare]:
    """One step without the update, on ``world`` simulated ranks; their shares by rank."""
    adapter = get_adapter("qwen3")

    def work(transport: LoopbackTransport) -> SimulatedShare:
        own = model()
        runner = StepRunner(own, adapter, LoopbackRuntime(transport, scheme, exchange), "reference")
        plans, works = kept_plans(runner), runner.prepare(packs, how, step=0)
        result = runner.run(works, train=True)
        sent = dict(transport.sent_rows), dict(transport.sent_bytes)
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.named_parameters()}
        logits = [every_row(adapter, own, one) for one in works]
        held = [one.plan.rank_plan.rows for one in works]
        shape = model_shape(adapter.export_config(own, {}), how.objective.clean_stream)
        return SimulatedShare(
            result.loss, result.terms, result.supervised, grads, [held_rows(one) for one in works], logits,
            sum(len(one.batch.loss_rows) for one in works), *sent, plans, *planned(plans, transport.rank, shape),
            result.grad_norm, [np.concatenate([rows.answers, rows.noised >= 0]) for rows in held])

    with exact_norms():  # patches the class, so once for all threads
        return run_threads(LoopbackWorld(world), work)


def summed_grads(shares: Sequence[SimulatedShare]) -> dict[str, Tensor]:
    """The gradients of the whole, in rank order."""
    return {name: torch.stack([share.grads[name] for share in shares]).sum(0) for name in shares[0].grads}

"""One kernel on one pack: held against float64, then timed, forward and backward apart.

Legend: S local rows, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csbp.attention.core import BACKENDS, default_scale
from csbp.attention.operator import BoundPlan
from csbp.bench.check import DTYPES, LIMITS, Inputs, draw, errors
from csbp.bench.clock import by_rank, slowest, spread, time_parts
from csbp.bench.packs import geometry_of
from csbp.bench.records import GIB
from csbp.bench.resident import ResidentTransport
from csbp.comm.transport import LocalTransport, Transport
from csbp.config.bench import BenchAttentionConfig
from csbp.parallel.runtime import Runtime
from csbp.plan.counts import attended_pairs
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import RankPlan, plan_rank
from csbp.plan.shapes import BACKWARD_PAIRS

Launch = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Job:
    """One pack on this rank.

    Attributes:
        ranks: of the sequence axis.
        pairs: attended pairs of what one rank has to do: an equal share of the pack.
        held: int64 [S], numbers of the rank's rows in [clean | noised], -1 for a dummy.
    """

    case: BenchAttentionConfig
    geometry: Geometry
    kind: LayerKind
    ranks: int
    plan: RankPlan
    pairs: float
    held: np.ndarray


def plan_job(case: BenchAttentionConfig, length: int, world: int, rank: int) -> Job:
    """This rank's part of a pack of ``length`` clean tokens."""
    geometry, kind = geometry_of(case, length)
    ranks = 1 if case.kind == "data" else world
    plan = plan_rank(geometry, (kind,), ranks, rank % ranks, exchange=case.exchange,
                     scheme="csbp" if case.kind == "data" else case.kind)
    noised = plan.rows.noised
    held = np.concatenate([plan.rows.clean, np.where(noised < 0, -1, geometry.num_clean + noised)])
    return Job(case, geometry, kind, ranks, plan, attended_pairs(geometry, kind) / ranks, held)


def measure_backend(runtime: Runtime, job: Job, name: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """The numbers of one row, equal on every rank; {"error": ...} for a kernel that is wrong. Collective.

    Args:
        tell: gets what is being done.
    """
    case = job.case
    transport: Transport = runtime.transport if job.ranks > 1 else LocalTransport()
    plan = BoundPlan(job.plan, transport, runtime.device, name, stages=runtime.stages)
    launch = launcher(plan, job, name)
    found = errors(runtime, case, job.geometry, job.kind, job.held, launch)
    row: dict[str, Any] = {f"error_{part}": error for part, error in found.items()}
    worst = max(found.values(), key=lambda error: (error != error, error))
    if not worst <= LIMITS[case.dtype]:
        return {**row, "error": f"wrong by {worst:.1e}, at most {LIMITS[case.dtype]:g} is rounding; not timed"}
    tell(f"right within {worst:.1e}; timing")
    parts, peak = _time(runtime, job, launch)
    forward, backward, both = (spread(x) for x in (parts[:, 0], parts[:, 1], parts.sum(1)))
    flops = 4.0 * case.heads * case.head_dim * job.pairs
    row |= {"forward_ms": forward.median, "forward_iqr_ms": forward.iqr, "backward_ms": backward.median,
            "backward_iqr_ms": backward.iqr, "ms": both.median, "iqr_ms": both.iqr, "runs": len(parts),
            "forward_tflops": flops / forward.median / 1e9,
            "backward_tflops": BACKWARD_PAIRS * flops / backward.median / 1e9,
            "forward_backward_tflops": (1 + BACKWARD_PAIRS) * flops / both.median / 1e9, "peak_gib": peak}
    received = received_bytes(job, DTYPES[case.dtype].itemsize)
    everyone = by_rank(runtime, [received])
    row |= {"bytes_received": int(everyone.max()), "bytes_received_mean": float(everyone.mean()),
            "gib_received": float(everyone.max()) / GIB}
    if plan.kinds[job.kind.name].stages:
        still = BoundPlan(job.plan, ResidentTransport(transport.rank, transport.world), runtime.device, name,
                          stages=runtime.stages)
        tell("timing without the exchange")
        alone, _ = _time(runtime, job, launcher(still, job, name))
        exposed = both.median - spread(alone.sum(1)).median
        row |= {"exposed_comm_ms": exposed, "exposed_comm_fraction": exposed / both.median}
    return row


def launcher(plan: BoundPlan, job: Job, name: str) -> Launch:
    """Attention of the rank's rows, differentiable: the distributed operator. On one device a kernel that has a
    backward of its own, made for a whole softmax, is called with it: no one would use another there."""
    whole = getattr(BACKENDS[name], "attend", None)
    if whole is not None and job.ranks == 1:
        mask = plan.kinds[job.kind.name].here
        return lambda query, key, value: whole(query, key, value, mask, default_scale(query, None))[0]
    return lambda query, key, value: plan.attend(job.kind.name, query, key, value, layer=0)


def _time(runtime: Runtime, job: Job, launch: Launch) -> tuple[np.ndarray, float | None]:
    """Milliseconds [runs, (forward, backward)] of the slowest rank, and the highest peak of memory in GiB, inputs
    included; None on a CPU. Collective."""
    case, device = job.case, runtime.device
    cuda = device.type == "cuda"
    inputs = [draw(case, len(job.held), device, case.seed + 100 * (runtime.rank + 1))]
    # Inputs that fit into the cache would be read from it; as many sets as do not.
    cache = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
    inputs += [draw(case, len(job.held), device, case.seed + 100 * (runtime.rank + 1) + turn)
               for turn in range(1, min(8, -(-2 * cache // inputs[0].bytes)))]
    sets = [Inputs(x.query.requires_grad_(), x.key.requires_grad_(), x.value.requires_grad_(), x.grad) for x in inputs]

    def run(turn: int) -> Iterator[None]:
        now = sets[turn % len(sets)]
        out = launch(now.query, now.key, now.value)
        yield
        torch.autograd.grad(out, (now.query, now.key, now.value), now.grad)
        yield

    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    parts = time_parts(runtime, run, warmup=case.warmup, repeats=case.repeats, seconds=case.seconds)
    peak = None
    if cuda:
        more = sum(x.bytes for x in sets[1:])
        peak = float(by_rank(runtime, [torch.cuda.max_memory_allocated(device) - more]).max()) / GIB
    return slowest(runtime, parts), peak


def received_bytes(job: Job, itemsize: int) -> int:
    """Bytes into this rank in one forward and backward: keys and values for each, and gradients of rows it has sent."""
    exchange = job.plan.kinds[job.kind.name].exchange
    row = 2 * job.case.kv_heads * job.case.head_dim * itemsize
    return row * (2 * sum(exchange.receive_counts) + sum(exchange.send_counts))


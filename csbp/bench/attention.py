"""``csbp bench attention``: the operator's forward and backward, first held against float64, then timed.

Legend: T clean rows, M noised rows, S local rows, R received rows, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csbp.attention.core import BACKENDS, default_scale
from csbp.attention.operator import BoundPlan
from csbp.bench.cases import attention_cases
from csbp.bench.causal import causal_tflops
from csbp.bench.check import DTYPES, LIMITS, Inputs, draw, errors
from csbp.bench.clock import by_rank, slowest, spread, time_parts
from csbp.bench.packs import geometry_of
from csbp.bench.records import GIB, Report, check_out, short_length, slow_link
from csbp.bench.resident import ResidentTransport
from csbp.comm.transport import LocalTransport, Transport
from csbp.config.bench import BenchAttentionConfig
from csbp.config.fields import nearest_name
from csbp.config.schema import ParallelConfig
from csbp.errors import ConfigError
from csbp.launch import started_ranks
from csbp.parallel.runtime import Runtime, start_runtime
from csbp.plan.counts import attended_pairs
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import RankPlan, plan_rank
from csbp.plan.shapes import BACKWARD_PAIRS

Launch = Callable[[Tensor, Tensor, Tensor], Tensor]
COLUMNS = {"forward_ms": "fwd ms", "backward_ms": "bwd ms", "iqr_ms": "IQR ms", "forward_tflops": "fwd TFLOP/s",
           "forward_backward_tflops": "fwd+bwd TFLOP/s", "ratio_to_causal": "/ causal", "ratio_to_flex": "/ flex",
           "peak_gib": "peak GiB", "gib_received": "GiB in", "exposed_comm_ms": "exposed ms", "error_out": "error"}


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


def run_attention(words: Sequence[str], *, json_only: bool = False, out: str = "") -> int:
    """Measure and say what was found. Collective, where torchrun has started ranks.

    Args:
        words: settings, ``key=value`` each.
        json_only: print one JSON list and nothing else.
        out: file of results to put the rows into.

    Returns:
        The exit code: 1 if a row could not be measured.

    Raises:
        ConfigError: a setting that cannot be measured here; before any measurement.
    """
    world = started_ranks() or 1
    cases = attention_cases(words, world)
    check_out(out)
    parallel = ParallelConfig(nproc=world, device=cases[0].device, threads=cases[0].threads)
    runtime = start_runtime(parallel, Path)
    backends = [usable_backends(case, runtime.device) for case in cases]
    report = Report("attention", words, runtime, COLUMNS, json_only, out)
    for case, names in zip(cases, backends, strict=True):
        for length in case.lengths:
            measure_pack(runtime, case, length, names, report)
    code = report.finish()
    runtime.close()
    return code


def usable_backends(case: BenchAttentionConfig, device: torch.device) -> list[str]:
    """The backends to measure, flex last but for plain torch.

    Raises:
        ConfigError: one that is named cannot compute this here.
    """
    known = [name for name in BACKENDS if name != "auto"]
    reasons = {name: _unusable(BACKENDS[name], case, device) for name in known}
    if "auto" in case.backends:
        able = [name for name in known if not reasons[name]]
        return [name for name in able if name != "reference"] or able
    for name in case.backends:
        if name not in known:
            raise ConfigError("backends", name, nearest_name(name, ["auto", *known], "backends"))
        if reasons[name]:
            raise ConfigError("backends", name, f"cannot run {case.name!r} here: {reasons[name]}")
    return list(dict.fromkeys(case.backends))


def _unusable(backend: Any, case: BenchAttentionConfig, device: torch.device) -> str:
    """What the backend says of itself, asked for what it wants to know."""
    ask = getattr(backend, "unusable", None)
    if ask is None:
        return ""
    known = {"device": device, "dtype": DTYPES[case.dtype], "key_dim": case.head_dim, "value_dim": case.head_dim,
             "deterministic": False}
    return ask(**{name: known[name] for name in inspect.signature(ask).parameters})


def plan_job(case: BenchAttentionConfig, length: int, world: int, rank: int) -> Job:
    """This rank's part of a pack of ``length`` clean tokens."""
    geometry, kind = geometry_of(case, length)
    ranks = 1 if case.kind == "data" else world
    plan = plan_rank(geometry, (kind,), ranks, rank % ranks, exchange=case.exchange,
                     scheme="csbp" if case.kind == "data" else case.kind)
    noised = plan.rows.noised
    held = np.concatenate([plan.rows.clean, np.where(noised < 0, -1, geometry.num_clean + noised)])
    return Job(case, geometry, kind, ranks, plan, attended_pairs(geometry, kind) / ranks, held)


def measure_pack(runtime: Runtime, case: BenchAttentionConfig, length: int, backends: Sequence[str],
                 report: Report) -> None:
    """One row for each backend, and what they are compared with. Collective."""
    job = plan_job(case, length, runtime.world, runtime.rank)
    causal = causal_tflops(runtime, case, length) if case.causal else None
    found: dict[str, dict[str, Any]] = {}
    for name in backends:
        report.progress(f"{case.name}, {short_length(length)}, {name}")
        try:
            found[name] = measure_backend(runtime, job, name)
        except Exception as error:  # a kernel that cannot be built says so in its own way; the others still count
            if runtime.world > 1:
                raise  # the other ranks may be waiting for this one
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
    flex = found.get("flex", {}).get("forward_backward_tflops")
    for name, row in found.items():
        forward, both = row.get("forward_tflops"), row.get("forward_backward_tflops")
        where = f", {case.kind}{slow_link()}" if runtime.world > 1 else ""
        report.add({
            "name": f"{case.name}, {short_length(length)}{where}, {name}", "gpus": runtime.world, "case": case.name,
            "kind": case.kind if runtime.world > 1 else "one", "backend": name, "tokens": length,
            "rows": length + job.geometry.num_noised, "documents": len(job.geometry.document_starts) - 1,
            "pairs": round(job.pairs * job.ranks), **row,
            "ratio_to_causal": both / causal[1] if both and causal else None,
            "ratio_to_causal_forward": forward / causal[0] if forward and causal else None,
            "causal_forward_backward_tflops": causal[1] if causal else None,
            "ratio_to_flex": both / flex if both and flex else None})


def measure_backend(runtime: Runtime, job: Job, name: str) -> dict[str, Any]:
    """The numbers of one row, equal on every rank; {"error": ...} for a kernel that is wrong. Collective."""
    case = job.case
    transport: Transport = runtime.transport if job.ranks > 1 else LocalTransport()
    plan = BoundPlan(job.plan, transport, runtime.device, name)
    launch = launcher(plan, job, name)
    found = errors(runtime, case, job.geometry, job.kind, job.held, launch)
    row: dict[str, Any] = {f"error_{part}": error for part, error in found.items()}
    worst = max(found.values(), key=lambda error: (error != error, error))
    if not worst <= LIMITS[case.dtype]:
        return {**row, "error": f"wrong by {worst:.1e}, at most {LIMITS[case.dtype]:g} is rounding; not timed"}
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
    if plan.kinds[job.kind.name].travels:
        still = BoundPlan(job.plan, ResidentTransport(transport.rank, transport.world), runtime.device, name)
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


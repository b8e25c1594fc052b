"""``csbp bench attention``: the operator's forward and backward, kernels side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from csbp.attention.core import BACKENDS
from csbp.attention.usable import unusable
from csbp.bench.cases import attention_cases, cpu_seconds, refuse_endless
from csbp.bench.causal import causal_tflops
from csbp.bench.check import DTYPES
from csbp.bench.kernels import measure_backend, plan_job
from csbp.bench.records import Report, check_out, short_length, slow_link
from csbp.config.bench import BenchAttentionConfig
from csbp.config.fields import nearest_name
from csbp.config.schema import ParallelConfig
from csbp.config.shared import shared_settings
from csbp.errors import ConfigError, met_by_all
from csbp.launch import before_ranks, started_ranks
from csbp.parallel.runtime import Runtime, start_runtime

COLUMNS = {"forward_ms": "fwd ms", "backward_ms": "bwd ms", "iqr_ms": "IQR ms", "forward_tflops": "fwd TFLOP/s",
           "forward_backward_tflops": "fwd+bwd TFLOP/s", "ratio_to_causal": "/ causal", "ratio_to_flex": "/ flex",
           "peak_gib": "peak GiB", "gib_received": "GiB in", "exposed_comm_ms": "exposed ms",
           "error_out": "error of out"}


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
    with before_ranks(), met_by_all():
        cases = attention_cases(words, world, torch.cuda.is_available())
        check_out(out)
        for case in cases:
            if not torch.cuda.is_available():
                refuse_endless(case, world)
    parallel = ParallelConfig(nproc=world, device=cases[0].device, threads=cases[0].threads)
    given = {f"{name} ({case.name})": value for case in cases for name, value in shared_settings(case).items()
             if name not in ("device", "threads")}  # a host's own
    runtime = start_runtime(parallel, Path, settings=given)
    with met_by_all():
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
    reasons = {name: unusable(name, device, DTYPES[case.dtype], case.head_dim) for name in known}
    if case.backends == ["auto"]:
        able = [name for name in known if not reasons[name]]
        return [name for name in able if name != "reference"] or able
    for name in case.backends:
        if name == "auto":
            raise ConfigError("backends", list(case.backends), "auto stands for all that can be used; name it alone")
        if name not in known:
            raise ConfigError("backends", name, nearest_name(name, ["auto", *known], "backends"))
        if reasons[name]:
            raise ConfigError("backends", name, f"cannot run {case.name!r} here: {reasons[name]}; use auto, or "
                                                "another")
    return list(dict.fromkeys(case.backends))


def measure_pack(runtime: Runtime, case: BenchAttentionConfig, length: int, backends: Sequence[str],
                 report: Report) -> None:
    """One row for each backend, and what they are compared with. Collective."""
    job = plan_job(case, length, runtime.world, runtime.rank)
    causal = causal_tflops(runtime, case, length) if case.causal else None
    found: dict[str, dict[str, Any]] = {}
    for name in backends:
        label = f"{case.name}, {short_length(length)}, {name}"
        on_cpu = runtime.device.type == "cpu"
        report.progress(label + (f": at least {cpu_seconds(case, job.pairs):,.0f} s" if on_cpu else ""))

        def tell(said: str, label: str = label) -> None:
            report.progress(f"{label}: {said}")

        try:
            found[name] = measure_backend(runtime, job, name, tell)
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

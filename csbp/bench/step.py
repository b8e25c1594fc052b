"""``csbp bench step``: whole optimizer steps on random tokens, variants of one run side by side."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from csbp.attention.usable import taken
from csbp.bench.cases import StepCase, step_cases
from csbp.bench.clock import by_rank, slowest, spread, time_parts
from csbp.bench.idle import idle_fraction
from csbp.bench.records import GIB, Report, check_out, slow_link
from csbp.comm.transport import Counting
from csbp.config.bench import BenchStepConfig
from csbp.config.cad import pooled
from csbp.config.mesh import axis_sizes
from csbp.config.schema import ParallelConfig, RunConfig
from csbp.config.shared import shared_settings
from csbp.data.batch import PackedBatch
from csbp.errors import met_by_all
from csbp.launch import before_ranks, started_ranks
from csbp.models.registry import get_adapter
from csbp.observe.accounting import utilisation
from csbp.parallel.repeatable import heed_determinism
from csbp.parallel.runtime import Runtime, choose_device, start_runtime
from csbp.plan.estimate import DEVICES
from csbp.plan.forecast import whole_pack
from csbp.plan.lengths import document_lengths, packs_of
from csbp.plan.limits import check_ranks, check_size, check_split, check_windows
from csbp.plan.shapes import model_shape
from csbp.plan_cli import plan_result
from csbp.train.ready import build_on_meta, check_kernels
from csbp.train.session import build_model, compute_dtype, make_ready
from csbp.train.step import Noising, StepResult, Work

COLUMNS = {"step_ms": "step ms", "step_iqr_ms": "IQR ms", "predicted_step_ms": "predicted",
           "tokens_per_second": "clean tok/s", "useful_tflops": "TFLOP/s/GPU", "mfu": "MFU",
           "ratio_to_first": "/ first", "peak_gib": "peak GiB", "wire_bytes": "wire", "exposed_comm_ms": "exposed ms",
           "exposed_comm_fraction": "exposed", "idle_fraction": "idle"}
CAD_COLUMNS = {"cad": "cad", "cad_bytes": "by cad"}  # where some variant has it


def run_step(words: Sequence[str], *, json_only: bool = False, out: str = "") -> int:
    """Measure and say what was found. Collective, where torchrun has started ranks.

    Args:
        words: settings of the benchmark and of the run, ``key=value`` each.
        json_only: print one JSON list and nothing else.
        out: file of results to put the rows into.

    Returns:
        The exit code: 1 if a variant could not be measured.

    Raises:
        ConfigError: a setting that cannot be measured here; before any measurement.
    """
    world = started_ranks() or 1
    with before_ranks():
        with met_by_all():
            cases = step_cases(words, world)
            check_out(out)
        for case in cases:
            for config in case.runs.values():
                check_step(config)
    first = next(iter(cases[0].runs.values()))
    heed_determinism(first)
    runtime = start_runtime(first.parallel, Path, pooled=pooled(first),
                            settings={**shared_settings(cases[0].bench), **shared_settings(first)})
    shared = any(config.cad.enabled for case in cases for config in case.runs.values())
    report = Report("step", words, runtime, COLUMNS | CAD_COLUMNS if shared else COLUMNS, json_only, out)
    meshes = {mesh_of(first): runtime}
    for case in cases:
        measure_case(case, meshes, report)
    code = report.finish()
    runtime.close()
    return code


def check_step(config: RunConfig) -> None:
    """Refuse a run whose model cannot be built, split, attended or shared among its ranks.

    Raises:
        ConfigError: it cannot.
    """
    adapter = get_adapter(config.model.family)
    model = build_on_meta(config, adapter)
    shape = model_shape(adapter.export_config(model, {}), config.objective.clean_stream)
    check_split(config.parallel.tp, shape)
    check_windows(adapter.layer_kinds(model, config.objective.clean_stream), config.objective)
    check_kernels(config, shape, choose_device(config.parallel.device, int(os.environ.get("LOCAL_RANK", 0))))
    lengths = document_lengths(config.data)
    check_size(lengths, config.objective.block_size, shape)
    pack = whole_pack(lengths, config.objective.block_size, noised=False)
    check_ranks(config.parallel, len(pack.cell_starts) - 1, "the measured pack")


def mesh_of(config: RunConfig) -> tuple[ParallelConfig, bool]:
    """What of a run decides how its ranks are grouped."""
    return replace(config.parallel, checkpointing="none", offload=False, compile=False), pooled(config)


def measure_case(case: StepCase, meshes: dict[tuple[ParallelConfig, bool], Runtime], report: Report) -> None:
    """One row for each variant. Collective.

    Args:
        meshes: those that were made already, so that variants on the same mesh use the same groups.
    """
    found: dict[str, dict[str, Any]] = {}
    for variant, config in case.runs.items():
        report.progress(f"{case.bench.name}, {variant}")
        runtime = meshes.get(mesh_of(config)) or start_runtime(config.parallel, Path, pooled=pooled(config))
        meshes[mesh_of(config)] = runtime
        try:
            found[variant] = measure_variant(runtime, case.bench, config)
        except Exception as error:  # the others can still be compared
            if runtime.world > 1:
                raise  # the other ranks may be waiting for this one
            found[variant] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        _free(runtime)
        speeds = {name: row.get("tokens_per_second") for name, row in found.items()}
        speed, first = speeds[variant], next(iter(speeds.values()))
        plain = next((speeds[name] for name in speeds if _flex_full(case.runs[name])), None)
        parallel, cad, lengths = config.parallel, config.cad, document_lengths(config.data)
        report.add({
            "name": f"{case.bench.name}, {variant}{slow_link()}", "gpus": parallel.nproc,
            "case": case.bench.name, "variant": variant, "kind": parallel.kind if parallel.nproc > 1 else "one",
            "backend": config.attention.backend, "checkpointing": parallel.checkpointing,
            "offload": parallel.offload, "compile": parallel.compile, "dtype": config.train.dtype,
            "cad": f"{cad.pool}, {cad.overlap}" if cad.enabled else "off",
            "tokens": sum(lengths), "documents": len(lengths), "packs_per_step": config.train.packs_per_step,
            "block_size": config.objective.block_size, **found[variant],
            "predicted_step_ms": predicted_ms(config) if runtime.main and runtime.device.type == "cuda" else None,
            "ratio_to_first": speed / first if speed and first else None,
            "ratio_to_flex_full": speed / plain if speed and plain else None})


def _flex_full(config: RunConfig) -> bool:
    """The plain way: FlexAttention, full checkpointing, nothing compiled."""
    parallel = config.parallel
    return config.attention.backend == "flex" and parallel.checkpointing == "full" and not parallel.compile


def measure_variant(runtime: Runtime, bench: BenchStepConfig, config: RunConfig) -> dict[str, Any]:
    """The numbers of one row, equal on every rank. Collective."""
    adapter, cuda = get_adapter(config.model.family), runtime.device.type == "cuda"
    with runtime.device:  # random weights are drawn there
        model = build_model(config, adapter)
    rows: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment, operator]
    parameters = sum(p.numel() for p in model.parameters())
    optimizer, runner = make_ready(config, runtime, adapter, model)
    mask = rows - 1 if config.model.mask_token_id is None else config.model.mask_token_id
    noising = Noising(config.objective, config.noise, mask, config.seed)
    results: list[StepResult] = []
    transport = runtime.transport
    assert isinstance(transport, Counting)

    def prepare(turn: int) -> list[Work]:
        return runner.prepare(synthetic_packs(config, rows - 1, turn), noising, turn)

    ahead = [prepare(0)]

    def run(turn: int) -> Iterator[None]:
        if turn == bench.warmup:
            transport.waits = [] if cuda else None
            if cuda:
                torch.cuda.reset_peak_memory_stats(runtime.device)
        result = runner.run(ahead.pop(), train=True, meanwhile=lambda: ahead.append(prepare(turn + 1)))
        results.append(runner.update(result, optimizer, config.optim.clip_norm))
        yield

    parts = time_parts(runtime, run, warmup=bench.warmup, repeats=bench.repeats, seconds=float("inf"))
    step, timed = spread(slowest(runtime, parts).sum(1)), results[bench.warmup:]
    if not all(result.updated for result in timed):
        return {"error": "a loss or gradient was not finite, so that not all steps updated the weights"}
    waited = 1e3 * float(np.mean([result.exposed_seconds for result in timed]))
    if cuda:
        waits, transport.waits = transport.waits or [], None
        waited = float(by_rank(runtime, [sum(a.elapsed_time(b) for a, b in waits) / len(timed)]).mean())
    last = timed[-1]
    seconds = step.median / 1e3
    idle = idle_fraction(runtime, lambda: next(run(len(results))))
    peak = by_rank(runtime, [torch.cuda.max_memory_allocated(runtime.device) / GIB]).max() if cuda else None
    known = cuda and "H200" in torch.cuda.get_device_name(runtime.device)
    assert runner.shape
    kernels = taken(config.attention.backend, runner.shape, runtime.device, compute_dtype(config),
                    config.train.deterministic)
    return {"backend": ", ".join(kernels), "parameters": parameters,
            "steps": len(timed), "step_ms": step.median, "step_iqr_ms": step.iqr,
            "tokens_per_second": last.clean_tokens / seconds,
            "useful_tflops": last.model_flops / seconds / runtime.world / 1e12,
            "mfu": utilisation(last.model_flops, seconds, runtime.world, DEVICES["h200"].peak) if known else None,
            "peak_gib": None if peak is None else float(peak), "wire_gib": last.wire_bytes / GIB,
            "wire_bytes": last.wire_bytes, "cad_bytes": last.cad_bytes, "exposed_comm_ms": waited,
            "exposed_comm_fraction": waited / step.median, "idle_fraction": idle, "loss": last.loss}


def synthetic_packs(config: RunConfig, vocabulary: int, step: int) -> list[PackedBatch]:
    """The packs of a step: the documents of data.document_lengths, pack after pack, or one of data.seq_len each, in
    random tokens below ``vocabulary``, all supervised."""
    found = []
    lengths = packs_of(config.data, config.train.packs_per_step)
    first = step * sum(map(len, lengths))
    for pack in lengths:
        edges = np.concatenate([[0], np.cumsum(pack)]).astype(np.int64)
        tokens = np.random.default_rng([config.seed, first]).integers(0, vocabulary, edges[-1])
        found.append(PackedBatch(tokens, edges, np.ones(len(tokens), bool), first + np.arange(len(pack))))
        first += len(pack)
    return found


def predicted_ms(config: RunConfig) -> float | None:
    """What ``csbp plan`` says of the step that is measured; None where its rates are not those of the kernels, or of
    layers that nobody compiles. Packs that differ between replicas are planned together for that, as they are with
    ``cad.pool=dp``."""
    parallel, cad = config.parallel, config.cad
    if not parallel.compile or config.attention.backend in ("flex", "reference"):
        return None
    apart = not cad.enabled and axis_sizes(parallel)[0] > 1 and parallel.kind in ("csbp", "data")
    if apart and parallel.exchange == "exact":
        config = replace(config, cad=replace(cad, enabled=True, pool="dp"))
    result = plan_result(config)
    return 1e3 * result.step_seconds(result.levelled.without if apart and result.levelled else result.chosen)


def _free(runtime: Runtime) -> None:
    """Forget what a variant has compiled and held."""
    torch._dynamo.reset()
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()

"""What ``csbp plan`` prints: a table of ranks, the alternatives, words; or one JSON object."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from csbp.observe.accounting import block_over_csbp
from csbp.observe.amounts import bytes_text, counted, parameters_text, seconds_text
from csbp.observe.cad_report import cad_columns, cad_json, cad_table, cad_title, cad_words
from csbp.observe.plan_result import PlanResult
from csbp.plan.counts import count_plan
from csbp.plan.forecast import contiguous, layer_pairs, max_over_mean_pairs
from csbp.plan.lengths import distribution
from csbp.plan.remedies import fullest, remedies

_WIDTH = 200  # of tables: their cells never wrap, whatever the terminal; its lines may


def as_json(result: PlanResult) -> dict[str, Any]:
    """The object of ``csbp plan --json``; bytes and seconds, per pack where not said otherwise."""
    chosen, shape, geometry = result.chosen, result.case.shape, result.case.geometry
    received = result.received(chosen)
    counts, seconds, memory = chosen.counts, chosen.seconds, chosen.memory
    loose = contiguous(chosen.plan) if chosen.plan.scheme != "context" else chosen.plan
    return {
        "experiment": result.experiment, "kind": result.kind, "world_size": result.settings.world,
        "csbp": chosen.ranks, "tp": result.settings.tp, "replicas": chosen.replicas, "device": result.device_name,
        "tokens": geometry.num_clean, "noised_rows": geometry.num_noised,
        "documents": len(geometry.document_starts) - 1, "blocks": geometry.num_blocks,
        "documents_used": result.documents.used or None, "documents_given": result.documents.given or None,
        "packs_planned": result.packs, "packs_per_step": result.packs_per_step,
        "parameters": shape.parameters, "active_parameters": shape.active_parameters,
        "max_over_mean_pairs": max_over_mean_pairs(shape, counts),
        "max_over_mean_pairs_contiguous": max_over_mean_pairs(shape, count_plan(loose)),
        "max_over_lower_bound": float(counts.cost.max()) / max(counts.bound, 1),
        "bytes_received_per_rank": result.formula(result.kind),
        "bytes_received_per_rank_context": result.formula("context"),
        "bytes_received_exact_mean": float(received.mean()), "bytes_received_exact_max": float(received.max()),
        "tp_bytes_received_per_rank": float(result.told.mean()), "exchange_stages": result.stages,
        "block_over_csbp_time": block_over_csbp(chosen.ranks, geometry.num_noised / geometry.num_clean),
        "peak_memory_bytes_per_rank": float(memory.total.max()), "fits": chosen.fits,
        "predicted_step_seconds": result.step_seconds(chosen), "predicted_pack_seconds": seconds.step,
        "predicted_tokens_per_second": result.tokens_per_second(chosen),
        "predicted_exposed_seconds": float(seconds.exposed.max()), "predicted_mfu": result.mfu,
        "model_flops": result.flops, **(cad_json(result, result.levelled) if result.levelled else {}),
        "ranks": _ranks_json(result),
        "alternatives": {kind: {
            "fits": found.fits, "peak_memory_bytes_per_rank": float(found.memory.total.max()),
            "predicted_step_seconds": result.step_seconds(found),
            "predicted_tokens_per_second": result.tokens_per_second(found),
            "bytes_received_exact_mean": float(result.received(found).mean())}
            for kind, found in result.found.items() if kind != result.kind},
        "checkpointing": {policy: {
            "fits": found.fits, "peak_memory_bytes_per_rank": float(found.memory.total.max()),
            "predicted_step_seconds": result.step_seconds(found)} for policy, found in result.policies.items()},
    }


def _ranks_json(result: PlanResult) -> list[dict[str, Any]]:
    chosen = result.chosen
    counts, seconds = chosen.counts, chosen.seconds
    whole = {"clean_rows": counts.clean, "noised_rows": counts.noised, "blocks": counts.blocks,
             "pairs": layer_pairs(result.case.shape, counts)}
    parts = {"bytes_received": result.received(chosen), "bytes_sent": result.sent(chosen),
             "attention_seconds": seconds.attention, "linear_seconds": seconds.linear,
             "exposed_seconds": seconds.exposed, "memory_bytes": chosen.memory.total}
    moved = cad_columns(result.levelled) if result.levelled else {}
    columns = {name: values.tolist() for name, values in {**whole, **parts, **moved}.items()}
    return [{"rank": rank, **{name: column[rank] for name, column in columns.items()}}
            for rank in range(chosen.plan.world)]


def show(result: PlanResult, console: Console | None = None) -> None:
    """Print the report; by default on stdout."""
    out = console or Console(highlight=False, soft_wrap=True, width=_WIDTH)
    chosen, shape, geometry = result.chosen, result.case.shape, result.case.geometry
    active = f", {shape.active_parameters / 1e9:.1f}B active" if shape.experts else ""
    out.print(Text(f"{result.experiment} on {result.settings.world} x {result.device_name}", style="bold"))
    packs = f"{result.packs} packs" if result.packs > 1 else "a pack"
    out.print(f"  {parameters_text(shape.parameters)} parameters{active}; {packs} of "
              f"{counted(geometry.num_clean, 'token')} in {counted(len(geometry.document_starts) - 1, 'document')}, "
              f"{counted(geometry.num_blocks, 'target block')}")
    split = result.settings.tp > 1
    mesh = f"dp={chosen.replicas} x csbp={chosen.ranks}" + (f" x tp={result.settings.tp}" if split else "")
    out.print(f"  parallel.kind={result.kind}: {mesh}, {counted(result.packs_per_step, 'pack')} a step, "
              f"checkpointing {result.settings.checkpointing}{', offloaded' * result.settings.offload}"
              f"{', compiled' * result.settings.compiled}")
    for line in _documents(result):
        out.print("  " + line, markup=False)
    out.print()
    out.print(_rank_table(result))
    out.print("\n  memory of the fullest rank: " + ", ".join(
        f"{name} {bytes_text(value)}" for name, value in fullest(chosen.memory).items()))
    out.print(f"  balance: pairs max/mean {max_over_mean_pairs(shape, chosen.counts):.3f}, work max/lower bound "
              f"{float(chosen.counts.cost.max()) / max(chosen.counts.bound, 1):.3f}")
    out.print(f"  bytes into a rank: {bytes_text(float(result.received(chosen).mean()))} mean, "
              f"{bytes_text(float(result.received(chosen).max()))} most; by the published all-gather formula "
              f"{bytes_text(result.formula(result.kind))}, context parallelism {bytes_text(result.formula('context'))}"
              + (f"; beside them {bytes_text(float(result.told.mean()))} of the tp axis" if split else ""))
    if result.stages > 1 and not result.levelled:
        now, once = chosen.seconds, result.at_once()
        out.print(f"  stages: keys come in up to {result.stages} (parallel.exchange_stages): a rank waits at most "
                  f"{now.exposed.max():.3f} s and attends {now.attention.max():.3f} s; in one stage "
                  f"{once.exposed.max():.3f} s and {once.attention.max():.3f} s")
    out.print()
    if result.levelled:
        out.print(cad_title(result, result.levelled))
        out.print(cad_table(result, result.levelled))
        out.print()
    for table in (_kind_table(result), *([] if result.levelled else [_policy_table(result)])):
        out.print(table)
        out.print()
    for line in verdict(result):
        out.print("  " + line)


def _documents(result: PlanResult) -> list[str]:
    """Which documents of ``data.document_lengths`` are planned, and for whom."""
    found, replicas = result.documents, result.chosen.replicas
    if not found.given:
        return []
    if found.used > found.given:
        which = f"the {counted(found.given, 'document')} of {found.source}, read {-(-found.used // found.given)} times"
    else:
        some = "all" if found.used == found.given else f"the first {found.used:,} of"
        which = f"{some} {counted(found.given, 'document')} of {found.source}"
    order = "as they were drawn" if distribution(found.source) else "in the file's order"
    short = result.case.geometry.num_clean
    lines = [f"{which}, {order}; training shuffles: csbp simulate draws many steps"
             + (f"; they fill {short:,} of {found.room:,} tokens" if short < found.room else "")]
    if replicas > 1 and result.chosen.together == 1:
        lines.append(f"one pack is planned, and taken for that of each of the {replicas} replicas"
                     + ("; with cad.enabled=true cad.pool=dp the packs of all are: compare the seconds of that report, "
                        "with and without cad, not those of this one" if result.kind in ("csbp", "data") else ""))
    return lines


def verdict(result: PlanResult) -> list[str]:
    """Whether disaggregation pays, which kinds fit the device, which is fastest, and whether plain data parallel would
    do."""
    lines = cad_words(result, result.levelled) if result.levelled else []
    fitting = [kind for kind, found in result.found.items() if found.fits]
    for kind, found in result.found.items():
        if not np.isfinite(result.device.memory):
            break
        need = f"{bytes_text(float(found.memory.total.max()))} of {bytes_text(result.device.memory)}"
        lines.append(f"{kind} {'fits' if found.fits else 'does not fit'}: the fullest rank needs {need}.")
    data, world = result.found.get("data"), result.settings.world // result.settings.tp
    if data is not None and result.kind != "data":
        # Judged with enough packs for every rank; whether the run has them is said beside it.
        packs = -(-result.packs_per_step // world) * world
        gain = result.tokens_per_second(data, packs) / result.tokens_per_second(result.chosen, packs) - 1
        if not data.fits:
            lines.append("Plain data parallel is out: a rank cannot hold a whole pack.")
        elif gain > 0.001:
            lines.append(f"Plain data parallel ({_settings(result, 'data')}) would be faster by {gain:.1%}: a rank can "
                         "hold a whole pack, and nothing travels.")
        else:
            lines.append(f"Plain data parallel ({_settings(result, 'data')}) fits and would not be faster.")
        if data.fits and result.packs_per_step % world:
            lines[-1] += f" That takes a multiple of {world} packs a step; the run has {result.packs_per_step}."
    idle = -result.packs_per_step % result.chosen.replicas if result.chosen.together == 1 else 0
    if idle:
        lines.append(f"{idle} of {result.chosen.replicas} replicas wait while the last packs of a step are trained: "
                     f"train.packs_per_step={result.packs_per_step}; a multiple of {result.chosen.replicas} would keep "
                     "all of them busy.")
    if fitting:
        best = max(fitting, key=lambda kind: result.tokens_per_second(result.found[kind]))
        lines.append(f"Fastest of those that fit: {_settings(result, best)}, "
                     f"{result.tokens_per_second(result.found[best]):,.0f} tokens/s.")
        if not result.settings.compiled and np.isfinite(result.device.memory):
            lines.append("Seconds are those of layers compiled with parallel.compile=true, which is not set: a step of "
                         "eager ones took about a third longer on an H200.")
    else:
        lines += _what_helps(result)
    return lines


def _settings(result: PlanResult, kind: str) -> str:
    """What to set for another kind, which is shown without disaggregation."""
    return f"parallel.kind={kind}" + (" cad.enabled=false" if result.levelled and kind != result.kind else "")


def _what_helps(result: PlanResult) -> list[str]:
    """What takes most where nothing fits, and the changes that would do most about it."""
    # Others than the run's kind would have to do without disaggregation, and then its own would take no more.
    tried = [result.chosen] if result.levelled else result.found.values()
    least = min(tried, key=lambda found: float(found.memory.total.max()))
    largest, size = max(fullest(least.memory).items(), key=lambda part: part[1])
    other = f"parallel.kind={least.kind}" if least.kind != result.kind else ""
    where = f" with {other}" if other else ""
    lines = [f"Nothing fits. The largest part of the fullest rank{where} is {largest}, {bytes_text(size)}. "
             "What would help:"]
    case = replace(result.case, geometry=least.plan.geometry, packs=result.case.packs if least.together > 1 else ())
    found = remedies(case, least, result.settings, result.device, least.plan.exchange)
    for remedy in found:
        words = f"{other} {remedy.words}".strip()
        lines.append(f"  {words}: {bytes_text(remedy.memory)}, {'fits' if remedy.fits else 'still too much'}")
    return [*lines, "  a shorter data.seq_len, or a smaller model"]


def _rank_table(result: PlanResult) -> Table:
    chosen, seconds = result.chosen, result.chosen.seconds
    table = Table("  rank", box=None, pad_edge=False, padding=(0, 1))
    for name in ("rows", "blocks", "pairs", "in", "out", "attention s", "linear s", "exposed s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    pairs, counts = layer_pairs(result.case.shape, chosen.counts), chosen.counts
    received, sent = result.received(chosen), result.sent(chosen)
    for rank in range(chosen.plan.world):
        table.add_row(f"  {rank}", f"{counts.rows[rank]:,}", f"{counts.blocks[rank]:,}", f"{pairs[rank]:.3e}",
                      bytes_text(received[rank]), bytes_text(sent[rank]), f"{seconds.attention[rank]:.3f}",
                      f"{seconds.linear[rank]:.3f}", f"{seconds.exposed[rank]:.3f}",
                      bytes_text(chosen.memory.total[rank]))
    return table


def _kind_table(result: PlanResult) -> Table:
    table = Table("  kind", box=None, pad_edge=False, padding=(0, 2))
    for name in ("s a step", "tokens/s", "exposed s", "in, mean", "memory", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {f"{'>' if kind == result.kind else ' '} {kind}": found for kind, found in result.found.items()}
    if result.levelled:
        rows["  without cad"] = result.levelled.without
    for name, found in rows.items():
        table.add_row(name, seconds_text(result.step_seconds(found)), f"{result.tokens_per_second(found):,.0f}",
                      f"{float(found.seconds.exposed.max()):.3f}", bytes_text(float(result.received(found).mean())),
                      bytes_text(float(found.memory.total.max())), "yes" if found.fits else "no")
    return table


def _policy_table(result: PlanResult) -> Table:
    table = Table("  checkpointing", box=None, pad_edge=False, padding=(0, 2))
    for name in ("s a step", "tokens/s", "memory", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy, found in result.policies.items():
        table.add_row(f"{'>' if policy == result.settings.checkpointing else ' '} {policy}",
                      seconds_text(result.step_seconds(found)), f"{result.tokens_per_second(found):,.0f}",
                      bytes_text(float(found.memory.total.max())), "yes" if found.fits else "no")
    return table

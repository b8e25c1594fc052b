"""``csbp simulate``: what steps of a cluster would take, from document lengths, shapes and measured costs. No GPU.

Every replica trains one pack a step, filled as training fills it. docs/cad.md says what is predicted, and how.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from csbp.config.cad import unpredicted
from csbp.config.compose import compose_flat, compose_run
from csbp.config.fields import nearest_name
from csbp.config.mesh import axis_sizes
from csbp.config.schema import DataConfig, RunConfig
from csbp.config.simulate import SimulateConfig
from csbp.config.validate import check_bounds, validate_plan
from csbp.data.packing import pack_documents
from csbp.errors import ConfigError
from csbp.observe.amounts import bytes_text, counted
from csbp.observe.plan_result import PlanResult
from csbp.plan.cad import cad_of
from csbp.plan.cluster import WAYS, Cluster, Outcome, simulate_step
from csbp.plan.documents import DISTRIBUTIONS
from csbp.plan.estimate import Device
from csbp.plan.lengths import distribution, longest, read_lengths
from csbp.plan.limits import MAX_AXIS
from csbp.plan.profiles import foreign
from csbp.plan_cli import plan_result, warn

_GIGA = 1e9
_PIPED_WIDTH = 120
_OWN = {field.name for field in dataclasses.fields(SimulateConfig)}
_WORDS = {"csbp": "ownership alone", "context": "zig-zag context parallelism",
          "data": "whole documents on ranks, variable-length packing"}


def run_simulate(words: Sequence[str], *, json_only: bool = False) -> int:
    """Simulate and say what came out.

    Args:
        words: settings of the simulation and of the run, ``key=value`` each. Without ``cad.pool`` ranks attend for
            those of other replicas too.
        json_only: print one JSON object and nothing else.

    Raises:
        ConfigError: settings that cannot be simulated.
    """
    asked = compose_flat("simulate", SimulateConfig, [word for word in words if _key(word) in _OWN])
    check_bounds(asked)
    asked = dataclasses.replace(asked, documents=distribution(asked.documents) or asked.documents)
    rest = [word for word in words if _key(word) not in _OWN]
    for key in (_key(word) for word in rest if "." not in _key(word)):
        if close := difflib.get_close_matches(key, _OWN, n=1, cutoff=0.7):
            raise ConfigError(key, ..., f"no such setting; did you mean {close[0]}?")
    config = compose_run(["cad.pool=dp", "cad.enabled=true", *rest])
    check_bounds(config)
    _check(config)
    validate_plan(config)
    result = plan_result(dataclasses.replace(config, cad=dataclasses.replace(config.cad, enabled=False)))
    device = _device(result.device, asked)
    cluster = _cluster(config, result, device)
    warn([*unpredicted(config), *foreign(config.cad.profile, cluster.cad.cost, result.device_name)])
    found: list[dict[str, Outcome]] = []
    packs = _packs(asked.documents, config, cluster.replicas)
    tokens = 0
    for _ in range(asked.steps):
        step = [next(packs) for _ in range(cluster.replicas)]
        tokens += sum(map(sum, step))
        found.append(simulate_step(result.case, step, config.objective.block_size, cluster))
    said = {**_about(config, asked, result, cluster), "tokens_per_step": tokens / asked.steps,
            **_summary(found, device)}
    print(json.dumps(said), flush=True) if json_only else _show(said)
    return 0


def _key(word: str) -> str:
    return word.partition("=")[0].strip()


def _check(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.kind != "csbp":
        raise ConfigError("parallel.kind", parallel.kind, "others are compared with csbp anyway; leave it out")
    if not config.cad.enabled:
        raise ConfigError("cad.enabled", False, "csbp is shown with and without it anyway; leave it out")
    if config.data.document_lengths:
        raise ConfigError("data.document_lengths", config.data.document_lengths, "is that of csbp plan; documents are "
                          "drawn from documents=FILE here")
    ranks = parallel.nproc // parallel.tp
    if ranks > MAX_AXIS:
        raise ConfigError("parallel.nproc", parallel.nproc, f"too many to simulate; at most {MAX_AXIS * parallel.tp:,}")


def _device(device: Device, asked: SimulateConfig) -> Device:
    near, far = (None if link is None else link * _GIGA for link in (asked.near_link, asked.far_link))
    return dataclasses.replace(device, near_link=near or device.near_link, far_link=far or device.far_link,
                               node=asked.node or device.node)


def _cluster(config: RunConfig, result: PlanResult, device: Device) -> Cluster:
    replicas, ranks, _ = axis_sizes(config.parallel)
    pooled = config.cad.pool == "dp"
    cad = cad_of(config, result.case.shape, result.device_name)
    assert cad is not None
    return Cluster(replicas, ranks, device, result.settings, dataclasses.replace(cad, device=device), pooled,
                   config.parallel.exchange)


def _packs(documents: str, config: RunConfig, count: int) -> Iterator[list[int]]:
    """Packs without end: windows of drawn documents, filled as training fills them.

    Raises:
        ConfigError: there is no such distribution, and no such file.
    """
    data, random = config.data, np.random.default_rng(config.seed)
    lengths = None
    if documents not in DISTRIBUTIONS:
        try:
            lengths = np.array(read_lengths(documents), np.int64)
        except ConfigError as error:
            names = nearest_name(documents, list(DISTRIBUTIONS), "or one of the distributions")
            raise ConfigError("documents", documents, f"{error.fix}; {names}") from error
    while True:
        drawn = (DISTRIBUTIONS[documents].draw(data.pack_window, random) if lengths is None else
                 random.choice(lengths, data.pack_window))
        whole = cut(drawn, data)
        for pack in pack_documents(whole, data.seq_len):
            yield whole[pack].tolist()


def cut(lengths: np.ndarray, data: DataConfig) -> np.ndarray:
    """Documents as training cuts them.

    Raises:
        ConfigError: one is too long, and ``data.long_documents`` is "error".
    """
    limit = longest(data)
    if data.long_documents == "error" and lengths.max() > limit:
        raise ConfigError("data.long_documents", "error", f"there are documents of {lengths.max():,} tokens, and "
                          f"{limit:,} are allowed; use split or truncate")
    if data.long_documents != "split":
        return np.minimum(lengths, limit)
    pieces = -(-lengths // limit)
    found = np.repeat(np.minimum(lengths, limit), pieces)
    found[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * limit
    return found


def _about(config: RunConfig, asked: SimulateConfig, result: PlanResult, cluster: Cluster) -> dict[str, Any]:
    device = cluster.device
    return {"simulation": True, "experiment": config.experiment, "device": result.device_name,
            "profile": cluster.cad.cost.name, "documents": asked.documents, "seed": config.seed, "steps": asked.steps,
            "world_size": config.parallel.nproc, "replicas": cluster.replicas, "csbp": cluster.ranks,
            "tp": config.parallel.tp, "pool": config.cad.pool, "tokens_per_replica": config.data.seq_len,
            "near_link_bytes_per_second": device.near_link, "far_link_bytes_per_second": device.far_link,
            "node": device.node}


def _summary(found: Sequence[dict[str, Outcome]], device: Device) -> dict[str, Any]:
    """Means over steps, and speedups of their sums: all ways train the same documents."""
    ways: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        steps = [each[way] for each in found]
        ways[way] = {
            "predicted_step_seconds": float(np.mean([step.seconds.step for step in steps])),
            "each_step_seconds": [step.seconds.step for step in steps],
            "busy_seconds_mean": float(np.mean([step.seconds.busy.mean() for step in steps])),
            "idle_share": 1 - sum(float(step.seconds.busy.mean()) for step in steps) / sum(
                step.seconds.step for step in steps),
            "max_over_mean_attention": float(np.mean([step.imbalance for step in steps])),
            "exposed_seconds_max": float(np.mean([step.seconds.exposed.max() for step in steps])),
            "bytes_received_mean": float(np.mean([step.received.mean() for step in steps])),
            "bytes_received_max": float(max(step.received.max() for step in steps)),
            "peak_memory_bytes_per_rank": float(max(step.memory.max() for step in steps)),
            "fits": all(step.fits for step in steps)}
    first = ways[WAYS[0]]["predicted_step_seconds"]
    return {"ways": ways, **{f"speedup_over_{way}": ways[way]["predicted_step_seconds"] / first for way in WAYS[1:]},
            "memory_bytes_per_rank": device.memory if np.isfinite(device.memory) else None}


def _show(said: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    if not out.is_terminal:
        out = Console(highlight=False, soft_wrap=True, width=_PIPED_WIDTH)
    out.print(f"[bold]simulation[/bold]: {said['experiment']} on {said['world_size']} x {said['device']}, nothing was "
              "measured but what the profile holds")
    mesh = f"dp={said['replicas']} x csbp={said['csbp']}" + (f" x tp={said['tp']}" if said["tp"] > 1 else "")
    near, far = (f"{said[f'{link}_link_bytes_per_second'] / _GIGA:g}" for link in ("near", "far"))
    links = f"links {near} and {far} GB/s, nodes of {said['node']}" if said["node"] < said["world_size"] else \
        f"links {near} GB/s, one node"
    out.print(f"  {mesh}, disaggregation among ranks of {'all replicas' if said['pool'] == 'dp' else 'a replica'} "
              f"(cad.pool={said['pool']})\n  {said['documents']} documents, seed {said['seed']}, a pack of "
              f"{said['tokens_per_replica']:,} tokens a replica; {counted(said['steps'], 'step')} of "
              f"{said['tokens_per_step']:,.0f} tokens; {links}\n", markup=False)
    table = Table("  ", box=None, pad_edge=False, padding=(0, 2))
    for name in ("s a step", "idle", "attention max/mean", "exposed s", "in, mean", "in, most", "memory", "fits"):
        table.add_column(name, justify="right")
    for way, row in said["ways"].items():
        table.add_row(f"  {way}", f"{row['predicted_step_seconds']:.3f}", f"{row['idle_share']:.1%}",
                      f"{row['max_over_mean_attention']:.3f}", f"{row['exposed_seconds_max']:.3f}",
                      *(bytes_text(row[key]) for key in ("bytes_received_mean", "bytes_received_max",
                                                         "peak_memory_bytes_per_rank")),
                      "yes" if row["fits"] else "no")
    out.print(table)
    out.print()
    first = said["ways"][WAYS[0]]["each_step_seconds"]
    for way in WAYS[1:]:
        each = [other / own for other, own in zip(said["ways"][way]["each_step_seconds"], first, strict=True)]
        over = f"; {min(each):.2f} to {max(each):.2f} in single steps" if len(each) > 1 else ""
        out.print(f"  csbp+cad is {said[f'speedup_over_{way}']:.2f} times as fast as {way} ({_WORDS[way]}){over}")

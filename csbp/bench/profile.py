"""``csbp bench profile``: what attention costs on this device, from launches of many shapes, for csbp to plan by.

The launches are those of training (packs of few and of many documents, a window) and those of a rank that computes for
others (some rows with a long run of keys). Each is timed forward and backward; costs of a tile, a segment, a pair and
a launch are fitted to the medians (docs/cad.md).
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from csbp.attention.core import BACKENDS, choose, interval_attention
from csbp.attention.mask import IntervalMask
from csbp.attention.usable import unusable
from csbp.bench.cases import NO_GPU
from csbp.bench.check import DTYPES
from csbp.bench.clock import spread, time_parts
from csbp.bench.packs import document_lengths
from csbp.bench.records import expect_place, replace_text, versions
from csbp.config.bench import BenchAttentionConfig, BenchProfileConfig
from csbp.config.compose import compose_flat
from csbp.config.fields import nearest_name
from csbp.config.schema import ParallelConfig
from csbp.config.validate import check_bounds
from csbp.errors import ConfigError
from csbp.launch import started_ranks
from csbp.parallel.runtime import Runtime, start_runtime
from csbp.plan.cost import launch_work
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.profiles import FORMAT, as_json, errors, fit, load_profile, predicted
from csbp.plan.ranges import RowRanges, clean_ranges, join, noised_ranges
from csbp.plan.tasks import TILE

_WIDTH = 150


@dataclass(frozen=True)
class Launch:
    """One shape: what S query rows see of some keys."""

    name: str
    ranges: RowRanges
    keys: int


def run_profile(words: Sequence[str], *, json_only: bool = False, out: str = "") -> int:
    """Measure, fit, say how well it fits, and write the profile.

    Args:
        words: settings, ``key=value`` each.
        json_only: print the profile and nothing else.
        out: file to write, as the setting of that name.

    Raises:
        ConfigError: a setting that cannot be measured here; before any measurement.
    """
    case = compose_flat("bench_profile", BenchProfileConfig, [*words, *([f"out={out}"] if out else [])])
    check_bounds(case)
    cuda = case.device != "cpu" and torch.cuda.is_available()
    if case.device == "cuda" and not cuda:
        raise ConfigError("device", "cuda", NO_GPU)
    case = suited(case, cuda)
    _check(case)
    runtime = start_runtime(ParallelConfig(device=case.device, threads=case.threads), Path)
    assert case.head_dim
    dtype, device = DTYPES[case.dtype], runtime.device
    backend = case.backend
    if backend == "auto":
        backend = choose(device, dtype, case.head_dim, case.head_dim, False)
    elif reason := unusable(backend, device, dtype, case.head_dim):
        raise ConfigError("backend", backend, f"cannot run here: {reason}")
    rows = []
    for launch in launches(case, short=not cuda):
        print(f"csbp: measuring {launch.name}", file=sys.stderr, flush=True)
        rows.append(measure(runtime, case, launch, backend))
    processor = torch.cuda.get_device_name(device) if cuda else _cpu_name()
    about = {"name": case.name or processor, "device": processor, "backend": backend}
    # On a GPU launches follow each other: what starting one takes is in none of the times.
    profile = made(case, about, rows, launch=not cuda)
    print(json.dumps(profile), flush=True) if json_only else show(profile)
    if case.out:
        replace_text(Path(case.out).expanduser(), json.dumps(profile, indent=1) + "\n")
        print(f"written to {case.out}", file=sys.stderr if json_only else sys.stdout)
    runtime.close()
    return 0


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _check(case: BenchProfileConfig) -> None:
    assert case.heads and case.kv_heads
    if (started_ranks() or 1) > 1:
        raise ConfigError("ranks", started_ranks(), "a profile is of one device; start csbp bench profile by itself")
    if case.heads % case.kv_heads:
        raise ConfigError("kv_heads", case.kv_heads, f"must divide heads={case.heads}")
    if case.backend not in BACKENDS:
        raise ConfigError("backend", case.backend, nearest_name(case.backend, list(BACKENDS), "backends"))
    if case.out:
        expect_place("out", case.out)
        if Path(case.out).expanduser().exists():
            try:
                load_profile(case.out)
            except ConfigError as error:
                raise ConfigError("out", case.out, "is there and holds no profile, which would be lost; name another "
                                                   "file") from error


def launches(case: BenchProfileConfig, short: bool = True) -> Iterator[Launch]:
    """The shapes that are measured, from ``case.rows`` query rows down; ``short``: also some that a GPU is through
    with before a host has started them."""
    assert case.rows is not None
    tokens, block = case.rows // 2, case.block_size
    for count in (1, 4, 16):
        yield _pack(f"{count} document(s)", [tokens // count] * count, block)
    yield _pack("short document", [tokens // 4], block)
    yield _pack("documents of two tiles", [2 * TILE] * max(tokens // (2 * TILE), 1), block)
    uneven = BenchAttentionConfig(documents="packed", median=max(tokens // 32, 1), longest=tokens // 2, seed=case.seed)
    yield _pack("ragged documents", document_lengths(uneven, tokens), block)
    yield _pack("window", [tokens], block, window=max(tokens // 16, block))
    for pieces, rows, keys in ((1, tokens // 4, tokens // 4), (2, tokens // 4, tokens // 2),
                               (4, tokens // 8, tokens // 4), (2, tokens // 16, tokens)):
        yield _served(pieces, rows, keys)
    for pieces, keys in ((1, tokens), (4, tokens), (1, tokens // 8), (8, tokens // 4)) if short else ():
        yield _served(pieces, TILE, keys)


def _pack(name: str, lengths: Sequence[int], block: int, window: int | None = None) -> Launch:
    """Both streams of a pack on one rank, every block a target."""
    geometry, kind = whole_pack(lengths, block, noised=True), LayerKind(window=window)
    clean = geometry.num_clean
    noised = noised_ranges(geometry, kind)
    noised = RowRanges(noised.prefix_start, noised.prefix_end, noised.block_start + clean, noised.block_end + clean)
    return Launch(f"{name}: {2 * clean} rows", join(clean_ranges(geometry, kind), noised), 2 * clean)


def _served(pieces: int, rows: int, keys: int) -> Launch:
    """What a rank computes for others: pieces of query rows, each with a run of keys of its own that all of it sees."""
    start = np.repeat(np.arange(pieces) * keys, rows)
    return Launch(f"{pieces} x {rows} rows by {keys} keys",
                  RowRanges(start, start + keys, np.zeros_like(start), np.zeros_like(start)), pieces * keys)


def suited(case: BenchProfileConfig, cuda: bool) -> BenchProfileConfig:
    """The sizes that were left to the device."""
    rows, heads, kv_heads, head_dim = (65536, 32, 8, 128) if cuda else (4096, 4, 2, 64)
    return replace(case, rows=case.rows or rows, heads=case.heads or heads, kv_heads=case.kv_heads or kv_heads,
                   head_dim=case.head_dim or head_dim,
                   dtype=case.dtype if case.dtype != "auto" else "bfloat16" if cuda else "float32")



def measure(runtime: Runtime, case: BenchProfileConfig, launch: Launch, backend: str) -> dict[str, Any]:
    """One row of a profile."""
    assert case.heads and case.kv_heads and case.head_dim
    device, dtype = runtime.device, DTYPES[case.dtype]
    ranges, random = launch.ranges, torch.Generator(runtime.device).manual_seed(case.seed)
    mask = IntervalMask.from_arrays(ranges.prefix_start, ranges.prefix_end, ranges.block_start, ranges.block_end,
                                    device)
    rows = len(mask)

    def normal(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, case.head_dim, generator=random, device=device, dtype=dtype)  # type: ignore[arg-type]

    leaves = [normal(rows, case.heads), normal(launch.keys, case.kv_heads), normal(launch.keys, case.kv_heads)]
    query, key, value = (x.requires_grad_() for x in leaves)
    grad = normal(rows, case.heads)

    def run(turn: int) -> Iterator[None]:
        out, _ = interval_attention(query, key, value, mask, backend=backend)
        yield
        torch.autograd.grad(out, (query, key, value), grad)
        yield

    # A single thread's own time is not lengthened by whatever else a CPU does.
    host = time.process_time if case.threads == 1 else time.perf_counter
    parts = time_parts(runtime, run, warmup=case.warmup, repeats=case.repeats, seconds=case.seconds, host=host)
    work = launch_work(ranges)
    forward, backward = (spread(x) for x in parts.T)
    return {"name": launch.name, "rows": rows, "keys": launch.keys, "tiles": int(work.tiles),
            "segments": int(work.segments), "pairs": int(work.pairs), "forward_ms": _short(forward.median),
            "forward_iqr_ms": _short(forward.iqr), "backward_ms": _short(backward.median),
            "backward_iqr_ms": _short(backward.iqr)}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def made(case: BenchProfileConfig, about: dict[str, str], rows: list[dict[str, Any]], *,
         launch: bool) -> dict[str, Any]:
    """The profile, as it is written. ``launch``: see ``fit``."""
    assert case.heads and case.kv_heads and case.head_dim
    model = fit(rows, name=about["name"], heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim,
                launch=launch)
    said = [{**row, **{f"predicted_{key}": _short(value) for key, value in predicted(model, row, case.heads).items()
                       if key != "ms"}} for row in rows]
    return {"format": FORMAT, **about, "date": time.strftime("%Y-%m-%d"), "versions": versions(),
            "dtype": case.dtype, "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim,
            "tile": TILE, "fit": as_json(model), "error": errors(model, rows, case.heads), "rows": said}


def show(profile: dict[str, Any]) -> None:
    """Print measured and predicted times side by side, the fit and its errors."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False, emoji=False)
    table = Table()
    for name in ("launch", "tiles", "segments", "pairs", "fwd ms", "predicted", "off", "bwd ms", "predicted", "off"):
        table.add_column(name, justify="left" if name == "launch" else "right")
    for row in profile["rows"]:
        times = []
        for key in ("forward_ms", "backward_ms"):
            guess = row[f"predicted_{key}"]
            times += [f"{row[key]:.3f}", f"{guess:.3f}", f"{guess / row[key] - 1:+.1%}"]
        table.add_row(row["name"], f"{row['tiles']:,}", f"{row['segments']:,}", f"{row['pairs']:,}", *times)
    console.print(table)
    for name in ("forward", "backward"):
        cost, error = profile["fit"][name], profile["error"][f"{name}_ms"]
        console.print(f"{name}: {cost['tile'] / 1e6:,.3f} ns a tile, {cost['segment'] / 1e6:,.3f} ns a segment, "
                      f"{cost['pair'] / 1e6:.3g} ns a pair, of one query head; off by {error['median']:.1%} in the "
                      f"median, {error['worst']:.1%} at worst", soft_wrap=True)
    console.print(f"a launch: {profile['fit']['launch'] / 1e9:,.1f} us; {profile['name']}, {profile['backend']}, "
                  f"{profile['date']}", soft_wrap=True)

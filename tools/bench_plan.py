"""How long planning takes on one core: ``python tools/bench_plan.py [--repeat 5] [--json FILE]``.

Milliseconds of processor time, medians: of one rank's plan from nothing (what a rank does once a step, all ranks' needs included), and
of every rank's plan (what ``csbp plan`` does). Beside them how well the plan is balanced and in how many runs a
rank holds its rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import PackPlan

KINDS = {"full": (LayerKind(),), "full+window": (LayerKind(), LayerKind("window", window=1024))}
CASES = [(1 << 17, 32, 8), (1 << 17, 32, 64), (1 << 19, 256, 64), (1 << 19, 32, 64), (1 << 19, 8, 64)]


def pack(total: int, block: int, packed: bool, seed: int = 0) -> Geometry:
    """One document, or documents of lognormal lengths (median 2K, longest 128K), with every block a target."""
    lengths = [total]
    if packed:
        random, lengths = np.random.default_rng(seed), []
        while sum(lengths) < total:
            length = int(np.clip(random.lognormal(np.log(2048), 1.2), 1, 128 << 10))
            lengths.append(min(length, total - sum(lengths)))
    edges = np.concatenate([[0], np.cumsum(lengths)])
    cells = np.concatenate([*(np.arange(a, b, block) for a, b in zip(edges[:-1], edges[1:], strict=True)), [total]])
    document = np.searchsorted(edges, cells[:-1], "right") - 1
    return Geometry(edges, cells, document, np.arange(len(document)), cells[:-1], cells)


def measure(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int, repeat: int) -> dict[str, float]:
    """Medians over ``repeat`` plans."""
    one, every = [], []
    for turn in range(repeat):
        start = time.process_time()
        plan = PackPlan(geometry, kinds, world)
        plan.rank_plan(turn % world)
        one.append(time.process_time() - start)
        for rank in range(world):
            plan.rank_plan(rank)
        every.append(time.process_time() - start)
    return {"one_rank_ms": 1e3 * statistics.median(one), "all_ranks_ms": 1e3 * statistics.median(every)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'tokens':>8} {'block':>5} {'ranks':>5} {'pack':>9} {'kinds':>12} {'one rank':>9} {'all ranks':>10}")
    for total, block, world in CASES:
        for packed in (False, True):
            for name, kinds in KINDS.items():
                found = measure(pack(total, block, packed), kinds, world, options.repeat)
                kind = "packed" if packed else "document"
                print(f"{total:>8} {block:>5} {world:>5} {kind:>9} {name:>12} {found['one_rank_ms']:>6.1f} ms "
                      f"{found['all_ranks_ms']:>7.0f} ms", flush=True)
                rows.append({"tokens": total, "block": block, "ranks": world, "pack": kind, "kinds": name, **found})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

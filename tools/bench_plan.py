"""How long planning takes on one core: ``python tools/bench_plan.py [--repeat 5] [--json FILE]``.

Milliseconds of processor time, medians: of one rank's plan from nothing (what a rank does once a step, all ranks'
needs included), the same with moves of attention in every layer kind (32 heads over 8, H200s between nodes),
of every rank's plan, and of counting them all (what ``csbp plan`` does). Beside them the fullest rank's cost over the
lower bound, the same over the mean if rows were dealt zig-zag over the whole pack, most rows over the mean, runs of
clean rows per rank, and the longest attention of a rank in a layer over the mean, in the kind where it is longest,
without moves and with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from csbp.plan.cad import Cad
from csbp.plan.counts import count_plan
from csbp.plan.disaggregate import CadSettings
from csbp.plan.estimate import DEVICES
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.profiles import load_profile
from csbp.plan.shapes import AttentionLayers, ModelShape
from csbp.plan.work import home_times, layer_rates

KINDS = {"full": (LayerKind(),), "full+window": (LayerKind(), LayerKind("window", window=1024))}
CASES = [(1 << 17, 32, 8), (1 << 17, 32, 64), (1 << 19, 256, 64), (1 << 19, 32, 64), (1 << 19, 8, 64), (1 << 20, 8, 64)]
# Median length of the documents of a pack, and its first document's share of the pack.
PACKS = {"document": (1, 1.0), "packed": (2048, 0.0), "short": (64, 0.0), "one long": (64, 0.5)}


def pack(total: int, block: int, median: int, first: float, seed: int = 0) -> Geometry:
    """A document with a share of the tokens, then documents of lognormal lengths (longest 128K), with every block a
    target."""
    random, lengths = np.random.default_rng(seed), [int(total * first)] if first else []
    drawn = np.clip(random.lognormal(np.log(median), 1.2, total // median), 1, 128 << 10).astype(np.int64)
    room = total - sum(lengths)
    drawn = drawn[:np.searchsorted(np.cumsum(drawn), room)]
    lengths += [*drawn.tolist(), room - int(drawn.sum())] if room else []
    edges = np.concatenate([[0], np.cumsum(lengths)])
    cells = np.concatenate([*(np.arange(a, b, block) for a, b in zip(edges[:-1], edges[1:], strict=True)), [total]])
    document = np.searchsorted(edges, cells[:-1], "right") - 1
    return Geometry(edges, cells, document, np.arange(len(document)), cells[:-1], cells)


def measure(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int, repeat: int) -> dict[str, float]:
    """Medians over ``repeat`` plans, and the balance of one."""
    times: dict[str, list[float]] = {"one_rank_ms": [], "with_moves_ms": [], "all_ranks_ms": [], "counts_ms": []}
    cad = moves_of(kinds)
    for turn in range(repeat):
        plan, start = PackPlan(geometry, kinds, world), time.process_time()
        plan.rank_plan(turn % world)
        times["one_rank_ms"].append(time.process_time() - start)
        for rank in range(world):
            plan.rank_plan(rank)
        times["all_ranks_ms"].append(time.process_time() - start)
        plan, start = PackPlan(geometry, kinds, world), time.process_time()
        moved = cad.moved(plan)
        moved.rank_plan(turn % world)
        times["with_moves_ms"].append(time.process_time() - start)
        plan, start = PackPlan(geometry, kinds, world), time.process_time()
        counts = count_plan(plan)
        times["counts_ms"].append(time.process_time() - start)
    zigzag = count_plan(PackPlan(geometry, kinds, world, "context")).cost
    return {name: round(1e3 * statistics.median(values), 1) for name, values in times.items()} | {
        "max_over_bound": round(counts.cost.max() / counts.bound, 3),
        "zigzag_max_over_mean": round(zigzag.max() / zigzag.mean(), 3),
        "rows_max_over_mean": round(counts.rows.max() / counts.rows.mean(), 3),
        "runs_per_rank": round(sum(len(runs.start) for runs in plan.holding.clean_runs) / world, 1),
        "attention_max_over_mean": fullest(moved, cad, moved=False),
        "with_moves_max_over_mean": fullest(moved, cad, moved=True)}


def moves_of(kinds: tuple[LayerKind, ...]) -> Cad:
    """What decides about moves, for layers of 32 query and 8 key heads of size 128 in bfloat16."""
    shape = ModelShape(tuple(AttentionLayers(kind, 16, 32, 8, 128) for kind in kinds), 4096, 14336, 131072, False)
    return Cad(CadSettings(), load_profile("h200", "profile"), shape, 2, 2, 1, DEVICES["h200"],
               row_seconds=3 * shape.row_flops / DEVICES["h200"].linear)


def fullest(plan: PackPlan, cad: Cad, *, moved: bool) -> float:
    """The longest attention of a rank over the mean, in the layer kind where that is most."""
    found = []
    for part in cad.shape.attention:
        moves = (plan.moves or {}).get(part.kind.name) if moved else None
        times = home_times(plan, part.kind, plan.pieces[part.kind.name], layer_rates(cad.cost, part), moves)
        found.append(times.max() / times.mean())
    return round(float(max(found)), 3)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for total, block, world in CASES:
        for which, made in PACKS.items():
            for name, kinds in KINDS.items():
                row = {"tokens": total, "block": block, "ranks": world, "pack": which,
                       "kinds": name, **measure(pack(total, block, *made), kinds, world, options.repeat)}
                if not rows:
                    print("  ".join(row))
                print("  ".join(f"{value:>{len(key)}}" for key, value in row.items()), flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

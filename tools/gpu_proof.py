"""Attention kernels held against float64 on a GPU: ``gpu_proof.py OUT.json [MASKS] [BACKEND[:DIM] ...]``.

Random packed masks per head size: out, dq, dk and dv of each backend (or of those named, ``flex:512`` at one head
size; OUT.json keeps the other rows) in bfloat16 against the reference in float64: one launch, two simulated ranks
(keys apart, in one to three stages, merged, gradients brought home), and two that attend rows for each other. Memory
is poisoned before each run, so that a value that nobody wrote shows. Exits with 1 if a bound is broken. In a small
pack of rows that see two or three keys, rounding to bfloat16 alone can cost more than the bound: then a kernel must
not cost more than that. Legend as in csbp.attention.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csbp.attention import flash, flex, reference, wide
from csbp.attention.core import BACKENDS
from csbp.attention.mask import IntervalMask
from csbp.attention.operator import BoundPlan
from csbp.attention.phases import backward_phases, forward_phases
from csbp.comm.loopback import LoopbackWorld
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.pieces import find_pieces
from csbp.plan.plan import PackPlan
from csbp.plan.stages import Stages
from csbp.plan.tasks import Moves

BOUND, TWO_RANKS, OVER_ROUNDING = 3e-3, 1.5, 1.02
SHAPES = ((8, 2, 64), (8, 2, 128), (4, 2, 256), (4, 4, 128), (8, 1, 96), (4, 1, 512))
NAMES = ("out", "dq", "dk", "dv")
# flash's two backwards, by how many processors its thread blocks must fill where each sees to a group of heads.
WAYS = {"heads together": 0, "heads apart": 1 << 30}


def draw(rng: np.random.Generator) -> tuple[Geometry, LayerKind]:
    """A pack of one to six documents, and a kind of layer."""
    lengths = [int(n) for n in rng.integers(1, 900, rng.integers(1, 7))]
    block = int(rng.choice([1, 4, 8, 32, 100, 256]))
    kind = LayerKind(clean=str(rng.choice(["block_causal", "token_causal"])),
                     window=int(rng.integers(block, 600)) if rng.random() < 0.4 else None,
                     in_block=str(rng.choice(["bidirectional", "causal"])))
    return whole_pack(lengths, block, noised=True), kind


def with_moves(rng: np.random.Generator, plan: PackPlan, kind: LayerKind) -> PackPlan:
    """The plan of two ranks with half of all pieces attended by the other rank, wholly or up to a random key."""
    pieces = find_pieces(plan, kind)
    go = np.flatnonzero(rng.random(len(pieces)) < 0.5)
    go = go[np.argsort(1 - pieces.owner[go], kind="stable")]
    dense = pieces.dense_high > pieces.dense_low
    cut = np.where(dense & (rng.random(len(pieces)) < 0.7),
                   rng.integers(pieces.dense_low, np.maximum(pieces.dense_high, pieces.dense_low) + 1), pieces.high)
    home = pieces.low.copy()
    home[go] = cut[go]
    return replace(plan, moves={kind.name: Moves(go, 1 - pieces.owner[go], pieces.low[go], cut[go], home, pieces.high)})


def apart(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def poison(gib: float = 2.0) -> None:
    """Leave NaN in the memory that the next results will lie in."""
    torch.full((int(gib * 2**28),), float("nan"), device="cuda")
    for _ in range(64):
        torch.full((1 << 16,), float("nan"), device="cuda")


def on_ranks(world: int, plan: PackPlan, kind: LayerKind, backend: str, inputs: Sequence[Tensor],
             scale: float, stages: int = 1) -> list[Tensor]:
    """out, dq, dk, dv [R, heads, D] of the whole pack, put together from simulated ranks."""
    transports = LoopbackWorld(world)
    bound = [BoundPlan(plan.rank_plan(rank), transports.transport(rank), "cuda", backend, stages=Stages(stages))
             for rank in range(world)]
    rows = []
    for one in bound:
        held = one.rank_plan.rows
        noised = np.where(held.noised < 0, -1, plan.geometry.num_clean + held.noised)
        rows.append(torch.from_numpy(np.concatenate([held.clean, noised])).cuda())
    mine = [[x[r.clamp(min=0)] for x in inputs] for r in rows]
    poison()
    done = transports.lock_step([forward_phases(q, k, v, b.kinds[kind.name], scale)
                                 for (q, k, v, _), b in zip(mine, bound, strict=True)])
    poison()
    grads = transports.lock_step([backward_phases(dout, q, k, v, out, lse, b.kinds[kind.name], scale)
                                  for (q, k, v, dout), b, (out, lse) in zip(mine, bound, done, strict=True)])
    whole = [torch.full_like(x, float("nan")) for x in (inputs[3], *inputs[:3])]
    for r, (out, _), three in zip(rows, done, grads, strict=True):
        for target, part in zip(whole, (out, *three), strict=True):
            target[r[r >= 0]] = part[r >= 0]
    return whole


def rounding(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: IntervalMask, scale: float,
             expected: Sequence[Tensor]) -> np.ndarray:
    """float64 [4]: errors of out, dq, dk and dv where only what tensor cores take, and the results, are rounded."""
    def half(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    seen, group, found = mask.dense(len(k)), q.shape[1] // k.shape[1], [torch.zeros_like(x) for x in expected]
    for head in range(q.shape[1]):
        key, value, mine = k[:, head // group], v[:, head // group], q[:, head]
        scores = (mine @ key.T * scale).masked_fill(~seen, -torch.inf)
        parts = (scores - scores.amax(1, keepdim=True)).exp().nan_to_num(0)
        total = parts.sum(1, keepdim=True).clamp(min=1e-300)
        out = half(half(parts) @ value / total)
        of_scores = half(parts / total * (dout[:, head] @ value.T - (out * dout[:, head]).sum(1, keepdim=True)))
        found[0][:, head], found[1][:, head] = out, of_scores @ key * scale
        found[2][:, head // group] += of_scores.T @ mine * scale
        found[3][:, head // group] += half(parts / total).T @ dout[:, head]
    return np.array([apart(half(a), b) for a, b in zip(found, expected, strict=True)])


def worst_of(backend: str, heads: int, kv_heads: int, dim: int, masks: int) -> dict[str, Any]:
    """Largest errors of one backend and head shape over random masks."""
    rng, scale = np.random.default_rng(dim + heads), dim ** -0.5
    one, two, moved, passed = *np.zeros((3, 4)), True
    for _ in range(masks):
        geometry, kind = draw(rng)
        rows = geometry.num_clean + geometry.num_noised
        inputs = [torch.randn(rows, n, dim, device="cuda", dtype=torch.bfloat16)
                  for n in (heads, kv_heads, kv_heads, heads)]
        q, k, v, dout = (x.double() for x in inputs)
        mask = BoundPlan(PackPlan(geometry, (kind,), 1).rank_plan(0), LoopbackWorld(1).transport(0),
                         "cuda", "reference").kinds[kind.name].here
        out, lse = reference.forward(q, k, v, mask, scale)
        expected = [out, *reference.backward(dout, q, k, v, out, lse, mask, scale)]
        apart_plan = PackPlan(geometry, (kind,), 2)
        for plan, errors in ((PackPlan(geometry, (kind,), 1), one), (apart_plan, two),
                             (with_moves(rng, apart_plan, kind), moved)):
            found = on_ranks(plan.world, plan, kind, backend, inputs, scale, int(rng.integers(1, 4)))
            now = np.array([apart(a, b) for a, b in zip(found, expected, strict=True)])
            np.maximum(errors, now, out=errors)
            if plan.world == 1 and np.any(now >= BOUND):
                alone = rounding(q, k, v, dout, mask, scale, expected)
                print(json.dumps({"rows": rows, "errors": now.tolist(), "rounding": alone.tolist()}), flush=True)
                passed &= bool(np.all(now < np.maximum(BOUND, OVER_ROUNDING * alone)))
    fine = passed and bool(np.all(np.maximum(two, moved) < TWO_RANKS * np.maximum(one, 1e-9)))
    return {"backend": backend, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "masks": masks,
            "one_rank": dict(zip(NAMES, one.tolist(), strict=True)),
            "two_ranks": dict(zip(NAMES, two.tolist(), strict=True)),
            "two_ranks_moved": dict(zip(NAMES, moved.tolist(), strict=True)), "fine": fine}


def usable(backend: str, dim: int) -> str:
    """Why a backend cannot take this head size; "" where it can."""
    reasons: dict[str, Callable[[], str]] = {
        "flash": lambda: flash.unusable(torch.device("cuda"), torch.bfloat16, dim, dim, False),
        "wide": lambda: wide.unusable(torch.device("cuda"), torch.bfloat16, dim, dim),
        "flex": lambda: flex.unusable(torch.device("cuda"), torch.bfloat16, dim, dim)}
    return reasons[backend]() if backend in reasons else ""


def rows_of(backend: str, dim: str, masks: int) -> Iterator[dict[str, Any]]:
    """What is found of one backend, head shape by head shape; of one head size, if it is given."""
    for shape in SHAPES:
        if dim and int(dim) != shape[2]:
            continue
        reason = usable(backend, shape[2])
        if reason:
            yield {"backend": backend, "head_dim": shape[2], "left_out": reason}
            continue
        for way in WAYS if backend == "flash" and shape[0] > shape[1] else ("",):
            started = time.time()
            if way:
                flash._hopper().PROCESSORS, flash._hopper().CACHED = WAYS[way], 1 << 60
            row = worst_of(backend, *shape, masks)
            yield row | ({"way": way} if way else {}) | {"seconds": round(time.time() - started)}


def main(out: Path, masks: int, names: Sequence[str]) -> int:
    """Check all, record."""
    torch._dynamo.config.recompile_limit = 64  # more head shapes than a model has
    names = names or [name for name in BACKENDS if name not in ("auto", "reference")]
    wanted = [(backend, dim) for backend, _, dim in (name.partition(":") for name in names)]
    older = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [row for row in older if not any(row["backend"] == backend and dim in ("", str(row["head_dim"]))
                                            for backend, dim in wanted)]
    for backend, dim in wanted:
        for row in rows_of(backend, dim, masks):
            rows.append(row | {"date": time.strftime("%Y-%m-%d")})
            print(json.dumps(row), flush=True)
    record = {"command": "python tools/gpu_proof.py", "device": torch.cuda.get_device_name(0), "bound": BOUND,
              "two_ranks_over_one": TWO_RANKS, "over_rounding": OVER_ROUNDING,
              "versions": {"python": platform.python_version(), "torch": torch.__version__}, "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(row.get("fine", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50, sys.argv[3:]))

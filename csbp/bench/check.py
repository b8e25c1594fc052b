"""Right before fast: some rows of the operator's result, and all that they give to gradients, against float64.

Legend: R = T + M rows of the pack [clean | noised], S local rows, E sampled rows, N query heads, K key/value heads,
D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from csbp.attention import reference
from csbp.attention.core import default_scale
from csbp.attention.mask import IntervalMask
from csbp.config.bench import BenchAttentionConfig
from csbp.parallel.runtime import Runtime
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ranges import clean_ranges, join, noised_ranges

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Largest relative error of a kernel that is right: half precision rounds to some 3e-3, tf32 to 3e-4.
LIMITS = {"bfloat16": 1e-2, "float32": 1e-3}


@dataclass
class Inputs:
    """Standard normal numbers. query, grad (of the output) [rows, N, D]; key, value [rows, K, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor

    @property
    def bytes(self) -> int:
        """Of all four."""
        return sum(x.numel() * x.element_size() for x in (self.query, self.key, self.value, self.grad))

    def of(self, rows: Tensor) -> Inputs:
        """Some rows of all four, as leaves to be differentiated by."""
        query, key, value = (x[rows].requires_grad_() for x in (self.query, self.key, self.value))
        return Inputs(query, key, value, self.grad[rows])


def draw(case: BenchAttentionConfig, rows: int, device: torch.device, seed: int) -> Inputs:
    """Equal on every rank of one kind of device."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(rows, heads, case.head_dim, generator=random, device=device, dtype=DTYPES[case.dtype])

    return Inputs(normal(case.heads), normal(case.kv_heads), normal(case.kv_heads), normal(case.heads))


def sampled_rows(case: BenchAttentionConfig, geometry: Geometry) -> np.ndarray:
    """int64 [E], ascending: the ends of both streams, and rows drawn from the seed."""
    clean, total = geometry.num_clean, geometry.num_clean + geometry.num_noised
    ends = {0, clean - 1, clean, total - 1}
    drawn = np.random.default_rng(case.seed).choice(total, min(case.sample, total), replace=False)
    return np.unique([*ends, *drawn.tolist()])


def mask_of(geometry: Geometry, kind: LayerKind, rows: np.ndarray, device: torch.device) -> IntervalMask:
    """What rows of the pack, ascending, see of all R keys [clean | noised]."""
    clean = geometry.num_clean
    seen = join(clean_ranges(geometry, kind, rows[rows < clean]),
                noised_ranges(geometry, kind, rows[rows >= clean] - clean))
    return IntervalMask.from_arrays(seen.prefix_start, seen.prefix_end, seen.block_start + clean,
                                    seen.block_end + clean, device)


def errors(runtime: Runtime, case: BenchAttentionConfig, geometry: Geometry, kind: LayerKind, held: np.ndarray,
           launch: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, float]:
    """Relative errors of output and gradients, over all ranks; NaN if anything was left unwritten. Collective.

    The gradient of the output is zero but for the sampled rows: then the reference needs no other row to know all of
    dk and dv.

    Args:
        held: int64 [S], numbers of the rank's rows in the pack, -1 for a dummy.
        launch: the operator on the rank's rows.
    """
    device = runtime.device
    everything = draw(case, geometry.num_clean + geometry.num_noised, device, case.seed + 1)
    rows = sampled_rows(case, geometry)
    sample, mask = torch.from_numpy(rows).to(device), mask_of(geometry, kind, rows, device)
    scale = default_scale(everything.query, None)
    query, grad = everything.query[sample].double(), everything.grad[sample].double()
    key, value = everything.key.double(), everything.value.double()
    out, lse = reference.forward(query, key, value, mask, scale)
    dq, dk, dv = reference.backward(grad, query, key, value, out, lse, mask, scale)
    # What dq and dk are differences of: where a row sees one key they cancel, and rounding alone is left.
    loose = reference.backward(grad, query, key, value, out, lse, mask, scale, (out * grad).sum(2))

    place = torch.from_numpy(np.maximum(held, 0)).to(device)
    mine = everything.of(place)
    asked = torch.from_numpy(np.isin(held, rows)).to(device)  # a dummy, -1, is none of them
    mine.grad[~asked] = 0
    for like in (mine.query, mine.key, mine.query):  # what is freed here is what results are soon written to
        torch.full_like(like, float("nan"))
    found = launch(mine.query, mine.key, mine.value)
    grads = torch.autograd.grad(found, (mine.query, mine.key, mine.value), mine.grad)
    at = torch.from_numpy(np.searchsorted(rows, held[np.isin(held, rows)])).to(device)
    pairs = {"out": (found[asked].detach(), out[at], out[at]), "dq": (grads[0][asked], dq[at], loose[0][at])}
    if case.kind != "block":  # there a clean row's gradient lies in parts on all ranks that compute the row
        real = torch.from_numpy(held >= 0).to(device)
        pairs |= {"dk": (grads[1][real], dk[place[real]], loose[1][place[real]]),
                  "dv": (grads[2][real], dv[place[real]], dv[place[real]])}
    sums = [float(x.square().sum()) for got, ref, parts in pairs.values() for x in (got.double() - ref, ref, parts / 2)]
    sums[3] += float(torch.linalg.vector_norm(grads[0][~asked], dtype=torch.float64)) ** 2  # nobody asked those rows
    unwritten = float(not bool(found.isfinite().all()))
    *sums, unwritten = runtime.total([*sums, unwritten])
    return {name: float("nan") if unwritten else (sums[3 * i] / max(*sums[3 * i + 1:3 * i + 3], 1e-300)) ** 0.5
            for i, name in enumerate(pairs)}

"""Runs the wide backend's kernels on the CPU, in Triton's interpreter: ``wide_interpreted.py CASE``. See test_wide.

A process of its own, because kernels are bound to the interpreter when they are first imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from csbp.attention import reference, wide
from csbp.attention.mask import IntervalMask
from csbp.attention.merge import merge

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    """Triton 3.6 counts loops with arrays of one number, which newer numpy takes for no index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched


def ranges(rng: np.random.Generator, rows: int, clean: int, keys: int) -> list[np.ndarray]:
    """Rows in order over two documents; some see nothing, some all of a tile."""
    end = np.sort(rng.integers(0, clean + 1, rows))
    low = np.where(end > clean // 2, clean // 3, 0)
    own = np.sort(rng.integers(clean, keys + 1, rows))
    last = np.minimum(own + rng.integers(0, 30, rows), keys)
    end[:rows // 6], last[:rows // 6] = 0, 0
    return [low, end, own, last]


def norms(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def case(name: str) -> None:
    """Prints the relative errors of out, lse, dq, dk, dv against the reference in float64."""
    rng = np.random.default_rng(sum(map(ord, name)))
    torch.manual_seed(0)
    wide.TUNING = wide.Tuning(
        forward_tile=(32, 64) if name == "tiles" else (32, 32), backward_tile=(32, 32), programs=4,
        chunk_tiles=0 if name == "chunks" else 64, scores={"BK": 16}, score_grads={"BK": 16},
        by_rows={"BK": 16, "BD": 32}, by_keys={"BK": 16, "BD": 32})
    rows, clean, keys, heads, key_heads, dim = 70, 60, 90, 4, 2, 40
    mask = IntervalMask.from_arrays(*ranges(rng, rows, clean, keys))
    q, dout = (torch.randn(rows, heads, dim).half() for _ in range(2))
    k, v = (torch.randn(keys, key_heads, dim).half() for _ in range(2))
    if name in ("tops", "chunks"):  # scores so far apart that tiles of a row differ in their tops
        q *= 5
    if name == "strides":
        q, dout, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, dout, k))
    dlse = torch.randn(rows, heads) if name == "chunks" else None
    whole, whole_lse = reference.forward(*(x.double() for x in (q, k, v)), mask, 0.2)
    if name == "part":  # keys in two parts: out and lse are those of both
        cut, halves = 50, []
        for a, b in ((0, cut), (cut, keys)):
            part = IntervalMask.from_arrays(*(np.clip(x, a, b) - a for x in mask.host))
            halves.append((k[a:b], v[a:b], part))
        out, lse = merge([wide.forward(q, *half, 0.2) for half in halves])
        grads = [wide.backward(dout, q, *half[:2], out, lse, half[2], 0.2) for half in halves]
        dq, dk, dv = grads[0][0].float() + grads[1][0], *(torch.cat([g[i] for g in grads]) for i in (1, 2))
    else:
        out, lse = wide.forward(q, k, v, mask, 0.2)
        assert lse.stride() == whole_lse.stride()
        dq, dk, dv = wide.backward(dout, q, k, v, out, lse, mask, 0.2, dlse)
    expected = reference.backward(dout.double(), *(x.double() for x in (q, k, v)), whole, whole_lse, mask, 0.2,
                                  None if dlse is None else dlse.double())
    blind = torch.isinf(whole_lse)
    assert torch.equal(blind, torch.isinf(lse)) and blind.any() and not out[blind].any() and not dq[blind].any()
    assert lse.dtype == torch.float32
    print(norms(out, whole), float((lse - whole_lse)[~blind].abs().max()),
          *(norms(a, b) for a, b in zip((dq, dk, dv), expected, strict=True)))


if __name__ == "__main__":
    case(sys.argv[1])

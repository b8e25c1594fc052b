"""FlashAttention-4's own causal kernel: what the kernels of interval masks are held against, in the same run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from csbp.attention import flash
from csbp.bench.check import DTYPES, draw
from csbp.bench.clock import slowest, spread, time_parts
from csbp.config.bench import BenchAttentionConfig
from csbp.parallel.runtime import Runtime


def causal_tflops(runtime: Runtime, case: BenchAttentionConfig, length: int) -> tuple[float, float] | None:
    """TFLOP/s of (forward, forward and backward) over ``length`` causal rows of the case's heads on the slowest rank;
    None where that kernel cannot run. Collective."""
    dtype, dim = DTYPES[case.dtype], case.head_dim
    if flash.unusable(runtime.device, dtype, dim, dim, False):
        return None
    from flash_attn.cute import flash_attn_func

    inputs = draw(case, length, runtime.device, case.seed)
    query, key, value = (x[None].requires_grad_() for x in (inputs.query, inputs.key, inputs.value))

    def run(turn: int) -> Iterator[None]:
        out = flash_attn_func(query, key, value, causal=True)
        out = out[0] if isinstance(out, tuple) else out
        yield
        torch.autograd.grad(out, (query, key, value), inputs.grad[None])
        yield

    parts = slowest(runtime, time_parts(runtime, run, warmup=case.warmup, repeats=case.repeats, seconds=case.seconds))
    flops = 4.0 * case.heads * dim * (length * (length + 1) // 2)
    return flops / spread(parts[:, 0]).median / 1e9, 3.5 * flops / spread(parts.sum(1)).median / 1e9

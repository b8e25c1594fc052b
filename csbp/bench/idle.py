"""How much of a step a GPU computes nothing, by the profiler's record of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from csbp.bench.clock import by_rank
from csbp.parallel.runtime import Runtime
from csbp.plan.runs import union


def idle_fraction(runtime: Runtime, step: Callable[[], None]) -> float | None:
    """Mean over ranks of the part of a step in which a GPU runs no kernel and no copy but NCCL's. Collective.

    The step lasts from the first to the last work of the rank where that is longest. Waiting for other ranks is idle,
    whatever it is that waits; so is the host being late.

    Args:
        step: one optimizer step; collective.

    Returns:
        0 to 1; None on a CPU, or where the profiler has seen nothing.
    """
    if runtime.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:  # else it warns of what it would lose
        step()
        torch.cuda.synchronize()
    found = [(event.time_range.start, event.time_range.end, event.name) for event in seen.events()
             if event.device_type == DeviceType.CUDA]
    busy = covered((start, end) for start, end, name in found if not name.lower().startswith("nccl"))
    lasted = max((end for _, end, _ in found), default=0) - min((start for start, _, _ in found), default=0)
    everyone = by_rank(runtime, [busy, lasted])
    longest = everyone[:, 1].max()
    return float(1 - everyone[:, 0].mean() / longest) if longest else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end), microseconds."""
    nanoseconds = np.rint(1e3 * np.array([*spans]).reshape(-1, 2)).astype(np.int64)
    return float(union(*nanoseconds.T).before[-1] / 1e3)

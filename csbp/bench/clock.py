"""Time as the device spends it: events on a GPU, so that the host need not wait between runs; else the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from csbp.bench.cases import FEWEST
from csbp.parallel.runtime import Runtime


@dataclass(frozen=True)
class Spread:
    """Milliseconds: the median of some runs, and the distance between their quartiles."""

    median: float
    iqr: float


def spread(milliseconds: np.ndarray) -> Spread:
    """Median and interquartile range of [runs]."""
    low, middle, high = np.percentile(milliseconds, (25, 50, 75))
    return Spread(float(middle), float(high - low))


class Clock:
    """Marks points in a device's work.

    Args:
        host: on a CPU, what tells the time, in seconds.
    """

    def __init__(self, device: torch.device, host: Callable[[], float] = time.perf_counter) -> None:
        self._cuda, self._host = device.type == "cuda", host

    def mark(self) -> Any:
        """Now, in the order of the work that is queued on this thread's stream."""
        if not self._cuda:
            return self._host()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: list[Any]) -> list[float]:
        """Milliseconds from each mark to the next, once all of them are reached."""
        if not self._cuda:
            return [1e3 * (after - before) for before, after in zip(marks[:-1], marks[1:], strict=True)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) for before, after in zip(marks[:-1], marks[1:], strict=True)]


def time_parts(runtime: Runtime, run: Callable[[int], Iterator[None]], *, warmup: int, repeats: int,
               seconds: float, host: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Milliseconds of the parts of a run, float64 [runs, parts]. Collective.

    The runs follow each other without a pause, as layers do; the ranks of a run hold each other in step.

    Args:
        run: gets the number of the run, yields wherever one part ends, the last one too.
        warmup: runs that are not counted.
        repeats: most runs that are.
        seconds: what they may take together, as far as ``FEWEST`` runs fit into it; rank 0 decides.
        host: on a CPU, what tells the time, in seconds.
    """
    clock = Clock(runtime.device, host)

    def once(turn: int) -> list[Any]:
        return [clock.mark(), *(clock.mark() for _ in run(turn))]

    for turn in range(warmup):
        taken = sum(clock.between(once(turn)))
    wanted = int(min(repeats, max(FEWEST, 1e3 * seconds / max(taken, 1e-6))))
    wanted = runtime.broadcast(wanted)
    marks = [once(warmup + turn) for turn in range(wanted)]
    return np.array([clock.between(each) for each in marks])


def by_rank(runtime: Runtime, values: list[float]) -> np.ndarray:
    """float64 [ranks, values]: every rank's. Collective."""
    table = np.zeros((runtime.world, len(values)))
    table[runtime.rank] = values
    return np.array(runtime.total(table.ravel().tolist())).reshape(table.shape)


def slowest(runtime: Runtime, parts: np.ndarray) -> np.ndarray:
    """The times of the rank whose runs take longest in the median; float64 [runs, parts] on every rank. Collective."""
    everyone = by_rank(runtime, parts.ravel().tolist()).reshape(runtime.world, *parts.shape)
    return everyone[int(np.median(everyone.sum(2), 1).argmax())]

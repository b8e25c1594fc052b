"""Seconds that a plan will take, before a device is rented.

A prediction, made of exact counts (rows, pairs, rows that travel) and a few measured rates. Left out: the traffic of
FSDP, which hides behind long packs, kernel launches, and how kernels slow down at rare head sizes.

N ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from csbp.plan.counts import KindCounts, PlanCounts
from csbp.plan.estimate import Device, Settings
from csbp.plan.shapes import BACKWARD_PAIRS, AttentionLayers, ModelShape
from csbp.plan.split import split_bytes, split_shape
from csbp.plan.stages import Stages
from csbp.plan.wire import row_bytes


@dataclass(frozen=True)
class Seconds:
    """Of one pack, forward and backward. float64 [N] each.

    Attributes:
        attention, linear: busy time, recomputed layers included; ``linear`` holds the head.
        exposed: waiting for keys and gradients that travel longer than there is something to compute meanwhile, and
            for the sums of a tp axis, which nothing hides.
    """

    attention: np.ndarray
    linear: np.ndarray
    exposed: np.ndarray

    @property
    def busy(self) -> np.ndarray:
        """Computing, float64 [N]."""
        return self.attention + self.linear

    @property
    def step(self) -> float:
        """Until the last rank is done."""
        return float((self.busy + self.exposed).max())


@dataclass(frozen=True)
class Passes:
    """Seconds of one layer's attention, float64 [N] each."""

    forward: np.ndarray
    backward: np.ndarray


@dataclass(frozen=True)
class Pace:
    """Seconds a byte for keys (and their gradients) and for query rows (and what is made of them), [N] or one."""

    keys: np.ndarray | float
    queries: np.ndarray | float


def key_trips(checkpointing: str) -> int:
    """How often keys and values travel in one step: for the forward and, since only shards are kept, again for
    the backward. Full checkpointing runs the forward twice."""
    return 3 if checkpointing == "full" else 2


def product_runs(checkpointing: str) -> int:
    """Matrix products of one step for each of a forward: it, the backward's two, and it again where its result was
    not kept."""
    return 3 if checkpointing in ("none", "matmuls") else 4


def predict_seconds(shape: ModelShape, counts: PlanCounts, loss_rows: np.ndarray, device: Device,
                    settings: Settings, *, attention: Mapping[str, Passes] | None = None,
                    pace: Mapping[str, Pace] | None = None) -> Seconds:
    """Time of one pack on each rank.

    In the forward what travels hides behind attention over the keys that are here, and what others attended behind
    that over keys from elsewhere. In the backward it hides behind half of the local part, and what travels home behind
    the other half. Where keys come in several stages, all but the first also hide behind attention over those before
    them, and what travels home behind that over those after them; each makes a rank go over its query rows once more.

    Args:
        shape: the whole model.
        loss_rows: [N], rows whose logits each rank needs.
        attention: of each layer kind, what one rank of a tp axis takes; None: by pairs, at the device's rate.
        pace: of each layer kind, how fast its rows travel; None: all at the rate of one link.
    """
    policy, item = settings.checkpointing, settings.itemsize
    told = split_bytes(shape, counts.rows, loss_rows, tp=settings.tp, checkpointing=policy, itemsize=item)
    shape = split_shape(shape, settings.tp)
    runs_linear, forwards = product_runs(policy), key_trips(policy) - 1
    # Ranks of a tp axis are neighbours.
    link = device.near_link if len(counts.clean) * settings.tp <= device.node else device.far_link
    stages = Stages.choose(settings.stages, len(counts.clean) * settings.tp, device.node)
    busy = np.zeros(len(counts.clean))
    exposed = told / (device.near_link if settings.tp <= device.node else device.far_link)
    for part in shape.attention:
        kind = counts.kinds[part.kind.name]
        by_pairs = kind.pairs * float(part.pair_flops) / device.attention
        time = attention[part.kind.name] if attention else Passes(by_pairs, BACKWARD_PAIRS * by_pairs)
        speed = pace[part.kind.name] if pace else Pace(1 / link, 1 / link)
        busy += part.count * (forwards * time.forward + time.backward)
        busy += part.count * (forwards + 1) * again_seconds(part, counts.rows, kind, device, item, stages)
        once, again = exposed_seconds(part, counts.rows, kind, time, speed, item, settings.gradient_itemsize, stages)
        exposed += part.count * (forwards * once + again)
    linear = counts.rows * float(shape.row_flops) * runs_linear + loss_rows * float(shape.logit_flops) * 3
    return Seconds(busy, linear / device.linear, exposed)


def exposed_seconds(part: AttentionLayers, rows: np.ndarray, kind: KindCounts, time: Passes, pace: Pace, itemsize: int,
                    gradient_itemsize: int | None, stages: Stages) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [N] that a forward and a backward of one layer wait for what travels.

    Args:
        rows: [N], of both streams.
        time: that each rank attends.
        stages: in how many shares keys come where no query rows move.
    """
    size = row_bytes(part.heads, part.kv_heads, part.head_dim, part.head_dim, itemsize, gradient_itemsize)
    # Own rows are assumed to be as popular as received ones. A rank lends query rows or attends those of others.
    here, queries = rows / np.maximum(rows + kind.received, 1), np.maximum(kind.guests, kind.lent) * pace.queries
    keys, home = kind.received * pace.keys, kind.sent * pace.keys * size.backward["gradients"]
    # Of the backward, while keys and queries come, or are lent.
    early = np.where((kind.received > 0) | (kind.guests > 0) | (kind.lent > 0), here / 2, 0.0)
    shares = shares_of(kind, rows, stages)

    def waits(busy: np.ndarray, first: np.ndarray, coming: np.ndarray, going: np.ndarray | float) -> np.ndarray:
        """Of a pass that is busy so long, ``first`` of it until the first keys are needed, ``here`` with its own."""
        now, waited, sent = first * busy, np.zeros(len(busy)), np.zeros(len(busy))
        for share in range(1, shares + 1):
            gap = np.maximum(coming * share / shares - now, 0)
            waited, now = waited + gap, now + gap + busy * (1 - here) / shares
            sent = np.maximum(sent, now) + going / shares
        waited += np.maximum(sent - (now + busy * (here - first)), 0)
        # What comes and what goes share a link.
        return np.maximum(waited, coming + going - busy) if shares > 1 else waited

    forward = (waits(time.forward, here, keys * size.forward["keys"] + queries * size.forward["queries"], 0.0)
               + np.maximum(queries * size.forward["outputs"] - time.forward * (1 - here), 0))
    coming = keys * size.backward["keys"] + queries * size.backward["queries"]
    backward = (waits(time.backward, early, coming, home)
                + np.maximum(queries * size.backward["query_gradients"] - time.backward * (1 - early), 0))
    return forward, backward


def again_seconds(part: AttentionLayers, rows: np.ndarray, kind: KindCounts, device: Device, itemsize: int,
                  stages: Stages) -> np.ndarray:
    """Seconds [N] that a forward, or a backward, of one layer takes for every stage beyond the first that brings a rank
    a row."""
    size = rows * float(part.heads * part.head_dim * itemsize)
    return np.maximum(np.minimum(shares_of(kind, rows, stages), kind.received) - 1, 0) * size / (2 * device.rows)


def shares_of(kind: KindCounts, rows: np.ndarray, stages: Stages) -> int:
    """In how many shares the keys of a layer kind come to ranks of so many rows [N]."""
    return 1 if kind.guests.any() else stages.of(int(kind.received.max()), int(rows.sum()) // len(rows))

"""Bytes and floating-point operations of training, counted from plans and shapes.

Two byte counts stand side by side. ``exact_bytes`` are what csbp moves: the rows of the plan's own lists. The
``formula_bytes`` are those of published measurements, in closed form: all-gather, full checkpointing with its
recomputed keys serving the backward (three trips in all: forward, recompute, gradients), two bytes a number, K and V
apart, the mean over ranks.

Model FLOPs count what the objective asks for: attended pairs of the mask, rows, rows with a loss, each once; never
recomputation, padding or replicated rows. So utilisation compares any two topologies.

N ranks, T clean rows, M noised rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from csbp.plan.counts import PlanCounts
from csbp.plan.seconds import key_trips
from csbp.plan.shapes import BACKWARD_PAIRS, ModelShape
from csbp.plan.wire import layer_bytes, received_rows, sent_rows

_FORMULA_TRIPS, _FORMULA_ITEM = 3, 2


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kind of layer in one step, all its layers together; float64 [N].

    Attributes:
        received, sent: keys and values forward and backward, their gradients, and all that moves of query rows.
    """

    received: np.ndarray
    sent: np.ndarray


def exact_bytes(shape: ModelShape, counts: PlanCounts, *, checkpointing: str, itemsize: int,
                gradient_itemsize: int | None = None) -> dict[str, Traffic]:
    """What each rank receives and sends in one step, by kind of layer (see ``wire``).

    Args:
        checkpointing: "none", "matmuls", "attention" or "full"; full checkpointing runs the forward once more.
        itemsize: bytes of a number of Q, K and V on the wire.
        gradient_itemsize: the same of dQ, dK and dV; None: as the keys.
    """
    forwards = key_trips(checkpointing) - 1
    found = {}
    for part in shape.attention:
        kind = counts.kinds[part.kind.name]
        sides = []
        for rows in (received_rows(kind), sent_rows(kind)):
            forward, backward = layer_bytes(rows, part, itemsize, gradient_itemsize)
            total = forwards * sum(forward.values()) + sum(backward.values())
            sides.append(part.count * np.asarray(total, np.float64))
        found[part.kind.name] = Traffic(*sides)
    return found


def formula_bytes(shape: ModelShape, clean: int, noised: int, world: int, scheme: str) -> float:
    """Bytes that a rank receives in one step, mean over ranks, by the published formula.

    "csbp": every clean row is gathered; a layer with a window W gathers halos: the zig-zag order has 2N chunks and
    2N - 2 borders between ranks, each W rows. "context": every row of both streams is gathered, without halos.
    A family with a clean pass of its own pays for the clean rows twice.

    Args:
        clean, noised: T and M.
        world: N.
        scheme: "csbp", "context"; others move nothing.
    """
    if scheme not in ("csbp", "context") or world == 1:
        return 0.0
    passes = 2 if shape.own_clean_pass else 1
    total = 0.0
    for part in shape.attention:
        gathered = clean * (world - 1) / world
        if scheme == "context":
            rows = passes * gathered + noised * (world - 1) / world
        elif part.kind.window is not None:
            rows = passes * min(gathered, (2 * world - 2) / world * part.kind.window)
        else:
            rows = passes * gathered
        total += _FORMULA_TRIPS * part.count * part.row_elements * _FORMULA_ITEM * rows
    return total


def block_over_csbp(world: int, sampled: float = 1.0) -> float:
    """Time of pure block parallelism over that of csbp, by formula: its ranks all compute the whole clean stream.

    Args:
        world: N.
        sampled: noised rows over clean rows.
    """
    return (world + sampled) / (1 + sampled)


def model_flops(shape: ModelShape, pairs: Mapping[str, int], rows: int, loss_rows: int) -> float:
    """FLOPs of one step: forward, and twice (attention: 2.5 times) that backward.

    Args:
        pairs: attended pairs in one layer, by kind.
        rows: T + M.
        loss_rows: rows whose logits the objective asks for.
    """
    attention = sum(float(part.count) * part.pair_flops * pairs[part.kind.name] for part in shape.attention)
    return (1 + BACKWARD_PAIRS) * attention + 3.0 * (rows * shape.row_flops + loss_rows * shape.logit_flops)


def utilisation(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """MFU: model FLOPs over what ``ranks`` devices of ``peak`` FLOP/s could do in that time."""
    return flops / (seconds * ranks * peak)

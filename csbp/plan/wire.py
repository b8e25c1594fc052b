"""Bytes of what travels in one layer, row by row: a plan's rows times these are what transports count.

Keys and values travel together, as the gradients of both do. Query rows that are attended elsewhere travel alone; what
goes back, and what the backward needs of them, is several tensors in one parcel of bytes a row. N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.counts import KindCounts
from csbp.plan.shapes import AttentionLayers

_ALIGNED = 16  # bytes, where each part of a parcel begins


def parcel(*sizes: int) -> tuple[int, ...]:
    """Where parts of these bytes begin in a row's parcel, and its length."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return tuple(places)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row of one layer by what travels, in the forward and in the backward."""

    forward: dict[str, int]
    backward: dict[str, int]


def row_bytes(heads: int, kv_heads: int, key_dim: int, value_dim: int, itemsize: int,
              gradient_itemsize: int | None = None) -> RowBytes:
    """Bytes of each row.

    Args:
        itemsize: bytes of a number of queries, keys and values.
        gradient_itemsize: the same of their gradients; None: as the keys.
    """
    home, stats = gradient_itemsize or itemsize, heads * (8 if itemsize == 8 else 4)
    keys, queries, outputs = kv_heads * (key_dim + value_dim), heads * key_dim, heads * value_dim
    return RowBytes(
        {"keys": keys * itemsize, "queries": queries * itemsize, "outputs": parcel(stats, outputs * itemsize)[-1]},
        {"keys": keys * itemsize, "gradients": keys * home, "query_gradients": queries * home,
         "queries": parcel(stats, stats, queries * itemsize, outputs * itemsize)[-1]})


def sent_rows(counts: KindCounts) -> dict[str, np.ndarray]:
    """Rows that each rank sends in one pass, int64 [N]: gradients go against keys, what is made of queries against
    them."""
    return {"keys": counts.sent, "gradients": counts.received, "queries": counts.lent, "outputs": counts.guests,
            "query_gradients": counts.guests}


def received_rows(counts: KindCounts) -> dict[str, np.ndarray]:
    """Rows that each rank receives, as ``sent_rows``."""
    return {"keys": counts.received, "gradients": counts.sent, "queries": counts.guests, "outputs": counts.lent,
            "query_gradients": counts.lent}


def layer_bytes(rows: dict[str, np.ndarray], part: AttentionLayers, itemsize: int,
                gradient_itemsize: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Bytes of ``rows`` in one layer by what travels, in its forward and in its backward; float64 [N] each."""
    width = row_bytes(part.heads, part.kv_heads, part.head_dim, part.head_dim, itemsize, gradient_itemsize)
    forward, backward = ({label: rows[label] * float(size) for label, size in side.items()}
                         for side in (width.forward, width.backward))
    return forward, backward


def buffer_bytes(counts: KindCounts, clean: np.ndarray, part: AttentionLayers, itemsize: int,
                 gradient_itemsize: int | None = None) -> np.ndarray:
    """Bytes of the memory for what travels, which stays from layer to layer where query rows move; float64 [N].

    Args:
        clean: [N], rows of the clean stream that each rank holds: guests may see them too.
    """
    came, went = (layer_bytes(rows, part, itemsize, gradient_itemsize)
                  for rows in (received_rows(counts), sent_rows(counts)))
    own = np.where(counts.guests > 0, clean, 0) * float(part.row_elements * itemsize)
    forward = sum(came[0].values()) + went[0]["outputs"]
    backward = sum(came[1].values()) + sum(went[1][label] for label in ("queries", "query_gradients", "gradients"))
    moves = bool(counts.guests.any())
    return np.asarray(np.maximum(forward, backward) + came[0]["keys"] + own, np.float64) * moves

"""Gradients of own keys or values: what this rank has found and what comes back from others, added up in one pass.

Legend: S own rows, G rows that come back, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from csbp.attention.merge import row_kernels
from csbp.attention.reference import compute_dtype
from csbp.comm.upload import upload


@dataclass(frozen=True)
class Returning:
    """Whose gradients come back.

    Attributes:
        rows: int64 [G], own rows; as they come, from one rank after another. A rank names each at most once.
        counts: how many come from each rank.
        first, place: int32 [S + 1] and [G]: gradients of row i are ``place[first[i]:first[i + 1]]`` of those that come,
            in the order of ranks. Where kernels use them.
    """

    rows: Tensor
    counts: tuple[int, ...]
    first: Tensor | None
    place: Tensor | None

    @classmethod
    def bind(cls, rows: np.ndarray, counts: tuple[int, ...], own: int, device: torch.device | str) -> Returning:
        """Of ``own`` rows, S, on a device."""
        first = place = None
        if torch.device(device).type == "cuda":
            order = np.argsort(rows, kind="stable")
            first = upload(np.searchsorted(rows[order], np.arange(own + 1)).astype(np.int32), device)
            place = upload(order.astype(np.int32), device)
        return cls(upload(rows, device), counts, first, place)


def total(parts: Sequence[Tensor], dtype: torch.dtype, returning: Returning | None = None,
          returned: Tensor | None = None) -> Tensor:
    """Their sum, in ``dtype``, rounded once. What ``parts`` lie in may be written to.

    Args:
        parts: the first of all own rows [S, K, D], the others of as many of the first as they have.
        returned: [G, K, D], by ``returning``.
    """
    now, *others = parts
    if not others and returned is None:
        return now.to(dtype)
    wide = compute_dtype(now.dtype)
    kernels = row_kernels(now, wide)
    if kernels is None:
        return _added(parts, wide, returning, returned).to(dtype)
    for part in others[:-1]:
        now = kernels.add(now, part, None, None, wide)
    return kernels.add(now, others[-1] if others else None, returning, returned, dtype)


def _added(parts: Sequence[Tensor], wide: torch.dtype, returning: Returning | None,
           returned: Tensor | None) -> Tensor:
    found = parts[0].to(wide)
    for part in parts[1:]:
        found[:len(part)] += part.to(wide)
    if returning is not None and returned is not None:
        for rows, part in zip(returning.rows.split(returning.counts), returned.split(returning.counts), strict=True):
            if len(rows):
                found[rows] += part.to(wide)
    return found

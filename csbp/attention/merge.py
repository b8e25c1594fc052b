"""Attention over disjoint sets of keys becomes attention over all of them: by output and log-sum-exp of each.

Legend: S query rows, G of them, N query heads, D head dim.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # here (out [S, N, D], lse [S, N]); elsewhere also what belongs to keys and values


def merge(parts: list[Pair]) -> Pair:
    """Join attention over disjoint key sets.

    Args:
        parts: (out, lse) of each set; a row that saw nothing has out 0 and lse -inf.

    Returns:
        (out, lse) over all of them, computed in the dtype of lse, out in the dtype of the first; lse is stored head
        after head.
    """
    if len(parts) == 1:
        return parts[0]
    lses_PNS = torch.stack([lse.t() for _, lse in parts])
    lse_NS = torch.logsumexp(lses_PNS, 0)
    # A row that saw nothing anywhere has lse -inf; shifting by 0 there keeps its weights 0 instead of NaN.
    weights_PNS = (lses_PNS - torch.where(lse_NS == float("-inf"), 0.0, lse_NS)).exp()
    out = sum(out.to(lse_NS.dtype) * weight.t()[..., None]
              for (out, _), weight in zip(parts, weights_PNS, strict=True))
    return out.to(parts[0][0].dtype), lse_NS.t()  # type: ignore[union-attr]


def merge_next(whole: Pair, part: Pair, dtype: torch.dtype) -> Pair:
    """``whole`` and one more part; out in ``dtype``. What ``whole`` lies in may be written to."""
    kernels = row_kernels(whole[0], whole[1].dtype)
    if kernels is None:
        out, lse = merge([(whole[0].to(torch.promote_types(dtype, whole[0].dtype)), whole[1]), part])
        return out.to(dtype), lse
    out = whole[0] if whole[0].dtype == dtype else torch.empty_like(whole[0], dtype=dtype)
    kernels.join(whole, part, out, None, None)
    return out, whole[1]


def merge_rows(whole: Pair, part: Pair, rows: Tensor, places: Tensor | None) -> None:
    """Into some rows of ``whole``, each once, in place.

    Args:
        part: of other keys, [G, N, D] and [G, N], or with ``places`` of any rows.
        rows: int64 [G].
        places: int64 [G], where in ``part`` they lie; None: as they come.
    """
    kernels = row_kernels(whole[0], whole[1].dtype)
    if kernels is not None:
        kernels.join(whole, part, whole[0], rows, places)
        return
    out, lse = whole
    chosen = part if places is None else (part[0][places], part[1][places])
    out[rows], lse[rows] = merge([(out[rows], lse[rows]), chosen])


def row_kernels(like: Tensor, dtype: torch.dtype) -> Any:
    """The module of kernels that go over such rows and compute in ``dtype``; None where there are none."""
    return _kernels() if like.is_cuda and dtype == torch.float32 else None


@functools.cache
def _kernels() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    from csbp.attention import row_kernels

    return row_kernels

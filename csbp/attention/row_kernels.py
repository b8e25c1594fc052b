"""Rows of outputs joined, and rows of gradients added, in one pass over memory. See ``merge`` and ``sums``, also for
the legends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from csbp.attention.merge import Pair
    from csbp.attention.sums import Returning

ROWS = 32  # of a program


@triton.jit
def _mine(heads, ROWS: tl.constexpr):
    """A program's head, and its rows. One dimension of programs: a GPU takes 65,535 in each of the others."""
    program = tl.program_id(0)
    return (program % heads).to(tl.int64), program // heads * ROWS + tl.arange(0, ROWS)


@triton.jit(do_not_specialize=["heads", "count", "lse_head", "part_lse_head", "lse_row", "part_lse_row"])
def _join(out_ptr, lse_ptr, part_ptr, part_lse_ptr, into_ptr, rows_ptr, places_ptr, heads, count, out_row, out_head,
          lse_row, lse_head, part_row, part_head, part_lse_row, part_lse_head, D: tl.constexpr, DIM: tl.constexpr,
          ROWS: tl.constexpr, CHOSEN: tl.constexpr, PLACED: tl.constexpr):
    """Some rows of one head; ``into`` lies as ``out`` does."""
    head, i = _mine(heads, ROWS)
    live = i < count
    mine = tl.load(rows_ptr + i, live, 0) if CHOSEN else i.to(tl.int64)
    theirs = tl.load(places_ptr + i, live, 0) if PLACED else i.to(tl.int64)
    lse_at = lse_ptr + mine * lse_row + head * lse_head
    a = tl.load(lse_at, live, 0.0)
    b = tl.load(part_lse_ptr + theirs * part_lse_row + head * part_lse_head, live, 0.0)
    # A row that saw nothing anywhere has lse -inf; shifting by 0 there keeps its weights 0 instead of NaN.
    top = tl.maximum(a, b)
    top = tl.where(top == float("-inf"), 0.0, top)
    wa, wb = tl.exp(a - top), tl.exp(b - top)
    total = wa + wb
    share = tl.where(total > 0, 1.0 / total, 0.0)
    d = tl.arange(0, DIM)[None, :]
    inside = live[:, None] & (d < D)
    at = mine[:, None] * out_row + head * out_head + d
    x = tl.load(out_ptr + at, inside, 0.0).to(tl.float32)
    y = tl.load(part_ptr + theirs[:, None] * part_row + head * part_head + d, inside, 0.0).to(tl.float32)
    joined = x * (wa * share)[:, None] + y * (wb * share)[:, None]
    tl.debug_barrier()  # every warp loads the lse that one of them stores
    tl.store(into_ptr + at, joined.to(into_ptr.dtype.element_ty), inside)
    tl.store(lse_at, top + tl.log(total), live)


def join(whole: Pair, part: Pair, into: Tensor, rows: Tensor | None, places: Tensor | None) -> None:
    """``whole`` and ``part`` into ``into`` and the lse of ``whole``; ``rows`` and ``places`` as in ``merge_rows``, or
    all rows."""
    (out, lse), (other, other_lse) = whole, part
    assert out.stride() == into.stride() and out.stride(2) == other.stride(2) == 1
    count = len(out) if rows is None else len(rows)
    if not count:
        return
    heads, dim = out.shape[1:]
    _join[(heads * triton.cdiv(count, ROWS),)](
        out, lse, other, other_lse, into, lse if rows is None else rows, lse if places is None else places, heads,
        count, out.stride(0), out.stride(1), *lse.stride(), other.stride(0), other.stride(1), *other_lse.stride(),
        D=dim, DIM=triton.next_power_of_2(dim), ROWS=ROWS, CHOSEN=rows is not None, PLACED=places is not None)


@triton.jit(do_not_specialize=["heads", "count", "others"])
def _add(now_ptr, other_ptr, back_ptr, first_ptr, place_ptr, into_ptr, heads, count, others, now_row, now_head,
         other_row, other_head, back_row, back_head, into_row, into_head, D: tl.constexpr, DIM: tl.constexpr,
         ROWS: tl.constexpr, OTHER: tl.constexpr, BACK: tl.constexpr):
    """Some rows of one head: ``now``, what ``other`` has of them, and what comes back of them."""
    head, i = _mine(heads, ROWS)
    live, d = i < count, tl.arange(0, DIM)[None, :]
    row, inside = i.to(tl.int64)[:, None], live[:, None] & (d < D)
    x = tl.load(now_ptr + row * now_row + head * now_head + d, inside, 0.0).to(tl.float32)
    if OTHER:
        there = inside & (i < others)[:, None]
        x += tl.load(other_ptr + row * other_row + head * other_head + d, there, 0.0).to(tl.float32)
    if BACK:
        low, high = tl.load(first_ptr + i, live, 0), tl.load(first_ptr + i + 1, live, 0)
        for turn in range(tl.max(high - low)):
            more = low + turn < high
            place = tl.load(place_ptr + low + turn, more, 0).to(tl.int64)[:, None]
            x += tl.load(back_ptr + place * back_row + head * back_head + d, more[:, None] & inside, 0.0).to(tl.float32)
    tl.debug_barrier()  # into may be now, which more than one thread loads where rows are short
    tl.store(into_ptr + row * into_row + head * into_head + d, x.to(into_ptr.dtype.element_ty), inside)


def add(now: Tensor, other: Tensor | None, returning: Returning | None, returned: Tensor | None,
        dtype: torch.dtype) -> Tensor:
    """As ``sums.total`` of one or two parts; ``now`` is written to if it has the dtype."""
    into = now if now.dtype == dtype else torch.empty_like(now, dtype=dtype)
    if not now.numel():
        return into
    count, heads, dim = now.shape
    more, back = now if other is None else other, now if returned is None else returned
    assert now.stride(2) == more.stride(2) == back.stride(2) == into.stride(2) == 1
    first, place = (returning.first, returning.place) if returning is not None and returned is not None else (now, now)
    assert returned is None or first is not None and len(first) == count + 1
    _add[(heads * triton.cdiv(count, ROWS),)](
        now, more, back, first, place, into, heads, count, len(more), now.stride(0), now.stride(1), more.stride(0),
        more.stride(1), back.stride(0), back.stride(1), into.stride(0), into.stride(1), D=dim,
        DIM=triton.next_power_of_2(dim), ROWS=ROWS, OTHER=other is not None, BACK=returned is not None)
    return into

"""One pass over the outputs of two sets of keys. See ``merge``, also for the legend."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from csbp.attention.merge import Pair

ROWS = 32  # of a program
_LOOSE = ["count", "lse_head", "part_lse_head", "lse_row", "part_lse_row"]


@triton.jit(do_not_specialize=_LOOSE)
def _join(out_ptr, lse_ptr, part_ptr, part_lse_ptr, into_ptr, rows_ptr, places_ptr, count, out_row, out_head, lse_row,
          lse_head, part_row, part_head, part_lse_row, part_lse_head, D: tl.constexpr, DIM: tl.constexpr,
          ROWS: tl.constexpr, CHOSEN: tl.constexpr, PLACED: tl.constexpr):
    """Some rows of one head; ``into`` lies as ``out`` does."""
    head, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
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
    tl.store(into_ptr + at, joined.to(into_ptr.dtype.element_ty), inside)
    tl.store(lse_at, top + tl.log(total), live)


def launch(whole: Pair, part: Pair, into: Tensor, rows: Tensor | None, places: Tensor | None) -> None:
    """``whole`` and ``part`` into ``into`` and the lse of ``whole``; ``rows`` and ``places`` as in ``merge_rows``, or
    all rows."""
    (out, lse), (other, other_lse) = whole, part
    assert out.stride() == into.stride() and out.stride(2) == other.stride(2) == 1
    count = len(out) if rows is None else len(rows)
    if not count:
        return
    dim = out.shape[2]
    _join[out.shape[1], triton.cdiv(count, ROWS)](
        out, lse, other, other_lse, into, lse if rows is None else rows, lse if places is None else places, count,
        out.stride(0), out.stride(1), *lse.stride(), other.stride(0), other.stride(1), *other_lse.stride(), D=dim,
        DIM=triton.next_power_of_2(dim), ROWS=ROWS, CHOSEN=rows is not None, PLACED=places is not None)

"""Triton kernels of the wide backend. See ``wide`` for what follows what.

A *slot* is one visited tile of scores, BR query rows of one head by BC keys, kept in half precision one after another:
slot s of head n is rows [(n * capacity + s) * BR, ...) of a matrix BC wide. A chunk's lines in a table (``wide_plan``)
begin at ``base``. Scores are in units of log 2. Rows and keys past the end of a tensor are read as zeros. Legend: S
query rows, T keys, N query heads, K key/value heads, D head dim, BR, BC, BD tile sizes, BK steps of a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that change from call to call: a kernel compiled anew for each of their kinds would cost seconds.
_LOOSE = ["base", "entry_base", "capacity", "rows", "keys", "first_tile", "factor", "scale"]


@triton.jit
def _hidden(row, key, low_ptr, high_ptr, own_ptr, end_ptr, rows):
    """Where ``row`` [BR, 1] must not see ``key`` [1, BC]; rows past the end see nothing."""
    inside = row < rows
    low, high = tl.load(low_ptr + row, inside, 0), tl.load(high_ptr + row, inside, 0)
    own, end = tl.load(own_ptr + row, inside, 0), tl.load(end_ptr + row, inside, 0)
    return ((key < low) | (key >= high)) & ((key < own) | (key >= end))


@triton.jit
def _product(a, a_head, a_row, b, b_head, b_row, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
             BK: tl.constexpr):
    """A tile of A B^T, [BR, BC] in float32; ``a`` and ``b`` are [heads, rows, D]."""
    total = tl.zeros((BR, BC), tl.float32)
    for d in range(0, D, BK):
        left = a.load([a_head, a_row, d]).reshape(BR, BK)
        right = b.load([b_head, b_row, d]).reshape(BC, BK)
        total = tl.dot(left, right.T, total)
    return total


@triton.jit(do_not_specialize=_LOOSE)
def scores(q, k, p, visits, low_ptr, high_ptr, own_ptr, end_ptr, top_ptr, sum_ptr, base, capacity, rows, factor,
           GROUP: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
           STEP: tl.constexpr):
    """2^(scores - top) of each slot; and of each of its rows ``top``, the nearest multiple of STEP to its highest score
    (-inf where it sees nothing), and the sum, both [N, capacity, BR].

    Tops are so coarse that those of a row's slots nearly always agree: ``settle`` then leaves the slots as they are.
    STEP / 2 is as far from 0 as exponents can be where half precision and sums lose nothing.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    row0 = tl.load(visits + (base + slot) * 3) * BR
    col0 = tl.load(visits + (base + slot) * 3 + 1) * BC
    full = tl.load(visits + (base + slot) * 3 + 2)
    s = _product(q, head, row0, k, head // GROUP, col0, D, BR, BC, BK) * factor
    if full == 0:
        row, key = row0 + tl.arange(0, BR)[:, None], col0 + tl.arange(0, BC)[None, :]
        s = tl.where(_hidden(row, key, low_ptr, high_ptr, own_ptr, end_ptr, rows), float("-inf"), s)
    highest = tl.max(s, 1)
    top = tl.where(highest == float("-inf"), 0.0, tl.floor(highest / STEP + 0.5) * STEP)
    s = tl.exp2(s - top[:, None])
    at = (head * capacity + slot) * BR
    tl.store(top_ptr + at + tl.arange(0, BR), tl.where(highest == float("-inf"), highest, top))
    tl.store(sum_ptr + at + tl.arange(0, BR), tl.sum(s, 1))
    p.store([at, 0], s.to(p.dtype))


@triton.jit
def _times(x, power):
    """x 2^power in two steps: the factor itself may be below what float32 holds where the product is not."""
    half = tl.exp2(power * 0.5)
    return x * half * half


@triton.jit
def _lower(p_ptr, at, top, peak, BR: tl.constexpr, BC: tl.constexpr):
    """Multiplies the rows of a slot whose ``top`` is below ``peak`` by the power of two between them: exact."""
    below = (top < peak) & (top > float("-inf"))
    place = p_ptr + (at.to(tl.int64) + tl.arange(0, BR))[:, None] * BC + tl.arange(0, 32)[None, :]
    for c in range(0, BC, 32):
        part = tl.load(place + c, below[:, None], 0.0).to(tl.float32)
        part = _times(part, (top - peak)[:, None])
        tl.store(place + c, part.to(p_ptr.dtype.element_ty), below[:, None])


@triton.jit(do_not_specialize=_LOOSE)
def settle(p_ptr, table, top_ptr, sum_ptr, peak_ptr, total_ptr, carry_ptr, lse_ptr, base, capacity, rows, first_tile,
           FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MANY: tl.constexpr):
    """Takes a chunk's slots into each row's highest top (``peak``), sum (``total``) and lse, all [N, S]; 2^``carry``
    is what earlier chunks' sums are to be multiplied by. Slots with lower tops are brought to the peak."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(table + (base + tile) * 5), tl.load(table + (base + tile) * 5 + 1)
    row = (first_tile + tile) * BR + tl.arange(0, BR)
    inside, state = row < rows, head * rows + row
    at = (head * capacity + first) * BR
    many, lane = tl.arange(0, MANY)[:, None], tl.arange(0, BR)[None, :]
    peak = tl.full((BR,), float("-inf"), tl.float32)
    total = tl.zeros((BR,), tl.float32)
    if not FIRST:
        peak, total = tl.load(peak_ptr + state, inside, float("-inf")), tl.load(total_ptr + state, inside, 0.0)
    before = peak
    for i in range(0, count, MANY):
        top = tl.load(top_ptr + at + (i + many) * BR + lane, i + many < count, float("-inf"))
        peak = tl.maximum(peak, tl.max(top, 0))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    carry = before - safe
    total = _times(total, carry)
    for i in range(0, count, MANY):
        top = tl.load(top_ptr + at + (i + many) * BR + lane, i + many < count, float("-inf"))
        part = tl.load(sum_ptr + at + (i + many) * BR + lane, i + many < count, 0.0)
        total += tl.sum(_times(part, top - safe[None, :]), 0)
        below = (top < safe[None, :]) & (top > float("-inf"))
        if tl.max(tl.max(below.to(tl.int32), 1), 0) > 0:
            for j in range(i, tl.minimum(i + MANY, count)):
                _lower(p_ptr, at + j * BR, tl.load(top_ptr + at + j * BR + tl.arange(0, BR)), safe, BR, BC)
    tl.debug_barrier()  # every warp loads the peaks and sums that one of them stores
    tl.store(peak_ptr + state, peak, inside)
    tl.store(total_ptr + state, total, inside)
    tl.store(carry_ptr + state, carry, inside)
    lse = tl.where(total > 0, (safe + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + state, lse, inside)


@triton.jit(do_not_specialize=_LOOSE)
def by_rows(p, x, out_ptr, held_ptr, table, carry_ptr, total_ptr, out_row, out_head, base, capacity, rows, first_tile,
            FIRST: tl.constexpr, LAST: tl.constexpr, SOFTMAX: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
            N: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):
    """Sum over a row tile's slots of slot [BR, BC] times ``x`` [K, T, D]. Sums over several chunks are held in float32,
    [rows of the chunks, N, D]. At the last, out is their sum, over ``total`` with SOFTMAX."""
    part, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = table + (base + tile) * 5
    first, count, key0 = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    turn, jump = tl.load(entry + 3), tl.load(entry + 4)
    lane, col = tl.arange(0, BR), part * BD + tl.arange(0, BD)
    row = (first_tile + tile) * BR + lane
    inside = row < rows
    shown = inside[:, None] & (col < D)[None, :]
    held = held_ptr + (((tile * BR + lane).to(tl.int64) * N + head) * D)[:, None] + col[None, :]
    sums = tl.zeros((BR, BD), tl.float32)
    if not FIRST:
        sums = tl.load(held, shown, 0.0)
        if SOFTMAX:
            sums = _times(sums, tl.load(carry_ptr + head * rows + row, inside, 0.0)[:, None])
    for i in range(count * (BC // BK)):
        slot, c = i // (BC // BK), i % (BC // BK) * BK
        key = (key0 + slot + (slot >= turn).to(tl.int32) * jump) * BC + c
        left = p.load([(head * capacity + first + slot) * BR, c])
        right = x.load([head // GROUP, key, part * BD]).reshape(BK, BD)
        sums = tl.dot(left, right, sums)
    if LAST:
        if SOFTMAX:
            total = tl.load(total_ptr + head * rows + row, inside, 0.0)
            sums *= tl.where(total > 0, 1.0 / total, 0.0)[:, None]
        place = out_ptr + (row.to(tl.int64) * out_row + head * out_head)[:, None] + col[None, :]
        tl.store(place, sums.to(out_ptr.dtype.element_ty), shown)
    else:
        tl.store(held, sums, shown)


@triton.jit(do_not_specialize=_LOOSE)
def by_keys(p, x, out_ptr, key_table, entries, base, entry_base, capacity, keys, GROUP: tl.constexpr,
            D: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):
    """Adds to out [T, K, D], float32, for each key tile of a chunk: the sum over its slots and the heads of a group of
    slot^T times ``x`` [N, S, D]. Each number has one writer: the sum's order never changes."""
    part, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = key_table + (base + tile) * 3
    key_tile, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    entry = entries + (entry_base + first) * 2
    row, col = key_tile * BC + tl.arange(0, BC), part * BD + tl.arange(0, BD)
    shown = (row < keys)[:, None] & (col < D)[None, :]
    place = out_ptr + ((row.to(tl.int64) * K + head) * D)[:, None] + col[None, :]
    sums = tl.load(place, shown, 0.0)
    for i in range(count * (GROUP * (BR // BK))):
        r, step = i % (BR // BK) * BK, i // (BR // BK)
        query_head, visit = head * GROUP + step % GROUP, step // GROUP
        slot, row_tile = tl.load(entry + visit * 2), tl.load(entry + visit * 2 + 1)
        left = p.load([(query_head * capacity + slot) * BR + r, 0])
        right = x.load([query_head, row_tile * BR + r, part * BD]).reshape(BK, BD)
        sums = tl.dot(left.T, right, sums)
    tl.store(place, sums, shown)


@triton.jit(do_not_specialize=_LOOSE)
def score_grads(q, k, v, dout, p, ds, visits, low_ptr, high_ptr, own_ptr, end_ptr, lse_ptr, delta_ptr, base, capacity,
                rows, factor, scale, GROUP: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
                BK: tl.constexpr):
    """Of each slot the probabilities and the gradients of the products of queries and keys. ``lse`` in units of log 2,
    ``delta`` times the scale, [N, S]."""
    head, slot = tl.program_id(0), tl.program_id(1)
    row0 = tl.load(visits + (base + slot) * 3) * BR
    col0 = tl.load(visits + (base + slot) * 3 + 1) * BC
    full = tl.load(visits + (base + slot) * 3 + 2)
    row = row0 + tl.arange(0, BR)
    inside, state = row < rows, head * rows + row
    s = _product(q, head, row0, k, head // GROUP, col0, D, BR, BC, BK)
    # Rows past the end have no weight.
    s = tl.exp2(s * factor - tl.load(lse_ptr + state, inside, float("inf"))[:, None])
    if full == 0:
        key = col0 + tl.arange(0, BC)[None, :]
        s = tl.where(_hidden(row[:, None], key, low_ptr, high_ptr, own_ptr, end_ptr, rows), 0.0, s)
    at = (head * capacity + slot) * BR
    p.store([at, 0], s.to(p.dtype))
    g = _product(dout, head, row0, v, head // GROUP, col0, D, BR, BC, BK)
    s *= g * scale - tl.load(delta_ptr + state, inside, 0.0)[:, None]
    ds.store([at, 0], s.to(ds.dtype))


@triton.jit(do_not_specialize=_LOOSE)
def row_sums(out, dout, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, rows, lse_row, lse_head, dlse_row, dlse_head,
             scale, HAS_DLSE: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """delta, the sum of out times its gradient, less lse's gradient, times the scale; and lse in units of log 2, +inf
    where a row has seen nothing; [N, S]."""
    row0, head = tl.program_id(0) * BR, tl.program_id(1)
    row = row0 + tl.arange(0, BR)
    inside = row < rows
    delta = tl.zeros((BR,), tl.float32)
    for d in range(0, D, BK):
        a, b = out.load([head, row0, d]).reshape(BR, BK), dout.load([head, row0, d]).reshape(BR, BK)
        delta += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row.to(tl.int64) * dlse_row + head * dlse_head, inside, 0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row.to(tl.int64) * lse_row + head * lse_head, inside, 0.0).to(tl.float32)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(lse2_ptr + head * rows + row, lse, inside)
    tl.store(delta_ptr + head * rows + row, delta * scale, inside)

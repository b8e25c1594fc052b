"""The wide backend: head dims above 256 (to 512) in half precision, as matrix products written in Triton.

A fused kernel has no room for such heads. Their arithmetic is so dense, though, that scores can go through memory:
4 D operations for each 2 bytes. So a chunk of the score tiles that the mask lets be seen (``wide_plan``) is computed
into a workspace of one size, and multiplied from there; tiles that nobody sees are never touched. Forward, for each
chunk: ``scores`` writes exponentials, ``settle`` each row's sum, ``by_rows`` multiplies by the values. Backward:
``score_grads`` writes probabilities and gradients of scores, then ``by_rows`` gives dQ, ``by_keys`` dV and dK. Seven
products in all, the fewest possible. Sums have one order: results are the same bits each time. Legend: S query rows,
T keys, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from csbp.attention import reference
from csbp.attention.mask import IntervalMask
from csbp.attention.wide_plan import Chunk, chunks_of
from csbp.comm.upload import upload
from csbp.plan.estimate import WIDE_DIMS, WIDE_TILES

# Per launch of a kernel: steps of its sum, warps, stages of loading, columns of D at once.
Launch = dict[str, int]


@dataclass
class Tuning:
    """Sizes, for Hopper GPUs.

    Attributes:
        forward_tile, backward_tile: query rows and keys of a slot.
        chunk_tiles: slots times heads of a chunk: 32 KiB each forward, twice that backward, for tiles of 128 x 128.
        programs: what ``by_rows`` has at least to keep a device busy.
    """

    forward_tile: tuple[int, int] = (128, 128)
    backward_tile: tuple[int, int] = (128, 128)
    chunk_tiles: int = WIDE_TILES
    programs: int = 256
    scores: Launch = field(default_factory=lambda: {"BK": 64, "num_warps": 8, "num_stages": 3})
    score_grads: Launch = field(default_factory=lambda: {"BK": 64, "num_warps": 8, "num_stages": 3})
    by_rows: Launch = field(default_factory=lambda: {"BK": 64, "BD": 256, "num_warps": 8, "num_stages": 4})
    by_keys: Launch = field(default_factory=lambda: {"BK": 64, "BD": 256, "num_warps": 8, "num_stages": 7})


TUNING = Tuning()

# Tops of rows are multiples of this, in units of log 2 (see ``wide_kernels.scores``).
_STEP = {torch.bfloat16: 128.0, torch.float16: 8.0}
_LOG2_E = 1.4426950408889634


def unusable(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> str:
    """Why this backend cannot compute that, in words; "" where it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return "it needs a Hopper GPU or a newer one"
    if dtype not in _STEP:
        return f"it computes in half precision, not in {dtype}"
    if key_dim != value_dim or key_dim not in WIDE_DIMS:
        return f"it takes head dims above 256, to 512, that are multiples of 8, not {key_dim} and {value_dim}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


@functools.cache
def _kernels() -> Any:
    from csbp.attention import wide_kernels

    return wide_kernels


def _matrix(x: Tensor, rows: int, cols: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, cols])


def _heads(x_SND: Tensor, rows: int, cols: int) -> Any:
    """How kernels read [rows, cols] of a head at once: heads first, whatever the strides, no copy."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    size, step = x_SND.element_size(), x_SND.stride()
    if step[2] != 1 or step[0] * size % 16 or step[1] * size % 16 or x_SND.data_ptr() % 16:
        x_SND = x_SND.contiguous()
    x_NSD = x_SND.transpose(0, 1)
    return TensorDescriptor(x_NSD, list(x_NSD.shape), list(x_NSD.stride()), [1, rows, cols])


@dataclass(frozen=True)
class _Bound:
    """A mask as the kernels take it: chunks, and their tables on the device."""

    chunks: tuple[Chunk, ...]
    capacity: int
    visits: Tensor
    row_table: Tensor
    key_table: Tensor
    entries: Tensor
    bounds: tuple[Tensor, ...]


def _bind(mask: IntervalMask, num_keys: int, tile: tuple[int, int], heads: int, parts: int) -> _Bound:
    found = chunks_of(mask.host, num_keys, tile, max(1, TUNING.programs // (heads * parts)),
                      max(1, TUNING.chunk_tiles * 128 * 128 // (heads * tile[0] * tile[1])))
    device = mask.prefix_start.device
    visits, rows, keys, entries = (upload(x, device) for x in
                                   (found.visits, found.row_table, found.key_table, found.entries))
    bounds = tuple(x.contiguous() for x in (mask.prefix_start, mask.prefix_end, mask.block_start, mask.block_end))
    return _Bound(found.chunks, found.capacity, visits, rows, keys, entries, bounds)


class _Job:
    """What the launches of one call have in common."""

    def __init__(self, query: Tensor, key: Tensor, mask: IntervalMask, scale: float, tile: tuple[int, int]) -> None:
        self.rows, self.heads, self.dim = query.shape
        self.keys, self.key_heads = key.shape[:2]
        self.tile, self.scale, self.device, self.dtype = tile, scale, query.device, query.dtype
        parts = -(-self.dim // TUNING.by_rows["BD"])
        name = ("wide", self.keys, self.heads, parts, tile, TUNING.chunk_tiles, TUNING.programs)
        self.bound = mask.remembered(name, lambda: _bind(mask, self.keys, tile, self.heads, parts))
        self.shape = {"GROUP": self.heads // self.key_heads, "D": self.dim, "BR": tile[0], "BC": tile[1]}
        split = [chunk.row_tiles for chunk in self.bound.chunks if not (chunk.first and chunk.last)]
        # Sums of a group's rows over its chunks.
        self.held = self.floats(max(split, default=0) * tile[0], self.heads, self.dim)

    def floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def slots(self) -> Tensor:
        """A workspace, [N * capacity * BR, BC]."""
        rows, keys = self.tile
        return torch.empty(self.heads * max(self.bound.capacity, 1) * rows, keys, dtype=self.dtype, device=self.device)

    def by_rows(self, chunk: Chunk, p: Tensor, x: Tensor, out: Tensor, carry: Tensor | None = None,
                total: Tensor | None = None) -> None:
        """``out`` from slots times ``x``: with ``total``, over that."""
        how, softmax = TUNING.by_rows, total is not None
        held = self.held if self.held.numel() else out
        _kernels().by_rows[(-(-self.dim // how["BD"]), self.heads, chunk.row_tiles)](
            _matrix(p, self.tile[0], how["BK"]), _heads(x, how["BK"], how["BD"]), out, held, self.bound.row_table,
            carry if softmax else held, total if softmax else held, out.stride(0), out.stride(1), chunk.row_base,
            self.bound.capacity, self.rows, chunk.row_tile, FIRST=chunk.first, LAST=chunk.last,
            SOFTMAX=softmax, N=self.heads, **self.shape, **how)

    def by_keys(self, chunk: Chunk, p: Tensor, x: Tensor, out: Tensor) -> None:
        """Adds to ``out`` slots^T times ``x``."""
        how = TUNING.by_keys
        _kernels().by_keys[(-(-self.dim // how["BD"]), self.key_heads, chunk.key_tiles)](
            _matrix(p, how["BK"], self.tile[1]), _heads(x, how["BK"], how["BD"]), out, self.bound.key_table,
            self.bound.entries, chunk.key_base, chunk.slot_base, self.bound.capacity, self.keys,
            K=self.key_heads, **self.shape, **how)


def forward(q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask, scale: float) -> tuple[Tensor, Tensor]:
    """As ``reference.forward``; out in the dtype of the query, lse float32."""
    out = torch.empty(q_SND.shape, dtype=q_SND.dtype, device=q_SND.device)
    if not len(q_SND) or not len(k_TKD):
        return reference.nothing_seen(q_SND, v_TKD)
    job, kernels = _Job(q_SND, k_TKD, mask, scale, TUNING.forward_tile), _kernels()
    (rows, keys), how, bound, heads = job.tile, TUNING.scores, job.bound, job.heads
    p = job.slots()
    top, sums = (job.floats(heads, max(bound.capacity, 1), rows) for _ in range(2))
    peak, total, carry, lse = (job.floats(heads, job.rows) for _ in range(4))
    q, k, tiles = _heads(q_SND, rows, how["BK"]), _heads(k_TKD, keys, how["BK"]), _matrix(p, rows, keys)
    for chunk in bound.chunks:
        if chunk.slots:
            kernels.scores[(heads, chunk.slots)](
                q, k, tiles, bound.visits, *bound.bounds, top, sums, chunk.slot_base, bound.capacity, job.rows,
                scale * _LOG2_E, STEP=_STEP[q_SND.dtype], **job.shape, **how)
        kernels.settle[(chunk.row_tiles, heads)](
            p, bound.row_table, top, sums, peak, total, carry, lse, chunk.row_base, bound.capacity, job.rows,
            chunk.row_tile, FIRST=chunk.first, BR=rows, BC=keys, MANY=16)
        job.by_rows(chunk, p, v_TKD, out, carry, total)
    return out, lse.t()


def backward(dout_SND: Tensor, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SND: Tensor, lse_SN: Tensor,
             mask: IntervalMask, scale: float, dlse_SN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.backward``; dq in the dtype of the query, dk and dv float32."""
    dq = torch.empty(q_SND.shape, dtype=q_SND.dtype, device=q_SND.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k_TKD, v_TKD))
    if not len(q_SND) or not len(k_TKD):
        return dq.zero_(), dk, dv
    job, kernels = _Job(q_SND, k_TKD, mask, scale, TUNING.backward_tile), _kernels()
    (rows, keys), how, bound, heads = job.tile, TUNING.score_grads, job.bound, job.heads
    dout_SND = dout_SND.to(q_SND.dtype)
    lse, delta = job.floats(heads, job.rows), job.floats(heads, job.rows)
    dlse = lse_SN if dlse_SN is None else dlse_SN
    kernels.row_sums[(-(-job.rows // 64), heads)](
        _heads(out_SND, 64, 64), _heads(dout_SND, 64, 64), lse_SN, dlse, lse, delta, job.rows, *lse_SN.stride(),
        *dlse.stride(), scale, HAS_DLSE=dlse_SN is not None, D=job.dim, BR=64, BK=64)
    p, ds = job.slots(), job.slots()
    inputs = [_heads(x, size, how["BK"]) for x, size in ((q_SND, rows), (k_TKD, keys), (v_TKD, keys), (dout_SND, rows))]
    tiles = [_matrix(x, rows, keys) for x in (p, ds)]
    for chunk in bound.chunks:
        if chunk.slots:
            kernels.score_grads[(heads, chunk.slots)](
                *inputs, *tiles, bound.visits, *bound.bounds, lse, delta, chunk.slot_base, bound.capacity, job.rows,
                scale * _LOG2_E, scale, **job.shape, **how)
        job.by_rows(chunk, ds, k_TKD, dq)
        if chunk.slots:
            job.by_keys(chunk, p, dout_SND, dv)
            job.by_keys(chunk, ds, q_SND, dk)
    return dq, dk, dv

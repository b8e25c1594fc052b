"""The flash backend: FlashAttention-4 on interval masks (Hopper GPUs; half precision; head dims to 256).

Legend: S query rows, T keys, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csbp.attention import reference
from csbp.attention.mask import IntervalMask, Ranges
from csbp.attention.tiles import Visits, key_visits, row_visits
from csbp.comm.upload import upload

# A kernel's last tile of rows reads bounds past the mask's end.
_MORE_ROWS = 256
_ROW_BYTES = 8  # of a head's query, its output's gradient and, in float32, its own, for each dim


def unusable(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, deterministic: bool) -> str:
    """Why this backend cannot compute that, in words; "" where it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in half precision, not in {dtype}"
    if key_dim != value_dim or key_dim % 8 or key_dim > 256:
        return f"it takes head dims to 256 that are multiples of 8, not {key_dim} and {value_dim}"
    if deterministic:
        return "its backward adds up in any order"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "flash-attn-4 is not installed (pip install 'csbp[flash]')"
    if not _hopper().installed():
        return f"it is written for flash-attn-4 {_hopper().RELEASE}"
    return ""


@functools.cache
def _hopper() -> Any:
    from csbp.attention import hopper

    return hopper


@dataclass(frozen=True)
class _Bound:
    """A mask as a kernel takes it.

    Attributes:
        bounds: int32 [S, 4] and more rows.
        visits: what its tiles visit.
        rows: that see a tile of keys, in the mean. Of a backward, as the next.
        abreast: how many thread blocks as long as the longest a head of keys is worth; 0 where a grid cannot hold them.
    """

    bounds: Tensor
    visits: Any
    rows: float = 0.0
    abreast: float = 0.0

    def by_group(self, heads: int, key_heads: int, dim: int) -> bool:
        """Whether a thread block of the backward sees to all query heads of a group."""
        group, kernels = heads // key_heads, _hopper()
        # Else thread blocks of all heads of a group, of which there are fewer and longer ones, leave processors idle.
        return (group > 1 and self.abreast * key_heads >= kernels.PROCESSORS
                and self.rows * group * dim * _ROW_BYTES <= kernels.CACHED)


def _bind_forward(mask: IntervalMask, num_keys: int, dims: tuple[int, int]) -> _Bound:
    tile, device = _hopper().forward_tile(*dims), mask.prefix_start.device
    return _Bound(mask.remembered("flash bounds", lambda: _bounds(mask.host, device)),
                  _tables(row_visits(mask.host, num_keys, tile), tile, device))


def _bind_backward(mask: IntervalMask, num_keys: int, dims: tuple[int, int]) -> _Bound:
    tile, device = _hopper().backward_tile(*dims), mask.prefix_start.device
    by_key = key_visits(row_visits(mask.host, num_keys, tile), -(-num_keys // tile[1]), *_hopper().KEY_RUNS)
    seen_by = by_key.partial.count + by_key.full.count
    abreast = seen_by.sum() / max(seen_by.max(), 1) if len(seen_by) <= _hopper().MOST_TILES else 0
    return _Bound(mask.remembered("flash bounds", lambda: _bounds(mask.host, device)), _tables(by_key, tile, device),
                  float(seen_by.mean() * tile[0]), float(abreast))


def _bounds(ranges: Ranges, device: torch.device) -> Tensor:
    bounds = np.zeros((len(ranges[0]) + _MORE_ROWS, 4), np.int32)
    bounds[:len(ranges[0])] = np.stack(ranges, 1)
    on_device = upload(bounds, device)
    # The library asks a tensor for these two: rows of four are aligned and lie together.
    on_device.__assumed_align__, on_device.__leading_dim__ = 16, 1  # type: ignore[attr-defined]
    return on_device


def _tables(visits: Visits, tile: tuple[int, int], device: torch.device) -> Any:
    def on(x: np.ndarray) -> Tensor:
        return upload(x.astype(np.int32), device)[None, None]

    return _hopper().BlockSparseTensorsTorch(
        on(visits.partial.count), on(visits.partial.table()), on(visits.full.count), on(visits.full.table()),
        block_size=tile)


def forward(q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask, scale: float) -> tuple[Tensor, Tensor]:
    """As ``reference.forward``; out in the dtype of the query, lse float32."""
    if not len(q_SND) or not len(k_TKD):
        return reference.nothing_seen(q_SND, v_TKD)
    dims = k_TKD.shape[2], v_TKD.shape[2]
    bound = mask.remembered(("flash forward", len(k_TKD), dims), lambda: _bind_forward(mask, len(k_TKD), dims))
    with _hopper().told_runs() as library:
        out, lse = library._flash_attn_fwd(
            q_SND[None], k_TKD[None], v_TKD[None], softmax_scale=scale, mask_mod=_hopper().visible,
            aux_tensors=[bound.bounds], block_sparse_tensors=bound.visits, return_lse=True)[:2]
    return out[0], lse[0].t()


def backward(dout_SND: Tensor, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SND: Tensor, lse_SN: Tensor,
             mask: IntervalMask, scale: float, dlse_SN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.backward``; gradients in the dtype of the inputs."""
    if not len(q_SND) or not len(k_TKD):
        return torch.zeros_like(q_SND), torch.zeros_like(k_TKD), torch.zeros_like(v_TKD)
    dims = k_TKD.shape[2], v_TKD.shape[2]
    bound = mask.remembered(("flash backward", len(k_TKD), dims), lambda: _bind_backward(mask, len(k_TKD), dims))
    by_group = bound.by_group(q_SND.shape[1], *k_TKD.shape[1:])
    with _hopper().told_runs(by_group) as library:
        dq, dk, dv = library._flash_attn_bwd(
            q_SND[None], k_TKD[None], v_TKD[None], out_SND[None], dout_SND[None], lse_SN.t()[None].contiguous(),
            softmax_scale=scale, mask_mod=_hopper().visible_to_group if by_group else _hopper().visible,
            aux_tensors=[bound.bounds], block_sparse_tensors=bound.visits,
            dlse=None if dlse_SN is None else dlse_SN.float().t()[None].contiguous())
    return dq[0], dk[0], dv[0]

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

from csbp.attention.mask import IntervalMask
from csbp.attention.tiles import Visits, key_visits, row_visits

# A kernel's last tile of rows reads bounds past the mask's end.
_MORE_ROWS = 256


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
    """A mask as the kernels take it."""

    bounds: Tensor
    forward: Any
    backward: Any


def _bind(mask: IntervalMask, num_keys: int, dims: tuple[int, int]) -> _Bound:
    hopper = _hopper()
    ranges, device = mask.host, mask.prefix_start.device
    forward_tile, backward_tile = hopper.forward_tile(*dims), hopper.backward_tile(*dims)
    by_row = row_visits(ranges, num_keys, forward_tile)
    by_key = key_visits(row_visits(ranges, num_keys, backward_tile), -(-num_keys // backward_tile[1]),
                        *hopper.KEY_RUNS)
    bounds = np.zeros((len(mask) + _MORE_ROWS, 4), np.int32)
    bounds[:len(mask)] = np.stack(ranges, 1)
    on_device = torch.from_numpy(bounds).to(device)
    # The library asks a tensor for these two: rows of four are aligned and lie together.
    on_device.__assumed_align__, on_device.__leading_dim__ = 16, 1  # type: ignore[attr-defined]
    return _Bound(on_device, _tables(by_row, forward_tile, device), _tables(by_key, backward_tile, device))


def _tables(visits: Visits, tile: tuple[int, int], device: torch.device) -> Any:
    def on(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(device)[None, None]

    return _hopper().BlockSparseTensorsTorch(
        on(visits.partial.count), on(visits.partial.table()), on(visits.full.count), on(visits.full.table()),
        block_size=tile)


def _bound(mask: IntervalMask, key: Tensor, value: Tensor) -> _Bound:
    dims = key.shape[2], value.shape[2]
    return mask.remembered(("flash", len(key), dims), lambda: _bind(mask, len(key), dims))


def forward(q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask, scale: float) -> tuple[Tensor, Tensor]:
    """As ``reference.forward``; out in the dtype of the query, lse float32."""
    rows, heads = q_SND.shape[:2]
    if not rows or not len(k_TKD):
        return (q_SND.new_zeros(rows, heads, v_TKD.shape[2]),
                q_SND.new_full((heads, rows), float("-inf"), dtype=torch.float32).t())
    bound = _bound(mask, k_TKD, v_TKD)
    with _hopper().told_runs() as library:
        out, lse = library._flash_attn_fwd(
            q_SND[None], k_TKD[None], v_TKD[None], softmax_scale=scale, mask_mod=_hopper().visible,
            aux_tensors=[bound.bounds], block_sparse_tensors=bound.forward, return_lse=True)[:2]
    return out[0], lse[0].t()


def backward(dout_SND: Tensor, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SND: Tensor, lse_SN: Tensor,
             mask: IntervalMask, scale: float, dlse_SN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.backward``; gradients in the dtype of the inputs."""
    if not len(q_SND) or not len(k_TKD):
        return torch.zeros_like(q_SND), torch.zeros_like(k_TKD), torch.zeros_like(v_TKD)
    bound = _bound(mask, k_TKD, v_TKD)
    with _hopper().told_runs() as library:
        dq, dk, dv = library._flash_attn_bwd(
            q_SND[None], k_TKD[None], v_TKD[None], out_SND[None], dout_SND[None], lse_SN.t()[None].contiguous(),
            softmax_scale=scale, mask_mod=_hopper().visible, aux_tensors=[bound.bounds],
            block_sparse_tensors=bound.backward,
            dlse=None if dlse_SN is None else dlse_SN.float().t()[None].contiguous())
    return dq[0], dk[0], dv[0]

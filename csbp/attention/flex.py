"""The flex backend: torch's FlexAttention, for GPUs that flash has no kernel for. One compiled graph per head shape.

Its backward knows only the softmax that its own forward made. Gradients of a *part* of a softmax follow from it all
the same: with w = exp(lse_part - lse), the part's own gradients for w * dO, and for a gradient of its log-sum-exp of
w * (rowsum(dO * out_part) - rowsum(dO * out)), are those of the part in the whole. So a backward runs the part's
forward again. Legend: S query rows, T keys, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from csbp.attention import reference
from csbp.attention.mask import IntervalMask
from csbp.attention.tiles import Runs, row_visits
from csbp.comm.upload import upload

_TILE = (128, 128)
_FAR = 2**31


def unusable(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> str:
    """Why this backend is not for that, in words; "" where it is."""
    if device.type != "cuda":
        return "it has no backward on the CPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it is for half precision, not for {dtype}"
    if max(key_dim, value_dim) > 512:
        return f"it takes head dims to 512, not {max(key_dim, value_dim)}"
    return ""


# Few rows would get a kernel of their own, made for decoding, that some lengths do not fit.
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
# Tiles of wide heads that fit into a GPU's shared memory; torch's own do not.
_WIDE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32, "num_stages": 1}


def near(x_SND: Tensor) -> Tensor:
    """The same, in a copy with the rows of a head side by side where rows lie further apart than 32 bits count:
    FlexAttention's backward counts so from a head's first row to any other."""
    return x_SND if len(x_SND) * x_SND.stride(0) < _FAR else x_SND.transpose(0, 1).contiguous().transpose(0, 1)


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Lengths differ from pack to pack; one graph serves all.
    return torch.compile(flex_attention, dynamic=True)


def _lists(runs: Runs, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What FlexAttention takes: how many tiles each row tile visits, [1, 1, M], and which, [1, 1, M, C]."""
    table = upload(runs.table(), device)
    place = torch.arange(tiles, dtype=torch.int32, device=device)
    lists = place + table[:, :1]
    for run in range(1, table.shape[1], 2):
        lists += (place >= table[:, run, None]) * table[:, run + 1, None]
    count = upload(runs.count.astype(np.int32), device)
    return count[None, None], torch.where(place < count[:, None], lists, 0).to(torch.int32)[None, None]


def block_mask(mask: IntervalMask, num_keys: int) -> BlockMask:
    """FlexAttention's form of a mask."""
    visits, tiles = row_visits(mask.host, num_keys, _TILE), -(-num_keys // _TILE[1])
    low, high, own, end = mask.prefix_start, mask.prefix_end, mask.block_start, mask.block_end

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= low[row]) & (key < high[row]) | (key >= own[row]) & (key < end[row])

    device = mask.prefix_start.device
    return BlockMask.from_kv_blocks(*_lists(visits.partial, tiles, device), *_lists(visits.full, tiles, device),
                                    BLOCK_SIZE=_TILE, mask_mod=visible, seq_lengths=(len(mask), num_keys))


def attend(q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask, scale: float) -> tuple[Tensor, Tensor]:
    """As ``reference.forward``, differentiable by FlexAttention's own backward."""
    blocks = mask.remembered(("flex", len(k_TKD)), lambda: block_mask(mask, len(k_TKD)))
    call = _compiled() if q_SND.is_cuda else cast(Callable[..., Any], flex_attention)
    out, aux = call(*(near(x).transpose(0, 1)[None] for x in (q_SND, k_TKD, v_TKD)), block_mask=blocks, scale=scale,
                    enable_gqa=q_SND.shape[1] != k_TKD.shape[1], return_aux=AuxRequest(lse=True),
                    kernel_options=_OPTIONS | (_WIDE if max(q_SND.shape[2], v_TKD.shape[2]) > 256 else {}))
    return out[0].transpose(0, 1), aux.lse[0].t()


def forward(q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask, scale: float) -> tuple[Tensor, Tensor]:
    """As ``reference.forward``."""
    if not len(q_SND) or not len(k_TKD):
        return reference.nothing_seen(q_SND, v_TKD)
    with torch.no_grad():
        out, lse = attend(q_SND, k_TKD, v_TKD, mask, scale)
    return out.contiguous(), lse


def backward(dout_SND: Tensor, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SND: Tensor, lse_SN: Tensor,
             mask: IntervalMask, scale: float, dlse_SN: Tensor | None = None, *,
             call: Callable[..., tuple[Tensor, Tensor]] = attend) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.backward``; gradients in the dtype of the inputs.

    Args:
        call: a differentiable attention of the part; this backend's own.
    """
    if not len(q_SND) or not len(k_TKD):
        return torch.zeros_like(q_SND), torch.zeros_like(k_TKD), torch.zeros_like(v_TKD)
    with _recording():
        inputs = [x.detach().requires_grad_() for x in (q_SND, k_TKD, v_TKD)]
        part, part_lse = call(*inputs, mask, scale)
    dout, dlse = share(dout_SND, out_SND, lse_SN, part.detach(), part_lse.detach(), dlse_SN)
    grads = torch.autograd.grad((part, part_lse), inputs, (dout.to(part.dtype), dlse.to(part_lse.dtype)))
    return grads[0], grads[1], grads[2]


@contextmanager
def _recording() -> Iterator[None]:
    """Record for autograd, also inside a custom op, where torch leaves out autograd's dispatch keys, whatever the
    grad mode."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out), torch.enable_grad():
        yield


def share(dout: Tensor, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor,
          dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a part of a softmax is to be given so that its own backward gives its gradients in the whole.

    Returns:
        The gradients of its output [S, N, D] and of its log-sum-exp [S, N].
    """
    wide = part_lse.dtype
    # A row that sees nothing here, or nothing at all, has no weight.
    weight = torch.where(part_lse == float("-inf"), 0.0, (part_lse - lse).exp())
    apart = (dout.to(wide) * (part.to(wide) - out.to(wide))).sum(-1)
    if dlse is not None:
        apart = apart + dlse
    return dout.to(wide) * weight[..., None], weight * apart

"""The reference backend: plain torch, any device, any float dtype, forward and backward.

Each tile of query rows (see ``mask``) meets only the hull of the key ranges that its rows need. Half-precision
inputs are computed in float32, float64 in float64. Legend: S query rows, T keys, N query heads, K key/value
heads, G = N / K, D head dim, R rows of a tile, L keys of a tile's hulls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csbp.attention.mask import IntervalMask, Tile


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(x_TKD: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TKD.to(dtype).transpose(0, 1)


def _queries(x_SND: Tensor, tile: Tile, heads: int) -> Tensor:
    """[K, G * R, D]: query heads that share a key head lie together."""
    x_RND = x_SND[tile.rows]
    rows, heads_all, dim = x_RND.shape
    return x_RND.reshape(rows, heads, heads_all // heads, dim).permute(1, 2, 0, 3).reshape(heads, -1, dim)


def _rows(x_KgD: Tensor, rows: int) -> Tensor:
    """Back to [R, N, D]."""
    heads, group_rows, dim = x_KgD.shape
    return x_KgD.view(heads, group_rows // rows, rows, dim).permute(2, 0, 1, 3).reshape(rows, -1, dim)


def _stats(x_SN: Tensor, tile: Tile, heads: int) -> Tensor:
    """[K, G * R, 1] of a per-row, per-head number."""
    return _queries(x_SN[..., None], tile, heads)


def _keys(x_KTD: Tensor, tile: Tile) -> Tensor:
    (a, b), (c, d) = tile.prefix, tile.block
    if d == c:
        return x_KTD[:, a:b]
    if b == a:
        return x_KTD[:, c:d]
    return torch.cat((x_KTD[:, a:b], x_KTD[:, c:d]), 1)


def _add_keys(target_KTD: Tensor, part_KLD: Tensor, tile: Tile) -> None:
    (a, b), (c, d) = tile.prefix, tile.block
    if b > a:
        target_KTD[:, a:b] += part_KLD[:, :b - a]
    if d > c:
        target_KTD[:, c:d] += part_KLD[:, b - a:]


def _hidden(mask: IntervalMask, tile: Tile) -> Tensor | None:
    """bool [R, L], True where a row of the tile must not see a key of the hulls."""
    if tile.full:
        return None
    device = mask.prefix_start.device
    prefix, block = torch.arange(*tile.prefix, device=device), torch.arange(*tile.block, device=device)
    low, high, own, end = (x[tile.rows][:, None] for x in
                           (mask.prefix_start, mask.prefix_end, mask.block_start, mask.block_end))
    return torch.cat(((prefix < low) | (prefix >= high), (block < own) | (block >= end)), 1)


def _scores(q_KgD: Tensor, k_KLD: Tensor, hidden_RL: Tensor | None, scale: float) -> Tensor:
    """[K, G * R, L], -inf where hidden."""
    s_KgL = torch.bmm(q_KgD * scale, k_KLD.transpose(1, 2))
    if hidden_RL is not None:
        rows, keys = hidden_RL.shape
        s_KgL.view(len(s_KgL), -1, rows, keys).masked_fill_(hidden_RL, float("-inf"))
    return s_KgL


def nothing_seen(q_SND: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """What ``forward`` of a half-precision kernel gives where there is no row or no key."""
    return (q_SND.new_zeros(*q_SND.shape[:2], v_TKD.shape[2]),
            q_SND.new_full(q_SND.shape[1::-1], float("-inf"), dtype=torch.float32).t())


def forward(q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask,
            scale: float) -> tuple[Tensor, Tensor]:
    """Output [S, N, D] like the query, and log-sum-exp [S, N] in the compute dtype, stored head after head."""
    dtype, heads = compute_dtype(q_SND.dtype), k_TKD.shape[1]
    q_SND_, k_KTD, v_KTD = q_SND.to(dtype), _heads_first(k_TKD, dtype), _heads_first(v_TKD, dtype)
    out = q_SND.new_zeros(*q_SND.shape[:2], v_TKD.shape[2])
    lse = torch.full(q_SND.shape[1::-1], float("-inf"), dtype=dtype, device=q_SND.device).t()
    for tile in mask.tiles:
        p_KgL = _scores(_queries(q_SND_, tile, heads), _keys(k_KTD, tile), _hidden(mask, tile), scale)
        top = p_KgL.amax(2, keepdim=True)
        p_KgL = p_KgL.sub_(top).exp_()
        total = p_KgL.sum(2, keepdim=True)
        o_KgD = torch.bmm(p_KgL, _keys(v_KTD, tile)) / total
        rows = tile.rows.stop - tile.rows.start if isinstance(tile.rows, slice) else len(tile.rows)
        out[tile.rows] = _rows(o_KgD, rows).to(out.dtype)
        lse[tile.rows] = _rows(top + total.log(), rows)[..., 0]
    return out, lse


def backward(dout_SND: Tensor, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SND: Tensor, lse_SN: Tensor,
             mask: IntervalMask, scale: float, dlse_SN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous, in the compute dtype.

    ``out`` and ``lse`` are those of the *whole* softmax, of which these keys may be a part: partial gradients then
    add. ``dlse``: gradient of lse, if it has one.
    """
    dtype, heads = compute_dtype(q_SND.dtype), k_TKD.shape[1]
    q_SND_, k_KTD, v_KTD = q_SND.to(dtype), _heads_first(k_TKD, dtype), _heads_first(v_TKD, dtype)
    dout_SND, lse_SN = dout_SND.to(dtype), lse_SN.to(dtype)
    delta_SN = (dout_SND * out_SND.to(dtype)).sum(-1)
    if dlse_SN is not None:
        delta_SN -= dlse_SN
    dq = torch.zeros_like(q_SND_, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k_TKD, v_TKD))
    dk_KTD, dv_KTD = dk.transpose(0, 1), dv.transpose(0, 1)
    for tile in mask.tiles:
        q_KgD, do_KgD = _queries(q_SND_, tile, heads), _queries(dout_SND, tile, heads)
        k_KLD, v_KLD = _keys(k_KTD, tile), _keys(v_KTD, tile)
        p_KgL = _scores(q_KgD, k_KLD, _hidden(mask, tile), scale)
        p_KgL = p_KgL.sub_(_stats(lse_SN, tile, heads)).exp_()
        _add_keys(dv_KTD, torch.bmm(p_KgL.transpose(1, 2), do_KgD), tile)
        dp_KgL = torch.bmm(do_KgD, v_KLD.transpose(1, 2))
        ds_KgL = dp_KgL.sub_(_stats(delta_SN, tile, heads)).mul_(p_KgL).mul_(scale)
        rows = tile.rows.stop - tile.rows.start if isinstance(tile.rows, slice) else len(tile.rows)
        dq[tile.rows] = _rows(torch.bmm(ds_KgL, k_KLD), rows)
        _add_keys(dk_KTD, torch.bmm(ds_KgL.transpose(1, 2), q_KgD), tile)
    return dq, dk, dv

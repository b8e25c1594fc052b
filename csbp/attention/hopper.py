"""FlashAttention-4's Hopper kernels, told runs of tiles instead of lists, and ranges instead of a mask function.

Two things in those kernels cost interval masks dearly: a list of tile numbers that is read from memory on the way to
every tile, and a mask function that is called for every score, reads its row's bounds anew and waits for them. Here
the number of a tile is computed from a few registers (``tiles.Runs.table``), and a thread reads the bounds of all its
rows at once, 16 bytes each. The kernels themselves are the library's own. This reaches into them, so it holds for
the one release named by ``RELEASE``. Import it only where that library is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import cutlass
import flash_attn.cute.block_sparse_utils as visiting
import flash_attn.cute.flash_bwd_sm90 as backward_kernel
import flash_attn.cute.interface as library
from cutlass import Float32, Int32, const_expr, cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import (
    BlockSparseTensorsTorch,
    NormalizedBlockSparseConfig,
    get_block_sparse_broadcast_pattern,
)
from flash_attn.cute.mask import AttentionMask, AuxData, layout_utils

from csbp.attention import hopper_heads

RELEASE = "4.0.0b36"
# The most runs of partial and of full tiles that a tile of rows, and a tile of keys, is told.
ROW_RUNS, KEY_RUNS = (4, 2), (6, 3)
# The most bytes of query rows of a group (their queries, their outputs' gradients and their own) that see a tile of
# keys, in the mean, where a backward by groups of heads is faster: a few such tiles' rows stay in the cache.
CACHED = 16 << 20
# The most tiles of keys that a grid of such thread blocks can have, and how many run at once on the largest GPU.
MOST_TILES, PROCESSORS = 65535, 132

_LOCK = threading.RLock()
_NO_AUX = AuxData()


def installed() -> bool:
    """Whether the library is there in the release that this file is written for."""
    return metadata.version("flash-attn-4") == RELEASE


@cute.jit
def visible(batch, head, row, key, info, aux):  # type: ignore[no-untyped-def]
    """The library's mask function of our masks: aux[0] is int32 [S, 4]."""
    bounds, at = aux[0], row[0]
    prefix_start, prefix_end, block_start, block_end = (utils.scalar_to_ssa(bounds[at, i], Int32) for i in range(4))
    return (key >= prefix_start) & (key < prefix_end) | (key >= block_start) & (key < block_end)


@cute.jit
def visible_to_group(batch, head, row, key, info, aux):  # type: ignore[no-untyped-def]
    """The same by another name: the library keeps what it has compiled by its mask function."""
    return visible(batch, head, row, key, info, aux)


# It can keep that on disk, past the next release of csbp: then by all that a kernel is made of here.
_SOURCES = b"".join(Path(str(file)).read_bytes() for file in (__file__, hopper_heads.__file__))
for _function in (visible, visible_to_group):
    _function.__cute_hash__ = hashlib.sha256(_function.__name__.encode() + _SOURCES).hexdigest()


@cute.jit
def _apply_mask(  # type: ignore[no-untyped-def]
        self, acc_S, batch_idx, head_idx, m_block, n_block, thr_mma, mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool], mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr[Callable | None] = None, aux_data: AuxData = _NO_AUX, fastdiv_mods=(None, None)):
    # Full tiles need nothing: the last, ragged tile of keys is never one of them, and rows past the end see nothing.
    if const_expr(mask_mod is not None):
        acc = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.swap_AB)
        whole = cute.make_identity_tensor((self.tile_n, self.tile_m) if self.swap_AB else (self.tile_m, self.tile_n))
        mine = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(whole), transpose=self.swap_AB)
        first = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(whole), transpose=self.swap_AB)
        row_axis, key_axis = (1, 0) if const_expr(self.swap_AB) else (0, 1)
        rows, keys = const_expr(cute.size(mine.shape[0])), const_expr(cute.size(mine.shape[1]))
        table = aux_data.tensors[0]
        bounds = cute.make_rmem_tensor((4, rows), Int32)
        for r in cutlass.range_constexpr(rows):
            row = mine[r, 0][row_axis] + m_block * self.tile_m
            if const_expr(self.qhead_per_kvhead_packgqa != 1):
                row = row // self.qhead_per_kvhead_packgqa
            four = cute.make_tensor(table.iterator + cute.assume(row * 4, divby=4), cute.make_layout(4))
            cute.autovec_copy(four, bounds[None, r])
        origin = mine[0][key_axis] + n_block * self.tile_n
        for r in cutlass.range_constexpr(rows):
            prefix_start, prefix_end = bounds[0, r] - origin, bounds[1, r] - origin
            block_start, block_end = bounds[2, r] - origin, bounds[3, r] - origin
            for c in cutlass.range_constexpr(keys):
                key = const_expr(first[0, c][key_axis])
                seen = ((key >= prefix_start) & (key < prefix_end)) | ((key >= block_start) & (key < block_end))
                acc[r, c] = acc[r, c] if seen else -Float32.inf


class _Row:
    """i -> number of the i-th tile, from a row of ``Runs.table`` in registers."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __getitem__(self, i: Any) -> Any:
        tile = i + self.values[0]
        for place, jump in zip(self.values[1::2], self.values[2::2], strict=True):
            tile = tile + jump * Int32(i >= place)
        return tile


class _Table:
    """Stands where the kernel expects the lists of all tiles."""

    def __init__(self, tensor: Any, runs: int) -> None:
        self.tensor, self.width = tensor, 2 * runs - 1

    def __getitem__(self, at: Any) -> _Row:
        batch, head, tile, _ = at
        return _Row([self.tensor[batch, head, tile, i] for i in range(self.width)])


def _of_row_tile(batch_idx: Any, head_idx: Any, m_block: Any, tensors: Any, *rest: Any) -> tuple[Any, ...]:
    at = batch_idx, head_idx, m_block
    return (tensors[0][at], _Table(tensors[1], ROW_RUNS[0])[*at, None],
            tensors[2][at], _Table(tensors[3], ROW_RUNS[1])[*at, None])


def _with_tables(original: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tables = visiting.BlockSparseTensors(tensors[0], _Table(tensors[1], KEY_RUNS[0]), tensors[2],
                                             _Table(tensors[3], KEY_RUNS[1]), *tensors[4:])
        return original(tables, *args, **kwargs)

    return replaced


def _forward_config(tensors: BlockSparseTensorsTorch, *, num_head: int, block_size: tuple[int, int],
                    **_: Any) -> NormalizedBlockSparseConfig:
    spread = _all_heads(tensors, num_head)
    assert tensors.block_size is not None
    return NormalizedBlockSparseConfig(spread, get_block_sparse_broadcast_pattern(spread),
                                       tensors.block_size[0] // block_size[0], 1)


def _backward_config(tensors: BlockSparseTensorsTorch, *, num_head: int, **_: Any) -> tuple[Any, Any]:
    spread = _all_heads(tensors, num_head)
    return spread, get_block_sparse_broadcast_pattern(spread)


def _all_heads(tensors: BlockSparseTensorsTorch, heads: int) -> BlockSparseTensorsTorch:
    """[1, 1, X] and [1, 1, X, W] become [1, N, X] and [1, N, X, W], without a copy."""
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    return tensors._replace(**{name: getattr(tensors, name).expand(-1, heads, *getattr(tensors, name).shape[2:])
                               for name in names})


_tile_size_bwd = library._tile_size_bwd_sm90


def _backward_tile(head_dim: int, head_dim_v: int, *_: Any, **__: Any) -> Any:
    # As for a causal mask, whatever the sparsity: runs do not care how large tiles are, and rows by 64 waste less.
    return _tile_size_bwd(head_dim, head_dim_v, True, False)


def forward_tile(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Rows and keys of a tile of the forward kernel."""
    config = library._tile_size_fwd_sm90(head_dim, head_dim_v, False, False)
    return config.m_block_size, config.n_block_size


def backward_tile(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Rows and keys of a tile of the backward kernel."""
    config = _backward_tile(head_dim, head_dim_v)
    return config.m_block_size, config.n_block_size


_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (AttentionMask, "apply_mask", _apply_mask),
    (visiting, "get_curr_blocksparse_tensors", _of_row_tile),
    *((backward_kernel, name, _with_tables(getattr(backward_kernel, name))) for name in hopper_heads.LOOPS),
    (library, "normalize_block_sparse_config", _forward_config),
    (library, "normalize_block_sparse_config_bwd", _backward_config),
    (library, "_tile_size_bwd_sm90", _backward_tile),
)
_BY_GROUP = (*_REPLACED, *hopper_heads.replaced(_Table, KEY_RUNS))


@contextlib.contextmanager
def told_runs(by_group: bool = False) -> Iterator[Any]:
    """Within it, the library's block-sparse calls take tables of runs; gives the library's interface module.

    Args:
        by_group: a backward's thread blocks see to all query heads of a group. Its mask function must be
            ``visible_to_group``, otherwise ``visible``.
    """
    changes = _BY_GROUP if by_group else _REPLACED
    with _LOCK:
        saved = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        try:
            for owner, name, new in changes:
                setattr(owner, name, new)
            yield library
        finally:
            for owner, name, old in reversed(saved):
                setattr(owner, name, old)

"""FlashAttention-4's block-sparse backward for Hopper with one thread block for all query heads that share keys.

The library starts a thread block for every tile of keys and every query head. Each loads the tile's keys and values
and adds its dK and dV to those of the other heads: where few rows see a tile (short documents, windows) that takes
longer than the attention itself. Here a thread block goes through the heads of a group one after another, as if their
row tiles lay behind each other, and adds dK and dV once. Where many rows see a tile, the library's order is faster:
then those of one head stay in the GPU's cache. Legend: G query heads of a group, M row tiles of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cutlass
import flash_attn.cute.flash_bwd_sm90 as backward_kernel
import flash_attn.cute.interface as library
from cutlass import Int32, cute
from flash_attn.cute.block_sparse_utils import BlockSparseTensors
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo


class _Scheduler(SingleTileScheduler):  # type: ignore[misc]
    """A thread block for each (head of keys, tile of keys), tile after tile; it names the group's first query head."""

    group = 1  # G of the kernel that is being compiled

    @staticmethod
    def to_underlying_arguments(args: Any, **where: Any) -> Any:
        of_keys = dataclasses.replace(args, num_head=args.num_head // _Scheduler.group)
        return SingleTileScheduler.to_underlying_arguments(of_keys, **where)

    @staticmethod
    def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> _Scheduler:
        return _Scheduler(params, cute.arch.block_idx(), loc=loc, ip=ip)

    @staticmethod
    def get_grid_shape(params: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any]:
        return params.num_head, params.num_block, params.num_batch

    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
        head, block, batch = self._blk_coord
        return WorkTileInfo((block, head * self.group, batch, Int32(0)), self._is_first_block)

    def __new_from_mlir_values__(self, values: list[Any]) -> _Scheduler:
        first = self._values_pos[0]
        again = _Scheduler(cutlass.new_from_mlir_values(self.params, values[:first]),
                           cutlass.new_from_mlir_values(self._blk_coord, values[first:]), loc=self._loc)
        again._is_first_block = self._is_first_block
        return again


class _Backward(backward_kernel.FlashAttentionBackwardSm90):  # type: ignore[misc]
    """The library's kernel on the row tiles of a whole group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _Scheduler.group = self.qhead_per_kvhead

    def load(self, query: Any, key: Any, value: Any, dout: Any, lse: Any, delta: Any, *rest: Any) -> Any:
        query, dout, lse, delta = (self._in_a_row(x, self.tile_m) for x in (query, dout, lse, delta))
        return super().load(query, key, value, dout, lse, delta, *rest)

    def dQaccum_store(self, dq: Any, *rest: Any) -> Any:
        return super().dQaccum_store(self._in_a_row(dq, self.tile_m * self.tile_hdim), *rest)

    def _in_a_row(self, tensor: Any, tile: int) -> Any:
        """Mode 0 becomes (tile, M, G): every head is followed by the next ones. Heads are the last mode but one."""
        (rows, *shape), (step, *strides) = tensor.shape, tensor.stride
        modes = (tile, cute.ceil_div(rows, tile), self.qhead_per_kvhead), (step, step * tile, strides[-2])
        return cute.make_tensor(tensor.iterator, cute.make_layout((modes[0], *shape), stride=(modes[1], *strides)))


def _place(tile: Any, tiles: Any) -> tuple[Any, Any]:
    """Of a tile of the group: (row tile of its head, head). Comparisons are cheaper here than a division."""
    head = sum((Int32(tile >= tiles * i) for i in range(1, _Scheduler.group)), Int32(0))
    return tile - head * tiles, head


class _Counts:
    """How many tiles of a group see a tile of keys, from those of one head."""

    def __init__(self, counts: Any) -> None:
        self.counts = counts

    def __getitem__(self, at: Any) -> Any:
        return self.counts[at] * _Scheduler.group


class _Lists:
    """Which tiles of a group see a tile of keys, from those of one head."""

    def __init__(self, table: Any, counts: Any, tiles: Any) -> None:
        self.table, self.counts, self.tiles = table, counts, tiles

    def __getitem__(self, at: Any) -> _List:
        return _List(self.table[at], self.counts[at[:-1]], self.tiles)


class _List:
    def __init__(self, row: Any, count: Any, tiles: Any) -> None:
        self.row, self.count, self.tiles = row, count, tiles

    def __getitem__(self, i: Any) -> Any:
        i, head = _place(i, self.count)
        return self.row[i] + head * self.tiles


class _Placed:
    """dQ as the kernel adds to it, asked for a tile of the group."""

    def __init__(self, dq: Any, tiles: Any) -> None:
        self.dq, self.tiles = dq, tiles

    def __getitem__(self, at: Any) -> Any:
        return self.dq[at[0], _place(at[1], self.tiles)]


def _at_place(step: Callable[..., Any], tiles: Any) -> Callable[..., Any]:
    return lambda tile, **more: step(_place(tile, tiles), **more)


def _of_head(step: Callable[..., Any], tiles: Any) -> Callable[..., Any]:
    return lambda tile, *args, **more: step(_place(tile, tiles)[0], *args, **more)


# What a loop is given beside lists, and what of it knows a tile's number: position, and what must stand there instead.
LOOPS: dict[str, tuple[range, Callable[[Any, Any], Any]]] = {
    "produce_block_sparse_q_loads_bwd_sm90": (range(9, 13), _at_place),  # loads of Q, dO, LSE and of dO's product
    "consume_block_sparse_mma_bwd_sm90": (range(5, 6), _of_head),  # whose number the mask is asked by
    "dQaccum_store_block_sparse_bwd_sm90": (range(4, 5), _Placed),
}


def replaced(table: Callable[[Any, int], Any], runs: tuple[int, int]) -> list[tuple[Any, str, Any]]:
    """(owner, name, what must stand there) for a backward by groups.

    Args:
        table: of a tensor of ``tiles.Runs.table`` and its runs: gives the i-th tile.
        runs: of partial and of full tiles.
    """
    return [*((backward_kernel, name, _looped(getattr(backward_kernel, name), table, runs, *of))
              for name, of in LOOPS.items()),
            (backward_kernel, "SingleTileScheduler", _Scheduler),
            (library, "FlashAttentionBackwardSm90", _Backward)]


def _looped(original: Callable[..., Any], table: Callable[[Any, int], Any], runs: tuple[int, int], where: range,
            instead: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def loop(lists: Any, *args: Any, m_block_max: Any, **more: Any) -> Any:
        partial, full = (_Lists(table(lists[i + 1], of), lists[i], m_block_max)
                         for i, of in zip((0, 2), runs, strict=True))
        of_group = BlockSparseTensors(_Counts(lists[0]), partial, _Counts(lists[2]), full, *lists[4:])
        told = [instead(arg, m_block_max) if at in where else arg for at, arg in enumerate(args)]
        return original(of_group, *told, m_block_max=m_block_max * _Scheduler.group, **more)

    return loop

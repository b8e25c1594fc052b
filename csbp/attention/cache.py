"""Keys and values of one text while it is generated, block by block.

A pass over clean rows (prefill, or a finished block) appends its keys and values; a pass over the noised rows
of a block reads what is kept and leaves nothing behind. Who sees whom comes from ``csbp.plan.ranges``, the
same rules as in training, applied to a text that ends with the rows of the pass.

Legend: S rows of a pass, T keys kept before it, N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from csbp.attention.core import interval_attention
from csbp.attention.mask import IntervalMask
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ranges import RowRanges, clean_ranges, noised_ranges


class GenerationCache:
    """Clean keys and values of every attention layer, for one text.

    Args:
        kinds: the model's layer kinds.
        block_size: cells of the text's grid.
        device: where the model is.
        backend: attention backend.
    """

    def __init__(self, kinds: tuple[LayerKind, ...], block_size: int, device: torch.device | str = "cpu",
                 backend: str = "auto") -> None:
        self._kinds, self._block_size = kinds, block_size
        self._device, self._backend = device, backend
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def clean_pass(self, rows: int) -> CachedPlan:
        """The plan of the next ``rows`` tokens of the text, whose keys and values are kept."""
        geometry = _text(self.length + rows, self._block_size)
        ranges = {kind.name: clean_ranges(geometry, kind, np.arange(self.length, self.length + rows))
                  for kind in self._kinds}
        plan = self._plan(ranges)
        self.length += rows
        return plan

    def noised_pass(self, rows: int) -> CachedPlan:
        """The plan of a noised block of ``rows`` tokens that follows the text."""
        geometry = replace(_text(self.length, self._block_size), block_document=np.zeros(1, np.int64),
                           block_cell=np.array([-1]), block_prefix_end=np.array([self.length]),
                           block_starts=np.array([0, rows]))
        return self._plan({kind.name: noised_ranges(geometry, kind) for kind in self._kinds})

    def _plan(self, ranges: dict[str, RowRanges]) -> CachedPlan:
        # Keys are [kept clean rows | rows of the pass]: a noised row's own block lies behind the kept ones.
        kept = self.length
        return CachedPlan(self, kept, {
            name: IntervalMask.from_arrays(r.prefix_start, r.prefix_end, r.block_start + kept,
                                           r.block_end + kept, self._device) for name, r in ranges.items()})

    def attend(self, query_SND: Tensor, key_SKD: Tensor, value_SKD: Tensor, mask: IntervalMask, kept: int,
               layer: int, scale: float | None) -> Tensor:
        """Write the pass's keys and values behind the ``kept`` ones, then attend (see ``CachedPlan``)."""
        end = kept + len(key_SKD)
        key, value = self._layers.get(layer, (key_SKD[:0], value_SKD[:0]))
        key, value = self._layers[layer] = _grown(key, end), _grown(value, end)
        key[kept:end], value[kept:end] = key_SKD, value_SKD
        return interval_attention(query_SND, key[:end], value[:end], mask, scale=scale,
                                  backend=self._backend)[0]


class CachedPlan:
    """One forward pass over a cache; takes the place of a training plan in a model's attention layers.

    Args:
        cache: where keys and values live.
        kept: rows in it that stay.
        masks: per layer kind, S rows over the T kept keys and then the S new ones.
    """

    numbers_layers = True

    def __init__(self, cache: GenerationCache, kept: int, masks: dict[str, IntervalMask]) -> None:
        self._cache, self._kept, self._masks = cache, kept, masks

    @torch.compiler.disable  # its masks are laid out in Python
    def attend(self, kind: str, query: Tensor, key: Tensor, value: Tensor, *, layer: int,
               scale: float | None = None) -> Tensor:
        """Attention of the S rows of this pass.

        Args:
            kind: name of the layer's kind.
            query: [S, N, D].
            key, value: [S, K, D].
            layer: index of the attention layer, the key of its cache.
            scale: score factor; default 1 / sqrt(D).

        Returns:
            [S, N, D].
        """
        return self._cache.attend(query, key, value, self._masks[kind], self._kept, layer, scale)


def _text(length: int, block_size: int) -> Geometry:
    """One document of that many clean rows, without target blocks."""
    none = np.zeros(0, np.int64)
    cells = np.append(np.arange(0, length, block_size), length)
    return Geometry(np.array([0, length]), cells, none, none, none, np.zeros(1, np.int64))


def _grown(buffer: Tensor, rows: int) -> Tensor:
    """The buffer, or a copy with room for at least ``rows`` rows."""
    if rows <= len(buffer):
        return buffer
    larger = buffer.new_empty(max(rows, 2 * len(buffer)), *buffer.shape[1:])
    larger[:len(buffer)] = buffer
    return larger

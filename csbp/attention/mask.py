"""The one mask type of the project: at most two contiguous key ranges per query row (DESIGN section 2)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class IntervalMask:
    """Row i sees keys [prefix_start[i], prefix_end[i]) and [block_start[i], block_end[i]).

    All four are int32 [S], half-open indices into the T rows of the key tensor. An empty range has end <=
    start. The two ranges of a row must not overlap. A row with two empty ranges sees nothing.
    """

    prefix_start: Tensor
    prefix_end: Tensor
    block_start: Tensor
    block_end: Tensor

    def __len__(self) -> int:
        return len(self.prefix_start)

    def to(self, device: torch.device | str) -> IntervalMask:
        """The same mask on another device."""
        return IntervalMask(*(getattr(self, f.name).to(device) for f in fields(self)))

"""Memory for what travels, used again by every operation: sizes that change from step to step then leave no gaps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ALIGNED = 256  # bytes; as the allocators of devices do


class Buffers:
    """One piece of memory, dealt out anew in every operation. It only grows.

    Nothing that is taken may be read after the operation. What still travelled then would be overwritten, so an
    operation waits for all that it has started; work on a device follows in the order of its stream.
    """

    def __init__(self, reuse: bool = True) -> None:
        """``reuse``: False takes all memory from the allocator, as other tensors do."""
        self.reuse = reuse
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device = self._memory.device
        self._taken = self._most = 0

    @property
    def most(self) -> int:
        """Bytes that one operation has taken at most."""
        return self._most

    def begin(self, device: torch.device) -> None:
        """Start an operation: all memory is free again."""
        self._taken, self._device = 0, device
        if self.reuse and (len(self._memory) < self._most or self._memory.device != device):
            self._memory = torch.empty(0)  # gone before the larger one is made
            self._memory = torch.empty(self._most, dtype=torch.uint8, device=device)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory, until the next ``begin``. What an operation takes beyond what any took before it comes
        from the allocator."""
        size, start = math.prod(shape) * dtype.itemsize, self._taken
        self._taken += -(-size // _ALIGNED) * _ALIGNED
        self._most = max(self._most, self._taken)
        if not self.reuse or self._taken > len(self._memory):
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._memory[start:start + size].view(dtype).view(shape)

"""What units keep for their backward, moved to the host's memory and back while the device computes.

A copy stream carries it. At any time the device holds what two units keep: in the forward the one at work and the one
whose copies are under way, in the backward the one at work and the next, fetched ahead. The streams wait for each
other; the host waits for none.

What selective checkpointing keeps outside of compiled code (outputs of attention, and of matrix products) is held
elsewhere and stays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 1 << 16  # bytes; what is smaller stays


class Mover:
    """Carries what the units of one model keep.

    Args:
        stream: where copies run; None: as the code comes to them, on a device without streams.
        smallest: bytes; smaller tensors stay.
    """

    def __init__(self, stream: torch.cuda.Stream | None, smallest: int = SMALLEST) -> None:
        self.stream, self.smallest = stream, smallest
        self.last: weakref.ref[_Kept] | None = None

    @contextmanager
    def moving(self, unit: nn.Module) -> Iterator[None]:
        """What is saved for a backward meanwhile leaves the device, but for the unit's weights."""
        if not torch.is_grad_enabled():
            yield
            return
        kept = _Kept(self, unit, self.last)
        self.last = weakref.ref(kept)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            yield
        kept.close()

    def copies(self) -> AbstractContextManager[Any]:
        """Copies that start after all that the device has been told so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """The end of the copies so far."""
        return None if self.stream is None else self.stream.record_event()


class _Away(NamedTuple):
    """A view of a moved tensor."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Kept:
    """Of one call of a unit. The graph of its backward keeps it alive, nothing else does."""

    def __init__(self, mover: Mover, unit: nn.Module, before: weakref.ref[_Kept] | None) -> None:
        self.mover, self.unit, self.before = mover, unit, before
        self.buffers: list[Tensor] = []  # [numel] each
        self.here: list[Tensor] = []  # the same on the device; empty while they are away
        self.numbers: dict[Any, int] = {}  # the same memory is often saved by several operators
        self.copied: torch.cuda.Event | None = None
        self.device = torch.device("cpu")

    @functools.cached_property
    def weights(self) -> set[int]:
        """Where the unit's weights lie while it runs: FSDP frees and gathers them itself."""
        with torch.no_grad():
            local = (p.to_local() if hasattr(p, "to_local") else p for p in self.unit.parameters())
            return {p.untyped_storage().data_ptr() for p in local}

    def pack(self, x: Tensor) -> Tensor | _Away:
        """Start moving a tensor. Returns where it is from now on, or the tensor itself, which stays."""
        if type(x) is not Tensor or x.nbytes < self.mover.smallest or x.untyped_storage().data_ptr() in self.weights:
            return x
        if torch.empty_like(x, device="meta").stride() != x.stride():  # with gaps, which no copy would keep
            return x
        key = (x.data_ptr(), x.numel(), x.dtype)
        if key not in self.numbers:
            flat = x.detach().as_strided((x.numel(),), (1,))
            self.numbers[key] = len(self.buffers)
            self.here.append(flat)
            self.buffers.append(torch.empty_like(flat, device="cpu", pin_memory=x.is_cuda))
            with self.mover.copies():
                self.buffers[-1].copy_(flat, non_blocking=True)
        return _Away(self.numbers[key], x.shape, x.stride())

    def close(self) -> None:
        """The unit's forward is over. What the one before it has kept is, or soon will be, away."""
        self.copied, self.numbers, before = self.mover.mark(), {}, self._before()
        if before is not None and before.here:
            _wait(before.copied)
            before.device = before.here[0].device
            before.here = []

    def unpack(self, kept: Tensor | _Away) -> Tensor:
        """A tensor again on its device; the unit whose backward comes next is fetched meanwhile."""
        if isinstance(kept, Tensor):
            return kept
        self.fetch()
        _wait(self.copied)
        before = self._before()
        if before is not None and before.buffers:
            before.fetch()
        return self.here[kept.number].as_strided(kept.shape, kept.stride)

    def fetch(self) -> None:
        """Start moving everything back, unless that was done."""
        if not self.here:
            # Made on the stream that will use and free them, so that their memory is used again without waiting.
            self.here = [torch.empty_like(buffer, device=self.device) for buffer in self.buffers]
            with self.mover.copies():
                for x, buffer in zip(self.here, self.buffers, strict=True):
                    x.copy_(buffer, non_blocking=True)
            self.copied = self.mover.mark()

    def _before(self) -> _Kept | None:
        return None if self.before is None else self.before()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class _Moved:
    """Mixed into the class of a unit, around its hooks and its compiled code."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with self.mover.moving(self):  # type: ignore[attr-defined]
            return super().__call__(*inputs, **named)  # type: ignore[misc]


@functools.cache  # one class for all layers: a compiler sees one kind of module
def _moved(kind: Any) -> type:
    return type(kind.__name__, (_Moved, kind), {})


def apply_offload(units: Sequence[nn.Module], mover: Mover) -> None:
    """Let a mover carry what each unit keeps for its backward, in place.

    Args:
        units: in forward order; call this after they are compiled and before they are sharded.
        mover: of these units alone.
    """
    for unit in units:
        kind: Any = type(unit)
        unit.__class__ = _moved(kind)
        unit.mover = mover  # type: ignore[assignment]

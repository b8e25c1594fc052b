"""Query rows attended by another rank than their owner: what travels of them, and how it is put together again.

Forward: queries go to a server, (out, lse) comes back and is merged. Backward: with the final lse and delta =
rowsum(dout * out) of the whole softmax, a server's partial gradients simply add. Legend: S query rows, F guest rows,
G rows that others attend, R received rows, Sc own clean rows, N query heads, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.attention.core import Backend
from csbp.attention.mask import IntervalMask
from csbp.attention.merge import Pair, merge_rows
from csbp.attention.reference import compute_dtype
from csbp.comm.buffers import Buffers
from csbp.comm.transport import Outgoing
from csbp.comm.upload import upload
from csbp.plan.guests import Guests
from csbp.plan.wire import parcel


@dataclass(frozen=True)
class BoundGuests:
    """A rank's part in moving query rows, on its device.

    Attributes:
        send: int64 [G], own query rows that others attend, by server.
        send_counts, receive_counts: rows per peer.
        order: int64 [F], the order in which the guest rows are attended, of that in which they come.
        mask: of the F guest rows in that order, into [R received | Sc own clean] or the one of them that they see.
        received, own: which of the two they see.
        rounds: of what comes back, (places in ``send`` or None for all, query rows); no row twice in a round.
    """

    send: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    order: Tensor
    mask: IntervalMask
    received: bool
    own: bool
    rounds: tuple[tuple[Tensor | None, Tensor], ...]

    @classmethod
    def bind(cls, guests: Guests, device: torch.device | str) -> BoundGuests:
        """The plan's guests on a device."""
        ranges = guests.ranges
        mask = IntervalMask.from_arrays(ranges.prefix_start, ranges.prefix_end, ranges.block_start, ranges.block_end,
                                        device)
        alone = len(guests.rounds) == 1  # nothing comes twice: all that comes, as it comes
        rounds = tuple((None if alone else upload(places, device), upload(rows, device))
                       for places, rows in guests.rounds)
        return cls(upload(guests.send, device), guests.send_counts, guests.receive_counts, upload(guests.order, device),
                   mask, guests.received, guests.own, rounds)

    def lend(self, query: Tensor, memory: Buffers) -> Outgoing:
        """Queries on their way to the servers."""
        return outgoing(query[self.send], self.send_counts, self.receive_counts, "queries", memory)

    def lend_all(self, dout: Tensor, query: Tensor, out: Tensor, lse: Tensor, memory: Buffers) -> Outgoing:
        """What servers need of query rows in the backward."""
        delta = (_deltas() if dout.is_cuda else _delta)(dout, out, self.send)
        parcels = pack([lse[self.send], delta, query[self.send], dout[self.send].to(out.dtype)], memory)
        return outgoing(parcels, self.send_counts, self.receive_counts, "queries", memory)

    def attend(self, query: Tensor, keys: Pair, backend: Backend, scale: float, memory: Buffers) -> Outgoing:
        """Attend the guest rows [F, N, D]; (lse, out) on their way home."""
        out, lse = query.new_empty(0, query.shape[1], keys[1].shape[2]), query.new_empty(
            0, query.shape[1], dtype=compute_dtype(query.dtype))
        if len(query):
            out, lse = backend.forward(query[self.order], *keys, self.mask, scale)
        parcels = pack([lse, out], memory, self.order)
        return outgoing(parcels, self.receive_counts, self.send_counts, "outputs", memory)

    def gradients(self, parcels: Tensor, like: Sequence[Tensor], keys: Pair, backend: Backend, scale: float,
                  memory: Buffers, wire: torch.dtype) -> tuple[Outgoing, Pair]:
        """Gradients of the guest rows' queries on their way home, and of the keys and values that they see.

        Args:
            parcels: what ``lend_all`` sent.
            like: lse, query and output, with their dtypes.
        """
        lse_like, query_like, out_like = ((x.shape[1:], x.dtype) for x in like)
        lent = unpack(parcels, [lse_like, lse_like, query_like, out_like])
        home = memory.take(tuple(lent[2].shape), wire)
        of_keys = keys[0][:0], keys[1][:0]
        if len(parcels):
            lse, delta, query, dout = (x[self.order] for x in lent)
            # An output of zeros whose log-sum-exp has the gradient -delta says just that delta.
            dq, *rest = backend.backward(dout, query, *keys, torch.zeros_like(dout), lse, self.mask, scale, -delta)
            home[self.order], of_keys = dq.to(wire), (rest[0], rest[1])
        return outgoing(home, self.receive_counts, self.send_counts, "query_gradients", memory), of_keys

    def merge(self, whole: Pair, returned: Pair) -> None:
        """Into own rows' (out, lse) what the servers have found, which comes as [G, ...]; in the order of ranks."""
        for places, rows in self.rounds:
            merge_rows(whole, returned, rows, places)

    def add(self, dq: Tensor, returned: Tensor | None) -> None:
        """Add the servers' gradients of queries [G, N, D], in the order of ranks."""
        assert returned is not None
        for places, rows in self.rounds:
            dq[rows] += (returned if places is None else returned[places]).to(dq.dtype)


@functools.cache
def _deltas() -> Callable[..., Tensor]:
    return torch.compile(_delta, dynamic=True)  # one pass, no copies in float32


def _delta(dout: Tensor, out: Tensor, rows: Tensor) -> Tensor:
    """[G, N], each row's and head's sum of output times its gradient."""
    wide = compute_dtype(out.dtype)
    return (dout[rows].to(wide) * out[rows].to(wide)).sum(-1)


def outgoing(rows: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...], label: str,
             memory: Buffers) -> Outgoing:
    """Rows to send, and memory for those that come."""
    into = memory.take((sum(receive_counts), *rows.shape[1:]), rows.dtype) if memory.reuse else None
    return Outgoing(rows, send_counts, receive_counts, label, into)


def pack(parts: Sequence[Tensor], memory: Buffers, order: Tensor | None = None) -> Tensor:
    """uint8 [rows, bytes] of tensors [rows, ...]: one parcel a row, without loss; ``order``: where each row goes."""
    width = parcel(*(math.prod(x.shape[1:]) * x.element_size() for x in parts))[-1]
    parcels = memory.take((len(parts[0]), width), torch.uint8)
    for part, view in zip(parts, unpack(parcels, [(x.shape[1:], x.dtype) for x in parts]), strict=True):
        if order is None:
            view.copy_(part)
        else:
            view[order] = part
    return parcels


def unpack(parcels: Tensor, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Views [rows, ...] of the parts of parcels, by shape of a row and dtype."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
    return [parcels[:, place:place + size].view(dtype).unflatten(1, tuple(shape))
            for place, size, (shape, dtype) in zip(parcel(*sizes), sizes, parts, strict=False)]

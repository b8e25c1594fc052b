"""One layer kind of a rank's plan on its device, and what its phases do with rows that travel.

Legend: S query rows, Sc own clean rows, R received rows, K key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.attention.core import Backend, get_backend
from csbp.attention.guests import BoundGuests, outgoing
from csbp.attention.mask import IntervalMask
from csbp.attention.merge import Pair
from csbp.attention.sums import Returning, total
from csbp.comm.buffers import Buffers
from csbp.comm.transport import Outgoing
from csbp.comm.upload import upload
from csbp.plan.plan import KindPlan
from csbp.plan.ranges import RowRanges
from csbp.plan.stages import Stages, in_stages
from csbp.plan.travel import Exchange

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


@dataclass(frozen=True)
class Part:
    """Some query rows over the keys that are here: ``rows``, their mask, and the first how many keys it is into."""

    rows: slice
    mask: IntervalMask
    keys: int | None


@dataclass(frozen=True)
class Stage:
    """A share of the rows that travel; all of them, where there is but one.

    Attributes:
        sent: own rows to send, by destination; in the "csbp" scheme clean rows only.
        to_global: int64 [R], permutation of the received rows into global order.
        arrived: mask into the received rows in global order.
        sees_far: whether it lets any row see any.
    """

    sent: Returning
    receive_counts: tuple[int, ...]
    to_global: Tensor
    arrived: IntervalMask
    sees_far: bool

    @classmethod
    def bind(cls, exchange: Exchange, arrived: RowRanges, own: int, device: torch.device | str) -> Stage:
        """The plan's share on a device; the rank has ``own`` keys."""
        return cls(Returning.bind(exchange.send, exchange.send_counts, own, device), exchange.receive_counts,
                   upload(exchange.to_global, device), _mask(arrived, device), bool(arrived.pairs.any()))


@dataclass(frozen=True)
class BoundKind:
    """One layer kind of a rank's plan, on its device.

    Attributes:
        here: mask into [own clean rows | own noised rows].
        parts: the local backward: its last part runs while gradients travel home, those before it (one, or none) while
            keys and queries come.
        stages: what travels, share by share; empty where nothing does in any pack.
        backend: the kernel.
        num_clean: Sc.
        wire: dtype in which gradients travel home; None: that of the keys.
        guests: its part in moving query rows; None where no rank's do.
        memory: for what travels.
    """

    here: IntervalMask
    parts: tuple[Part, ...]
    stages: tuple[Stage, ...]
    backend: Backend
    num_clean: int
    wire: torch.dtype | None
    guests: BoundGuests | None
    memory: Buffers

    def ship(self, stage: Stage, key: Tensor, value: Tensor) -> Outgoing:
        """Own keys and values on their way to those who need them."""
        rows = torch.cat((key[stage.sent.rows], value[stage.sent.rows]), -1)
        return outgoing(rows, stage.sent.counts, stage.receive_counts, "keys", self.memory)

    def unpack(self, stage: Stage, received: Tensor | None, key: Tensor, value: Tensor) -> tuple[Pair, Pair]:
        """(K, V) of the received rows in global order (the one copy they need), and (K, V) that guests see."""
        assert received is not None
        rows, guests, clean = len(stage.to_global), self.guests, self.num_clean
        both = guests is not None and guests.received and guests.own
        found = []
        for own, part in ((key, received[..., :key.shape[-1]]), (value, received[..., key.shape[-1]:])):
            all_rows = self.memory.take((rows + clean * both, *own.shape[1:]), own.dtype)
            torch.index_select(part, 0, stage.to_global, out=all_rows[:rows])
            if both:
                all_rows[rows:] = own[:clean]
            found.append((all_rows[:rows], own[:clean] if guests is not None and not guests.received else all_rows))
        (far_key, seen_key), (far_value, seen_value) = found
        return (far_key, far_value), (seen_key, seen_value)

    def local(self, part: Part, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
              scale: float) -> Gradients:
        """The backward of a part."""
        rows = part.rows
        return self.backend.backward(dout[rows], query[rows], key[:part.keys], value[:part.keys], out[rows], lse[rows],
                                     part.mask, scale)

    def home(self, stage: Stage, parts: list[Pair], key: Tensor, value: Tensor) -> Outgoing:
        """Gradients of the received rows on their way to their owners.

        Args:
            parts: gradients of K and of V, [R, K, D] each, to be added.
        """
        wire, width = self.wire or key.dtype, key.shape[2]
        rows = self.memory.take((len(stage.to_global), key.shape[1], width + value.shape[2]), wire)
        if not parts:
            rows.zero_()
        for place, side in zip((rows[..., :width], rows[..., width:]), zip(*parts, strict=True), strict=False):
            place[stage.to_global] = total(side, wire)
        return outgoing(rows, stage.receive_counts, stage.sent.counts, "gradients", self.memory)

    @staticmethod
    def with_returned(stage: Stage, mine: list[Pair], returned: Tensor | None, dtype: torch.dtype) -> Pair:
        """Gradients of own keys and values: the sum of ``mine`` (see ``sums.total``) and of what others have found."""
        assert returned is not None
        keys, values = zip(*mine, strict=True)
        width = keys[0].shape[-1]
        return (total(keys, dtype, stage.sent, returned[..., :width]),
                total(values, dtype, stage.sent, returned[..., width:]))


def _mask(ranges: RowRanges, device: torch.device | str, rows: slice = slice(None)) -> IntervalMask:
    return IntervalMask.from_arrays(ranges.prefix_start[rows], ranges.prefix_end[rows], ranges.block_start[rows],
                                    ranges.block_end[rows], device)


def bind_kind(kind: KindPlan, num_clean: int, device: torch.device | str, backend: str, wire: torch.dtype | None,
              memory: Buffers, *, stages: Stages | None, overlap: bool) -> BoundKind:
    """A layer kind of the plan of a rank with ``num_clean`` clean rows.

    Args:
        stages: in how many shares rows travel, of a kind where no query rows do; None: nothing travels.
        overlap: see ``BoundPlan``.
    """
    exchange, guests, here = kind.exchange, kind.guests, _mask(kind.here, device)
    count, clean = len(here), 0 if kind.kind.clean == "absent" else num_clean
    first = clean if 0 < clean < count else count // 2
    parts: tuple[Part, ...] = (Part(slice(None), here, None),)
    comes = any(exchange.receive_counts) or guests is not None and any(guests.receive_counts + guests.send_counts)
    if overlap and first and comes:
        early, late = slice(first), slice(first, None)
        # Clean rows see no noised key.
        parts = (Part(early, _mask(kind.here, device, early), num_clean if first <= clean else None),
                 Part(late, _mask(kind.here, device, late), None))
    keys = num_clean + count - clean  # own clean rows have keys also where they ask nothing
    shares: list[tuple[Exchange, RowRanges]] = []
    if stages is not None:
        count_of = 1 if guests is not None else stages.of(kind.most_received, kind.mean_rows)
        shares = in_stages(exchange, kind.arrived, count_of)
    return BoundKind(
        here=here, parts=parts, stages=tuple(Stage.bind(*share, keys, device) for share in shares),
        backend=get_backend(backend), num_clean=num_clean, wire=wire, memory=memory,
        guests=None if guests is None else BoundGuests.bind(guests, device))

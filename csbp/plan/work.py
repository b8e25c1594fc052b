"""What moved attention costs: femtoseconds of pieces and of ranks, bytes of the rows that travel for it.

N ranks, P pieces. Times and bytes are those of one layer in one training step, whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.cost import CostModel, PassCost, key_tiles
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.runs import sums
from csbp.plan.shapes import AttentionLayers
from csbp.plan.tasks import Moves, Pieces
from csbp.plan.wire import row_bytes

_TIME_BITS = 59  # of the time of all ranks; moves add segments, and tiles where a piece is cut


def layer_rates(model: CostModel, part: AttentionLayers, forwards: int = 1) -> PassCost:
    """Femtoseconds of one layer over all query heads: some forwards (two where it is computed again), one backward."""
    return model.for_heads(part.head_dim).passes(forwards).times(part.heads)


def task_times(pieces: Pieces, rates: PassCost, index: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """int64, what the pieces ``index`` take over the keys [low, high); 0 for an empty range."""
    time = rates.of(key_tiles(low, high), np.int64(1), pieces.pairs_within(index, low, high))
    return np.where(high > low, time, 0)


def time_unit(plan: PackPlan, kind: LayerKind, pieces: Pieces, rates: PassCost, beside: float = 0.0) -> int:
    """Femtoseconds in which 64 bits hold what all ranks together take: one, or a power of two where long packs meet a
    slow device. ``beside``: femtoseconds of their other work."""
    tiles = int(key_tiles(pieces.low, pieces.high).sum())
    counts = zip(plan.own_work[kind.name], (tiles, len(pieces), int(pieces.pairs.sum())), strict=True)
    each = zip((rates.tile, rates.segment, rates.pair), counts, strict=True)
    total = int(beside) + sum(cost * (int(own.sum()) + other) for cost, (own, other) in each)
    return 1 << max(total.bit_length() - _TIME_BITS, 0)


def home_work(plan: PackPlan, kind: LayerKind, pieces: Pieces, moves: Moves | None = None) -> tuple[np.ndarray, ...]:
    """Attention of every rank, its own blocks, what is left of its pieces, and tasks that it serves: int64 [N] each of
    tiles, segments, pairs."""
    parts = [(pieces.owner, pieces.low, pieces.high, pieces.pairs)]
    if moves is not None:
        tasks = ((pieces.owner, np.arange(len(pieces)), moves.home_low, moves.home_high),
                 (moves.server, moves.piece, moves.low, moves.high))
        parts = [(rank, low, high, pieces.pairs_within(index, low, high)) for rank, index, low, high in tasks]
    found = plan.own_work[kind.name]
    for rank, low, high, pairs in parts:
        counts = sums(rank, plan.world, key_tiles(low, high), high > low, pairs)
        found = tuple(total + count for total, count in zip(found, counts, strict=True))
    return found


def home_times(plan: PackPlan, kind: LayerKind, pieces: Pieces, rates: PassCost,
               moves: Moves | None = None) -> np.ndarray:
    """int64 [N], attention of every rank."""
    return rates.of(*home_work(plan, kind, pieces, moves))


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one row in one layer of a training step.

    Attributes:
        query, answer: of a query row in a forward, to its server and back (out and log-sum-exp).
        gradient, query_gradient: of a query row in the backward, to its server (query, dout, log-sum-exp, delta) and
            back (dq).
        key, key_gradient: of a clean row's key and value, in every pass, and of their gradients.
        forwards: 2 where a layer is computed again in the backward, with all that travels.
    """

    query: int
    answer: int
    gradient: int
    query_gradient: int
    key: int
    key_gradient: int
    forwards: int = 1

    @classmethod
    def of(cls, part: AttentionLayers, itemsize: int, gradient_itemsize: int | None = None,
           forwards: int = 1) -> StepBytes:
        """Of a kind's layers.

        Args:
            itemsize: bytes of a number in the compute dtype.
            gradient_itemsize: of a gradient that travels home; None: the same.
        """
        width = row_bytes(part.heads, part.kv_heads, part.head_dim, part.head_dim, itemsize, gradient_itemsize)
        forward, backward = width.forward, width.backward
        return cls(forward["queries"], forward["outputs"], backward["queries"], backward["query_gradients"],
                   forward["keys"], backward["gradients"], forwards)

    @property
    def lent(self) -> int:
        """From a query row's owner to its server, in a step."""
        return self.forwards * self.query + self.gradient

    @property
    def returned(self) -> int:
        """Of a query row, from its server to its owner."""
        return self.forwards * self.answer + self.query_gradient

    @property
    def fetched(self) -> int:
        """Of a clean row, from its owner to a server."""
        return (self.forwards + 1) * self.key

    @property
    def query_row(self) -> int:
        """Of a query row, both ways."""
        return self.lent + self.returned

    @property
    def key_row(self) -> int:
        """Of a clean row, both ways."""
        return self.fetched + self.key_gradient

    @property
    def buffered_query(self) -> int:
        """Of a query row in the pass that moves more of it, on either side."""
        return max(self.query + self.answer, self.gradient + self.query_gradient)

    @property
    def buffered_key(self) -> int:
        """Of a clean row in the backward, on either side."""
        return self.key + self.key_gradient


class MovedBytes:
    """Bytes that moves add to every rank; int64 [N] each.

    Attributes:
        sent, received: in a step.
        buffered: all that one pass sends and receives, in the pass of more.
        all: the three, [3, N].
    """

    def __init__(self, world: int, sizes: StepBytes) -> None:
        self.sizes = sizes
        self.all = np.zeros((3, world), np.int64)
        self.sent, self.received, self.buffered = self.all

    def add(self, owner: int, server: int, queries: int, key_owners: np.ndarray, keys: np.ndarray) -> None:
        """Count query rows of an owner that go to a server, and clean rows that go there from their owners."""
        sizes = self.sizes
        self.sent[owner] += queries * sizes.lent
        self.sent[server] += queries * sizes.returned
        self.received[server] += queries * sizes.lent
        self.received[owner] += queries * sizes.returned
        self.buffered[owner] += queries * sizes.buffered_query
        self.buffered[server] += queries * sizes.buffered_query
        if len(keys):
            total = int(keys.sum())
            self.sent[server] += total * sizes.key_gradient
            self.received[server] += total * sizes.fetched
            self.buffered[server] += total * sizes.buffered_key
            np.add.at(self.sent, key_owners, keys * sizes.fetched)
            np.add.at(self.received, key_owners, keys * sizes.key_gradient)
            np.add.at(self.buffered, key_owners, keys * sizes.buffered_key)

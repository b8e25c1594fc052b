"""What a rank receives in several shares, so that it attends the first while the others are on their way.

S query rows, R received rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from csbp.plan.ranges import RowRanges
from csbp.plan.travel import Exchange

ACROSS_NODES = 8  # shares, where rows come from other nodes; within one they come faster than they are attended
ROWS = 4096  # of a share, at least
# With more stages less is waited for the first, and each goes over all query rows once more. At the rates of H200s the
# root of this times received rows over query rows is best.
_WORTH = 2


@dataclass(frozen=True)
class Stages:
    """In how many shares keys travel.

    Attributes:
        most: so many.
        rows: of at least so many rows each, for the rank that receives most.
        sparing: fewer where ranks have many query rows beside those that they receive.
    """

    most: int = 1
    rows: int = 1
    sparing: bool = False

    @classmethod
    def choose(cls, asked: int | None, ranks: int, node: int) -> Stages:
        """As asked for, or by where ``ranks`` neighbours lie, of which a node has ``node``."""
        return cls(asked) if asked else cls() if ranks <= node else cls(ACROSS_NODES, ROWS, True)

    def of(self, received: int, queries: int) -> int:
        """Shares of a layer kind of which some rank receives so many rows, and none more; ranks have so many query rows
        in the mean."""
        worth = math.isqrt(_WORTH * received // max(queries, 1)) if self.sparing else self.most
        return max(1, min(self.most, received // self.rows, worth))


AT_ONCE = Stages()


def in_stages(exchange: Exchange, arrived: RowRanges, stages: int) -> list[tuple[Exchange, RowRanges]]:
    """The exchange in shares: of the rows that go from one rank to another, each has one stretch, nearly as long as the
    others.

    Args:
        arrived: ranges into the received rows in global order, int64 [S] each.

    Returns:
        Each share with the ranges into its own received rows.
    """
    if stages == 1:
        return [(exchange, arrived)]
    sent, came = _Shares.of(exchange.send_counts, stages), _Shares.of(exchange.receive_counts, stages)
    place = np.empty(len(came.order), np.int64)  # of a received row among those of its share, as they come
    place[came.order] = np.arange(len(place)) - np.repeat(came.edges[:-1], np.diff(came.edges))
    globally = np.argsort(came.share[exchange.to_global], kind="stable")
    found = []
    for stage in range(stages):
        own = globally[came.edges[stage]:came.edges[stage + 1]]  # where the share's rows stand, in global order
        bounds = [own.searchsorted(bound) if bound.any() else bound for bound in (
            arrived.prefix_start, arrived.prefix_end, arrived.block_start, arrived.block_end)]
        found.append((Exchange(exchange.send[sent.order[sent.edges[stage]:sent.edges[stage + 1]]], sent.counts[stage],
                               came.counts[stage], place[exchange.to_global[own]]), RowRanges(*bounds)))
    return found


@dataclass(frozen=True)
class _Shares:
    """Rows grouped by peer, in shares.

    Attributes:
        share: uint8, of each row.
        order: the rows, share after share, where each share's begin and end at ``edges``.
        counts: of each share, rows per peer.
    """

    share: np.ndarray
    order: np.ndarray
    edges: np.ndarray
    counts: list[tuple[int, ...]]

    @classmethod
    def of(cls, counts: tuple[int, ...], stages: int) -> _Shares:
        """Of lists of so many rows."""
        each = np.array(counts, np.int64)
        # Row i of n is of share i * stages // n, so share s begins with row ceil(s * n / stages).
        begin = -(-np.arange(stages + 1)[:, None] * each // stages)
        rows = np.diff(begin, axis=0)
        share = np.repeat(np.tile(np.arange(stages, dtype=np.uint8), len(each)), rows.T.ravel())
        return cls(share, np.argsort(share, kind="stable"), np.concatenate([[0], np.cumsum(rows.sum(1))]),
                   [tuple(part) for part in rows.tolist()])

"""What a rank receives in several shares, so that it attends the first while the others are on their way.

S query rows, R received rows.
"""

from __future__ import annotations

import numpy as np

from csbp.plan.ranges import RowRanges
from csbp.plan.travel import Exchange

ACROSS_NODES = 8  # shares, where rows come from other nodes; within one they come faster than they are attended


def default_stages(ranks: int, node: int) -> int:
    """Shares in which keys travel among so many ranks that are neighbours, on nodes of ``node`` ranks."""
    return 1 if ranks <= node else ACROSS_NODES


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
    sent, came = _shares(exchange.send_counts, stages), _shares(exchange.receive_counts, stages)
    found = []
    for stage in range(stages):
        here = came == stage
        part = Exchange(exchange.send[sent == stage], _counts(exchange.send_counts, sent, stage),
                        _counts(exchange.receive_counts, came, stage),
                        (np.cumsum(here) - 1)[exchange.to_global[here[exchange.to_global]]])
        below = np.concatenate([[0], np.cumsum(here[exchange.to_global])])  # rows of the share before each place
        found.append((part, RowRanges(*(below[bound] for bound in (arrived.prefix_start, arrived.prefix_end,
                                                                   arrived.block_start, arrived.block_end)))))
    return found


def _shares(counts: tuple[int, ...], stages: int) -> np.ndarray:
    """int64, the share of each row of a list that is grouped by peer."""
    each = np.array(counts, np.int64)
    place = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    return place * stages // np.repeat(each, each)


def _counts(counts: tuple[int, ...], shares: np.ndarray, stage: int) -> tuple[int, ...]:
    """Rows of a share per peer."""
    return tuple(int(part.sum()) for part in np.split(shares == stage, np.cumsum(counts)[:-1]))

"""Which rows travel: what each rank's queries see and it does not own.

Rows are numbered globally over [clean 0..T-1 | noised T..T+M-1] where one number covers both streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csbp.plan.geometry import LayerKind
from csbp.plan.holding import Holding
from csbp.plan.ranges import clean_ranges, noised_ranges
from csbp.plan.runs import Runs, cut, expand, union

# Ranges of rows over both streams that ranks' queries see: (ranks, starts, ends), int64 each.
Needs = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Exchange:
    """One rank's part in moving rows, for one layer kind.

    Attributes:
        send: int64, local rows of [own clean | own noised] to send, grouped by destination, ascending globally
            within each.
        send_counts, receive_counts: rows per peer rank, one tuple entry a rank.
        to_global: int64 [R], order that puts the received rows (owner after owner) into global order.
    """

    send: np.ndarray
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    to_global: np.ndarray


@dataclass(frozen=True)
class Travel:
    """All that travels for one layer kind, as stretches of rows with one owner.

    Attributes:
        world: number of ranks.
        dest, owner: int64 [K], where each stretch goes and whence; by destination and ascending.
        start, end: int64 [K], its rows over both streams.
    """

    world: int
    dest: np.ndarray
    owner: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @cached_property
    def matrix(self) -> np.ndarray:
        """int64 [world, world], rows that go from each owner to each destination."""
        found = np.bincount(self.owner * self.world + self.dest, self.end - self.start, self.world ** 2)
        return found.astype(np.int64).reshape(self.world, self.world)

    def arriving(self, rank: int) -> Runs:
        """The rows that a rank receives."""
        mine = self.dest == rank
        return Runs(self.start[mine], self.end[mine])

    def exchange(self, rank: int, held: Runs) -> Exchange:
        """One rank's part; ``held`` are its rows, whose travelling part it holds in ascending order."""
        leaves, arrives, count = self.owner == rank, self.dest == rank, self.end - self.start
        # Received rows lie owner after owner: find where each stretch of the global order lies.
        length, order = count[arrives], np.argsort(self.owner[arrives], kind="stable")
        place = np.zeros(len(length), np.int64)
        place[order] = np.cumsum(length[order]) - length[order]
        return Exchange(send=expand(held.below(self.start[leaves]), count[leaves]),
                        send_counts=tuple(self.matrix[rank].tolist()),
                        receive_counts=tuple(self.matrix[:, rank].tolist()), to_global=expand(place, length))


def find_travel(holding: Holding, kind: LayerKind, gather: bool, needs: Needs | None = None) -> Travel:
    """What travels for a layer kind.

    Args:
        holding: who owns what.
        kind: the layer kind.
        gather: send every row of the streams that travel to every rank, seen or not.
        needs: what is seen where, unless every rank attends its own query rows and no others.
    """
    geometry, (runs, owner) = holding.geometry, holding.owned
    size = geometry.num_clean + geometry.num_noised + 1
    rank, start, end = _needs(holding, kind, gather) if gather or needs is None else needs
    # All ranks' needs are united at once, on one line with a stretch for each rank.
    needed = union(rank * size + start, rank * size + end)
    dest = needed.start // size
    need, run, first, last = cut(needed.start - dest * size, needed.end - dest * size, runs)
    travels = dest[need] != owner[run]
    return Travel(holding.world, dest[need][travels], owner[run][travels], first[travels], last[travels])


def _needs(holding: Holding, kind: LayerKind, gather: bool) -> Needs:
    """What each rank's own query rows see.

    Neighbouring rows of a document or block see overlapping or adjoining ranges, so together they see all from where
    the first one's range starts to where the last one's ends.
    """
    geometry, clean, zigzag = holding.geometry, holding.geometry.num_clean, holding.owners is None
    none = np.zeros(0, np.int64)
    found = [(none, none, none)]
    if holding.replicated or holding.world == 1:
        return found[0]
    if gather:
        ranks = np.arange(holding.world)
        last = clean + (geometry.num_noised if zigzag and kind.noised else 0)
        return ranks, np.zeros_like(ranks), np.full_like(ranks, last)
    if kind.clean != "absent":
        texts = holding.texts
        low, high = (clean_ranges(geometry, kind, rows, texts.unit) for rows in (texts.start, texts.end - 1))
        found.append((texts.owner, low.prefix_start, high.prefix_end))
    if kind.noised:
        blocks = holding.blocks
        low = noised_ranges(geometry, kind, blocks.start, blocks.unit)
        found.append((blocks.owner, low.prefix_start, low.prefix_end))
        if zigzag:  # blocks may be cut between ranks
            high = noised_ranges(geometry, kind, blocks.end - 1, blocks.unit)
            found.append((blocks.owner, clean + low.block_start, clean + high.block_end))
    ranks, starts, ends = (np.concatenate(column) for column in zip(*found, strict=True))
    return ranks, starts, ends

"""How long core attention takes: whole femtoseconds, so that every rank comes to the same plan.

A kernel visits tiles of 128 query rows by 128 keys. Its time is counted from the tiles that it visits, from its
segments (a run of at most 128 query rows with one run of keys, each of which starts and ends something) and from the
pairs that are really attended; a profile says what one of each costs for one query head (docs/cad.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from csbp.plan.ranges import RowRanges
from csbp.plan.tasks import TILE

FEMTO = 1e-15  # seconds
Count = np.ndarray | np.signedinteger


@dataclass(frozen=True)
class Work:
    """What attention has to do: of one launch, or of many, one entry each. int64."""

    tiles: np.ndarray
    segments: np.ndarray
    pairs: np.ndarray


@dataclass(frozen=True)
class PassCost:
    """Femtoseconds of one query head, in one pass over a layer (forward or backward)."""

    tile: int
    segment: int
    pair: int

    def of(self, tiles: Count, segments: Count, pairs: Count) -> np.ndarray:
        """int64, like the counts: femtoseconds of one query head."""
        return np.asarray(self.tile * tiles + self.segment * segments + self.pair * pairs)

    def times(self, factor: float) -> PassCost:
        """The same of something that takes so many times as long, in whole femtoseconds: what costs something still
        does."""
        return PassCost(*(max(round(part * factor), 1) if part else 0
                          for part in (self.tile, self.segment, self.pair)))


@dataclass(frozen=True)
class CostModel:
    """What attention costs on one kind of device, as measured (``csbp bench profile``).

    Attributes:
        name: the device, e.g. "h200".
        head_dim, queries_per_key: of the heads that it was measured with.
        forward, backward: of one query head.
        launch: femtoseconds of a kernel launch, forward and backward together.
        device: what it was measured on, by its maker's name; "" where that is not known.
    """

    name: str
    head_dim: int
    queries_per_key: int
    forward: PassCost
    backward: PassCost
    launch: int
    device: str = ""

    def for_heads(self, head_dim: int) -> CostModel:
        """For heads of another size: every part in the proportion of their FLOPs, but for the launch."""
        factor = head_dim / self.head_dim
        return replace(self, head_dim=head_dim, forward=self.forward.times(factor),
                       backward=self.backward.times(factor))

    def passes(self, forwards: int = 1) -> PassCost:
        """One training step of a layer: some forwards (two where it is computed again) and one backward."""
        pairs = ((self.forward.tile, self.backward.tile), (self.forward.segment, self.backward.segment),
                 (self.forward.pair, self.backward.pair))
        return PassCost(*(forwards * forward + backward for forward, backward in pairs))


def key_tiles(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """int64, tiles of keys that a segment visits whose rows together see [low, high), none if that is empty. Counted
    on the grid in which these keys are numbered: a range that is cut on it visits as many tiles in parts as whole."""
    return np.where(high > low, -(-high // TILE) - low // TILE, 0)


def launch_work(ranges: RowRanges) -> Work:
    """Of one launch over S query rows in the order in which they lie: every ``TILE`` rows visit all keys between the
    first and the last that one of them sees, in each of the two ranges."""
    tiles = segments = 0
    at, far = np.arange(0, len(ranges.prefix_start), TILE), np.iinfo(np.int64).max
    for low, high in ((ranges.prefix_start, ranges.prefix_end), (ranges.block_start, ranges.block_end)):
        live = high > low
        if live.any():
            last = np.maximum.reduceat(np.where(live, high, 0), at)
            first = np.minimum(np.minimum.reduceat(np.where(live, low, far), at), last)
            tiles, segments = tiles + int(key_tiles(first, last).sum()), segments + int((last > 0).sum())
    return Work(np.int64(tiles), np.int64(segments), np.int64(ranges.pairs.sum()))  # type: ignore[arg-type]

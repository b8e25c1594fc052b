"""How long core attention takes: whole femtoseconds, so that every rank comes to the same plan.

A kernel visits tiles of 128 query rows by 128 keys. Its time is counted from the tiles that it visits, from its
segments (a run of at most 128 query rows with one run of keys, each of which starts and ends something) and from the
pairs that are really attended; a profile says what one of each costs for one query head (docs/cad.md).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassCost:
    """Femtoseconds of one query head, in one pass over a layer (forward or backward)."""

    tile: int
    segment: int
    pair: int


@dataclass(frozen=True)
class CostModel:
    """What attention costs on one kind of device, as measured (``csbp bench profile``).

    Attributes:
        name: the device, e.g. "h200".
        head_dim, queries_per_key: of the heads that it was measured with.
        forward, backward: of one query head.
        launch: femtoseconds of a kernel launch, forward and backward together.
    """

    name: str
    head_dim: int
    queries_per_key: int
    forward: PassCost
    backward: PassCost
    launch: int

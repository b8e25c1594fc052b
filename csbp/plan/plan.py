"""The plan of one pack: a pure function of its geometry, the layer kinds and the number of ranks.

Every rank computes the same plan without communication. It says which rows each rank holds, which rows it
must receive from whom, and what each query row sees of the keys that are *here* (own clean and own noised rows)
and of those that *arrive*. Both are interval masks: a range of all rows meets a subset that is kept in global
order in a range of the subset (closure, docs/attention.md).

Three schemes share all of it: "csbp" (blocks whole on a rank, clean rows sharded, clean keys travel), "context"
(both streams sharded zig-zag, keys of both travel) and "block" (blocks whole on a rank, the clean rows that they
see computed there too, nothing travels).

Rows are numbered globally over [clean 0..T-1 | noised T..T+M-1] where one number covers both streams.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.guests import Guests, QueryRows, Served
from csbp.plan.holding import Holding, RankRows
from csbp.plan.ownership import PAIRS_PER_ROW, Ownership, assign_owners
from csbp.plan.ranges import RowRanges, clean_ranges, join, meet, noised_ranges
from csbp.plan.tasks import Moves, Pieces
from csbp.plan.travel import Exchange, Travel, find_travel

if TYPE_CHECKING:
    from csbp.plan.pieces import Cuts

SCHEMES = ("csbp", "context", "block")
EXCHANGES = ("exact", "all_gather")
FORMAT = 1  # of the JSON that a plan is written as


@dataclass(frozen=True)
class KindPlan:
    """What one rank does in a layer of one kind: S query rows, R received rows.

    Attributes:
        kind: the layer kind.
        here: ranges into [own clean rows | own noised rows], int64 [S] each.
        arrived: ranges into the received rows in global order, int64 [S] each.
        exchange: the rows that travel.
        most_received: rows that the rank receives to which most go.
        mean_rows: rows that a rank has, in the mean.
        pairs: (query, key) pairs that this rank attends, as a server of others too.
        guests: its part in moving query rows; None where no rank's do. What others attend is not in the ranges above.
    """

    kind: LayerKind
    here: RowRanges
    arrived: RowRanges
    exchange: Exchange
    most_received: int
    mean_rows: int
    pairs: int
    guests: Guests | None = None


@dataclass(frozen=True)
class RankPlan:
    """All that one rank needs to know."""

    rank: int
    world: int
    scheme: str
    rows: RankRows
    kinds: dict[str, KindPlan]


@dataclass(frozen=True)
class PackPlan:
    """The plan of one pack for all ranks; ``rank_plan`` gives one rank's part.

    Attributes:
        geometry: the pack.
        kinds: every kind of attention layer in the model; names differ.
        world: size of the sequence axis.
        scheme: one of ``SCHEMES``.
        exchange: "exact": a rank receives just the rows that its queries see; "all_gather": every row of the
            streams that travel. In the "context" scheme layers without a window always gather.
        owners: who owns which cell and block, if not for the planner to choose; unused in the "context" scheme.
        weights: what a pair costs in all layers of each kind (see ``ModelShape.weights``); 1 each by default.
        row_pairs: pairs that a token-wise row weighs in a layer (see ``ModelShape.row_pairs``).
        moves: by name of a layer kind, what other ranks than the owners attend (scheme "csbp" alone).
    """

    geometry: Geometry
    kinds: tuple[LayerKind, ...]
    world: int
    scheme: str = "csbp"
    exchange: str = "exact"
    owners: Ownership | None = None
    weights: tuple[int, ...] | None = None
    moves: Mapping[str, Moves] | None = None
    row_pairs: int = PAIRS_PER_ROW

    def __post_init__(self) -> None:
        assert self.scheme == "csbp" or not self.moves
        assert self.scheme in SCHEMES and self.exchange in EXCHANGES
        assert len({kind.name for kind in self.kinds}) == len(self.kinds), "layer kinds must have different names"
        assert self.weights is None or len(self.weights) == len(self.kinds)

    @property
    def pair_weights(self) -> tuple[int, ...]:
        """``weights``, or 1 for each kind."""
        return self.weights or (1,) * len(self.kinds)

    @cached_property
    def ownership(self) -> Ownership:
        """Owner of every cell and block."""
        return self.owners or assign_owners(self.geometry, self.kinds, self.world, self.pair_weights,
                                            self.row_pairs)

    @cached_property
    def holding(self) -> Holding:
        """Which rows each rank holds."""
        return Holding(self.geometry, self.world, None if self.scheme == "context" else self.ownership,
                       replicated=self.scheme == "block" and self.world > 1,
                       to_cell_end=any(kind.clean == "block_causal" for kind in self.kinds))

    @cached_property
    def rows(self) -> tuple[RankRows, ...]:
        """Every rank's rows."""
        return tuple(self._rows(rank) for rank in range(self.world))

    @cached_property
    def traffic(self) -> dict[str, np.ndarray]:
        """Layer kind -> int64 [world, world], rows that go from each owner to each rank."""
        return {name: travel.matrix for name, travel in self.travel.items()}

    @cached_property
    def travel(self) -> dict[str, Travel]:
        """Layer kind -> the rows that travel between all ranks."""
        return {kind.name: self._travel(kind) for kind in self.kinds}

    def _travel(self, kind: LayerKind) -> Travel:
        gathers = self.exchange == "all_gather" or (self.scheme == "context" and kind.window is None)
        served = self.served.get(kind.name)
        return find_travel(self.holding, kind, gathers, None if served is None else served.needs())

    @cached_property
    def served(self) -> dict[str, Served]:
        """Layer kind -> the query rows that move; only kinds of which some do."""
        moves = {} if self.world == 1 else self.moves or {}
        if not moves:
            return {}
        return {kind.name: Served(QueryRows(self.holding, kind), self.pieces[kind.name], moves[kind.name])
                for kind in self.kinds if kind.name in moves and len(moves[kind.name])}

    @cached_property
    def pieces(self) -> dict[str, Pieces]:
        """Layer kind -> all attention that could move (scheme "csbp" alone)."""
        from csbp.plan.pieces import find_pieces  # which knows plans

        return {kind.name: find_pieces(self, kind, self._cuts) for kind in self.kinds}

    @cached_property
    def own_work(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Layer kind -> attention that stays at home (scheme "csbp" alone), see ``pieces.own_work``."""
        from csbp.plan.pieces import own_work

        return {kind.name: own_work(self, kind, self._cuts) for kind in self.kinds}

    @cached_property
    def _cuts(self) -> Cuts:
        from csbp.plan.pieces import Cuts

        return Cuts(self)

    @cached_property
    def home(self) -> PackPlan:
        """The same plan where nothing moves."""
        return self.with_moves({}) if self.moves else self

    def with_moves(self, moves: Mapping[str, Moves]) -> PackPlan:
        """The same plan with these moves; who holds what, and what travels in other kinds, is not found again."""
        found, kept = replace(self, moves=moves), ("ownership", "holding", "pieces", "own_work")
        vars(found).update({name: vars(self)[name] for name in kept if name in vars(self)})
        same = {name for name in self.travel if moves.get(name) is (self.moves or {}).get(name)}
        vars(found)["travel"] = {kind.name: self.travel[kind.name] if kind.name in same else found._travel(kind)
                                 for kind in self.kinds}
        if moves:
            vars(found)["home"] = self.home if self.moves else self
        return found

    def rank_plan(self, rank: int) -> RankPlan:
        """One rank's part."""
        rows = self._rows(rank)
        kinds = {kind.name: self._kind(kind, rank, rows) for kind in self.kinds}
        return RankPlan(rank, self.world, self.scheme, rows, kinds)

    def queries(self, kind: LayerKind, rows: RankRows) -> RowRanges:
        """Global ranges of a rank's query rows: its clean rows, then its noised rows, as the kind has them."""
        parts = [] if kind.clean == "absent" else [clean_ranges(self.geometry, kind, rows.clean)]
        if kind.noised and len(rows.noised) and rows.noised[0] < 0:
            parts.append(RowRanges(*(np.zeros(1, np.int64),) * 4))
        elif kind.noised:
            parts.append(noised_ranges(self.geometry, kind, rows.noised))
        return parts[0] if len(parts) == 1 else join(*parts)

    def digest(self) -> str:
        """sha256 of all that decides the plan, in hexadecimal: ranks that agree on it agree on every row."""
        settings, arrays = self._parts(self.ownership if self.scheme != "context" else None)
        found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for name, array in arrays.items():
            found.update(f"{name} {len(array)}\n".encode() + array.astype("<i8").tobytes())
        return found.hexdigest()

    def to_json(self) -> str:
        """What ``from_json`` makes the same plan of; owners only if they were given."""
        settings, arrays = self._parts(self.owners)
        return json.dumps(settings | {"arrays": {name: array.tolist() for name, array in arrays.items()}})

    @classmethod
    def from_json(cls, text: str) -> PackPlan:
        """The plan that ``to_json`` wrote.

        Raises:
            ValueError: for another format.
        """
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise ValueError(f"plan format {found.get('format')!r}: this csbp reads format {FORMAT}")
        arrays = {name: np.array(values, np.int64) for name, values in found["arrays"].items()}
        geometry = Geometry(**{f.name: arrays.pop(f.name) for f in fields(Geometry)})
        weights = None if found["weights"] is None else tuple(found["weights"])
        moves = {name: Moves(**{f.name: arrays.pop(f"{name}: {f.name}") for f in fields(Moves)})
                 for name in found.get("moved", [])}
        return cls(geometry, tuple(LayerKind(**kind) for kind in found["kinds"]), found["world"], found["scheme"],
                   found["exchange"], Ownership(**arrays) if arrays else None, weights, moves or None,
                   found.get("row_pairs", PAIRS_PER_ROW))

    def _parts(self, owners: Ownership | None) -> tuple[dict[str, object], dict[str, np.ndarray]]:
        """Settings and arrays of the plan."""
        settings = {"format": FORMAT, "world": self.world, "scheme": self.scheme, "exchange": self.exchange,
                    "weights": self.weights and list(self.weights), "row_pairs": self.row_pairs,
                    "kinds": [asdict(kind) for kind in self.kinds]}
        arrays = {f.name: getattr(part, f.name) for part in (self.geometry, owners) if part for f in fields(part)}
        for name, moves in sorted((self.moves or {}).items()):
            arrays |= {f"{name}: {f.name}": getattr(moves, f.name) for f in fields(moves)}
        return settings | {"moved": sorted(self.moves or {})}, arrays

    def _rows(self, rank: int) -> RankRows:
        return self.holding.rank_rows(rank, any(kind.clean == "absent" for kind in self.kinds))

    def _kind(self, kind: LayerKind, rank: int, rows: RankRows) -> KindPlan:
        (held, places), travel, clean = self.holding.held(rank), self.travel[kind.name], self.geometry.num_clean
        mine, arriving = self.queries(kind, rows), travel.arriving(rank)
        served, guests = self.served.get(kind.name), None
        if served is not None:
            mine = served.at_home(rank, mine)
            guests = served.guests(rank, arriving, self.holding.clean_runs[rank])
        return KindPlan(kind=kind, here=meet(mine, held, clean, places), arrived=meet(mine, arriving, clean, None),
                        exchange=travel.exchange(rank, held), guests=guests,
                        most_received=int(travel.matrix.sum(0).max()),
                        mean_rows=int(self.holding.row_counts.sum()) // self.world,
                        pairs=int(mine.pairs.sum()) + (guests.pairs if guests else 0))


def plan_rank(geometry: Geometry, kinds: tuple[LayerKind, ...], world: int, rank: int, *, scheme: str = "csbp",
              exchange: str = "exact", weights: tuple[int, ...] | None = None) -> RankPlan:
    """One rank's plan of a pack; see ``PackPlan`` for the arguments."""
    return PackPlan(geometry, kinds, world, scheme, exchange, weights=weights).rank_plan(rank)

"""What is given up early: moves that do not pay, and those that limits keep from paying."""

from __future__ import annotations

import numpy as np
from cad import LEVEL, PAIRS, head_tail, packed, sizes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cad_balance import FULL, SIZES, draw

from csbp.plan.cad import Cad
from csbp.plan.cost import CostModel, PassCost
from csbp.plan.disaggregate import disaggregate
from csbp.plan.estimate import DEVICES
from csbp.plan.geometry import LayerKind
from csbp.plan.ownership import Ownership
from csbp.plan.plan import PackPlan
from csbp.plan.remains import Remains
from csbp.plan.resident import Resident
from csbp.plan.shapes import AttentionLayers, ModelShape
from csbp.plan.work import home_times

WINDOW = LayerKind("window", window=200)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9))
def test_no_rank_gives_more_than_its_rows_could_save(seed: int) -> None:
    plan, kind, rates, options = draw(seed)
    pieces = plan.pieces[kind.name]
    moves = disaggregate(plan, kind, pieces, rates, SIZES, options)
    saved = home_times(plan, kind, pieces, rates) - home_times(plan, kind, pieces, rates, moves)
    remains = Remains(pieces, np.ones(len(pieces), bool), rates, SIZES, Resident(plan, kind.name), plan.world)
    for rank in range(plan.world):
        mine = pieces.owner[moves.piece] == rank
        rows = int(pieces.rows[moves.piece[mine]].sum())
        assert saved[rank] <= remains.most(rank, rows)
        assert remains.most(rank, 0) == 0


def test_moves_end_with_the_givers_that_make_it_worse() -> None:
    geometry, asked = packed([9000, 300, 5000, 1200, 2500], 64), list[int]()
    plan = PackPlan(geometry, (FULL,), 8, owners=head_tail(geometry, 8))

    def givers(bad: int) -> int:
        def worse(moves: object) -> bool:
            asked.append(len(moves))  # type: ignore[arg-type]
            return len(asked) == bad

        asked.clear()
        pieces = plan.pieces["full"]
        found = disaggregate(plan, FULL, pieces, PAIRS, sizes_of(), LEVEL, worse=worse)
        return len(np.unique(pieces.owner[found.piece]))

    every = givers(-1)
    assert asked == sorted(asked) and len(asked) == 2 and every > 2, "after the second giver and the fourth"
    assert givers(1) == 2 < every and len(asked) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9))
def test_a_kind_moves_where_that_makes_the_step_shorter(seed: int) -> None:
    random = np.random.default_rng(seed)
    geometry, world = packed(random.integers(20, 1500, random.integers(2, 8)).tolist(), 32), int(random.integers(2, 6))
    ranks = np.sort(world * random.random(len(geometry.cell_starts) - 1) ** random.uniform(0.5, 2)).astype(np.int64)
    plan = PackPlan(geometry, (FULL, WINDOW), world, owners=Ownership(ranks, ranks[geometry.block_cell]))
    shape = ModelShape(tuple(AttentionLayers(kind, 2, 4, 2, 64) for kind in plan.kinds), 256, 512, 1000, True)
    costs = PassCost(int(10 ** random.uniform(7, 9)), int(10 ** random.uniform(5, 8)), 3)
    cad = Cad(LEVEL, CostModel("any", 64, 2, costs, costs, 0), shape, 4, 4, 1, DEVICES["h200"],
              row_seconds=float(10 ** random.uniform(-7, -4)))
    moved = cad.moved(plan)
    step = cad.step_seconds(moved)
    assert (step < cad.step_seconds(plan)) == bool(moved.moves)
    names = list(moved.moves or ())
    for count in range(len(names)):
        before = {name: moved.moves[name] for name in names[:count]}  # type: ignore[index]
        less = cad.step_seconds(plan.with_moves(before))
        before[names[count]] = moved.moves[names[count]]  # type: ignore[index]
        assert cad.step_seconds(plan.with_moves(before)) < less

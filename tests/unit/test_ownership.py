"""How well ownership balances ranks: what always holds, what holds where units are small, and on realistic packs.

What can be reached depends on the dearest unit (a block with its text), because a unit is never cut. With the lower
bound LB = max(total / N, dearest unit):

- always, room for rows granted: no move of one unit from the fullest to the emptiest rank would help (unless the
  fullest is within 1/64 of LB), so the fullest is at most (2 - 1/N) LB, and (4/3 - 1/(3N)) of the optimum;
- if the dearest unit is at most 1/20 of the mean: the fullest is at most 1.05 LB.

In between it is bin packing (five equal units on four ranks: 1.6 LB is the optimum), and no such bound exists.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from drawn import draw_geometry, draw_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import make_layout, make_pack

from csbp.plan.balance import CLOSE, lower_bound, rebalance
from csbp.plan.counts import count_plan
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import (
    PAIRS_PER_KEY_ROW,
    PAIRS_PER_ROW,
    ROWS_CAP,
    Units,
    assign_owners,
    assign_units,
    make_units,
    rows_cap,
)
from csbp.plan.plan import PackPlan
from csbp.plan.ranges import clean_ranges, index_of, noised_ranges

KINDS = (LayerKind(), LayerKind("near", window=7), LayerKind("alone", clean="token_causal", noised=False))


def sums(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    found = np.zeros(size, np.int64)
    np.add.at(found, index, values)
    return found


def drawn_units(seed: int, most_documents: int = 12) -> Units:
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.lognormal(4.5, 1.5, random.integers(1, most_documents)), 4000).astype(int) + 1
    geometry = draw_geometry(random, lengths.tolist(), int(2 ** random.uniform(0, 6)))
    return make_units(geometry, (draw_kind(random, 200),))


def made_units(costs: list[int], rows: list[int] | None = None, documents: list[int] | None = None) -> Units:
    count = len(costs)
    return Units(np.array(documents or range(count)), np.array(costs), np.array(rows or [1] * count), np.arange(count),
                 np.full(count, -1))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 64))
def test_rows_are_capped_and_no_single_move_helps(seed: int, world: int) -> None:
    units = drawn_units(seed)
    cap, bound = rows_cap(units, world), lower_bound(units.cost, world)
    owner = assign_units(units, world, cap)
    load, rows = sums(owner, units.cost, world), sums(owner, units.rows, world)
    assert rows.max() <= cap
    full, empty = int(load.argmax()), int(load.argmin())
    if load[full] > bound + bound // CLOSE:
        movable = (owner == full) & (units.cost > 0) & (rows[empty] + units.rows <= cap)
        assert np.all(units.cost[movable] >= load[full] - load[empty])
        if movable.any():
            cheapest = int(units.cost[movable].min())
            assert load[full] <= units.cost.sum() / world + (1 - 1 / world) * cheapest


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_within_5_percent_where_units_are_small(seed: int, part: float) -> None:
    units = drawn_units(seed, most_documents=30)
    most = min(int(units.cost.sum()) // (20 * max(int(units.cost.max()), 1)), 64)
    if most < 2:
        return
    world = 2 + int(part * (most - 2))
    load = sums(assign_units(units, world, rows_cap(units, world)), units.cost, world)
    assert load.max() <= 1.05 * lower_bound(units.cost, world)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(2, 3))
def test_never_far_from_the_optimum(costs: list[int], world: int) -> None:
    units = made_units(costs)
    found = sums(assign_units(units, world, len(costs)), units.cost, world).max()
    best = min(max(sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(world))
               for ranks in itertools.product(range(world), repeat=len(costs)))
    assert found <= (4 / 3 - 1 / (3 * world)) * best
    assert found <= (2 - 1 / world) * lower_bound(units.cost, world)


def test_rebalancing_moves_swaps_and_cuts() -> None:
    def after(owner: list[int], units: Units, cap: int = 100) -> list[int]:
        return rebalance(np.array(owner), units.document, units.cost, units.rows, 2, cap).tolist()

    assert after([0, 0, 0], made_units([8, 2, 6])) in ([1, 0, 0], [0, 1, 1]), "a whole run moves"
    assert after([0, 0, 1, 1], made_units([9, 6, 5, 2])) == [1, 0, 0, 1], "two runs are swapped"
    one = made_units([1] * 8, documents=[0] * 8)
    assert after([0] * 8, one) in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4), "a document is cut once"
    heavy = made_units([10, 10, 1], rows=[5, 5, 6])
    assert after([0, 0, 1], heavy, cap=10) == [0, 0, 1], "no room for another row"
    assert sums(np.array(after([0, 0, 1], heavy, cap=11)), heavy.cost, 2).tolist() == [10, 11]


@pytest.mark.parametrize("weights", [(1, 1, 1), (25, 5, 0), (1, 2, 3)])
def test_cost_of_a_unit(weights: tuple[int, ...]) -> None:
    """Against the rows' ranges: pairs and token-wise rows of every layer."""
    geometry = make_layout(make_pack([37, 5, 60], targets=[range(9, 37), (), range(60)]), 8).geometry
    units = make_units(geometry, KINDS, weights)
    cells, blocks = len(geometry.cell_starts) - 1, geometry.num_blocks
    cell_of = np.repeat(np.arange(cells), np.diff(geometry.cell_starts))
    block_of = geometry.block_cell[np.repeat(np.arange(blocks), np.diff(geometry.block_starts))]
    cost = np.zeros(cells, np.int64)
    for kind, weight in zip(KINDS, weights, strict=True):
        np.add.at(cost, cell_of, weight * (clean_ranges(geometry, kind).pairs + PAIRS_PER_ROW))
        if kind.noised:
            np.add.at(cost, block_of, weight * (noised_ranges(geometry, kind).pairs + PAIRS_PER_ROW))
    assert np.array_equal(units.cell, np.arange(cells)) and np.array_equal(units.cost, cost)
    keys = make_units(geometry, (LayerKind(clean="absent"),)).cost[[5, 6]]
    assert list(keys) == [5 * PAIRS_PER_KEY_ROW, sum(PAIRS_PER_KEY_ROW + PAIRS_PER_ROW + 8 for _ in range(8))]


def lognormal_pack(total: int, block: int, longest: int, median: int, seed: int) -> Geometry:
    """One document of ``longest`` tokens among documents of lognormal lengths; every block is a target."""
    random, lengths = np.random.default_rng(seed), [longest]
    while sum(lengths) < total:
        lengths.append(min(int(random.lognormal(np.log(median), 1.2)) + 1, longest, total - sum(lengths)))
    random.shuffle(lengths)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    cells = np.concatenate([*(np.arange(a, b, block) for a, b in zip(edges[:-1], edges[1:], strict=True)), [total]])
    document = np.searchsorted(edges, cells[:-1], "right") - 1
    return Geometry(edges, cells, document, np.arange(len(document)), cells[:-1], cells)


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("world,total,longest", [(8, 2**17, 44 << 10), (8, 2**17, 2**16), (64, 2**19, 44 << 10),
                                                 (64, 2**19, 2**17)])
@pytest.mark.parametrize("kinds", [(LayerKind(),), (LayerKind(clean="token_causal"), LayerKind("near", window=1024))],
                         ids=["full", "full and window"])
def test_realistic_packs(world: int, total: int, longest: int, block: int, kinds: tuple[LayerKind, ...]) -> None:
    for seed, median in enumerate((1000, 2000, 3000)):
        geometry = lognormal_pack(total, block, longest, median, seed)
        counts = count_plan(PackPlan(geometry, kinds, world))
        assert counts.cost.max() <= 1.05 * counts.bound
        assert counts.rows.max() <= ROWS_CAP * counts.rows.mean()
        zigzag = count_plan(PackPlan(geometry, kinds, world, "context"))
        assert zigzag.cost.max() > 1.25 * zigzag.cost.mean(), "pairing over a packed stream is no balance"


def test_runs_are_few_and_most_documents_whole() -> None:
    """What balance costs: rows of a rank in some stretches, and only long documents on several ranks."""
    geometry = lognormal_pack(2**19, 32, 2**17, 2000, 0)
    owner = assign_owners(geometry, (LayerKind(),), 64).cell_rank
    document = geometry.block_document
    assert np.count_nonzero(np.diff(owner)) < 8 * 64
    lengths = np.diff(geometry.document_starts)
    short = np.flatnonzero(lengths <= 4096)
    split = [d for d in short if len(set(owner[document == d])) > 1]
    assert len(short) > 40 and len(split) <= len(short) // 10


@pytest.mark.parametrize(("world", "short", "noised"), [(8, 180, True), (32, 180, True), (32, 20, True), (8, 20, False),
                                                        (64, 60, False)])
def test_short_documents_beside_a_dear_one_stay_whole(world: int, short: int, noised: bool) -> None:
    """They cost little and have half of the rows: ranks fill up with rows before they do with cost."""
    geometry = whole_pack([2**19] + [short] * (2**19 // short), 32, noised=noised)
    owner = assign_owners(geometry, (LayerKind(),), world).cell_rank
    document = index_of(geometry.document_starts, geometry.cell_starts[:-1])
    cut = np.unique(document[1:][(np.diff(owner) != 0) & (np.diff(document) == 0)])
    assert len(cut) <= 1 + world // 8


@pytest.mark.parametrize("world", [1, 2, 64])
def test_any_pack_is_legal(world: int) -> None:
    none = np.zeros(0, np.int64)
    empty = Geometry(np.zeros(1, np.int64), np.zeros(1, np.int64), none, none, none, np.zeros(1, np.int64))
    for geometry in (empty, make_layout(make_pack([1]), 8).geometry, make_layout(make_pack([1] * 300), 8).geometry):
        owners = assign_owners(geometry, KINDS, world)
        assert len(owners.cell_rank) == len(geometry.cell_starts) - 1
        assert np.array_equal(owners.block_rank, owners.cell_rank[geometry.block_cell])
        assert np.bincount(owners.cell_rank, minlength=world).max() <= -(-len(owners.cell_rank) // world) * 1.05 + 1


def test_rows_without_cost_are_spread_too() -> None:
    geometry = make_layout(make_pack([40] * 16), 8).geometry
    assert list(np.bincount(assign_owners(geometry, (LayerKind(),), 4, weights=(0,)).cell_rank)) == [20] * 4

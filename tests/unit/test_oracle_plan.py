"""The planner's ranges and every rank's two masks, against the table taken one (row, key) at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dense_mask
from packs import anchor_geometry, make_layout, make_pack

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import RankPlan, plan_rank
from csbp.plan.ranges import RowRanges, clean_ranges, noised_ranges

KINDS = [
    LayerKind("block", clean="block_causal"),
    LayerKind("block window", clean="block_causal", window=3),
    LayerKind("token", clean="token_causal"),
    LayerKind("window", clean="token_causal", window=4),
    LayerKind("window 1", clean="token_causal", window=1),
    LayerKind("row window", clean="token_causal", window=5, window_anchor="row"),
    LayerKind("causal block", clean="token_causal", in_block="causal"),
    LayerKind("clean alone", clean="token_causal", noised=False),
    LayerKind("draft", clean="absent"),
    LayerKind("draft window", clean="absent", window=4, window_anchor="row"),
]


def grid_geometry(lengths: list[int], block: int, seed: int) -> Geometry:
    """A grid where about half of the tokens are targets, so some cells have no block."""
    random = np.random.default_rng(seed)
    targets = [np.flatnonzero(random.random(n) < 0.5) for n in lengths]
    return make_layout(make_pack(lengths, targets=targets), block).geometry


def drawn_anchors(lengths: list[int], block: int, seed: int) -> Geometry:
    random = np.random.default_rng(seed)
    documents = np.sort(random.integers(0, len(lengths), 5))
    return anchor_geometry(lengths, [(d, int(random.integers(1, lengths[d] + 1))) for d in documents], block)


geometries = st.builds(lambda build, *a: build(*a), st.sampled_from([grid_geometry, drawn_anchors]),
                       st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 99))


def as_dense(ranges: RowRanges, first: tuple[int, int], size: int) -> np.ndarray:
    """bool [rows, size]; prefix ranges count from first[0], block ranges from first[1]."""
    sees = np.zeros((len(ranges.prefix_start), size), bool)
    for row in range(len(sees)):
        sees[row, first[0] + ranges.prefix_start[row]:first[0] + ranges.prefix_end[row]] = True
        sees[row, first[1] + ranges.block_start[row]:first[1] + ranges.block_end[row]] = True
    return sees


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@settings(max_examples=25, deadline=None)
@given(geometry=geometries)
def test_ranges_are_the_table(kind, geometry):
    total = geometry.num_clean + geometry.num_noised
    first = (0, geometry.num_clean)
    expected = dense_mask(geometry, kind)
    if kind.clean != "absent":
        found = as_dense(clean_ranges(geometry, kind), first, total)
        np.testing.assert_array_equal(found, expected[:geometry.num_clean])
    if kind.noised:
        found = as_dense(noised_ranges(geometry, kind), first, total)
        np.testing.assert_array_equal(found, expected[geometry.num_clean:])


def arrived_rows(plans: list[RankPlan], rank: int, name: str) -> np.ndarray:
    """Global clean rows that a rank gets, by carrying out every rank's sends, in the order it keeps them."""
    parts = []
    for sender in plans:
        exchange = sender.kinds[name].exchange
        ends = np.cumsum(exchange.send_counts)
        sent = exchange.send[ends[rank] - exchange.send_counts[rank]:ends[rank]]
        assert len(sent) == plans[rank].kinds[name].exchange.receive_counts[sender.rank]
        parts.append(sender.rows.clean[sent])
    return np.concatenate(parts)[plans[rank].kinds[name].exchange.to_global]


@settings(max_examples=40, deadline=None)
@given(world=st.sampled_from([1, 2, 3, 5]), geometry=geometries,
       kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True))
def test_ranks_together_see_the_table(world, geometry, kinds):
    """Own keys and arrived keys of all ranks: each pair once, each row on one rank, nothing needless sent."""
    plans = [plan_rank(geometry, tuple(kinds), world, rank) for rank in range(world)]
    clean, noised = (np.concatenate([getattr(p.rows, side) for p in plans]) for side in ("clean", "noised"))
    np.testing.assert_array_equal(np.sort(clean), np.arange(geometry.num_clean))
    np.testing.assert_array_equal(np.sort(noised[noised >= 0]), np.arange(geometry.num_noised))
    for kind in kinds:
        expected = dense_mask(geometry, kind).astype(int)
        found = np.zeros_like(expected)
        for rank, plan in enumerate(plans):
            mine, rows = plan.kinds[kind.name], plan.rows
            here = np.concatenate([rows.clean, np.where(rows.noised < 0, -1, geometry.num_clean + rows.noised)])
            arrived = arrived_rows(plans, rank, kind.name)
            assert (np.diff(arrived) > 0).all() and not np.isin(arrived, rows.clean).any()
            queries = here[len(rows.clean) if kind.clean == "absent" else 0:
                           len(here) if kind.noised else len(rows.clean)]
            seen_here = as_dense(mine.here, (0, 0), len(here))
            seen_arrived = as_dense(mine.arrived, (0, 0), len(arrived))
            assert seen_arrived.any(0).all(), "a row was sent that no query sees"
            assert mine.pairs == seen_here.sum() + seen_arrived.sum()
            real = np.flatnonzero(queries >= 0)
            np.add.at(found, np.ix_(queries[real], here), seen_here[real])
            np.add.at(found, np.ix_(queries[real], arrived), seen_arrived[real])
            assert not seen_here[np.setdiff1d(np.arange(len(queries)), real)].any(), "a dummy row sees a key"
        np.testing.assert_array_equal(found, expected)

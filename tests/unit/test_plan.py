"""Properties of plans: every row has one owner, every pair is attended once, what is sent is what arrives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import anchor_geometry, make_layout, make_pack

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import assign_owners
from csbp.plan.plan import RankPlan, plan_rank
from csbp.plan.ranges import RowRanges, clean_ranges, noised_ranges

KINDS = (LayerKind(), LayerKind("near", window=7), LayerKind("causal", clean="token_causal"),
         LayerKind("noised", clean="absent", window=9, window_anchor="row", in_block="causal"))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    block = draw(st.integers(1, 12))
    if draw(st.booleans()):
        anchors = draw(st.lists(st.integers(0, len(lengths) - 1).flatmap(
            lambda d: st.tuples(st.just(d), st.integers(0, lengths[d]))), max_size=9))
        return anchor_geometry(lengths, anchors, block)
    targets = [draw(st.lists(st.integers(0, n - 1), max_size=n, unique=True)) for n in lengths]
    return make_layout(make_pack(lengths, targets=targets), block).geometry


def keys_seen(geometry: Geometry, plan: RankPlan, name: str, arriving: np.ndarray) -> list[set[tuple[str, int]]]:
    """For each query row of a rank, the global keys that its two masks name; fails if one is named twice."""
    kind, rows = plan.kinds[name], plan.rows
    here = [("clean", int(r)) for r in rows.clean] + [("noised", int(r)) for r in rows.noised]
    arrived = [("clean", int(r)) for r in arriving]
    seen = []
    for i in range(len(kind.here.prefix_start)):
        keys = []
        for ranges, names in ((kind.here, here), (kind.arrived, arrived)):
            keys += names[ranges.prefix_start[i]:ranges.prefix_end[i]]
            keys += names[ranges.block_start[i]:ranges.block_end[i]]
        assert len(keys) == len(set(keys))
        seen.append(set(keys))
    return seen


def truth(geometry: Geometry, kind: LayerKind, rows: RankPlan) -> list[set[tuple[str, int]]]:
    """The same from the global ranges; a dummy sees nothing."""
    def all_sets(ranges: RowRanges) -> list[set[tuple[str, int]]]:
        return [{("clean", k) for k in range(a, b)} | {("noised", k) for k in range(c, d)} for a, b, c, d in zip(
            ranges.prefix_start, ranges.prefix_end, ranges.block_start, ranges.block_end, strict=True)]

    clean = [] if kind.clean == "absent" else all_sets(clean_ranges(geometry, kind))
    noised = all_sets(noised_ranges(geometry, kind))
    return [clean[r] for r in (rows.rows.clean if clean else ())] + [
        noised[r] if r >= 0 else set() for r in rows.rows.noised]


@settings(max_examples=30)
@given(geometries(), st.integers(1, 7))
def test_every_pair_once_and_only_what_is_missing_travels(geometry: Geometry, world: int) -> None:
    plans = [plan_rank(geometry, KINDS, world, rank) for rank in range(world)]
    assert all(len(kind.here.prefix_start) > 0 for plan in plans for kind in plan.kinds.values()), "no query row"
    owned = np.concatenate([p.rows.clean for p in plans])
    assert sorted(owned) == list(range(geometry.num_clean))
    noised = np.concatenate([p.rows.noised for p in plans])
    assert sorted(noised[noised >= 0]) == list(range(geometry.num_noised))
    for kind in KINDS:
        for plan in plans:
            exchange = plan.kinds[kind.name].exchange
            sent = []  # rows in the order in which they arrive: owner after owner
            for peer in plans:
                theirs = peer.kinds[kind.name].exchange
                first = sum(theirs.send_counts[:plan.rank])
                part = theirs.send[first:first + theirs.send_counts[plan.rank]]
                assert len(part) == exchange.receive_counts[peer.rank]
                sent.append(peer.rows.clean[part])
            arriving = np.concatenate(sent)[exchange.to_global]
            assert np.all(np.diff(arriving) > 0), "not in global order"
            assert not set(arriving) & set(plan.rows.clean), "a rank was sent what it owns"
            expected = truth(geometry, kind, plan)
            assert keys_seen(geometry, plan, kind.name, arriving) == expected
            needed = {k for keys in expected for stream, k in keys if stream == "clean"}
            assert needed == set(arriving) | (needed & set(plan.rows.clean)), "a row travelled for nothing"
            assert plan.kinds[kind.name].pairs == sum(len(keys) for keys in expected)


def one_document(length: int, block: int) -> Geometry:
    return make_layout(make_pack([length]), block).geometry


@pytest.mark.parametrize("world", [2, 4, 8])
def test_early_and_late_blocks_are_paired(world: int) -> None:
    geometry = one_document(1024, 8)
    owners = assign_owners(geometry, (LayerKind(),), world)
    assert np.array_equal(owners.cell_rank, owners.cell_rank[::-1])
    assert np.array_equal(owners.cell_rank, owners.block_rank)
    pairs = [plan_rank(geometry, (LayerKind(),), world, rank).kinds["full"].pairs for rank in range(world)]
    assert max(pairs) / np.mean(pairs) < 1.001


def test_short_documents_stay_whole_and_are_balanced() -> None:
    geometry = make_layout(make_pack([64] * 64), 8).geometry
    owners = assign_owners(geometry, (LayerKind(),), 4)
    assert all(len(set(owners.cell_rank[i * 8:i * 8 + 8])) == 1 for i in range(64))
    assert all(sum(plan_rank(geometry, (LayerKind(),), 4, r).kinds["full"].exchange.send_counts) == 0 for r in range(4))
    assert list(np.bincount(owners.cell_rank)) == [128] * 4


def test_a_long_document_among_short_ones_is_spread() -> None:
    geometry = make_layout(make_pack([2048, *[32] * 32]), 8).geometry
    pairs = [plan_rank(geometry, (LayerKind(),), 4, rank).kinds["full"].pairs for rank in range(4)]
    assert max(pairs) / np.mean(pairs) < 1.05


def test_plans_repeat() -> None:
    geometry = make_layout(make_pack([37, 5, 90, 1]), 8).geometry
    first, again = (plan_rank(geometry, KINDS, 3, 1) for _ in range(2))
    assert repr(first) == repr(again)

"""Counts of a plan equal those of the plan itself, rank by rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import anchor_geometry, make_layout, make_pack

from csbp.plan.counts import count_plan
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import EXCHANGES, SCHEMES, PackPlan

KINDS = (LayerKind(), LayerKind("near", window=7), LayerKind("causal", clean="token_causal"),
         LayerKind("both", clean="token_causal", window=5, window_anchor="row"))
DRAFT = (LayerKind("noised", clean="absent", window=9, window_anchor="row", in_block="causal"),
         LayerKind("far", clean="absent"))


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, tuple[LayerKind, ...]]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    block = draw(st.integers(1, 12))
    if draw(st.booleans()):
        anchors = draw(st.lists(st.integers(0, len(lengths) - 1).flatmap(
            lambda d: st.tuples(st.just(d), st.integers(0, lengths[d]))), max_size=9))
        return anchor_geometry(lengths, anchors, block), DRAFT
    targets = [draw(st.lists(st.integers(0, n - 1), max_size=n, unique=True)) for n in lengths]
    return make_layout(make_pack(lengths, targets=targets), block).geometry, KINDS


@settings(max_examples=80, deadline=None)
@given(geometries(), st.integers(1, 7), st.sampled_from(SCHEMES), st.sampled_from(EXCHANGES))
def test_counts_equal_the_plan(case: tuple[Geometry, tuple[LayerKind, ...]], world: int, scheme: str,
                               exchange: str) -> None:
    geometry, kinds = case
    plan = PackPlan(geometry, kinds, world, scheme, exchange)
    counts = count_plan(plan)
    for rank in range(world):
        part = plan.rank_plan(rank)
        assert counts.clean[rank] == len(part.rows.clean)
        assert counts.noised[rank] == np.sum(part.rows.noised >= 0)
        assert counts.answered[rank] == part.rows.answers.sum()
        for kind in kinds:
            there, here = part.kinds[kind.name], counts.kinds[kind.name]
            assert here.pairs[rank] == there.pairs
            assert here.received[rank] == sum(there.exchange.receive_counts), (kind.name, rank)
            assert here.sent[rank] == sum(there.exchange.send_counts), (kind.name, rank)
    assert counts.blocks.sum() == geometry.num_blocks

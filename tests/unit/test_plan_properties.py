"""Whatever the pack, the layers and the number of ranks: plans repeat, every row has one owner, what is sent is what
arrives, and it is just what is missing. Two kinds of layer at once, all schemes, against the table as a matrix."""

from __future__ import annotations

from dataclasses import is_dataclass, replace

import numpy as np
import pytest
from drawn import draw_case, draw_kind, mask_of_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.plan.counts import KindCounts, count_plan
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import EXCHANGES, SCHEMES, PackPlan, RankPlan

cases = (st.integers(0, 10**9), st.sampled_from(SCHEMES), st.sampled_from(EXCHANGES))


def flat(part: object) -> list[object]:
    """All that a rank's plan holds."""
    if isinstance(part, np.ndarray):
        return part.tolist()
    if isinstance(part, dict):
        return [flat(value) for value in part.values()]
    return [flat(value) for value in vars(part).values()] if is_dataclass(part) else [part]


def held(plan: RankPlan, clean: int) -> np.ndarray:
    """Global rows in the order in which a rank holds them; -1 for a dummy."""
    noised = plan.rows.noised
    return np.concatenate([plan.rows.clean, np.where(noised < 0, -1, clean + noised)])


def arriving(plans: list[RankPlan], helds: list[np.ndarray], name: str) -> list[np.ndarray]:
    """For each rank the global rows that it gets, by carrying out every rank's sends, in the order in which it keeps
    them."""
    exchanges = [plan.kinds[name].exchange for plan in plans]
    counts = np.array([exchange.send_counts for exchange in exchanges])
    assert np.array_equal(counts.T, [exchange.receive_counts for exchange in exchanges])
    rows = np.concatenate([here[exchange.send] for here, exchange in zip(helds, exchanges, strict=True)])
    dest = np.repeat(np.tile(np.arange(len(plans)), len(plans)), counts.ravel())
    got = np.split(rows[np.argsort(dest, kind="stable")], np.cumsum(counts.sum(0))[:-1])
    return [part[exchange.to_global] for part, exchange in zip(got, exchanges, strict=True)]


def check_kind(plan: PackPlan, plans: list[RankPlan], counts: KindCounts, kind: LayerKind) -> None:
    geometry, clean = plan.geometry, plan.geometry.num_clean
    mask, (runs, owners) = mask_of_pack(geometry, kind), plan.holding.owned
    owner = np.repeat(owners, runs.end - runs.start)
    helds = [held(part, clean) for part in plans]
    arrived = arriving(plans, helds, kind.name)
    gathers = plan.exchange == "all_gather" or plan.scheme == "context" and kind.window is None
    for rank, (part, here, got) in enumerate(zip(plans, helds, arrived, strict=True)):
        mine = part.kinds[kind.name]
        rows = here[0 if kind.clean != "absent" else len(part.rows.clean):
                    len(here) if kind.noised else len(part.rows.clean)]
        rows = rows[rows >= 0]
        assert np.all(np.diff(got) > 0), "received rows are kept in global order"
        if plan.scheme == "csbp":
            assert np.all(got < clean), "a noised row travels"
        seen = np.flatnonzero(mask[rows].any(0))
        missing = np.setdiff1d(seen, here)
        if plan.scheme == "block" or plan.world == 1:
            assert len(got) == len(missing) == 0
        elif gathers:
            streams = [np.arange(clean)]
            if plan.scheme == "context" and kind.noised:
                streams.append(clean + np.arange(geometry.num_noised))
            assert np.array_equal(got, np.setdiff1d(np.concatenate(streams), here))
            assert not np.setdiff1d(missing, got).size
        else:
            assert np.array_equal(got, missing)
        assert np.all(owner[got] != rank)
        assert counts.pairs[rank] == mine.pairs == mask[rows].sum()
        assert counts.received[rank] == len(got)
        assert counts.sent[rank] == len(mine.exchange.send) == sum(mine.exchange.send_counts)
    assert counts.received.sum() == counts.sent.sum()


def check(seed: int, scheme: str, exchange: str) -> None:
    case = draw_case(seed, most_rows=250)
    random = np.random.default_rng(seed + 1)
    kinds = (case.kind, replace(draw_kind(random, 40), name="other"))
    plan, again = (PackPlan(case.geometry, kinds, case.world, scheme, exchange) for _ in range(2))
    plans = [plan.rank_plan(rank) for rank in range(case.world)]
    assert plan.digest() == again.digest()
    assert flat(plans[-1]) == flat(again.rank_plan(case.world - 1))
    noised = np.concatenate([part.rows.noised for part in plans])
    assert np.array_equal(np.sort(noised[noised >= 0]), np.arange(case.geometry.num_noised))
    answered = np.concatenate([part.rows.clean[part.rows.answers] for part in plans])
    assert np.array_equal(np.sort(answered), np.arange(case.geometry.num_clean))
    for part in plans:
        asked = [mine for mine in part.kinds.values() if mine.kind.noised]
        assert all(len(mine.here.prefix_start) for mine in asked), "a rank without query rows"
        if scheme != "context" and np.all(part.rows.noised >= 0):
            block = np.searchsorted(case.geometry.block_starts, part.rows.noised, "right") - 1
            keys = case.geometry.block_document * (case.geometry.num_clean + 1) + case.geometry.block_prefix_end
            assert np.all(np.diff(keys[block]) >= 0), "rows of similar prefixes lie together"
    counts = count_plan(plan)
    for kind in kinds:
        check_kind(plan, plans, counts.kinds[kind.name], kind)


@settings(max_examples=40, deadline=None)
@given(*cases)
def test_planner(seed: int, scheme: str, exchange: str) -> None:
    check(seed, scheme, exchange)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=2000, deadline=None)
@given(*cases)
def test_planner_at_length(seed: int, scheme: str, exchange: str) -> None:
    check(seed, scheme, exchange)

"""Keys in several stages are the same keys, each once."""

from __future__ import annotations

import numpy as np
import pytest
from packs import make_layout, make_pack

from csbp.plan.counts import count_plan
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.ranges import RowRanges
from csbp.plan.stages import Stages, in_stages


def seen(ranges: RowRanges, keys: np.ndarray) -> list[set[int]]:
    """Of every query row, which of the keys."""
    return [{*keys[a:b].tolist(), *keys[c:d].tolist()}
            for a, b, c, d in zip(ranges.prefix_start, ranges.prefix_end, ranges.block_start, ranges.block_end,
                                  strict=True)]


@pytest.mark.parametrize("scheme", ["csbp", "context"])
@pytest.mark.parametrize("stages", [1, 2, 5, 64])
def test_shares_of_an_exchange(scheme: str, stages: int) -> None:
    pack = PackPlan(make_layout(make_pack([150, 9, 90]), 8).geometry, (LayerKind(window=70),), 4, scheme)
    plans = [pack.rank_plan(rank).kinds["full"] for rank in range(4)]
    assert {plan.most_received for plan in plans} == {max(sum(plan.exchange.receive_counts) for plan in plans)}
    counts = count_plan(pack)
    assert {plan.mean_rows for plan in plans} == {int(counts.rows.sum()) // 4}
    shares = [in_stages(plan.exchange, plan.arrived, stages) for plan in plans]
    sent_by = [[np.split(part.send, np.cumsum(part.send_counts)[:-1]) for part, _ in of] for of in shares]
    for rank, (plan, of) in enumerate(zip(plans, shares, strict=True)):
        assert len(of) == stages
        counts = np.array([part.receive_counts for part, _ in of])
        assert (counts.sum(0) == plan.exchange.receive_counts).all() and (np.ptp(counts, 0) <= 1).all()
        whole = np.split(plan.exchange.send, np.cumsum(plan.exchange.send_counts)[:-1])
        for peer in range(4):
            assert np.array_equal(np.concatenate([sent_by[rank][stage][peer] for stage in range(stages)]), whole[peer])
            assert [len(sent_by[peer][stage][rank]) for stage in range(stages)] == counts[:, peer].tolist()
        # Names of what arrives, as it comes: owner after owner; then as each rank looks at it.
        names = np.split(np.arange(counts.sum()), np.cumsum(plan.exchange.receive_counts)[:-1])
        found: list[set[int]] = [set() for _ in plan.arrived.prefix_start]
        done = np.zeros(4, np.int64)
        for part, ranges in of:
            came = [one[a:a + n] for one, a, n in zip(names, done, part.receive_counts, strict=True)]
            done += part.receive_counts
            for row, more in enumerate(seen(ranges, np.concatenate(came)[part.to_global])):
                assert not found[row] & more
                found[row] |= more
        assert found == seen(plan.arrived, plan.exchange.to_global)


@pytest.mark.parametrize(("asked", "ranks", "received", "queries", "expected"), [
    (None, 8, 10**6, 1, 1),  # within a node
    (None, 16, 10**6, 1000, 8), (None, 16, 5 * 4096, 100, 5), (None, 16, 4095, 1, 1),  # few rows are not cut up
    (None, 16, 0, 0, 1), (None, 16, 128_000, 16_000, 4), (None, 16, 128_000, 100_000, 1),  # nor where many rows wait
    (3, 8, 10**6, 10**6, 3), (3, 16, 2, 50, 2), (3, 16, 0, 50, 1), (1, 16, 10**6, 1, 1)])
def test_how_many(asked: int | None, ranks: int, received: int, queries: int, expected: int) -> None:
    assert Stages.choose(asked, ranks, 8).of(received, queries) == expected

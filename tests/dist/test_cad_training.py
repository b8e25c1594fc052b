"""Training steps whose attention ranks share, in an axis or over all replicas: loss, logits and gradients to 1e-10."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from exact import Share, assert_exact, assert_sent_as_planned, expected, noising, step_on_ranks
from packs import make_pack

from csbp.data.batch import join

FREE = {"tolerance": 0.0, "min_gain": 0.0}
# One long document beside short ones: replicas and ranks that ownership alone cannot make equal.
LENGTHS = ([280, 20], [40, 30])


def packs() -> list:
    return [make_pack(list(lengths), seed=n, first_id=10 * n) for n, lengths in enumerate(LENGTHS)]


def check(shares: Sequence[Share]) -> None:
    """All ranks have made the same plans, which move something, and have sent what these say."""
    assert len({tuple(plan.digest() for plan in share.plans) for share in shares}) == 1
    assert_sent_as_planned(shares)
    assert sum(share.sent_rows["queries"] for share in shares) > 0


@pytest.mark.parametrize(("world", "block", "options", "cad"), [
    (2, 128, {"clean_stream": "token_causal", "ar_weight": 0.3}, {}),
    pytest.param(4, 128, {}, {}, marks=pytest.mark.slow),
    pytest.param(4, 128, {"clean_stream": "token_causal", "ar_weight": 0.3}, {"overlap": "none"},
                 marks=pytest.mark.slow),
    pytest.param(3, 128, {}, {"ship_queries": False}, marks=pytest.mark.slow),
])
def test_within_an_axis(ranks, world, block, options, cad):
    pack, how = make_pack([330, 20], seed=3), noising(block, **options)
    shares = ranks(world, partial(step_on_ranks, cad={**FREE, **cad}), [pack], how)
    assert_exact(shares, expected([pack], how), [[0]] * world)
    check(shares)


@pytest.mark.parametrize(("csbp", "parallel"), [
    (2, {}), (1, {"kind": "data"}),
    pytest.param(2, {"checkpointing": "full"}, marks=pytest.mark.slow),
    pytest.param(1, {"kind": "data", "tp": 2}, marks=pytest.mark.slow)])
def test_over_all_replicas(ranks, csbp, parallel):
    both, how = packs(), noising(64)
    shares = ranks(4, partial(step_on_ranks, csbp=csbp, parallel=parallel, cad={**FREE, "pool": "dp"}), both, how)
    answer = expected([join(both)], how)
    if parallel.get("tp", 1) == 1:
        assert_exact(shares, answer, [[0]] * 4)
    else:
        assert all(abs(share.loss - answer.loss) <= 1e-10 for share in shares)
    check(shares)


@pytest.mark.slow
def test_in_each_replica(ranks):
    both, how = [packs()[0], make_pack([150, 90], seed=1, first_id=10)], noising(64)
    shares = ranks(4, partial(step_on_ranks, csbp=2, cad=FREE), both, how)
    assert_exact(shares, expected(both, how), [[0], [0], [1], [1]])
    for replica in (shares[:2], shares[2:]):
        check(replica)
    assert shares[0].plans[0].digest() != shares[2].plans[0].digest()


@pytest.mark.slow
def test_a_step_that_is_a_pack_short(ranks):
    """Three packs for two replicas: the second micro-batch has one pack."""
    three, how = [*packs(), make_pack([150], seed=7, first_id=90)], noising(64)
    shares = ranks(2, partial(step_on_ranks, csbp=1, parallel={"kind": "data"}, cad={**FREE, "pool": "dp"}), three, how)
    answer = expected([join(three[:2]), three[2]], how)
    assert_exact(shares, answer, [[0, 1]] * 2)
    check(shares)

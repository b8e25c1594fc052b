"""The training step on 1 to 4 ranks gives the loss, the logits and every gradient of the oracle, to 1e-10."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from exact import assert_exact, assert_same_grads, assert_sent_as_planned, expected, noising, step_on_ranks
from packs import make_pack

# name -> (documents' lengths, supervised positions or None for all, block size, objective)
CASES = {
    "two documents": ([6, 10], None, 4, {}),
    "two documents, token causal": ([6, 10], None, 4, {"clean_stream": "token_causal"}),
    "odd lengths": ([1, 3, 5, 13, 17], None, 4, {}),
    "odd lengths, next token too": ([1, 3, 5, 13, 17], None, 4, {
        "clean_stream": "token_causal", "ar_weight": 0.3, "weight": "inverse_t", "denominator": "supervised"}),
    "odd lengths, shifted": ([1, 3, 5, 13, 17], None, 4, {"clean_stream": "token_causal", "label_shift": True}),
    "shifted, block causal": ([6, 10], None, 4, {"label_shift": True}),
    "fewer blocks than ranks": ([4], None, 4, {}),
    "one token": ([1], None, 4, {"weight": "inverse_t"}),
    "a rank without a target": ([9, 4, 8], [[8], [], []], 4, {}),
    "no target at all": ([5, 3], [[], []], 4, {}),
    "block of one": ([6, 5], None, 1, {}),
    "block of the document": ([7, 7], None, 7, {"scope": "document"}),
    "block longer than the document": ([5, 2], None, 8, {}),
    "prompt and answer": ([11, 14], [[5, 6, 9, 10], [13]], 4, {"denominator": "supervised"}),
    "more rows than a tile": ([150, 331], None, 32, {}),
    "autoregressive": ([6, 10], None, 1, {"kind": "autoregressive", "clean_stream": "token_causal"}),
}
SAMPLE = {("two documents", n) for n in (1, 2, 4)} | {("odd lengths", 3), (
    "odd lengths, next token too", 2), ("odd lengths, shifted", 3), ("fewer blocks than ranks", 2), (
    "a rank without a target", 3), ("no target at all", 2), ("block of one", 2), ("block of the document", 2)}


@pytest.mark.parametrize("case,world", [
    pytest.param(case, world, marks=() if (case, world) in SAMPLE else pytest.mark.slow)
    for case in CASES for world in (1, 2, 3, 4)])
def test_one_pack_on_any_number_of_ranks(ranks, case, world):
    lengths, targets, block, options = CASES[case]
    packs, how = [make_pack(lengths, targets=targets)], noising(block, **options)
    answer = expected(packs, how)
    shares = ranks(world, step_on_ranks, packs, how)
    assert_exact(shares, answer, [[0]] * world)
    assert any(g.abs().max() > 1e-3 for g in answer.grads.values()) == (case not in ("no target at all",))
    if case == "a rank without a target" and world > 1:
        assert min(share.asked for share in shares) == 0 < max(share.asked for share in shares)
    if case == "fewer blocks than ranks" and world > 1:
        assert sum((share.rows[0] >= 0).any() for share in shares) == 1


# Documents with 1, 7, 30 and 64 supervised tokens: the last ones of each, behind a prompt.
LENGTHS = {1: 5, 7: 12, 30: 37, 64: 66}


def documents(*supervised: int):
    """A pack of those documents. Sample ids belong to the documents, so noise follows them everywhere."""
    packs = [make_pack([LENGTHS[n]], targets=[range(LENGTHS[n] - n, LENGTHS[n])], seed=n, first_id=n)
             for n in supervised]
    joined = make_pack([LENGTHS[n] for n in supervised])
    return type(joined)(np.concatenate([p.tokens for p in packs]), joined.document_starts,
                        np.concatenate([p.target_mask for p in packs]), np.array(supervised))


GROUPINGS = {
    "one pack": [(1, 7, 30, 64)],
    "four packs": [(1,), (7,), (30,), (64,)],
    "backwards": [(64,), (30,), (7,), (1,)],
    "two packs": [(64, 1), (30, 7)],
    "three packs": [(30,), (1, 64), (7,)],
}
MESHES = [(1, 1), (2, 1), (2, 2), (3, 3), (3, 1), (4, 2), (4, 4), (4, 1)]
GROUPING_SAMPLE = {("four packs", (1, 1), "masked"), ("four packs", (4, 1), "supervised"),
                   ("backwards", (2, 2), "supervised"), ("two packs", (4, 2), "masked"),
                   ("three packs", (2, 1), "masked"), ("one pack", (2, 1), "supervised")}


@pytest.fixture(scope="module")
def reference():
    """The oracle's answers to the four documents, by denominator. Any packing of them has the same."""
    packs = [documents(1, 7, 30, 64)]
    return {name: expected(packs, noising(8, denominator=name)) for name in ("masked", "supervised")}


@pytest.mark.parametrize("grouping,mesh,denominator", [
    pytest.param(*case, marks=() if case in GROUPING_SAMPLE else pytest.mark.slow)
    for case in itertools.product(GROUPINGS, MESHES, ("masked", "supervised"))])
def test_grouping_of_documents_changes_nothing(ranks, reference, grouping, mesh, denominator):
    world, csbp = mesh
    packs = [documents(*group) for group in GROUPINGS[grouping]]
    stages = {"exchange_stages": csbp} if csbp > 1 else None  # in how many shares keys come changes nothing either
    shares = ranks(world, step_on_ranks, packs, noising(8, denominator=denominator), csbp, None, stages)
    answer = reference[denominator]
    for share in shares:
        assert abs(share.loss - answer.loss) <= 1e-10 and share.supervised == 102
    assert_same_grads(shares[0].grads, answer.grads)
    # A replica that is a pack short runs an empty one: every rank has as many micro-batches.
    assert {len(share.rows) for share in shares} == {-(-len(packs) // (world // csbp))}


@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 3])
def test_a_step_sends_the_planned_rows_and_no_others(ranks, world):
    packs = [make_pack([1, 3, 5, 13, 17]), make_pack([6, 10], first_id=9)]
    shares = ranks(world, step_on_ranks, packs, noising(4))
    row_bytes = 2 * 2 * 8 * 8  # K and V, two key/value heads of 8 channels, float64
    assert_sent_as_planned(shares)
    for share in shares:
        assert share.sent_bytes == {label: share.sent_rows[label] * row_bytes for label in ("keys", "gradients")}
    kv, grad = (sum(share.sent_rows[label] for share in shares) for label in ("keys", "gradients"))
    assert kv == 2 * grad > 0  # every row sent in the forward and again in the backward has its gradient returned


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_scrambling_one_document_leaves_the_other_bit_identical(ranks, world):
    pack, how = make_pack([13, 18]), noising(4)
    scrambled = make_pack([13, 18], seed=1)
    assert (scrambled.tokens[:13] != pack.tokens[:13]).sum() > 6
    scrambled.tokens[13:] = pack.tokens[13:]
    first, second = (ranks(world, step_on_ranks, [p], how, None, 1) for p in (pack, scrambled))
    assert first[0].loss == second[0].loss > 0
    assert_same_grads(second[0].grads, first[0].grads, rtol=0.0, atol=0.0)
    # The other document is in the pass, and what was changed reaches its own rows.
    whole, changed = (ranks(world, step_on_ranks, [p], how) for p in (pack, scrambled))
    assert whole[0].loss != changed[0].loss

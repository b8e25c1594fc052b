"""Heads and MLP columns split over a tp axis: loss, logits and every gradient are the oracle's, to 1e-10.

Ranks are numbered tp fastest: every second one has the same rows as the one before it.
"""

from __future__ import annotations

import pytest
from exact import EXACT, assert_exact, assert_same_grads, expected, noising, step_on_ranks
from packs import make_pack

slow = pytest.mark.slow
PACKS = [make_pack([1, 3, 5, 13, 17]), make_pack([9, 4, 8], targets=[[8], [], []], seed=1, first_id=9)]
# name -> (world, csbp, further settings)
MESHES = {"tp": (2, 1, {}), "csbp x tp": (4, 2, {}), "dp x tp": (4, 1, {}),
          "copies x tp": (4, 1, {"dp_replicate": 2}), "context x tp": (4, 2, {"kind": "context"}),
          "block x tp": (4, 2, {"kind": "block"}), "attention kept": (2, 1, {"checkpointing": "attention"}),
          "nothing kept": (4, 2, {"checkpointing": "full"})}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[] if i < 3 or m == "attention kept" else slow)
                                  for i, m in enumerate(MESHES)])
def test_loss_and_gradients_of_two_packs(ranks, mesh):
    """One of them leaves ranks without a row that has a loss."""
    world, csbp, settings = MESHES[mesh]
    how = noising(4, clean_stream="token_causal", ar_weight=0.3)
    answer = expected(PACKS, how)
    shares = ranks(world, step_on_ranks, PACKS, how, csbp, None, {"tp": 2, **settings})
    assert all(abs(share.loss - answer.loss) <= 1e-10 and share.supervised == 40 for share in shares)
    assert_same_grads(shares[0].grads, answer.grads)
    for share, twin in zip(shares[::2], shares[1::2], strict=True):
        assert [list(rows) for rows in share.rows] == [list(rows) for rows in twin.rows]


# Tied: one weight, two modules. The others: FSDP cuts what tp has cut into pieces of unequal size.
SHAPES = {"tied": {"tie_word_embeddings": True}, "odd": {"intermediate_size": 42, "vocab_size": 42},
          "one head a rank": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6},
          "biases": {"attention_bias": True}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("csbp", [2, pytest.param(1, marks=slow)])
def test_models_of_other_shapes(ranks, shape, csbp):
    answer = expected(PACKS[:1], noising(4), **SHAPES[shape])
    shares = ranks(4, step_on_ranks, PACKS[:1], noising(4), csbp, None, {"tp": 2}, SHAPES[shape])
    assert abs(shares[0].loss - answer.loss) <= 1e-10
    assert_same_grads(shares[0].grads, answer.grads)


def test_logits_of_all_rows_and_no_loss_at_all(ranks):
    how = noising(4)
    shares = ranks(4, step_on_ranks, PACKS[:1], how, 2, None, {"tp": 2})
    assert_exact(shares[::2], expected(PACKS[:1], how), [[0]] * 2)
    nothing = [make_pack([5, 3], targets=[[], []])]
    assert_same_grads(ranks(4, step_on_ranks, nothing, how, 2, None, {"tp": 2})[0].grads,
                      expected(nothing, how).grads, **EXACT)


def test_each_rank_sends_its_own_heads(ranks):
    whole = ranks(2, step_on_ranks, PACKS, noising(4))
    halves = ranks(4, step_on_ranks, PACKS, noising(4), 2, None, {"tp": 2})
    for rank, share in enumerate(halves):
        assert share.sent_rows == whole[rank // 2].sent_rows
        assert share.sent_bytes == {label: n // 2 for label, n in whole[rank // 2].sent_bytes.items()}

"""Models whose layers differ in their windows, and steps with next to nothing to learn, on 1 to 4 ranks.

The windowed model is held against the stock one in one dense pass over all rows, with a mask for each kind of layer.
"""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch
from exact import assert_same_grads, assert_sent_as_planned, csbp_model, expected, layouts, noising, step_on_ranks
from oracle import dense_mask, exact_norms, gradients, tiny_model
from packs import make_pack
from simulated import step_on_threads, summed_grads
from torch import Tensor, nn

from csbp.models.registry import get_adapter

slow = pytest.mark.slow
WINDOW, LAYER_TYPES = 6, ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE = {"layers": len(LAYER_TYPES), "layer_types": LAYER_TYPES, "use_sliding_window": True, "sliding_window": WINDOW}
LONG = "one long document"  # some of its attention moves
KIND_OF_TYPE = {"full_attention": "full", "sliding_attention": "sliding"}
CASES = {
    "block causal": ([make_pack([41, 3, 14])], noising(4)),
    "token causal, next token too": ([make_pack([9, 26], targets=[range(9), range(7, 26)]), make_pack([7], first_id=8)],
                                     noising(3, clean_stream="token_causal", ar_weight=0.5)),
    LONG: ([make_pack([330, 20], seed=3)], noising(128, clean_stream="token_causal", ar_weight=0.3)),
}
SHORT = [case for case in CASES if case != LONG]


@functools.cache
def dense_step(case: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the stock model over all rows of each pack at once."""
    packs, how = CASES[case]
    adapter, model, streams = get_adapter("qwen3"), tiny_model(**SHAPE), layouts(*CASES[case])
    kinds = {kind.name: kind for kind in adapter.layer_kinds(model, how.objective.clean_stream)}
    assert kinds["sliding"].window == WINDOW and kinds["full"].window is None
    counts = [sum(layout.terms[i].count for layout in streams) for i in range(len(streams[0].terms))]
    total = torch.zeros((), dtype=torch.float64)
    with exact_norms():
        for layout in streams:
            sees = {layer: torch.from_numpy(dense_mask(layout.geometry, kinds[kind]))[None, None]
                    for layer, kind in KIND_OF_TYPE.items()}
            logits = model(input_ids=torch.from_numpy(layout.tokens)[None], attention_mask=sees,
                           position_ids=torch.from_numpy(layout.positions)[None]).logits[0]
            for term, count in zip(layout.terms, counts, strict=True):
                nats = nn.functional.cross_entropy(logits[term.rows], torch.from_numpy(term.labels), reduction="none")
                total = total + term.scale * (nats * torch.from_numpy(term.weights)).sum() / count
        return total.item(), gradients(total, model)


@pytest.mark.parametrize(("case", "world", "scheme", "exchange"), [
    pytest.param(case, world, scheme, exchange, marks=() if scheme == "csbp" and (case, world, exchange) in (
        (SHORT[0], 2, "exact"), (SHORT[0], 2, "all_gather"), (SHORT[1], 4, "exact")) else slow)
    for case in SHORT for world in (1, 2, 4)
    for scheme, exchange in (("csbp", "exact"), ("csbp", "all_gather"), ("context", "exact"), ("block", "exact"))])
def test_layers_with_and_without_a_window(ranks, case, world, scheme, exchange):
    loss, grads = dense_step(case)
    way = {"kind": scheme, "exchange": exchange}
    shares = ranks(world, partial(step_on_ranks, parallel=way, shape=SHAPE), *CASES[case])
    assert all(abs(share.loss - loss) <= 1e-10 for share in shares)
    assert_same_grads(shares[0].grads, grads)
    assert_sent_as_planned(shares)
    sent = sum(sum(share.sent_rows.values()) for share in shares)
    assert sent == 0 if world == 1 or scheme == "block" else sent > 0
    if world > 1 and (scheme, exchange) == ("csbp", "exact"):
        full, near = (sum(plan.traffic[kind].sum() for plan in shares[0].plans) for kind in KIND_OF_TYPE.values())
        assert 0 < near < full, "a window's exchange is its halo"


@pytest.mark.parametrize(("world", "parallel"), [
    (2, {}), pytest.param(4, {}, marks=slow), pytest.param(2, {"checkpointing": "full"}, marks=slow),
    pytest.param(4, {"tp": 2}, marks=slow)])
def test_attention_of_both_kinds_moves(ranks, world, parallel):
    loss, grads = dense_step(LONG)
    cad = {"tolerance": 0.0, "min_gain": 0.0}
    shares = ranks(world, partial(step_on_ranks, parallel=parallel, shape=SHAPE, cad=cad), *CASES[LONG])
    assert all(abs(share.loss - loss) <= 1e-10 for share in shares)
    assert_same_grads(shares[0].grads, grads)
    assert_sent_as_planned(shares)
    assert shares[0].plans[0].served.keys() == {"full", "sliding"}


@pytest.mark.parametrize("scheme", ["csbp", "context", "block"])
def test_layers_with_and_without_a_window_on_many_simulated_ranks(scheme):
    loss, grads = dense_step("block causal")
    shares = step_on_threads(8, *CASES["block causal"], scheme, model=lambda: csbp_model(**SHAPE))
    assert all(abs(share.loss - loss) <= 1e-10 for share in shares)
    assert_same_grads(summed_grads(shares), grads)
    assert_sent_as_planned(shares)


def test_the_window_matters():
    """The dense version that the ranks are held against does what its name says."""
    case = CASES["block causal"]
    full = step_on_threads(1, *case, model=lambda: csbp_model(layers=len(LAYER_TYPES)))
    assert abs(full[0].loss - dense_step("block causal")[0]) > 1e-3


@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("options", [{}, {"clean_stream": "token_causal", "label_shift": True}])
def test_one_supervised_token_in_all(ranks, world, options):
    """Its gradient is the same on any number of ranks; those without it, and without any row, finish in time."""
    packs = [make_pack([9, 14, 5], targets=[[], [11], []]), make_pack([6], targets=[[]], first_id=7)]
    how = noising(4, t_min=1.0, **options)
    answer = expected(packs, how)
    shares = ranks(world, step_on_ranks, packs, how)
    assert sorted(share.asked for share in shares) == [0] * (world - 1) + [1]
    assert all(share.supervised == 1 and abs(share.loss - answer.loss) <= 1e-10 for share in shares)
    assert answer.loss > 0.1 and answer.grads["lm_head.weight"].abs().max() > 1e-3
    assert_same_grads(shares[0].grads, answer.grads)

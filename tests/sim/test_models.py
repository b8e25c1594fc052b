"""Whole models on 1 to 8 simulated ranks, in every scheme: loss, logits and every gradient of the oracle, to 1e-10."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from exact import EXACT, assert_same_grads, assert_sent_as_planned, csbp_model, expected, noising
from oracle import Answer
from packs import make_pack
from simulated import LoopbackRuntime, SimulatedShare, step_on_threads, summed_grads

from csbp.comm.loopback import LoopbackError, LoopbackTransport, LoopbackWorld, run_threads

PACKS = {
    "odd lengths": ([make_pack([1, 3, 5, 13, 17])], noising(4)),
    "two packs, next token too": ([make_pack([11, 6], targets=[[4, 5, 9], range(6)]), make_pack([9], first_id=5)],
                                  noising(4, clean_stream="token_causal", ar_weight=0.3, weight="inverse_t",
                                          denominator="supervised")),
    "shifted": ([make_pack([19, 6])], noising(3, clean_stream="token_causal", label_shift=True)),
    "one block": ([make_pack([4])], noising(4)),
    "one supervised token": ([make_pack([9, 14, 5], targets=[[], [11], []])], noising(4, t_min=1.0)),
}
WAYS = [("csbp", "exact"), ("csbp", "all_gather"), ("context", "exact"), ("context", "all_gather"),
        ("block", "exact")]
SAMPLE = {("odd lengths", 3): WAYS, ("two packs, next token too", 4): WAYS[:1], ("shifted", 5): WAYS[:1],
          ("one block", 6): WAYS[:1]}


@functools.cache
def answer_to(case: str) -> Answer:
    return expected(*PACKS[case])


def check(shares: list[SimulatedShare], answer: Answer) -> None:
    """Loss, terms and gradients; logits wherever a row is computed; each row counts on one rank."""
    for share in shares:
        assert abs(share.loss - answer.loss) <= 1e-10
        assert share.terms.keys() == answer.terms.keys()
        assert all(abs(share.terms[name] - value) <= 1e-10 for name, value in answer.terms.items())
    assert_same_grads(summed_grads(shares), answer.grads)
    for pack, logits in enumerate(answer.logits):
        counted = []
        for share in shares:
            rows, real = share.rows[pack], share.rows[pack] >= 0
            torch.testing.assert_close(share.logits[pack][real], logits[rows[real]], **EXACT)
            counted.append(rows[share.counts[pack]])
        np.testing.assert_array_equal(np.sort(np.concatenate(counted)), np.arange(len(logits)))


@pytest.mark.parametrize(("case", "world", "scheme", "exchange"), [
    pytest.param(case, world, *way, marks=() if way in SAMPLE.get((case, world), ()) else pytest.mark.slow)
    for case in PACKS for world in range(1, 9) for way in WAYS])
def test_a_step_on_simulated_ranks_is_the_oracles(case: str, world: int, scheme: str, exchange: str) -> None:
    shares = step_on_threads(world, *PACKS[case], scheme, exchange)
    check(shares, answer_to(case))
    if case == "one supervised token":
        assert sorted(share.asked for share in shares) == [0] * (world - 1) + [1] and answer_to(case).loss > 0
    assert_sent_as_planned(shares)
    row_bytes = 2 * 2 * 8 * 8  # K and V, two key/value heads of 8 channels, float64
    assert all(size == row_bytes * share.sent_rows[label] for share in shares
               for label, size in share.sent_bytes.items())
    total = sum(sum(share.sent_rows.values()) for share in shares)
    assert total == 0 if scheme == "block" or world == 1 or (case == "one block" and exchange == "exact"
                                                             and scheme == "csbp") else total > 0


@pytest.mark.slow
def test_the_schemes_differ_in_what_they_move_and_compute() -> None:
    case = PACKS["odd lengths"]
    shares = {way: step_on_threads(4, *case, *way) for way in WAYS}
    moved = {way: sum(share.sent_rows.get("keys", 0) for share in found) for way, found in shares.items()}
    assert 0 == moved["block", "exact"] < moved["csbp", "exact"] < moved["csbp", "all_gather"]
    assert moved["csbp", "all_gather"] < moved["context", "all_gather"]
    computed = {way: sum(len(share.rows[0]) for share in found) for way, found in shares.items()}
    assert computed["block", "exact"] > computed["csbp", "exact"] == 2 * sum([1, 3, 5, 13, 17])


def test_a_rank_that_fails_in_its_backward_ends_the_others() -> None:
    packs, how = PACKS["odd lengths"]

    def broken() -> torch.nn.Module:
        model = csbp_model()

        def hook(gradient: torch.Tensor) -> None:
            raise FloatingPointError("a gradient that is not there")

        if next(turns) == 1:
            model.model.layers[0].mlp.down_proj.weight.register_hook(hook)
        return model

    turns = iter(range(3))
    with pytest.raises(FloatingPointError, match="not there") as caught:
        step_on_threads(3, packs, how, model=broken)
    assert "on simulated rank" in caught.value.__notes__[-1]


def test_ranks_with_different_numbers_of_packs_are_told_so() -> None:
    """What would hang on a network: one rank runs a pack that the others do not have."""
    packs, how = PACKS["two packs, next token too"]
    from csbp.models.registry import get_adapter
    from csbp.train.step import StepRunner

    def work(transport: LoopbackTransport) -> float:
        runner = StepRunner(csbp_model(), get_adapter("qwen3"), LoopbackRuntime(transport), "reference")
        return runner.run(runner.prepare(packs[:1] if transport.rank == 2 else packs, how, 0), train=True).loss

    with pytest.raises(LoopbackError, match="rank 2 at a gathering of 'a sum'|rank 2 is at a gathering of 'a sum'"):
        run_threads(LoopbackWorld(4), work)


def test_the_simulated_collectives() -> None:
    def work(transport: LoopbackTransport) -> tuple[list[float], str, int]:
        runtime = LoopbackRuntime(transport)
        runtime.barrier()
        return (runtime.total([1.0, transport.rank]), runtime.broadcast(f"from {transport.rank}"),
                runtime.on_main(lambda: 7))

    assert run_threads(LoopbackWorld(3), work) == [([3.0, 3.0], "from 0", 7)] * 3

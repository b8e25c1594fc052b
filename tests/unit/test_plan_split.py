"""csbp plan with a tp axis: every number of a rank that halves, every one that does not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from csbp.errors import ConfigError
from csbp.plan.counts import count_plan
from csbp.plan.estimate import Settings, predict_memory
from csbp.plan.forecast import whole_pack
from csbp.plan.plan import PackPlan
from csbp.plan.shapes import model_shape
from csbp.plan_cli import run_plan

WORDS = ["experiment=nemotron_8b_sft", "data.seq_len=32768", "parallel.csbp=4"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    run_plan([*WORDS, *words], json_only=True)
    return json.loads(capsys.readouterr().out)


def test_a_rank_has_half_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    whole, half = planned(capsys), planned(capsys, "parallel.tp=2")
    assert (half["world_size"], half["csbp"], half["tp"], half["replicas"]) == (8, 4, 2, 1)
    assert whole["tp"] == 1 and whole["tp_bytes_received_per_rank"] == 0 < half["tp_bytes_received_per_rank"]
    for name in ("bytes_received_per_rank", "bytes_received_exact_mean", "bytes_received_exact_max"):
        assert half[name] == whole[name] / 2
    for name in ("max_over_mean_pairs", "model_flops", "parameters"):
        assert half[name] == whole[name]
    for one, two in zip(half["ranks"], whole["ranks"], strict=True):
        assert one["attention_seconds"] == pytest.approx(two["attention_seconds"] / 2)
        assert one["linear_seconds"] == pytest.approx(two["linear_seconds"] / 2)
        assert (one["clean_rows"], one["noised_rows"], one["pairs"]) == (
            two["clean_rows"], two["noised_rows"], two["pairs"])
    assert half["predicted_mfu"] < whole["predicted_mfu"]  # the sums of the tp axis are waited for


def test_memory() -> None:
    shape = model_shape({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320}, "block_causal")
    counts = count_plan(PackPlan(whole_pack([64], 4, noised=True), shape.kinds, 2))
    four, split = (predict_memory(shape, counts, counts.noised, Settings(4, "none", 4, tp=tp)) for tp in (1, 2))
    assert split.weights == four.weights and split.optimizer == four.optimizer  # all ranks hold one copy either way
    assert split.gathered == four.gathered / 2 and (split.keys == four.keys / 2).all()
    # Logits and the head's gradient are of half of the tokens; the gradient of its rows is whole.
    whole = 4 * 32 * counts.noised
    np.testing.assert_array_equal(split.logits - whole, (four.logits - whole) / 2)
    # Of a row: what the four matrices of 32 inputs take, whole; what they give and the others take, half.
    assert 0.5 < (split.activations / four.activations).max() < 0.8


def test_a_copy_of_the_weights_is_sharded_over_its_own_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.nproc=16", "parallel.csbp=2", "parallel.tp=2"]
    one, two = planned(capsys, *words), planned(capsys, *words, "parallel.dp_replicate=2")
    name = "peak_memory_bytes_per_rank"
    # 16 bytes a parameter (weight, gradient, two moments) over 16 ranks, and over 8.
    assert two[name] - one[name] == pytest.approx(16 * one["parameters"] / 16, rel=1e-6)


@pytest.mark.parametrize(("words", "said"), [
    (["parallel.tp=3"], "parallel.tp=3: must divide the model's"),
    (["parallel.tp=2", "parallel.nproc=9"], "parallel.tp=2: must divide parallel.nproc=9: one of 1, 3, 9"),
    (["parallel.tp=2", "parallel.nproc=4"], "parallel.csbp=4: must divide parallel.nproc / parallel.tp = 2"),
])
def test_a_tp_axis_that_does_not_divide(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_plan([*WORDS, *words])


def test_the_report_names_the_axis(capsys: pytest.CaptureFixture[str]) -> None:
    run_plan([*WORDS, "parallel.tp=2"])
    text = capsys.readouterr().out
    assert "dp=1 x csbp=4 x tp=2" in text and "of the tp axis" in text

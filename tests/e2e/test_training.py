"""Training runs on gloo ranks: same losses on any topology, exact resume, faults."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cad import dear_profile
from runs import ask_to_stop, at_step, final_weights, losses, make_corpus, steps_of, tiny_run, train_here

from csbp.config.schema import CHECKPOINTING, RunConfig
from csbp.train.recorder import Recorder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


slow = pytest.mark.slow
TOPOLOGIES = [(2, {"csbp": 2}), (2, {"kind": "context"}), pytest.param(2, {"kind": "block"}, marks=slow),
              pytest.param(3, {"csbp": 1}, marks=slow), pytest.param(3, {"kind": "data"}, marks=slow),
              pytest.param(3, {"csbp": 3, "exchange": "all_gather"}, marks=slow),
              pytest.param(4, {"csbp": 2}, marks=slow), pytest.param(4, {"csbp": 4}, marks=slow),
              pytest.param(4, {"csbp": 2, "kind": "context"}, marks=slow),
              pytest.param(4, {"csbp": 2, "kind": "block"}, marks=slow),
              pytest.param(4, {"csbp": 2, "dp_replicate": 2}, marks=slow),
              pytest.param(4, {"csbp": 1, "dp_replicate": 2}, marks=slow)]


@pytest.fixture(scope="module")
def one_rank(ranks: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("one")
    assert ranks(1, train_here, tiny_run(corpus, run, train={"steps": 20})) == [0]
    assert losses(run)[-1] < losses(run)[0]
    return run


def model_flops(run: Path) -> list[float]:
    return [row["model_flops_per_second"] * row["clean_tokens"] / row["tokens_per_second"] for row in steps_of(run)]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parallel"), TOPOLOGIES)
def test_losses_do_not_depend_on_the_topology(ranks: Any, corpus: Path, tmp_path: Path, one_rank: Path,
                                              world: int, parallel: dict[str, Any]) -> None:
    assert ranks(world, train_here, tiny_run(corpus, tmp_path, parallel=parallel, train={"steps": 20})) == [0] * world
    np.testing.assert_allclose(losses(tmp_path), losses(one_rank), rtol=1e-5)
    norms = [[row["grad_norm"] for row in steps_of(run)] for run in (tmp_path, one_rank)]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    travels = parallel.get("kind", "csbp") in ("csbp", "context") and parallel.get("csbp", world) > 1
    assert all((row["wire_bytes"] > 0) == travels for row in steps_of(tmp_path))
    np.testing.assert_allclose(model_flops(tmp_path), model_flops(one_rank), rtol=1e-12)


def notes_of_training(config: RunConfig) -> list[str]:
    """What this rank tells whoever watches."""
    notes, note = list[str](), Recorder.note
    Recorder.note = lambda self, text: notes.append(text)  # type: ignore[method-assign]
    try:
        assert train_here(config) == 0
    finally:
        Recorder.note = note  # type: ignore[method-assign]
    return notes


@pytest.mark.slow
def test_bytes_that_attention_moved_are_recorded(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    """In one sequence axis owners are the same with and without moves."""
    told = {}
    for enabled in (True, False):
        cad = {"enabled": enabled, "tolerance": 0.0, "min_gain": 0.0, "profile": str(dear_profile(tmp_path))}
        asked = tiny_run(corpus, tmp_path / str(enabled), train={"steps": 4}, objective={"block_size": 64},
                         data={"seq_len": 500, "document_tokens": 400}, cad=cad)
        told[enabled] = [note for note in ranks(2, notes_of_training, asked)[0] if "disaggregation" in note]
    moved, home = (steps_of(tmp_path / str(enabled)) for enabled in (True, False))
    assert [row["cad_bytes"] for row in moved] == [a["wire_bytes"] - b["wire_bytes"]
                                                   for a, b in zip(moved, home, strict=True)]
    assert any(row["cad_bytes"] for row in moved) and not any("cad_bytes" in row for row in home)
    assert len(told[True]) == 1 and "of the time of the layers in the first step. Later steps differ" in told[True][0]
    summaries = [json.loads((tmp_path / str(enabled) / "summary.json").read_text()) for enabled in (True, False)]
    assert summaries[0]["cad_bytes"] == sum(row["cad_bytes"] for row in moved) and "cad_bytes" not in summaries[1]
    assert told[False] == []


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_two_and_two_steps_are_four(ranks: Any, corpus: Path, tmp_path: Path, world: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks(world, train_here, tiny_run(corpus, whole, train={"steps": 4}))
    ranks(world, train_here, tiny_run(corpus, parts, train={"steps": 2}))
    ranks(world, train_here, tiny_run(corpus, parts, train={"steps": 4}, resume="auto"))
    assert [x.hex() for x in losses(parts)] == [x.hex() for x in losses(whole)]
    assert [r["grad_norm"] for r in steps_of(parts)] == [r["grad_norm"] for r in steps_of(whole)]
    assert final_weights(parts) == final_weights(whole)


MOVES = [({"csbp": 1}, 1, {}, 3), ({}, 3, {"csbp": 1, "dp_replicate": 2}, 4),
         ({"csbp": 2, "dp_replicate": 2}, 4, {}, 2)]


@pytest.mark.parametrize(("before", "first", "after", "second"), [
    pytest.param(*move, marks=[] if i == 0 else slow) for i, move in enumerate(MOVES)])
def test_a_run_goes_on_on_another_topology(ranks: Any, corpus: Path, tmp_path: Path, first: int, second: int,
                                           before: dict[str, Any], after: dict[str, Any]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks(1, train_here, tiny_run(corpus, whole, train={"steps": 4}))
    ranks(first, train_here, tiny_run(corpus, parts, train={"steps": 2}, parallel=before))
    ranks(second, train_here, tiny_run(corpus, parts, train={"steps": 4}, resume="auto", parallel=after))
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)
    assert losses(whole)[-1] < losses(whole)[0]


def stop_at_four(config: Any, rank: int) -> int:
    return train_here(config, lambda session: at_step(session, rank, 4, ask_to_stop))


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_on_all(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks(2, train_here, tiny_run(corpus, whole))
    assert ranks(2, stop_at_four, tiny_run(corpus, parts), 1) == [1, 1]
    assert not (parts / "summary.json").exists()
    stopped = len(losses(parts))
    assert stopped in (5, 6)  # the step in which the signal came, or the next
    assert ranks(2, train_here, tiny_run(corpus, parts, resume="auto")) == [0, 0]
    assert losses(parts) == losses(whole) and final_weights(parts) == final_weights(whole)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks(2, train_here, tiny_run(corpus, whole))
    ranks(2, train_here, tiny_run(corpus, parts, train={"steps": 6}, checkpoint={"every": 3}))
    shard = sorted((parts / "checkpoints" / "step-00000006").glob("*.safetensors"))[0]
    flipped = bytearray(shard.read_bytes())
    flipped[-5] ^= 4
    shard.write_bytes(flipped)
    ranks(2, train_here, tiny_run(corpus, parts, resume="auto"))
    assert losses(parts) == losses(whole) and final_weights(parts) == final_weights(whole)


def poison(config: Any, rank: int, first: int, last: int) -> int:
    """NaN rows on one rank in some steps."""
    def disturb(session: Any) -> None:
        forward, current = session.adapter.forward, {"step": -1}
        prepare = session.runner.prepare

        def watched(packs: Any, noising: Any, step: int) -> Any:
            current["step"] = step if noising is session.training else -1
            return prepare(packs, noising, step)

        def broken(model: Any, batch: Any, plan: Any, read: Any = None) -> Any:
            bad = session.runtime.rank == rank and first <= current["step"] <= last
            return forward(model, batch, plan, (lambda rows, head: read(rows * math.nan, head)) if bad else read)

        session.runner.prepare = watched
        session.runner.adapter = type("Broken", (), {**{n: getattr(session.adapter, n) for n in
                                                        ("layer_kinds", "units")}, "forward": staticmethod(broken)})()

    return train_here(config, disturb)


def test_a_nan_on_one_rank_changes_no_weights_anywhere(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    assert ranks(2, poison, tiny_run(corpus, tmp_path, train={"steps": 4}), 1, 1, 2) == [0, 0]
    rows = steps_of(tmp_path)
    assert [row["updated"] for row in rows] == [True, False, False, True]
    assert all(math.isfinite(row["loss"]) for row in rows if row["updated"])


@pytest.mark.slow
def test_nans_without_end_stop_the_run(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, train={"steps": 9}, checkpoint={"every": 1})
    with pytest.raises(Exception, match="3 times in a row"):
        ranks(2, poison, config, 1, 2, 99)
    assert len(steps_of(tmp_path)) == 5
    # What was saved before is still there to go on from.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


KEEPING = [{"checkpointing": "attention"}, {"checkpointing": "matmuls"}, {"checkpointing": "full"},
           {"offload": True}, {"checkpointing": "attention", "offload": True}]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", KEEPING)
def test_what_is_kept_for_the_backward_changes_no_bit(ranks: Any, corpus: Path, tmp_path: Path,
                                                      parallel: dict[str, Any]) -> None:
    runs = [tiny_run(corpus, tmp_path / name, train={"steps": 4}, parallel=how)
            for name, how in (("plain", {}), ("kept", parallel))]
    for run in runs:
        ranks(2, train_here, run)
    assert losses(tmp_path / "kept") == losses(tmp_path / "plain")
    assert final_weights(tmp_path / "kept") == final_weights(tmp_path / "plain")


def keys_sent(config: Any) -> int:
    """Rows that this rank sent in all, evaluations included."""
    transports: list[Any] = []
    train_here(config, lambda session: transports.append(session.runtime.transport))
    return int(transports[0].sent_rows["keys"])


@pytest.mark.slow
def test_attention_is_recomputed_only_where_asked(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    """Keys travel once for each time attention runs, and once for its backward."""
    sent = {}
    for policy in CHECKPOINTING:
        run = tiny_run(corpus, tmp_path / policy, train={"steps": 2}, parallel={"checkpointing": policy})
        sent[policy] = sum(ranks(2, keys_sent, run))
    assert sent["attention"] == sent["matmuls"] == sent["none"]
    evaluations = 3 * sent["none"] - 2 * sent["full"]  # forward only, whatever the policy
    assert evaluations > 0 and 2 * (sent["full"] - evaluations) == 3 * (sent["none"] - evaluations)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_agree(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {"plain": {}} | {
        policy: {"compile": True, "checkpointing": policy} for policy in ("attention", "matmuls")}
    for name, how in ways.items():
        ranks(2, train_here, tiny_run(corpus, tmp_path / name, train={"steps": 4}, parallel=how), timeout=800)
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "plain"), rtol=1e-5)


OBJECTIVES: list[dict[str, Any]] = [
    {"kind": "autoregressive", "clean_stream": "token_causal"},
    {"clean_stream": "token_causal", "label_shift": True},
    {"clean_stream": "token_causal", "ar_weight": 0.5, "weight": "inverse_t", "denominator": "supervised"},
]


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_and_agrees_on_two_ranks(ranks: Any, corpus: Path, tmp_path: Path,
                                                        objective: dict[str, Any]) -> None:
    for world in (1, 2):
        run = tiny_run(corpus, tmp_path / str(world), objective=objective, train={"steps": 4})
        assert ranks(world, train_here, run) == [0] * world
    first, second = losses(tmp_path / "1"), losses(tmp_path / "2")
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert first[-1] < first[0]


def test_export_and_summary(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, train={"steps": 2, "eval_every": 1, "sample_every": 1},
                      checkpoint={"export": True}, observe={"plot": True})
    assert ranks(2, train_here, config) == [0, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    for key in ("eval_loss_before", "eval_loss_after", "eval_loss_unigram", "masked_accuracy_before",
                "masked_accuracy_after", "seconds"):
        assert math.isfinite(summary[key]), key
    assert summary["eval_loss_random_start"] is None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(summary["export_dir"])
    assert (model.config.block_size, model.config.mask_token_id) == (4, 257)
    assert (tmp_path / "loss.png").stat().st_size > 5000


def count_micro_batches(config: Any) -> int:
    """How many micro-batches this rank ran in the first step."""
    seen: list[int] = []

    def disturb(session: Any) -> None:
        prepare = session.runner.prepare

        def watched(*args: Any, **named: Any) -> Any:
            works = prepare(*args, **named)
            seen.append(len(works))
            return works

        session.runner.prepare = watched

    train_here(config, disturb)
    return seen[-2]  # the last is the closing evaluation


def test_replicas_short_of_a_pack_run_an_empty_one(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, parallel={"csbp": 1}, train={"steps": 2, "packs_per_step": 1})
    assert ranks(2, count_micro_batches, config) == [1, 1]
    assert all(math.isfinite(x) for x in losses(tmp_path))

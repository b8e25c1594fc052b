"""Runs that are stopped, resumed with something changed, or refused by the disk, on gloo ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import ask_to_stop, at_step, final_weights, losses, make_corpus, on_steps, steps_of, tiny_run, train_here

from csbp.checkpoint.files import Manifest
from csbp.errors import ConfigError, UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*"))


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").split("\n") if line]


def flip(run: Path, step: int) -> None:
    shard = sorted((run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))[0]
    shard.write_bytes(bytes([*shard.read_bytes()[:-1], 77]))


@pytest.mark.slow
def test_a_run_with_nothing_but_damage_is_never_started_anew(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    ranks(1, train_here, tiny_run(corpus, tmp_path, train={"steps": 4}, checkpoint={"every": 2}))
    flip(tmp_path, 4)
    config = tiny_run(corpus, tmp_path, resume="auto", train={"steps": 4})
    assert ranks(1, train_here, config) == [0]
    assert saved(tmp_path) == ["step-00000002", "step-00000004", "step-00000004.damaged"]
    for step in (2, 4):
        flip(tmp_path, step)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for names in (["step-00000002", "step-00000004", "step-00000004.damaged"], ["step-00000004.damaged"]):
        with pytest.raises(ConfigError, match="are all damaged"):
            ranks(1, train_here, config)
        assert saved(tmp_path) == names and (tmp_path / "metrics.jsonl").read_bytes() == before
        for name in names[:-1]:
            (tmp_path / "checkpoints" / name).rename(tmp_path / name)


@pytest.mark.parametrize("split", ["train", pytest.param("validation", marks=pytest.mark.slow)])
def test_changed_data_are_noticed(ranks: Any, tmp_path: Path, split: str) -> None:
    corpus, run = make_corpus(tmp_path / "corpus"), tmp_path / "run"
    held = corpus / "held"
    held.mkdir()
    (held / "a.txt").write_text("w1 w2 w3 w4 w5 w6")
    source = tiny_run(corpus, run).data.sources[0]
    config = tiny_run(corpus, run, train={"steps": 1},
                      data={"validation": [replace(source, path=str(held))], "validation_fraction": 0.0})
    ranks(1, train_here, config)
    again = replace(config, resume="auto", train=replace(config.train, steps=2))
    assert ranks(1, train_here, again) == [0]
    file = held / "a.txt" if split == "validation" else corpus / "texts" / "03.txt"
    file.write_text(file.read_text() + " more")
    before, named = saved(run), "data.validation" if split == "validation" else "data.sources"
    with pytest.raises(ConfigError, match=rf"{named}=.*{file.parent}.*start another run_dir") as caught:
        ranks(1, train_here, again)
    assert ("held-out" in str(caught.value)) == (split == "validation") and saved(run) == before


def poisoned(config: Any, first: int, last: int, stop_at: int = -1) -> int:
    """NaN losses from one optimizer step to another."""
    def disturb(session: Any) -> None:
        def broken(step: int, run: Any) -> Any:
            result = run()
            return replace(result, loss=math.nan) if first <= step <= last else result

        on_steps(session, broken)
        at_step(session, 0, stop_at, ask_to_stop)

    return train_here(config, disturb)


@pytest.mark.slow
def test_no_checkpoint_is_given_up_for_one_of_skipped_updates(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, train={"steps": 9, "nonfinite_limit": 4},
                      checkpoint={"every": 1, "keep": 1})
    with pytest.raises(UserError, match="4 times in a row"):
        ranks(1, poisoned, config, 3, 99)
    assert saved(tmp_path) == ["step-00000003"]
    # A stop may come meanwhile: its steps are saved, beside the last good state; the count then starts anew.
    assert ranks(1, poisoned, replace(config, resume="auto"), 3, 99, 5) == [1]
    assert saved(tmp_path) == ["step-00000003", "step-00000006"]
    assert ranks(1, poisoned, replace(config, resume="auto"), 6, 7) == [0]
    assert [row["updated"] for row in steps_of(tmp_path)] == [True] * 3 + [False] * 5 + [True]
    assert saved(tmp_path) == ["step-00000009"]


def test_a_postponed_checkpoint_comes_with_the_next_update(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, train={"steps": 4}, checkpoint={"every": 2})
    ranks(1, poisoned, config, 1, 1)
    assert saved(tmp_path) == ["step-00000003", "step-00000004"]


@pytest.mark.slow
def test_the_best_stays_the_best_when_a_finished_run_goes_on(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, tmp_path, train={"steps": 4}, checkpoint={"keep": 1})
    again = replace(run, resume="auto")
    worse = replace(again, optim=replace(run.optim, lr=0.5, warmup_steps=0), train=replace(run.train, steps=6))
    path = tmp_path / "checkpoints" / "step-00000004"
    for config in (run, again, worse):
        assert ranks(1, train_here, config) == [0]
        assert Manifest.read(path).best
    assert saved(tmp_path) == ["step-00000004", "step-00000006"]


def stopped_in_evaluation(config: Any, rank: int, evaluation: int) -> tuple[int, list[int]]:
    """A stop request to one rank in the first micro-batch of its n-th evaluation. Micro-batches by evaluation."""
    seen: list[int] = []

    def disturb(session: Any) -> None:
        prepare, forward = session.runner.prepare, session.runner.adapter.forward

        def watched(packs: Any, noising: Any, step: int) -> Any:
            if noising is session.evaluation:
                seen.append(0)
            counting[0] = noising is session.evaluation
            return prepare(packs, noising, step)

        def counted(*args: Any) -> Any:
            if counting[0]:
                seen[-1] += 1
                if session.runtime.rank == rank and len(seen) == evaluation and seen[-1] == 1:
                    ask_to_stop()
            return forward(*args)

        counting = [False]
        session.runner.prepare = watched
        session.runner.adapter = type("Watched", (), {"layer_kinds": session.adapter.layer_kinds,
                                                      "forward": staticmethod(counted)})()

    return train_here(config, disturb), seen


@pytest.mark.slow
def test_a_stop_in_the_first_evaluation_saves_nothing(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, train={"steps": 2, "eval_packs": 3})
    assert ranks(2, stopped_in_evaluation, config, 1, 1) == [(1, [1])] * 2
    assert saved(tmp_path) == [] and rows(tmp_path, "eval.jsonl") == []
    assert ranks(2, train_here, config) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [2, 4])
def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(ranks: Any, corpus: Path, tmp_path: Path,
                                                            evaluation: int) -> None:
    """The second is at step 2, the fourth at the end."""
    whole, parts = (tiny_run(corpus, tmp_path / name, train={"steps": 5, "eval_packs": 3, "eval_every": 2},
                             checkpoint={"keep": 9}) for name in ("whole", "parts"))
    ranks(2, train_here, whole)
    (code, seen), other = ranks(2, stopped_in_evaluation, parts, 1, evaluation)
    assert (code, seen) == other and code == 1 and seen[-1] == 1 < seen[0]
    assert saved(tmp_path / "parts")[-1] == {2: "step-00000002", 4: "step-00000005"}[evaluation]
    assert ranks(2, train_here, replace(parts, resume="auto")) == [0, 0]
    assert rows(tmp_path / "parts", "eval.jsonl") == rows(tmp_path / "whole", "eval.jsonl")
    assert saved(tmp_path / "parts") == saved(tmp_path / "whole")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert final_weights(tmp_path / "parts") == final_weights(tmp_path / "whole")


def stopped_in_sample(config: Any) -> int:
    """A stop request in the first pass of the first filled-in block."""
    def disturb(session: Any) -> None:
        forward, passes = session.adapter.forward, [0]

        def counted(*args: Any) -> Any:
            passes[0] += 1
            assert passes[0] < 3, "the sample went on"  # the first is the context
            if passes[0] == 2:
                ask_to_stop()
            return forward(*args)

        session.adapter = type("Watched", (), {"layer_kinds": session.adapter.layer_kinds,
                                               "export_config": session.adapter.export_config, "family": "qwen3",
                                               "forward": staticmethod(counted)})()

    return train_here(config, disturb)


def test_a_stop_ends_a_sample(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    assert ranks(1, stopped_in_sample, tiny_run(corpus, tmp_path, noise={"t_min": 0.9})) == [1]
    assert rows(tmp_path, "samples.jsonl") == [] and saved(tmp_path) == []


def without_bytes(config: Any) -> int:
    """Held-out targets that stand for no text, such as special tokens only."""
    def disturb(session: Any) -> None:
        samples = session.held_out.samples
        totals = replace(samples.totals(), target_bytes=0.0)
        samples.totals = lambda: totals

    return train_here(config, disturb)


def test_held_out_targets_without_text_have_no_bits_per_byte(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    assert ranks(1, without_bytes, tiny_run(corpus, tmp_path, train={"steps": 1})) == [0]
    assert [row["bits_per_byte"] for row in rows(tmp_path, "eval.jsonl")] == [None, None]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["bits_per_byte_after"] is None and summary["eval_loss_after"] > 0


def undrawable(config: Any) -> int:
    """The drawing library fails."""
    from csbp.train import recorder

    real = recorder.plot_losses

    def broken(*args: Any, **named: Any) -> None:
        raise RuntimeError("no font")

    recorder.plot_losses = broken
    try:
        return train_here(config)
    finally:
        recorder.plot_losses = real


def test_a_picture_that_cannot_be_drawn_costs_nothing_else(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, train={"steps": 1}, checkpoint={"export": True}, observe={"plot": True})
    assert ranks(1, undrawable, config) == [0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert Path(summary["export_dir"], "model.safetensors").exists() and not (tmp_path / "loss.png").exists()


def test_an_export_that_cannot_be_written_leaves_numbers_and_checkpoint(ranks: Any, corpus: Path,
                                                                        tmp_path: Path) -> None:
    (tmp_path / "export").write_text("in the way")
    config = tiny_run(corpus, tmp_path, train={"steps": 1}, checkpoint={"export": True})
    with pytest.raises(UserError, match=f"could not export to {tmp_path / 'export'}"):
        ranks(1, train_here, config)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["export_dir"] is None and summary["eval_loss_after"] > 0 and saved(tmp_path) == ["step-00000001"]


def with_full_disk(config: Any, name: str) -> int:
    """The disk is full for one file from step 3 on."""
    from csbp.observe import metrics

    real = metrics.MetricsWriter.step

    def step(writer: Any, number: int, record: Any) -> None:
        if number == 3:
            writer._files[name].close()
            writer._files[name] = open("/dev/full", "a", buffering=1)
        real(writer, number, record)

    metrics.MetricsWriter.step = step  # type: ignore[method-assign]
    try:
        return train_here(config)
    finally:
        metrics.MetricsWriter.step = real  # type: ignore[method-assign]


def test_a_full_disk_ends_the_run_with_the_file_and_a_sound_checkpoint(ranks: Any, corpus: Path,
                                                                       tmp_path: Path) -> None:
    config = tiny_run(corpus, tmp_path, train={"steps": 4}, checkpoint={"every": 2})
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        ranks(1, with_full_disk, config, "metrics.jsonl")
    assert saved(tmp_path) == ["step-00000002"]
    assert ranks(1, train_here, replace(config, resume="auto")) == [0] and len(losses(tmp_path)) == 4


@pytest.mark.parametrize("name", ["model", pytest.param("summary.json", marks=pytest.mark.slow)])
def test_a_path_that_cannot_be_written_is_named(ranks: Any, corpus: Path, tmp_path: Path, name: str) -> None:
    if name == "model":
        (tmp_path / name).write_text("in the way")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{tmp_path / name}: cannot be written"):
        ranks(1, train_here, tiny_run(corpus, tmp_path, train={"steps": 1}))

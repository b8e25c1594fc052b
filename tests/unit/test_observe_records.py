"""What a run writes: records, throughput, progress, the curve, the report."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from csbp.errors import UserError, writing
from csbp.observe import progress
from csbp.observe.curve import plot_losses, smooth
from csbp.observe.metrics import EVALUATIONS, METRICS, SAMPLES, MetricsWriter, read_records
from csbp.observe.progress import ProgressReporter
from csbp.observe.summary import comparisons, print_report, result_lines, write_summary
from csbp.observe.throughput import ThroughputMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_steps(run_dir: Path, first: int, last: int, resumed_at: int | None = None) -> None:
    writer = MetricsWriter(run_dir, resumed_at)
    for step in range(first, last + 1):
        writer.step(step, {"loss": 1 / step, "lr": 1e-3})
        if step % 2 == 0:
            writer.evaluation(step, {"loss": 2 / step})
    writer.close()


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_record_is_on_disk_at_once_and_exact(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.step(1, {"loss": 0.1 + 0.2, "terms": {"ar": math.nan}, "norms": [1.0, math.inf]})
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.1 + 0.2, "terms": {"ar": None}, "norms": [1.0, None]}]
    writer.sample(1, {"filled": "a▒\n"})
    assert read_records(tmp_path / "samples.jsonl") == [{"step": 1, "filled": "a▒\n"}]
    writer.close()


def test_resuming_drops_what_comes_again(tmp_path):
    write_steps(tmp_path, 1, 7)
    write_steps(tmp_path, 5, 9, resumed_at=4)
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 10))
    assert steps(tmp_path / "eval.jsonl") == [2, 4, 6, 8]
    write_steps(tmp_path, 1, 2)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]  # a fresh run starts empty


def test_a_text_may_hold_any_separator_of_lines(tmp_path):
    """Only a newline ends a record: a tokenizer's decoded bytes hold others too."""
    texts = ["".join(map(chr, (97, code, 98))) for code in (0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029)]
    writer = MetricsWriter(tmp_path)
    for step, text in enumerate(texts, 1):
        writer.sample(step, {"filled": text})
    writer.close()
    MetricsWriter(tmp_path, resumed_at=len(texts) - 1).close()
    assert [record["filled"] for record in read_records(tmp_path / "samples.jsonl")] == texts[:-1]


def test_torn_last_line_and_garbage_are_skipped(tmp_path):
    write_steps(tmp_path, 1, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\nnull\n{"loss": 2}\n\xff\xfe\n{"step": 4, "lo')
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    write_steps(tmp_path, 4, 4, resumed_at=3)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_throughput_leaves_pauses_out():
    clock = Clock()
    meter = ThroughputMeter(clock, earlier=50.0)
    clock.now += 2
    assert meter.step(100) == 50.0
    clock.now += 1
    with meter.paused():
        clock.now += 1000
        with meter.paused():
            clock.now += 1000
        clock.now += 1000
        assert meter.seconds() == 53.0
    clock.now += 1
    assert meter.step(100) == 50.0 and meter.average() == 50.0 and meter.seconds() == 54.0
    assert meter.step(100) == 0.0  # no time has passed: no rate, and no division by zero


def shown(mode: str, *, terminal: bool = False) -> tuple[ProgressReporter, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=120)
    return ProgressReporter(mode, 100, 20, console=console, clock=clock), out, clock


def test_lines_are_plain_rare_and_end_with_the_last():
    reporter, out, clock = shown("auto")
    for step in range(21, 101):
        clock.now += 1
        reporter.update(step, 2.0, 1234.5)
    reporter.note("[saved]")
    reporter.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 21/100  loss 2.0000  1,234 tokens/s"  # one step says nothing of the pace
    assert lines[1].startswith("step 31/100") and lines[1].endswith("1:09 left")
    assert lines[-2] == "step 100/100  loss 2.0000  1,234 tokens/s  done" and lines[-1] == "[saved]"
    assert len(lines) == 10 and "\x1b" not in out.getvalue()


def test_a_bar_on_a_terminal_and_nothing_when_off():
    reporter, out, clock = shown("auto", terminal=True)
    clock.now += 7200  # reading, a first evaluation
    reporter.update(20, 1.5, 10.0)
    clock.now += 3600
    reporter.update(40, 1.5, 10.0)
    reporter.close()
    reporter.close()
    assert reporter.mode == "bar" and "step 40/100" in out.getvalue() and "3:00:00 left" in out.getvalue()
    reporter, out, _ = shown("off", terminal=True)
    reporter.update(40, 1.5, 10.0)
    reporter.note("saved")
    reporter.close()
    assert out.getvalue() == ""
    reporter.tell("step 41: not finite")
    assert out.getvalue() == "step 41: not finite\n"
    assert progress.LINE_SECONDS > 1


def test_a_long_evaluation_is_told_and_a_short_one_is_not():
    reporter, out, clock = shown("lines")
    for seconds in (1, 4):
        for done in range(8):
            reporter.waiting("evaluating", done, 8)
            clock.now += seconds
        reporter.waiting("evaluating", 8, 8)
    assert out.getvalue().splitlines() == ["evaluating 3/8", "evaluating 6/8"]
    reporter.update(21, 2.0, 1234.5)
    assert out.getvalue().splitlines()[2].startswith("step 21/100")  # a step's line does not wait for it


def test_the_bar_shows_an_evaluation_and_then_the_step_again():
    reporter, out, _ = shown("bar", terminal=True)
    reporter.update(30, 1.5, 10.0)
    reporter.waiting("evaluating", 3, 8)
    reporter._bar.refresh()
    assert out.getvalue().splitlines()[-1].endswith("evaluating 3/8")
    reporter.waiting("evaluating", 8, 8)
    reporter.close()
    assert "loss 1.5000" in out.getvalue().rsplit("evaluating", 1)[1]


def test_running_mean():
    assert smooth([4.0, 2.0, 0.0, 6.0], 2) == [4.0, 3.0, 1.0, 3.0]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]


def test_the_curve_is_drawn_from_the_records(tmp_path):
    assert plot_losses(tmp_path) is None
    write_steps(tmp_path, 1, 60)
    plain = plot_losses(tmp_path, title="run").read_bytes()
    assert plain[:8] == b"\x89PNG\r\n\x1a\n" and len(plain) > 10_000
    lined = plot_losses(tmp_path, {"unigram model": 0.5, "random start": None, "bad": math.nan}, title="run")
    assert lined == tmp_path / "loss.png" and lined.read_bytes() != plain
    drawn = lined.read_bytes()
    assert plot_losses(tmp_path, {"unigram model": 0.5}, title="run").read_bytes() == drawn


SUMMARY = {"eval_loss_before": 6.5, "eval_loss_after": 5.25, "eval_loss_unigram": 5.0, "eval_loss_random_start": None,
           "random_start_steps": None, "bits_per_byte_before": 4.5, "bits_per_byte_after": 3.25,
           "masked_accuracy_before": 0.01, "masked_accuracy_after": 0.125, "export_dir": "/runs/a [b]/export",
           "seconds": 12.5}


def test_summary_is_strict_json(tmp_path):
    path = write_summary(tmp_path, {**SUMMARY, "eval_loss_best": math.inf})
    assert json.loads(path.read_text()) == {**SUMMARY, "eval_loss_best": None}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_comparisons_claim_only_what_was_measured():
    assert comparisons(SUMMARY) == [
        ("after training", 5.25, ""),
        ("before training", 6.5, "after is 1.2500 lower"),
        ("unigram model", 5.0, "after is 0.2500 higher: not yet better than counting tokens; train longer")]
    assert comparisons({**SUMMARY, "eval_loss_unigram": 6.0})[2] == ("unigram model", 6.0, "after is 0.7500 lower")
    worse = comparisons({**SUMMARY, "eval_loss_before": 5.25})[1][2]
    assert worse.startswith("the same: training has not helped")
    assert comparisons({"eval_loss_before": 6.5})[1] == ("before training", 6.5, "")
    recorded = comparisons({**SUMMARY, "eval_loss_random_start": 5.25, "random_start_steps": 84})
    assert recorded[3] == ("random start, 84 steps (recorded)", 5.25, "the same")


def test_the_result_in_a_line_or_two():
    assert result_lines(SUMMARY) == [
        "held-out loss 5.2500 nats per supervised token (before training 6.5000, unigram model 5.0000)",
        "exported model: /runs/a [b]/export"]
    assert len(result_lines({**SUMMARY, "export_dir": None})) == 1
    said = "ore attention disaggregation has added 1.5 MiB to what ranks sent, over all steps"
    assert result_lines({**SUMMARY, "cad_bytes": 3 << 19})[1] == f"c{said}"
    assert f"C{said}\n" in report({**SUMMARY, "cad_bytes": 3 << 19})


def report(summary: dict, *samples: dict | None) -> str:
    out = io.StringIO()
    print_report(summary, *samples, console=Console(file=out, width=100))
    return out.getvalue()


def test_report_shows_numbers_and_texts_as_they_are():
    block = {"context": "def f(", "original": "a, b):\n  [bold]", "noised": "▒, ▒", "filled": "[/x] b"}
    text = report(SUMMARY, {**block, "filled": "q q"}, block)
    for part in ("6.5000", "5.2500", "after is 0.2500 higher", "bits per byte (upper bound)", "3.2500",
                 "12.50%", "[bold]", "[/x] b", "q q", "▒, ▒", "Exported model: /runs/a [b]/export",
                 "Seconds of training: 12"):
        assert part in text, part
    assert text.index("q q") < text.index("[/x] b")


def test_a_number_that_there_is_not_is_a_dash():
    missing = {"bits_per_byte_before": None, "bits_per_byte_after": None, "masked_accuracy_after": math.nan}
    text = report({**SUMMARY, **missing})
    row = next(line for line in text.splitlines() if "bits per byte" in line)
    assert row.split("│")[2:4] == ["      - ", "     - "] and "not recorded" not in text and "nan" not in text


def test_headings_stay_on_one_line_and_control_characters_do_nothing():
    block = {"context": "a", "original": "b\n\tc", "noised": "▒", "filled": "\x1b[2J\x18\x9b1A"}
    text = report(SUMMARY, None, block)
    assert "Held-out loss, nats per supervised token, lower is better\n" in text
    assert not {"\x1b", "\x18", "\x9b"} & set(text) and "�[2J��1A" in text


@pytest.mark.parametrize("name", [METRICS, EVALUATIONS, SAMPLES])
def test_a_full_disk_is_named_and_closing_does_not_hide_it(tmp_path, name):
    writer = MetricsWriter(tmp_path)
    writer._files[name].close()
    writer._files[name] = open("/dev/full", "a", buffering=1)
    write = {METRICS: writer.step, EVALUATIONS: writer.evaluation, SAMPLES: writer.sample}[name]
    with pytest.raises(UserError, match="/dev/full: cannot be written: No space left on device"):
        write(1, {"loss": 1.0})
    writer.close()


def test_records_that_cannot_be_opened_are_named(tmp_path):
    (tmp_path / "eval.jsonl").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path / 'eval.jsonl'}: cannot be written"):
        MetricsWriter(tmp_path)


def test_a_refusal_told_by_a_library_in_rust_counts():
    with pytest.raises(UserError, match=r"model: cannot be written: No space left on device \(os error 28\)"):
        with writing("model"):
            raise Exception("No space left on device (os error 28)")
    with pytest.raises(KeyError), writing("model"):
        raise KeyError("a mistake of ours")


def test_report_of_an_autoregressive_run_has_no_block():
    text = report({**SUMMARY, "objective": "autoregressive"})
    assert "next-token accuracy" in text and "masked" not in text and "upper bound" not in text


@pytest.mark.parametrize("module", ["metrics", "progress", "throughput", "curve", "summary", "trackers"])
def test_observing_needs_no_torch(module):
    import ast

    import csbp.observe

    tree = ast.parse((Path(csbp.observe.__file__).parent / f"{module}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.split(".")[0] == "torch" for name in names)

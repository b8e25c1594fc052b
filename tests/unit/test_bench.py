"""``csbp bench``: what it counts, what it refuses, what it keeps, and that a wrong kernel is never timed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import dense_mask

from csbp.attention import core, reference
from csbp.bench.cases import attention_cases, step_cases
from csbp.bench.clock import spread
from csbp.bench.idle import covered
from csbp.bench.packs import document_lengths, geometry_of
from csbp.bench.presets import read_preset
from csbp.bench.records import keep_rows, read_rows
from csbp.bench.resident import ResidentTransport
from csbp.bench.step import predicted_ms
from csbp.cli import main
from csbp.comm.transport import Outgoing
from csbp.config.bench import BenchAttentionConfig
from csbp.errors import ConfigError

SMALL = ("heads=4", "kv_heads=2", "head_dim=8", "block_size=4", "dtype=float32", "repeats=3", "warmup=1", "sample=12",
         "device=cpu")
STEP = ("experiment=quickstart", "data.seq_len=48", "warmup=1", "repeats=2")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["bench", *words])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    code, out, err = answer(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("words", [
    ["lengths=[24, 37]"], ["lengths=[40]", "documents=packed", "longest=17", "median=5"],
    ["lengths=[33]", "window=6", "clean_stream=token_causal"], ["lengths=[2]"]])
def test_rows_say_what_was_computed(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    rows = rows_of(capsys, "attention", *SMALL, *words)
    [case, *_] = attention_cases([*SMALL, *words], 1)
    assert [row["tokens"] for row in rows] == case.lengths and len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        geometry, kind = geometry_of(case, row["tokens"])
        assert row["pairs"] == int(dense_mask(geometry, kind).sum())
        flops = 4 * 4 * 8 * row["pairs"] / 1e9
        assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"], rel=1e-4)
        assert row["backward_tflops"] == pytest.approx(2.5 * flops / row["backward_ms"], rel=1e-4)
        assert row["forward_backward_tflops"] == pytest.approx(3.5 * flops / row["ms"], rel=1e-4)
        assert all(row[f"error_{part}"] < 1e-5 for part in ("out", "dq", "dk", "dv"))
        assert (row["gpus"], row["bytes_received"], row["ratio_to_causal"], row["ratio_to_flex"]) == (1, 0, None, None)
        assert row["versions"]["torch"] == torch.__version__ and row["command"].startswith("csbp bench attention")


def test_sizes_suit_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    for words, gpu, lengths, dtype in ((["device=auto"], True, [32768, 65536], "bfloat16"),
                                       (["device=auto"], False, [512, 1024], "float32"),
                                       (["device=cpu"], True, [512, 1024], "float32"),
                                       (["lengths=[24]", "dtype=bfloat16"], False, [24], "bfloat16")):
        [case] = attention_cases(words, 1, gpu)
        assert (case.lengths, case.dtype) == (lengths, dtype)
    code, out, err = answer(capsys, "attention", *SMALL, "lengths=[24]", "device=cpu")
    assert code == 0 and "24" in out
    first, second = err.splitlines()
    assert first.endswith("24, reference: at least 0 s") and re.search(r"reference: right within \d.*; timing$", second)


def test_backends_are_compared_with_flex(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash", "flex"):
        monkeypatch.setitem(core.BACKENDS, name, reference)
    rows = {row["backend"]: row for row in rows_of(capsys, "attention", *SMALL, "lengths=[24]")}
    assert set(rows) == {"flash", "flex"}  # plain torch is measured only where there is nothing else
    speed = {name: row["forward_backward_tflops"] for name, row in rows.items()}
    assert rows["flex"]["ratio_to_flex"] == 1
    assert rows["flash"]["ratio_to_flex"] == pytest.approx(speed["flash"] / speed["flex"], rel=1e-4)


def broken(what: str) -> SimpleNamespace:
    """The reference with one thing wrong in it."""
    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = reference.forward(*args)
        if what == "out":
            out = out * 1.01
        if what == "unwritten":
            out[len(out) // 3] = float("nan")
        return out, lse

    def backward(*args: Any) -> tuple[torch.Tensor, ...]:
        if what == "no kernel":
            raise NotImplementedError("no tile fits\nand much more")
        grads = list(reference.backward(*args))
        if what in ("dq", "dk", "dv"):
            grads["dq dk dv".split().index(what)][-1] *= 2
        if what == "not asked":
            grads[0][args[0].abs().sum((1, 2)) == 0] += 1e-2
        return tuple(grads)

    return SimpleNamespace(forward=forward, backward=backward)


def test_a_backward_for_whole_softmaxes_is_used_on_one_device(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> Any:
        called.append(len(query))
        return core.interval_attention(query, key, value, mask, scale=scale)

    called: list[int] = []
    monkeypatch.setitem(core.BACKENDS, "whole", SimpleNamespace(attend=attend))  # nothing else to call
    [row] = rows_of(capsys, "attention", *SMALL, "lengths=[24]", "backends=[whole]")
    assert row["error_dk"] < 1e-5 and called == [48] * (1 + 1 + row["runs"])  # the check, the warm-up, the runs


@pytest.mark.parametrize("what", ["out", "dq", "dk", "dv", "unwritten", "not asked", "no kernel"])
def test_a_wrong_kernel_is_never_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                       tmp_path: Path, what: str) -> None:
    monkeypatch.setitem(core.BACKENDS, "broken", broken(what))
    out = tmp_path / "rows.json"
    code, said, err = answer(capsys, "attention", *SMALL, "lengths=[60]", "backends=[broken, reference]", "--json",
                             "--out", str(out))
    wrong, right = json.loads(said)
    assert code == 1 and "error" in wrong and "forward_ms" not in wrong and wrong["error"] in err
    assert ("no tile fits" if what == "no kernel" else "not timed") in wrong["error"] and "much more" not in err
    assert right["forward_ms"] > 0
    assert [row["backend"] for row in read_rows(out)] == ["reference"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "said"), [
    (["attentoin"], "did you mean attention?"), ([], "bench: say what to measure: attention, step"),
    (["attention", "lengths=[0]"], "lengths=[0]"), (["attention", "lengths=[64, 65536]"], "or device=cpu if that is"),
    (["attention", "preset=h200"], "there is no GPU here, and on a CPU 32,768 tokens take at least"),
    (["attention", "kv_heads=3"], "kv_heads=3: must divide heads=32"),
    (["attention", "lengths=[[64]]"], "lengths=[[64]]"), (["attention", "lengths=[64, 64]"], "there twice"),
    (["attention", "device=cuda"], "device='cuda': torch finds no CUDA device here; use device=cpu"),
    (["attention", "only=a"], "only='a': chooses rows of a preset"),
    (["attention", "preset=h200", "name=a"], "name='a': would be the name of several rows"),
    (["attention", "lengths=[64]", "backends=[auto, fast]"], "name it alone"),
    (["attention", "--out", "/proc/a.json"], "--out='/proc/a.json': cannot be written"),
    (["attention", "lenghts=[3]"], "did you mean lengths?"),
    (["attention", "window=8"], "window=8: smaller than a block"),
    (["attention", "here"], "csbp: here: write KEY=VALUE"),
    (["attention", "documents=packed", "lengths=[64]"], "longest=45056: longer than a pack"),
    (["attention", "documents=/no/file"], "documents='/no/file': cannot be read"),
    (["attention", "backends=[fast]"], "backends='fast': did you mean flash?"),
    (["attention", "backends=[flash]", "device=cpu"], "backends='flash': cannot run"),
    (["attention", "dtype=float8"], "dtype='float8'"), (["attention", "repeats=0"], "repeats=0"),
    (["attention", "ranks=2"], "ranks=2: 1 rank(s) were started; start 2: torchrun"),
    (["attention", "preset=h100"], "preset='h100': did you mean h200?"),
    (["attention", "preset=h200", "only=nothing like it"], "only='nothing like it': no row"),
    (["attention", "--out", "rows.txt"], "--out='rows.txt'"), (["attention", "--out", "/no/rows.json"], "--out="),
    (["step"], "csbp: experiment: say which"),
    (["step", *STEP, "variants=['train.stepss=2']"], "did you mean train.steps?"),
    (["step", *STEP, "variants=[fast]"], "variants='fast': fast is no setting"),
    (["step", *STEP, "variants=[default, default]"], "'default' is there twice"),
    (["step", *STEP, "variants=['parallel.device=cuda', default]"], "is the same for all that is compared"),
    (["step", *STEP, "parallel.device=cpu", "variants=[default, 'flash: attention.backend=flash']"],
     "attention.backend='flash': cannot run this model here: it needs a Hopper GPU; use auto"),
    (["step", *STEP, "parallel.nproc=2"], "parallel.nproc=2: 1 rank(s) were started"),
    (["step", *STEP, "model.shape.num_attention_heads=3"], "model.shape.num_key_value_heads"),
    (["step", *STEP, "variants=['a: \"b']"], "no closing quotation")])
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, out, err = answer(capsys, *words)
    if torch.cuda.is_available() and "device=cpu" in said + " ".join(words) + "no GPU":
        pytest.skip("there is a GPU")
    assert code == 2 and said in err and not out and "measuring" not in err, err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_shipped_presets_can_be_read(ranks: int) -> None:
    cases = attention_cases(["preset=h200", "repeats=7"], ranks)
    assert len({case.name for case in cases}) == len(cases) > 2
    assert {case.repeats for case in cases} == {7} and {case.ranks for case in cases} == {ranks}
    for case in step_cases(["preset=h200"], ranks):
        for config in case.runs.values():
            assert config.parallel.nproc == ranks and config.model.init == "random" and not config.model.path


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("short: lengths=[16] block_size=4\n'packed, odd': lengths=[31] documents=packed longest=9\n")
    short, odd = attention_cases([f"preset={file}", "head_dim=16"], 1)
    assert attention_cases([f"preset={file}", "head_dim=16", "only=odd"], 1) == [replace(odd, only="odd")]
    assert (short.name, short.lengths, short.head_dim) == ("short", [16], 16)
    assert (odd.name, odd.longest, odd.head_dim) == ("packed, odd", 9, 16)
    for text, said in (("- a\n", "mapping"), ("a: [b]\n", "must be a text of settings"), ("{}", "holds no rows"),
                       ("a: 'b \"c'\n", "no closing quotation")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_preset(str(file), "attention")


def test_documents_of_a_pack(tmp_path: Path) -> None:
    case = BenchAttentionConfig(documents="packed", median=64, longest=3000, spread=1.0)
    lengths = document_lengths(case, 20000)
    assert sum(lengths) == 20000 and max(lengths) == 3000 and lengths.count(3000) == 1
    assert 40 < np.median(lengths) < 100
    assert lengths == document_lengths(case, 20000) != document_lengths(BenchAttentionConfig(
        documents="packed", median=64, longest=3000, spread=1.0, seed=1), 20000)
    equal = BenchAttentionConfig(documents="packed", median=1024, longest=1024, spread=0.0)
    assert document_lengths(equal, 4096) == [1024] * 4
    file = tmp_path / "lengths"
    file.write_text("5\n3\n")
    assert document_lengths(BenchAttentionConfig(documents=str(file)), 20) == [5, 3, 5, 3, 4]


def test_a_file_of_results_keeps_the_newest_row_of_each_name(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    keep_rows(file, [{"name": "a", "gpus": 1, "ms": 1}, {"name": "b", "gpus": 1, "ms": 2}])
    keep_rows(file, [{"name": "a", "gpus": 2, "ms": 3}, {"name": "a", "gpus": 1, "ms": 4}])
    assert [(row["name"], row["gpus"], row["ms"]) for row in read_rows(file)] == [("a", 1, 4), ("b", 1, 2), ("a", 2, 3)]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    keep_rows(file, [{"name": "a", "gpus": 1, "ms": 5, "device": "cpu"}])
    assert [row["ms"] for row in read_rows(file)] == [4, 2, 3, 5]
    for text in ("{}", "[1]", "[", '[{"name": ["a"]}]', '[{"name": "a", "ms": NaN}]', "[" * 10**5):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--out"):
            keep_rows(file, [])


def many_rows(file: str, first: int) -> None:
    for i in range(first, first + 20):
        keep_rows(Path(file), [{"name": str(i)}])


def test_several_may_write_to_a_file_of_results(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    writers = [multiprocessing.get_context("spawn").Process(target=many_rows, args=(str(file), 20 * i)) for i in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {row["name"] for row in read_rows(file)} == set(map(str, range(40)))


def test_a_disk_that_is_full_for_a_while_costs_no_row(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    file, replace_file, refused = tmp_path / "rows.json", os.replace, []

    def full(*paths: Any) -> None:
        if len(refused) < 1:
            refused.append(paths)
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(*paths)

    monkeypatch.setattr("os.replace", full)
    code, said, err = answer(capsys, "attention", *SMALL, "lengths=[8, 12]", "--out", str(file))
    assert code == 0 and len(read_rows(file)) == 2 and "cannot be written: No space left" in err
    refused.clear()
    code, said, err = answer(capsys, "attention", *SMALL, "lengths=[8]", "--out", str(file))
    assert code == 1 and "8, reference" in said and "not in" in err and len(read_rows(file)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_rows_of_different_packs_have_different_names() -> None:
    packed = ["documents=packed", "longest=100", "lengths=[512]"]
    words = [[], ["spread=0"], ["spread=2"], ["seed=5"], ["median=20"], ["longest=99"]]
    names = [attention_cases([*packed, *more], 1)[0].name for more in words]
    assert len(set(names)) == len(words)


@pytest.mark.parametrize("words", [["block_size=1", "window=1"], ["block_size=1", "window=1", "dtype=bfloat16"],
                                   ["documents=packed", "longest=1", "median=1", "spread=0"]])
def test_rows_that_see_one_key_each_are_right(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, _ = answer(capsys, "attention", *SMALL, "lengths=[64]", *words, "--json")
    row, = json.loads(out)
    assert code == 0 and row["error_dq"] < 1e-2 and row["error_dk"] < 1e-2


def test_median_and_spread() -> None:
    found = spread(np.array([5.0, 1.0, 2.0, 100.0, 3.0]))
    assert (found.median, found.iqr) == (3.0, 3.0)


def test_a_resident_transport_answers_with_rows_of_the_right_shape() -> None:
    transport = ResidentTransport(0, 3)
    request = Outgoing(torch.zeros(4, 2, 6), (0, 3, 1), (0, 2, 5), "keys")
    first, second = (transport.start(request).wait() for _ in range(2))
    assert first is second and first.shape == (7, 2, 6) and first.std() > 0.5
    assert transport.sent_rows == {"keys": 8}


@pytest.mark.slow
def test_variants_of_a_step_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("20\n17\n11\n")
    words = ("step", *STEP, f"data.document_lengths={file}", "name=tiny",
             "variants=['full, again: parallel.checkpointing=full', default, 'objective.block_size=48']")
    full, plain, one = rows_of(capsys, *words)
    assert [row["name"] for row in (full, plain, one)] == ["tiny, full, again", "tiny, default",
                                                           "tiny, objective.block_size=48"]
    assert full["loss"] == plain["loss"] != one["loss"]  # the same tokens, weights, noise and updates
    assert (full["checkpointing"], plain["checkpointing"]) == ("full", "none")
    for row in (full, plain, one):
        assert (row["tokens"], row["documents"], row["steps"], row["wire_bytes"]) == (48, 3, 2, 0)
        assert row["tokens_per_second"] == pytest.approx(48e3 / row["step_ms"], rel=1e-4)
        assert row["ratio_to_first"] == pytest.approx(row["tokens_per_second"] / full["tokens_per_second"], rel=1e-4)
        assert row["backend"] == "reference"
        assert row["ratio_to_flex_full"] is None and row["mfu"] is None
    done = [row["useful_tflops"] * row["step_ms"] for row in (full, plain)]
    assert done[0] == pytest.approx(done[1], rel=1e-4) and done[0] > 0  # what is computed again is not counted


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, "attention", *SMALL, "lengths=[16]", "name=mine[red][/x]")
    assert code == 0 and "mine[red][/x], 16, reference" in out and "fwd+bwd TFLOP/s" in out and "torch" in out
    assert "measuring mine" in err and "/ causal" not in out  # nothing to show in that column


@pytest.mark.parametrize("enabled", [True, False])
def test_the_table_has_what_moved_where_something_may(capsys: pytest.CaptureFixture[str], monkeypatch: Any,
                                                      enabled: bool) -> None:
    found = {"wire_bytes": 3 << 20, "cad_bytes": 5 << 10, "tokens_per_second": 1.0}
    monkeypatch.setattr("csbp.bench.step.measure_variant", lambda runtime, bench, config: found)
    code, out, _ = answer(capsys, "step", *STEP, f"cad.enabled={str(enabled).lower()}")
    shown = {part.strip() for part in re.split("[│┃\n]", out)}
    assert code == 0 and {"wire", "3.0 MiB"} <= shown
    for cell in ("cad", "by cad", "csbp, operator", "5.0 KiB"):
        assert (cell in shown) == enabled, cell


def test_spans_that_overlap_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2), (3, 3.5)]) == 4.5
    assert covered([]) == 0


def test_only_what_the_rates_are_of_is_predicted() -> None:
    [case] = step_cases(["experiment=quickstart", "plan.device=h200", "train.dtype=bfloat16", "variants=["
                         "'fast: parallel.compile=true', 'eager: parallel.compile=false', "
                         "'flex: parallel.compile=true attention.backend=flex']"], 1)
    found = {name: predicted_ms(config) for name, config in case.runs.items()}
    assert found["fast"] and found["eager"] is None and found["flex"] is None

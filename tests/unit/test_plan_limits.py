"""What ``csbp plan`` refuses, however absurd: a field, its value and a fix, and exit code 2; and what it must not
count wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from csbp.cli import main
from csbp.plan.asked import shaped
from csbp.plan.limits import MAX_AXIS

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
         "intermediate_size": 128, "num_hidden_layers": 5}
LARGEST = 2**31 - 1


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["plan", "experiment=nemotron_8b_sft", "--json", *words])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, err = answer(capsys, *words)
    assert code == 2 and not out and err.startswith("csbp: ") and err.count("\n") == 1, err
    return err


def of_config(folder: Path, text: str, *words: str) -> tuple[str, ...]:
    (folder / "config.json").write_text(text)
    return (f"model.path={folder}", "model.shape={}", *words)


@pytest.mark.parametrize(("words", "said"), [
    (["parallel.csbp=-1"], "parallel.csbp=-1: must be"), (["parallel.csbp=0"], "parallel.csbp=0: must be"),
    (["parallel.csbp=8192", "data.seq_len=1048576"], f"parallel.csbp=8192: more ranks than a sequence axis can have; "
                                                     f"use at most {MAX_AXIS}"),
    (["data.seq_len=1073741824", "objective.block_size=1"], "data.seq_len=1073741824: too much to plan"),
    (["data.seq_len=1073741824", "data.document_tokens=1"], "data.seq_len=1073741824: too much to plan"),
    (["data.seq_len=1073741824", "objective.block_size=65536"], "more attended pairs than 64 bits count")])
def test_sizes_beyond_reason(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refused(capsys, *words)


def test_what_is_just_within_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Products of counts pass 64 bits long before the counts do: time goes with the square of the length."""
    def seconds(tokens: int) -> float:
        code, out, err = answer(capsys, "parallel.nproc=1", f"data.seq_len={tokens}", "objective.block_size=65536")
        assert code == 0, err
        return sum(rank["attention_seconds"] for rank in json.loads(out)["ranks"])

    assert seconds(2**25) / seconds(2**21) == pytest.approx(256, rel=5e-2)


def test_plain_data_parallel_on_more_ranks_than_an_axis_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallel.kind=data", "parallel.nproc=6144", "data.seq_len=65536", "objective.block_size=8")
    code, out, err = answer(capsys, *words)
    assert code == 0 and json.loads(out)["replicas"] == 6144, err


def test_no_remedy_has_more_ranks_than_an_axis(capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def offered() -> bool:
        with pytest.raises(SystemExit):
            main(["plan", "experiment=nemotron_8b_sft", "parallel.csbp=4", "data.seq_len=2048",
                  "model.shape.hidden_size=10000000"])
        said = capsys.readouterr().out
        assert "Nothing fits" in said
        return "parallel.nproc=8" in said or "parallel.csbp=64" in said

    assert offered()
    monkeypatch.setattr("csbp.plan.remedies.MAX_AXIS", 4)
    assert not offered()


@pytest.mark.parametrize("text", ["[]", "5", "null", '"x"'])
def test_a_config_that_is_no_object(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    assert "config.json is not a JSON object" in refused(capsys, *of_config(tmp_path, text))


@pytest.mark.parametrize(("changes", "said"), [
    ({"num_global_key_value_heads": "x"}, "model.shape.num_global_key_value_heads='x': must be a whole number"),
    ({"num_global_key_value_heads": 3}, "model.shape.num_global_key_value_heads=3: must divide num_attention_heads=4"),
    ({"num_experts": 4, "num_experts_per_tok": 9, "moe_intermediate_size": 8},
     "model.shape.num_experts_per_tok=9: must be a whole number from 1 to 4"),
    ({"sliding_window": 64}, "model.shape.sliding_window=64: no layer would have a window"),
    ({"use_sliding_window": True, "max_window_layers": 5}, "model.shape.use_sliding_window=true: no layer would"),
    ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"], "sliding_window": 32, "head_dim": 1,
      "global_head_dim": LARGEST}, "more attended pairs")])
def test_shapes_that_do_not_fit_together(capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any],
                                         said: str) -> None:
    words = of_config(tmp_path, json.dumps(SIZES), "parallel.csbp=2", "data.seq_len=2097152")
    given = "model.shape=" + json.dumps(changes).replace('"', "")
    if "x" in changes.values():
        given = "model.shape={num_global_key_value_heads: x}"
    assert said in refused(capsys, *words, given)


@pytest.mark.parametrize("changes", [
    {"moe_intermediate_size": "x"}, {"moe_intermediate_size": 7},
    {name: LARGEST for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim")}
    | {"num_key_value_heads": 1, "num_hidden_layers": 1024}])
def test_fields_that_say_nothing_and_sizes_that_nobody_has(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                           changes: dict[str, Any]) -> None:
    """An MLP's width of experts that are not there splits nothing; absurd products are still numbers."""
    split = "2" if len(changes) == 1 else "1"
    words = of_config(tmp_path, json.dumps(SIZES | changes), "parallel.csbp=2", f"parallel.tp={split}",
                      "data.seq_len=8192")
    code, out, err = answer(capsys, *words)
    assert code == 0, err
    found = json.loads(out)
    assert all(rank["memory_bytes"] > 0 and rank["linear_seconds"] > 0 for rank in found["ranks"])
    assert found["model_flops"] > 0 and found["tp_bytes_received_per_rank"] >= 0


def test_lengths_of_any_size_and_any_beginning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    words = (f"data.document_lengths={file}", "parallel.csbp=2", "data.seq_len=4096")
    for text in ("9" * 5000, "9" * 19, "0" * 5000):
        file.write_text(text)
        assert "line 1 is" in refused(capsys, *words)
    file.write_text("\ufeff0100\r\n" + "0" * 17 + "7\n", encoding="utf-8")  # with a byte order mark
    code, out, err = answer(capsys, *words)
    assert code == 0 and (json.loads(out)["documents"], json.loads(out)["tokens"]) == (2, 107), err


def test_layer_types_that_changes_contradict_are_derived_anew() -> None:
    base = SIZES | {"layer_types": ["full_attention"] * 5}
    assert shaped(base, {"vocab_size": 7})["layer_types"] == base["layer_types"]
    for changes in ({"num_hidden_layers": 2}, {"use_sliding_window": True}, {"max_window_layers": 1}):
        assert "layer_types" not in shaped(base, changes) and shaped(base, changes).items() >= changes.items()
    both = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    assert shaped(base, both)["layer_types"] == ["sliding_attention"]

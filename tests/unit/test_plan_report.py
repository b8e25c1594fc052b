"""``csbp plan``: its words agree with its tables, and it answers soon where nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_plan_cli import PLANNED, answer, planned

from csbp.config.compose import compose_run
from csbp.errors import ConfigError
from csbp.plan import remedies
from csbp.plan.asked import expect_fields


def test_words_and_table_agree_where_replicas_share_packs_unevenly(capsys: pytest.CaptureFixture[str]) -> None:
    """8 packs on 3 replicas are 3 rounds: what a multiple of 3 would bring is said as such."""
    words = ("experiment=nemotron_3b_sft", "data.seq_len=8192", "train.packs_per_step=8")
    code, out, _ = answer(capsys, *words, "parallel.csbp=3")
    assert code == 0 and "That takes a multiple of 3 packs a step; the run has 8." in out
    assert "replicas wait" not in out
    out = answer(capsys, *words, "parallel.kind=data", "parallel.nproc=3")[1]
    assert "1 of 3 replicas wait" in out and "a multiple of 3 would" in out
    out = answer(capsys, *words, "parallel.csbp=4", "parallel.nproc=8")[1]
    assert "multiple of" not in out


def test_the_report_says_what_a_step_and_the_mesh_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("experiment=nemotron_3b_sft", "data.seq_len=8192", "parallel.nproc=8", "parallel.csbp=2", "parallel.tp=2",
             "train.packs_per_step=6")
    out = answer(capsys, *words)[1]
    assert "parallel.kind=csbp: dp=2 x csbp=2 x tp=2, 6 packs a step, checkpointing attention" in out
    found = planned(capsys, *words)
    assert found["packs_per_step"] == 6
    assert found["predicted_step_seconds"] == pytest.approx(3 * found["predicted_pack_seconds"])


@pytest.mark.parametrize("words", [["parallel.compile=false"], ["parallel.checkpointing=matmuls"],
                                   ["parallel.compile=false", "parallel.offload=true", "parallel.checkpointing=none"]])
def test_the_report_has_the_run_under_each_checkpointing(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """As if each had been asked for; the run's own is marked. Of what is computed again nothing is kept."""
    words = ["experiment=nemotron_3b_sft", "data.seq_len=131072", "parallel.csbp=8", *words]
    out, found = answer(capsys, *words)[1], planned(capsys, *words)["checkpointing"]
    assert list(found) == ["none", "matmuls", "attention", "full"]
    own = next((word.partition("=")[2] for word in words if word.startswith("parallel.checkpointing=")), "attention")
    for policy, said in found.items():
        then = planned(capsys, *words, f"parallel.checkpointing={policy}")
        assert said == {name: then[name] for name in said} and len(said) == 3
        (line,) = (line for line in out.splitlines() if line.lstrip("> ").startswith(f"{policy} "))
        assert (line[0] == ">") == (policy == own)
        assert f"{said['peak_memory_bytes_per_rank'] / 2**30:.2f} GiB" in line
    memory = [said["peak_memory_bytes_per_rank"] for said in found.values()]
    assert memory == sorted(memory, reverse=True) or "parallel.offload=true" in words
    seconds = [said["predicted_step_seconds"] for said in found.values()]
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]
    # What is not compiled is slower than said, and nothing moves what selective checkpointing holds then.
    assert ("Seconds are those of layers compiled" in out) == ("parallel.compile=false" in words)
    if "parallel.offload=true" in words:
        assert memory[0] < memory[1] > memory[2] > memory[3]


def test_disaggregation_is_shown_for_what_is_asked_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=nemotron_3b_sft", "data.seq_len=65536", "parallel.csbp=2", "cad.enabled=true"]
    assert "  checkpointing  " not in answer(capsys, *words)[1] and planned(capsys, *words)["checkpointing"] == {}


def test_the_report_says_what_stages_cost_and_gain(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("experiment=nemotron_3b_sft", "data.seq_len=131072", "parallel.csbp=16", "plan.device=h200")
    out, once, many = answer(capsys, *words)[1], *(planned(capsys, *words, f"parallel.exchange_stages={n}")
                                                   for n in (1, 3))

    def most(found: dict[str, Any], column: str) -> float:
        return max(rank[column] for rank in found["ranks"])

    assert once["exchange_stages"] == 1 and many["exchange_stages"] == planned(capsys, *words)["exchange_stages"] == 3
    now, before = ([most(found, f"{name}_seconds") for name in ("exposed", "attention")] for found in (many, once))
    assert now[0] < before[0] and now[1] > before[1]
    assert ("stages: keys come in up to 3 (parallel.exchange_stages): a rank waits at most {:.3f} s and attends {:.3f} "
            "s; in one stage {:.3f} s and {:.3f} s".format(*now, *before)) in out
    for one in ("parallel.exchange_stages=1", "parallel.csbp=8"):
        assert "stages:" not in answer(capsys, *words, one)[1]


def test_which_documents_are_planned_and_for_whom(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "[lengths]"
    file.write_text("5000\n3000\n4000\n")
    words = ["experiment=nemotron_3b_sft", "data.seq_len=8192", "parallel.nproc=2", "parallel.csbp=2",
             f"data.document_lengths={file}"]
    pool = ["parallel.nproc=6", "cad.enabled=true", "cad.pool=dp"]
    for more, used, said in (
            ([], 3, f"all 3 documents of {file}, in the file's order; training shuffles: csbp simulate draws"),
            (["data.seq_len=4096"], 1, "the first 1 of 3 documents"),
            (["data.seq_len=32768"], 3, "draws many steps; they fill 12,000 of 32,768 tokens"),
            (pool, 9, f"the 3 documents of {file}, read 3 times, in the file's order"),
            (["data.document_lengths=pretrain", "data.seq_len=1024"], 1, "of 65,536 documents of pretrain, as they")):
        found, out = planned(capsys, *words, *more), answer(capsys, *words, *more)[1]
        assert said in out and found["documents_used"] == used and "one pack is planned" not in out
        assert found["documents_given"] == (65536 if "pretrain" in said else 3)
    out = answer(capsys, *words, "parallel.nproc=6")[1]
    assert "one pack is planned, and taken for that of each of the 3 replicas; with cad.enabled=true cad.pool=dp" in out
    found, out = planned(capsys, *words[:-1]), answer(capsys, *words[:-1])[1]
    assert found["documents_used"] is None is found["documents_given"] and "training shuffles" not in out


def test_a_short_step_has_digits_and_wide_cells_do_not_wrap(capsys: pytest.CaptureFixture[str]) -> None:
    out = answer(capsys, "experiment=tiny_ar", "train.packs_per_step=1")[1]
    step = next(line for line in out.splitlines() if line.startswith("> csbp")).split()[2]
    assert 0 < float(step) < 0.01
    out = answer(capsys, "experiment=nemotron_8b_sft", "parallel.csbp=32", "data.seq_len=8388608")[1]
    lines = [line.split() for line in out.splitlines()]
    head = next(at for at, line in enumerate(lines) if line[:1] == ["rank"])
    assert [line[0] for line in lines[head + 1:head + 33]] == [str(rank) for rank in range(32)]
    assert float(lines[head + 1][4]) > 1000 and lines[head + 1].count("GiB") == 3


def test_more_ranks_are_not_tried_where_they_cannot_do(capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one long document do not get fewer with more ranks."""
    tried: list[int] = []
    planner = remedies.forecast
    monkeypatch.setattr(remedies, "forecast", lambda *given: tried.append(given[2]) or planner(*given))
    out = answer(capsys, "experiment=nemotron_3b_sft", "parallel.csbp=64", "data.seq_len=8388608")[1]
    assert tried == [128] and "parallel.nproc=128 parallel.csbp=128: " in out and "still too much" in out
    tried.clear()
    out = answer(capsys, "experiment=nemotron_3b_sft", "parallel.csbp=2", "data.seq_len=1048576")[1]
    assert tried == [4, 8, 16] and "parallel.nproc=16 parallel.csbp=16: " in out and ", fits" in out


@pytest.mark.parametrize("experiment", PLANNED)
def test_a_misspelt_size_is_refused(experiment: str) -> None:
    shape = compose_run([f"experiment={experiment}"]).model.shape
    expect_fields({}, {**shape, "rms_norm_eps": 1e-6})
    for name in shape:
        with pytest.raises(ConfigError, match=f"^model.shape.{name[:-1]}=7: no such field; did you mean {name}[?]$"):
            expect_fields({}, {name[:-1]: 7})
        expect_fields({name[:-1]: 1}, {name[:-1]: 7})


def test_a_misspelt_size_is_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = answer(capsys, "experiment=nemotron_3b_sft", "model.shape.num_hidden_layer=3")
    assert code == 2 and "model.shape.num_hidden_layer=3: no such field; did you mean num_hidden_layers?" in err

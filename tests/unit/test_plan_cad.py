"""``csbp plan`` with core attention disaggregation: numbers as of plans and counts, words that say why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_plan_cli import answer, planned

from csbp.config.compose import compose_run
from csbp.config.places import conf_dir
from csbp.observe.accounting import exact_bytes
from csbp.observe.cad_report import cad_words
from csbp.observe.picture import draw_plan, stripes
from csbp.plan.cad import cad_of
from csbp.plan.counts import count_plan
from csbp.plan.forecast import plan_case
from csbp.plan.lengths import planned as filled
from csbp.plan.pool import pack_of, pool_owners, share_documents
from csbp.plan.priced import attention_passes
from csbp.plan_cli import plan_result

UNEVEN = "6144\n2048\n" + 7 * "1024\n" + "4096\n"  # the last one is cut


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Two replicas of two ranks, whose packs differ."""
    file = tmp_path / "lengths"
    file.write_text(UNEVEN)
    return ["experiment=nemotron_3b_sft", "parallel.csbp=2", "parallel.nproc=4", "data.seq_len=8192",
            "objective.block_size=256", f"data.document_lengths={file}", "data.document_tokens=8192",
            "cad.enabled=true", "cad.pool=dp"]


def test_packs_are_filled_one_after_another(words: list[str]) -> None:
    def packs(*more: str) -> list[list[int]]:
        return filled(compose_run([*words, *more])).packs

    assert packs() == [[6144, 2048], [1024] * 8]
    three = packs("parallel.nproc=6")
    assert three[:2] == packs() and three[2] == [6144, 2048]  # from the beginning again
    assert packs("parallel.nproc=8", "train.packs_per_step=3") == [*three, []]
    assert packs("cad.pool=csbp") == packs()[:1]
    assert packs("data.document_lengths=") == [[8192], [8192]]


def test_numbers_are_those_of_the_trained_plan(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """The plan that training makes (see train.step), counted."""
    found = planned(capsys, *words)
    config = compose_run(words)
    case = plan_result(config).case
    geometry, kinds, weights = case.geometry, case.shape.kinds, case.shape.weights(case.shape.kinds)
    packs = pack_of([2, 8])
    replica = share_documents(geometry, kinds, weights, packs, 2)
    assert replica[0] != replica[1]
    cad = cad_of(config, case.shape, "h200")
    assert cad is not None
    home = plan_case(case, "csbp", 2)
    np.testing.assert_array_equal(home.ownership.block_rank,
                                  pool_owners(geometry, kinds, weights, replica, 2, 2).block_rank)
    moved = cad.moved(home)
    assert moved.moves and len(moved.moves["full"])
    received = []
    for plan in (moved, home):
        parts = exact_bytes(case.shape, count_plan(plan), checkpointing=config.parallel.checkpointing, itemsize=2)
        received.append(sum(part.received for part in parts.values()))
    assert found["bytes_moved_by_cad"] == pytest.approx(float((received[0] - received[1]).sum()))
    np.testing.assert_allclose([rank["bytes_received"] for rank in found["ranks"]], received[0])
    np.testing.assert_allclose([rank["query_bytes_added"] + rank["key_bytes_added"] for rank in found["ranks"]],
                               received[0] - received[1])
    guests = [rank["query_rows_for_others"] for rank in found["ranks"]]
    assert guests == count_plan(moved).kinds["full"].guests.tolist() and sum(guests) > 0
    assert sum(rank["query_rows_elsewhere"] for rank in found["ranks"]) == sum(guests)

    def over_mean(plan: Any) -> float:
        times = attention_passes(plan, cad)["full"]
        seconds = cad.forwards * times.forward + times.backward
        return float(seconds.max() / seconds.mean())

    apart = plan_case(case, "csbp", 2, share=False)
    np.testing.assert_array_equal(apart.ownership.block_rank // 2, packs[geometry.block_document])
    assert found["max_over_mean_time_without"] == pytest.approx(over_mean(apart))
    assert found["max_over_mean_time_with"] == pytest.approx(over_mean(moved))
    assert found["max_over_mean_time_with"] < 1.1 < found["max_over_mean_time_without"]


def test_the_report_says_what_it_saves(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    found = planned(capsys, *words)
    assert (found["packs_planned"], found["csbp"], found["replicas"], len(found["ranks"])) == (2, 2, 2, 4)
    assert found["predicted_step_seconds"] == found["predicted_step_seconds_with"]
    assert found["predicted_step_seconds"] == pytest.approx(4 * found["predicted_pack_seconds"])  # 8 packs, 2 at once
    out = answer(capsys, *words)[1]
    assert "2 packs of 2 replicas planned together" in out and "csbp=2" in out
    gain = 1 - found["predicted_step_seconds_with"] / found["predicted_step_seconds_without"]
    said = "pays" if gain > 0.001 else "does not pay" if gain < -0.001 else "makes no difference"
    assert f"Disaggregation {said}" in out
    assert (f"max/mean of attention {found['max_over_mean_time_without']:.3f} without, "
            f"{found['max_over_mean_time_with']:.3f} with; of all work {found['max_over_mean_work_without']:.3f}, "
            f"{found['max_over_mean_work_with']:.3f}") in out
    busy = [rank["attention_seconds"] + rank["linear_seconds"] for rank in found["ranks"]]
    assert found["max_over_mean_work_with"] == pytest.approx(max(busy) / np.mean(busy))
    # Level attention alone is no gain where ownership had levelled attention together with all else.
    out = answer(capsys, *words, "cad.pool=csbp", "parallel.nproc=3", "parallel.csbp=3", "objective.block_size=2048")[1]
    assert "within a sequence axis" in out and "Disaggregation " in out and "changes nothing" not in out


def test_without_it_nothing_is_said_of_it(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    found = planned(capsys, *words, "cad.enabled=false")
    assert found["packs_planned"] == 1 and "bytes_moved_by_cad" not in found
    assert "query_bytes_added" not in found["ranks"][0]
    assert "isaggregation" not in answer(capsys, *words, "cad.enabled=false")[1]


@pytest.mark.parametrize(("more", "said"), [
    (["data.document_lengths=", "parallel.nproc=4", "parallel.csbp=4", "objective.block_size=1024"],
     "more than the mean, within cad.tolerance=0.02"),
    (["cad.min_gain=0.9"], "of the slowest rank's time, below cad.min_gain=0.9 (max/mean is "),
    (["cad.max_receive_mib=0"], "no move makes the slowest rank faster within what may travel: "
     "cad.max_receive_mib=0, cad.max_buffer_mib=8192, and what links carry while a layer attends (max/mean is ")])
def test_why_nothing_moves(capsys: pytest.CaptureFixture[str], words: list[str], more: list[str], said: str) -> None:
    more = ["cad.pool=csbp", "parallel.nproc=3", "parallel.csbp=3", "objective.block_size=2048", *more]
    out = answer(capsys, *words, *more)[1]
    assert "Nothing moves in full layers: " in out and said in out and "changes nothing here" in out
    found = planned(capsys, *words, *more)
    assert found["bytes_moved_by_cad"] == 0
    assert found["predicted_step_seconds_with"] == found["predicted_step_seconds_without"]


def test_why_nothing_moves_without_limits(words: list[str]) -> None:
    result = plan_result(compose_run([*words, "cad.pool=csbp", "parallel.nproc=3", "parallel.csbp=3",
                                      "objective.block_size=2048", "cad.max_receive_mib=0", "cad.max_buffer_mib=null"]))
    assert result.levelled is not None
    cad = result.levelled.cad
    free = replace(cad, settings=replace(cad.settings, max_receive_bytes=None))
    assert "may travel: what links carry while" in cad_words(result, replace(result.levelled, cad=free))[0]
    assert "may travel: cad.max_receive_mib=0, and what" in cad_words(result, result.levelled)[0]


def test_many_equally_full_ranks_must_all_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first few that do only make others wait for more."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("262144\n" + "4096\n" * 192)
    found = planned(capsys, "experiment=nemotron_8b_sft", "parallel.nproc=64", "parallel.csbp=16", "cad.enabled=true",
                    "cad.pool=dp", "cad.max_buffer_mib=null", "train.packs_per_step=4", "data.seq_len=262144",
                    f"data.document_lengths={lengths}")
    assert found["predicted_step_seconds_with"] < 0.75 * found["predicted_step_seconds_without"]


def test_the_other_replicas_could_share_too(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    still, said = [*words, "cad.pool=csbp", "cad.min_gain=0.9"], "There are 2 replicas: cad.pool=dp shares attention"
    out = answer(capsys, *still)[1]
    assert f"Disaggregation changes nothing here. {said} among them too." in out
    out = answer(capsys, *still, "parallel.nproc=2")[1]
    assert "Disaggregation changes nothing here." in out and said not in out


@pytest.mark.parametrize(("recorded", "device", "alien"), [
    ("AMD EPYC", "h200", True), ("NVIDIA GH200 480GB", "h200", True), ("NVIDIA H200 NVL", "h200", False),
    ("Intel Xeon", "cpu", False), ("NVIDIA H200", "cpu", True), ("", "h200", False)])
def test_a_profile_of_another_device_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str],
                                              recorded: str, device: str, alien: bool) -> None:
    profile = json.loads((conf_dir() / "profile" / "h200.json").read_text())
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**profile, "name": "mine", "device": recorded}))
    words = [*words, f"cad.profile={file}", f"plan.device={device}"]
    code, out, err = answer(capsys, *words)
    said = f"csbp: warning: cad.profile={file} was measured on {recorded!r}, and plan.device is {device}: "
    assert code == 0 and (err.startswith(said) if alien else not err)
    assert "; attention by the profile mine:" in out and planned(capsys, *words)["profile"] == "mine"


def test_fewer_packs_than_replicas_and_documents_shared_out(capsys: pytest.CaptureFixture[str],
                                                            words: list[str]) -> None:
    """Replicas without a pack stand for no pack of the other kinds; sharing documents alone is called that."""
    lonely = ["data.document_lengths=", "train.packs_per_step=1", "parallel.nproc=3", "parallel.csbp=null",
              "parallel.kind=data"]
    found = planned(capsys, *words, *lonely)
    assert found["packs_planned"] == 1 and len(found["alternatives"]) == 3
    apart = planned(capsys, *words, *lonely, "cad.enabled=false")["alternatives"]
    for kind, other in found["alternatives"].items():
        assert other["bytes_received_exact_mean"] == apart[kind]["bytes_received_exact_mean"]
        assert other["predicted_step_seconds"] > 0
    still = [*words, *lonely, "cad.max_buffer_mib=0"]
    out = answer(capsys, *still)[1]
    assert "Each pack planned is one document" in out and "Sharing documents among replicas makes no difference" in out
    out = answer(capsys, *still, "data.document_tokens=1024")[1]
    assert "Sharing documents among replicas pays: " in out and "Disaggregation pays" not in out
    assert "Each pack" not in out


def test_more_ranks_than_a_plan_can_have(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, _, err = answer(capsys, *words, "parallel.nproc=8192", "data.seq_len=1024", "data.document_tokens=null",
                          "train.packs_per_step=1")
    assert code == 2 and "cad.pool='dp': 4096 replicas of 2 ranks are more than a plan can have" in err


def test_the_picture_shows_what_moves(tmp_path: Path, words: list[str]) -> None:
    result = plan_result(compose_run(words))
    assert result.levelled is not None
    plan, kind = result.chosen.plan, result.chosen.plan.kinds[0]
    found, clean = stripes(plan, kind), plan.geometry.num_clean
    served = plan.served[kind.name]
    for stream in (0, 1):  # a row is at home or lent, of one rank each
        owned = found["block" if stream else "own"][stream]
        np.testing.assert_allclose(found["lent"][stream].sum(0) + owned.sum(0), 1)
    columns = found["lent"][0].shape[1]
    for rank in range(plan.world):
        mine = served.pieces.owner[served.moves.piece] == rank
        rows = int(served.pieces.rows[np.unique(served.moves.piece[mine])].sum())
        shown = sum(found["lent"][stream][rank].sum() for stream in (0, 1)) * clean / columns
        assert shown == pytest.approx(rows, rel=0.01)
    picture = tmp_path / "plan.svg"
    draw_plan(plan, picture, ranks=2, attention=(result.levelled.before["all"].seconds,
                                                 result.levelled.after["all"].seconds))
    text = picture.read_text()
    for said in ("own queries, attended elsewhere", "queries of others, attended here", "attention time / mean",
                 "the same without disaggregation"):
        assert said in text
    draw_plan(result.levelled.without.plan, picture)
    assert "attended" not in picture.read_text() and "pairs / mean" in picture.read_text()

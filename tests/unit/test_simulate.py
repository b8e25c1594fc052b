"""``csbp simulate``: documents as corpora have them, ways of training them compared by the numbers of ``csbp plan``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csbp.cli import main
from csbp.config.schema import DataConfig
from csbp.plan.cad import Cad
from csbp.plan.cluster import WAYS, Cluster, Outcome, simulate_step
from csbp.plan.counts import KindCounts
from csbp.plan.disaggregate import CadSettings
from csbp.plan.documents import DISTRIBUTIONS
from csbp.plan.estimate import DEVICES, Settings
from csbp.plan.forecast import Case, whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.levelled import level
from csbp.plan.profiles import load_profile
from csbp.plan.seconds import Pace, Passes, again_seconds, exposed_seconds
from csbp.plan.shapes import AttentionLayers, ModelShape
from csbp.plan.stages import Stages
from csbp.plan.wire import row_bytes
from csbp.simulate_cli import cut

SHAPE = ModelShape((AttentionLayers(LayerKind(), 3, 16, 4, 64),
                    AttentionLayers(LayerKind("near", window=512), 1, 8, 4, 64)), 256, 512, 1024, True)
PACKS = [[8192], [4096, 3000, 1000], [2000] * 4, [700, 70, 7, 5000, 2000]]
SMALL = ("experiment=quickstart", "parallel.nproc=8", "parallel.csbp=2", "data.seq_len=4096", "plan.device=h200",
         "data.pack_window=64")


def cluster(**changes: Any) -> Cluster:
    device = dataclasses.replace(DEVICES["h200"], node=4, far_link=200e9)
    cad = Cad(CadSettings(), load_profile("h200"), SHAPE, 2, 2, 1, device)
    return dataclasses.replace(Cluster(4, 2, device, Settings(8, "attention", 2), cad, pooled=True), **changes)


def step(packs: list[list[int]] = PACKS, block: int = 32, **changes: Any) -> dict[str, Outcome]:
    case = Case(SHAPE, whole_pack([block], block, noised=True), 0.5, True)
    return simulate_step(case, packs, block, cluster(**changes))


@pytest.mark.parametrize(("name", "median", "mean", "p99", "share"), [
    ("pretrain", 3200, 4000, 26000, 0.79), ("prolong", 1900, 3100, 16000, 0.63)])
def test_documents_are_as_long_as_published(name: str, median: float, mean: float, p99: float, share: float) -> None:
    made = DISTRIBUTIONS[name]
    drawn = made.draw(400_000, np.random.default_rng(3))
    assert np.array_equal(drawn[:9], made.draw(400_000, np.random.default_rng(3))[:9])
    assert np.median(drawn) == pytest.approx(median, rel=0.06) and drawn.mean() == pytest.approx(mean, rel=0.06)
    assert np.percentile(drawn, 99) == pytest.approx(p99, rel=0.06) and drawn.min() > 0
    assert drawn.max() == made.longest == {"pretrain": 125, "prolong": 340}[name] << 10
    squares = np.sort(drawn.astype(float) ** 2)[::-1]
    assert squares[:len(drawn) // 100].sum() / squares.sum() == pytest.approx(share, rel=0.06)


def test_documents_are_cut_as_training_cuts_them() -> None:
    lengths = np.array([5, 10, 11, 25, 30])
    assert cut(lengths, DataConfig(seq_len=40, document_tokens=10)).tolist() == [5, 10, 10, 1, 10, 10, 5, 10, 10, 10]
    assert cut(lengths, DataConfig(seq_len=10, long_documents="truncate")).tolist() == [5, 10, 10, 10, 10]


def test_numbers_are_those_of_csbp_plan() -> None:
    found, where = step(), cluster()
    case = Case(SHAPE, whole_pack([x for pack in PACKS for x in pack], 32, noised=True), 0.5, True,
                tuple(map(len, PACKS)))
    known = level(case, "csbp", 2, where.settings, where.device, "exact", where.cad)
    assert found["csbp+cad"].seconds.step == known.with_moves.seconds.step
    assert np.array_equal(found["csbp+cad"].memory, known.with_moves.memory.total)
    assert found["csbp"].imbalance == pytest.approx(known.home["all"].over_mean)
    assert found["csbp+cad"].imbalance < 1.1 < found["csbp"].imbalance
    assert known.bytes_moved == pytest.approx((found["csbp+cad"].received - found["csbp"].received).sum())


def test_all_ways_do_the_same_work() -> None:
    found = step()
    rows = 2 * sum(map(sum, PACKS))
    for way in WAYS:
        outcome = found[way]
        assert len(outcome.memory) == len(outcome.received) == len(outcome.seconds.linear) == 8
        attention = outcome.seconds.attention.sum()
        # Pieces that are cut, and rows that share tiles with others, cost a little more.
        assert attention == pytest.approx(found["csbp"].seconds.attention.sum(), rel=0.05), way
        assert outcome.seconds.linear.sum() == pytest.approx(found["csbp"].seconds.linear.sum())
        assert 0 <= outcome.idle < 1 and outcome.imbalance >= 1
    assert rows and not found["data"].received.any() and not found["data"].seconds.exposed.any()
    # Both streams of each pack go to the other of its two ranks: keys and values, thrice, and once home.
    width = sum(part.count * part.row_elements for part in SHAPE.attention[:1]) * 2 * 3
    assert found["context"].received.sum() > 0.9 * rows * width


def test_whole_documents_go_to_the_rank_with_least_to_do() -> None:
    # The longest document has a rank for itself; nothing balances it.
    data = step([[8192], [100] * 20, [100] * 20, [100] * 20])["data"]
    assert np.sort(data.seconds.linear)[-1] == data.seconds.linear.max() > 5 * np.sort(data.seconds.linear)[-2]
    even = step([[1024] * 4] * 4)["data"]  # two each
    assert even.imbalance == pytest.approx(1) and even.idle == pytest.approx(0, abs=1e-9)
    # Short documents have next to no attention, but rows.
    slow = dataclasses.replace(DEVICES["h200"], linear=1e12)
    mixed = step([[2048] * 2, [2048] * 2, [256] * 24, [256] * 24], device=slow)
    assert mixed["data"].idle < 0.05 and mixed["data"].imbalance > 1.2


def test_a_pool_of_a_replica_balances_only_that() -> None:
    alone, pooled, without = step(pooled=False)["csbp+cad"], step()["csbp+cad"], step()["csbp"]
    most = [outcome.seconds.attention.max() for outcome in (pooled, alone, without)]
    assert len(alone.memory) == 8 and most[0] < 0.9 * most[1] and most[1] <= most[2]
    # The replica with the long document keeps all of it.
    assert alone.seconds.attention[:2].sum() == pytest.approx(without.seconds.attention[:2].sum())


def test_slower_links_are_waited_for() -> None:
    quick = dataclasses.replace(DEVICES["h200"], node=2, far_link=350e9)
    slow = dataclasses.replace(quick, far_link=1e9, near_link=1e9)
    for way in ("csbp", "context", "csbp+cad"):
        assert step(device=slow)[way].seconds.exposed.sum() > step(device=quick)[way].seconds.exposed.sum(), way
    # What stays within nodes does not care how far nodes are apart.
    near = dataclasses.replace(quick, far_link=1e3)
    assert step(device=near)["csbp"].seconds.exposed.max() == step(device=quick)["csbp"].seconds.exposed.max()


def test_what_is_waited_for_by_hand() -> None:
    part, one = AttentionLayers(LayerKind(), 1, 8, 2, 64), np.array([1])
    size = row_bytes(8, 2, 64, 64, 2)
    far, near = Pace(1e-3, 2e-3), Pace(1e-12, 1e-12)
    still = KindCounts(one, 300 * one, 200 * one, 0 * one, 0 * one)
    moving = dataclasses.replace(still, guests=50 * one, lent=70 * one)
    time = Passes(np.array([8.0]), np.array([20.0]))  # three quarters of the keys are here
    forward, backward = exposed_seconds(part, np.array([900]), still, time, far, 2, None, Stages())
    keys = 1e-3 * size.forward["keys"]
    assert forward == pytest.approx([300 * keys - 6]) and backward == pytest.approx([300 * keys + 200 * keys - 15])
    forward, backward = exposed_seconds(part, np.array([900]), moving, time, far, 2, None, Stages())
    ask, answer = (70 * 2e-3 * size.forward[name] for name in ("queries", "outputs"))
    assert forward == pytest.approx([300 * keys + ask - 6 + answer - 2])
    lend, home = (70 * 2e-3 * size.backward[name] for name in ("queries", "query_gradients"))
    assert backward == pytest.approx([300 * keys + lend - 7.5 + 200 * keys - 7.5 + home - 12.5])
    assert exposed_seconds(part, np.array([900]), moving, time, near, 2, None, Stages()) == ([0], [0])


def test_keys_in_stages_hide_behind_those_before_them_by_hand() -> None:
    part, one, rows = AttentionLayers(LayerKind(), 1, 8, 2, 64), np.array([1]), np.array([900])
    size, time = row_bytes(8, 2, 64, 64, 2), Passes(np.array([8.0]), np.array([20.0]))
    kind = KindCounts(one, 300 * one, 300 * one, 0 * one, 0 * one)
    assert size.forward["keys"] == size.backward["keys"] == size.backward["gradients"]

    def waited(seconds: float, stages: int, kind: KindCounts = kind) -> list[float]:
        """Where all keys travel so long, and all gradients."""
        pace = Pace(seconds / 300 / size.forward["keys"], 0.0)
        return [float(x[0]) for x in exposed_seconds(part, rows, kind, time, pace, 2, None, Stages(stages))]

    # Forward: 6 s with own keys, 2 with others. Backward: 7.5 early, 5 with others, 7.5 late.
    assert waited(9.0, 1) == pytest.approx([3, 1.5 + 1.5])
    # The first half is here by 4.5, the second by 9; 1 s of attention each. Gradients of the first half are on their
    # way from 10 on, those of the second from 12.5.
    assert waited(9.0, 2) == pytest.approx([2, 0])
    # Backward: the halves are attended from 10 to 12.5 and from 20 to 22.5; half of the gradients go home each time.
    assert waited(20.0, 2) == pytest.approx([20 + 1 - 8, 20 + 20 - 20])  # one link for both ways
    # The link is free again after 32.5 s, half of what goes home then.
    few = dataclasses.replace(kind, sent=150 * one)
    assert waited(20.0, 2, few) == pytest.approx([13, 20 + 2.5 + 7.5 - 20])
    moving = dataclasses.replace(kind, guests=one, lent=one)
    assert waited(9.0, 2, moving) == waited(9.0, 1, moving)


def test_a_stage_costs_a_walk_over_the_query_rows_by_hand() -> None:
    part, rows, device = AttentionLayers(LayerKind(), 6, 8, 2, 64), np.array([1000, 500]), DEVICES["h200"]
    still = KindCounts(*(np.array([n, n]) for n in (1, 4096, 300, 0, 0)))
    over = again_seconds(part, rows, still, device, 2, Stages(8, 1024))
    assert over == pytest.approx(3 * rows * 8 * 64 * 2 / 2 / device.rows)
    assert not again_seconds(part, rows, still, device, 2, Stages()).any()
    apart = dataclasses.replace(still, received=np.array([4096, 0]))  # who is sent nothing goes over nothing again
    assert again_seconds(part, rows, apart, device, 2, Stages(8, 1024)) == pytest.approx([over[0], 0])
    moving = dataclasses.replace(still, guests=np.array([5, 0]))
    assert not again_seconds(part, rows, moving, device, 2, Stages(8, 1024)).any()


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["simulate", *words])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def test_what_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = answer(capsys, *SMALL, "steps=2", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["simulation"] is True and set(found["ways"]) == set(WAYS)
    assert (found["world_size"], found["replicas"], found["csbp"], found["pool"]) == (8, 4, 2, "dp")
    first = found["ways"]["csbp+cad"]["predicted_step_seconds"]
    for way, row in found["ways"].items():
        assert row["predicted_step_seconds"] == pytest.approx(np.mean(row["each_step_seconds"]))
        assert way == "csbp+cad" or found[f"speedup_over_{way}"] == row["predicted_step_seconds"] / first
        assert row["idle_share"] == pytest.approx(1 - row["busy_seconds_mean"] / row["predicted_step_seconds"])
    assert 0.7 * 4 * 4096 < found["tokens_per_step"] <= 4 * 4096
    assert answer(capsys, *SMALL, "steps=2", "--json")[1] == out
    assert json.loads(answer(capsys, *SMALL, "steps=2", "seed=1", "--json")[1])["ways"] != found["ways"]
    assert answer(capsys, *SMALL, "steps=2", "documents=@pretrain", "--json")[1] == out
    file = tmp_path / "lengths"
    file.write_text("4096\n")
    code, out, err = answer(capsys, *SMALL, f"documents={file}", "steps=1", "near_link=100", "far_link=10", "node=2",
                            "cad.pool=csbp")
    assert code == 0 and "simulation" in out and "links 100 and 10 GB/s, nodes of 2" in out and "16,384 tokens" in out
    assert " times as fast as context (zig-zag context parallelism)\n" in out, err
    assert "dp=4 x csbp=2, disaggregation among ranks of a replica (cad.pool=csbp)" in out and "1 step of 16,384" in out
    assert " MiB " in out and "0.00 GiB" not in out
    _, out, err = answer(capsys, *SMALL, "steps=2", "cad.profile=cpu", "cad.overlap=none")
    ways = json.loads(answer(capsys, *SMALL, "steps=2", "cad.profile=cpu", "--json")[1])["ways"]
    each = [ways[way]["each_step_seconds"] for way in ("csbp+cad", "csbp")]
    ratios = sorted(other / own for own, other in zip(*each, strict=True))
    assert f"csbp (ownership alone); {ratios[0]:.2f} to {ratios[1]:.2f} in single steps" in out
    assert "warning: cad.overlap=none: predictions" in err
    assert "warning: cad.profile=cpu was measured on 'AMD EPYC'" in err
    out = answer(capsys, *SMALL, "steps=1", "plan.device=cpu")[1]
    assert "GB/s, one node" in out and "among ranks of all replicas" in out  # a number of ranks would say nothing


@pytest.mark.parametrize(("words", "said"), [
    ([*SMALL, "documents=pretrian"], "documents='pretrian': cannot be read"),
    ([*SMALL, "documents=pretrian"], "; did you mean pretrain? or one of the distributions: pretrain, prolong"),
    ([*SMALL, "documents="], "documents='': names no file"),
    ([*SMALL, "step=3"], "step: no such setting; did you mean steps?"),
    ([*SMALL, "data.document_lengths=x"], "data.document_lengths='x': is that of csbp plan; documents are drawn from "),
    ([*SMALL, "steps=0"], "steps=0: must be"), ([*SMALL, "far_link=0"], "far_link=0"), ([*SMALL, "node=0"], "node=0"),
    ([*SMALL, "parallel.kind=context"], "parallel.kind='context': others are compared"),
    ([*SMALL, "parallel.csbp=3"], "parallel.csbp=3: must divide"), ([*SMALL, "cad.profile=h20"], "did you mean h200?"),
    ([*SMALL, "cad.profile=mine"], "cad.profile='mine': a FILE.json of csbp bench profile, or one of: auto, "),
    ([*SMALL, "data.seq_len=4", "data.document_tokens=4"], "more ranks than blocks"),
    ([*SMALL, "data.seq_len=4"], "data.document_tokens=256: a document must fit a pack: at most data.seq_len=4"),
    (["steps=2"], "experiment: say which"),
    ([*SMALL, "stepss=2"], "stepss"),
    ([*SMALL, "cad.enabled=false"], "cad.enabled=false: csbp is shown with and without"),
    ([*SMALL, "data.long_documents=error", "seed=3"], "data.long_documents='error': there are documents of")])
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, out, err = answer(capsys, *words)
    assert code == 2 and said in err and not out, err


def test_other_objectives_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["experiment=tiny_ar", "plan.device=cpu"], ["experiment=quickstart", "parallel.tp=2"]):
        code, out, err = answer(capsys, *[word for word in SMALL if word[:4] != words[0][:4]], "steps=1", *words,
                                "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["profile"] == found["device"] == ("cpu" if "plan.device=cpu" in words else "h200")
        assert found["replicas"] == 4 // found["tp"] and found["ways"]["data"]["bytes_received_max"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "ranks", "tokens"), [("pretrain", 8, 1 << 17), ("prolong", 16, 1 << 18)])
def test_512_ranks(capsys: pytest.CaptureFixture[str], documents: str, ranks: int, tokens: int) -> None:
    code, out, err = answer(capsys, "experiment=nemotron_8b_sft", "parallel.nproc=512", f"parallel.csbp={ranks}",
                            f"data.seq_len={tokens}", "steps=2", f"documents={documents}", "cad.max_buffer_mib=null",
                            "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["speedup_over_context"] >= 1.2 and found["speedup_over_data"] >= 1.2
    assert found["ways"]["csbp+cad"]["fits"] and found["speedup_over_csbp"] > 1.1

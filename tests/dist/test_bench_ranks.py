"""``csbp bench`` where ranks were started: bytes, exposed communication, and numbers that every rank agrees on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cad import dear_profile

from csbp.bench.records import read_rows

ATTENTION = ["lengths=[96]", "heads=4", "kv_heads=2", "head_dim=8", "block_size=4", "dtype=float32", "device=cpu",
             "documents=packed", "longest=50", "median=8", "repeats=3", "warmup=1", "seconds=0.05"]
STEP = ["experiment=quickstart", "data.seq_len=48", "warmup=1", "repeats=2"]


def bench(command: str, words: list[str], out: str) -> int:
    """On a rank of the pool."""
    from csbp.bench.attention import run_attention
    from csbp.bench.step import run_step

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # as torchrun would; the ranks have already met
    try:
        return (run_attention if command == "attention" else run_step)(words, out=out)
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def moved(kind: str, exchange: str) -> tuple[int, int]:
    """Bytes that a rank's transport has sent in one forward and backward, and what the row would say it receives."""
    import torch.distributed as dist

    from csbp.attention.operator import BoundPlan
    from csbp.bench.cases import attention_cases
    from csbp.bench.check import draw
    from csbp.bench.kernels import launcher, plan_job, received_bytes
    from csbp.comm.transport import LocalTransport, ProcessGroupTransport

    rank, world = dist.get_rank(), dist.get_world_size()
    [case] = attention_cases([*ATTENTION, f"kind={kind}", f"exchange={exchange}"], world)
    job = plan_job(case, 96, world, rank)
    transport: Any = LocalTransport() if kind == "data" else ProcessGroupTransport(dist.group.WORLD)
    plan = BoundPlan(job.plan, transport, "cpu", "reference")
    mine = draw(case, len(job.held), torch.device("cpu"), rank).of(torch.arange(len(job.held)))
    launcher(plan, job, "reference")(mine.query, mine.key, mine.value).backward(mine.grad)
    return sum(transport.sent_bytes.values()), received_bytes(job, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csbp", *(pytest.param(kind, marks=pytest.mark.slow)
                                             for kind in ("context", "block", "data"))])
def test_attention_in_every_scheme(ranks: Callable[..., list[Any]], tmp_path: Path, kind: str) -> None:
    out = tmp_path / "rows.json"
    assert ranks(2, bench, "attention", [*ATTENTION, f"kind={kind}"], str(out)) == [0, 0]
    [row] = read_rows(out)
    travels = kind in ("csbp", "context")
    assert (row["gpus"], row["kind"], row["name"].count(kind)) == (2, kind, 1)
    assert row["command"].startswith("torchrun --nproc-per-node 2 $(which csbp) bench attention")
    assert (row["bytes_received"] > 0) == travels == ("exposed_comm_ms" in row)
    parts = ("out", "dq") if kind == "block" else ("out", "dq", "dk", "dv")
    assert all(row[f"error_{part}"] < 1e-5 for part in parts)
    share = row["pairs"] if kind == "data" else row["pairs"] / 2
    assert row["forward_backward_tflops"] == pytest.approx(3.5 * 4 * 4 * 8 * share / 1e9 / row["ms"], rel=1e-4)
    if travels:
        assert row["exposed_comm_fraction"] == pytest.approx(row["exposed_comm_ms"] / row["ms"], rel=1e-4)


@pytest.mark.parametrize(("kind", "exchange"), [
    ("csbp", "exact"), ("csbp", "all_gather"), pytest.param("context", "exact", marks=pytest.mark.slow),
    pytest.param("data", "exact", marks=pytest.mark.slow)])
def test_bytes_are_those_that_travel(ranks: Callable[..., list[Any]], kind: str, exchange: str) -> None:
    sent, received = zip(*ranks(3, moved, kind, exchange), strict=True)
    assert sum(sent) == sum(received) and (sum(sent) > 0) == (kind != "data")


@pytest.mark.slow
def test_steps_in_every_scheme(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    variants = "variants=[default, 'parallel.kind=context', 'parallel.kind=block', " \
               "'two: parallel.kind=data train.packs_per_step=2']"
    assert ranks(2, bench, "step", [*STEP, variants], str(out)) == [0, 0]
    assert ranks(1, bench, "step", STEP, str(out)) == [0]
    csbp, context, block, data, one = read_rows(out)
    assert [row["kind"] for row in (csbp, context, block, data, one)] == ["csbp", "context", "block", "data", "one"]
    flops = one["useful_tflops"] * one["step_ms"]
    for row in (csbp, context, block):  # the same steps, wherever their rows are computed
        assert row["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert 2 * row["useful_tflops"] * row["step_ms"] == pytest.approx(flops, rel=1e-3)
    assert (csbp["wire_bytes"] > 0, context["wire_bytes"] > csbp["wire_bytes"]) == (True, True)
    assert block["wire_bytes"] == data["wire_bytes"] == 0
    assert csbp["exposed_comm_ms"] > 0 == data["exposed_comm_ms"]
    assert data["tokens_per_second"] == pytest.approx(2 * 48e3 / data["step_ms"], rel=1e-4)


@pytest.mark.slow
def test_what_moves_in_a_step_is_told(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    out, lengths, profile = tmp_path / "rows.json", tmp_path / "lengths", dear_profile(tmp_path)
    lengths.write_text("200\n56\n")
    moving = f"cad.enabled=true cad.tolerance=0 cad.profile={profile}"
    words = [*STEP, "data.seq_len=256", "data.document_tokens=256", f"data.document_lengths={lengths}", "repeats=1",
             "objective.block_size=64", "parallel.nproc=2", f"variants=[default, 'on: {moving}']"]
    assert ranks(2, bench, "step", words, str(out)) == [0, 0]
    off, on = read_rows(out)
    assert (off["cad"], off["cad_bytes"], on["cad"]) == ("off", 0, "csbp, operator")
    assert on["cad_bytes"] == on["wire_bytes"] - off["wire_bytes"] != 0


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "csbp.cli", "bench"]
    for words in (["attention", *ATTENTION], ["step", *STEP]):
        done = subprocess.run([*command, *words, "--json", "--out", str(out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1  # one rank prints
    assert [row["gpus"] for row in read_rows(out)] == [2, 2]
    refused = subprocess.run([*command, "attention", *ATTENTION, "lengths=[3]", "documents=one"], capture_output=True,
                             text=True)
    assert refused.returncode and "a pack of 1 block(s) is too short for 2 ranks" in refused.stderr

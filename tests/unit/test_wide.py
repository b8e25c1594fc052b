"""The wide backend: its chunks on any machine; its kernels in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from csbp.attention import core, flash, flex, wide
from csbp.attention.mask import IntervalMask, Ranges
from csbp.attention.wide_plan import Chunk, Chunks, chunks_of
from csbp.plan.counts import count_plan
from csbp.plan.estimate import Settings, predict_memory
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.shapes import AttentionLayers, ModelShape

BOUND = 1.5e-3  # half precision has 11 bits


def draw(seed: int) -> tuple[Ranges, int]:
    """Ranges of [clean | noised] rows of a few documents, some rows left out, and the number of keys."""
    rng = np.random.default_rng(seed)
    lengths, block = rng.integers(1, 150, rng.integers(1, 6)), int(rng.choice([1, 8, 50]))
    total, start = int(lengths.sum()), np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.arange(total)
    own = start + (place - start) // block * block
    end = np.minimum(own + block, start + np.repeat(lengths, lengths))
    low, none = np.maximum(start, place - int(rng.integers(1, 300))), np.zeros(total, np.int64)
    both = ((low, np.minimum(low, own)), (place + 1, own), (none, total + own), (none, total + end))
    kept = np.flatnonzero(rng.random(2 * total) < rng.choice([0.3, 1.0]))
    kept = kept if len(kept) else np.zeros(1, np.int64)
    low, high, own, end = (np.concatenate(x)[kept].astype(np.int32) for x in both)
    return (low, high, own, end), 2 * total


def slots(found: Chunks, chunk: Chunk) -> np.ndarray:
    return found.visits[chunk.slot_base:chunk.slot_base + chunk.slots]


def by_row(found: Chunks, chunk: Chunk) -> list[tuple[int, int, int]]:
    """(slot, row tile, key tile) as ``by_rows`` goes through them."""
    lines = found.row_table[chunk.row_base:chunk.row_base + chunk.row_tiles].tolist()
    return [(first + s, chunk.row_tile + tile, key + s + (jump if s >= turn else 0))
            for tile, (first, count, key, turn, jump) in enumerate(lines) for s in range(count)]


def by_key(found: Chunks, chunk: Chunk) -> list[tuple[int, int, int]]:
    """(slot, row tile, key tile) as ``by_keys`` goes through them."""
    entries = found.entries[chunk.slot_base:chunk.slot_base + chunk.slots].tolist()
    lines = found.key_table[chunk.key_base:chunk.key_base + chunk.key_tiles].tolist()
    return [(*entries[e], key) for key, first, count in lines for e in range(first, first + count)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 7), (4, 1000)])
def test_every_visible_pair_is_in_one_slot(seed: int, least: int, most: int) -> None:
    (ranges, keys), tile = draw(seed), (16, 32)
    found, seen = chunks_of(ranges, keys, tile, least, most), IntervalMask.from_arrays(*ranges).dense(keys).numpy()
    times = np.zeros((-(-len(seen) // tile[0]), -(-keys // tile[1])), np.int64)
    for chunk in found.chunks:
        for row, key, full in slots(found, chunk).tolist():
            times[row, key] += 1
            part = seen[row * tile[0]:(row + 1) * tile[0], key * tile[1]:(key + 1) * tile[1]]
            assert not full or part.all() and part.shape[1] == tile[1]
        expected = [(slot, row, key) for slot, (row, key, _) in enumerate(slots(found, chunk).tolist())]
        assert by_row(found, chunk) == expected and sorted(by_key(found, chunk)) == expected
        assert chunk.slots <= found.capacity
    covered = np.kron(times, np.ones(tile, np.int64))[:len(seen), :keys]
    assert times.max(initial=0) <= 1 and (covered[seen] == 1).all()


@pytest.mark.parametrize("seed", range(6))
def test_chunks_follow_their_rows_and_stay_small(seed: int) -> None:
    (ranges, keys), least, most = draw(seed), 3, 12
    found = chunks_of(ranges, keys, (16, 16), least, most)
    groups: dict[int, list[Chunk]] = {}
    for chunk in found.chunks:
        groups.setdefault(chunk.row_tile, []).append(chunk)
    reached = 0
    for start, chunks in groups.items():  # every row tile in one group, in order, those without visits too
        assert start == reached and len({chunk.row_tiles for chunk in chunks}) == 1
        reached += chunks[0].row_tiles
        assert [c.first for c in chunks] == [True] + [False] * (len(chunks) - 1)
        assert [c.last for c in chunks] == [False] * (len(chunks) - 1) + [True]
        # A chunk ends with a whole key tile, which every row tile may visit.
        assert max(c.slots for c in chunks) < most + chunks[0].row_tiles
    assert reached == -(-len(ranges[0]) // 16)
    assert all(chunks[0].row_tiles >= least for chunks in list(groups.values())[:-1])


def test_rows_that_see_nothing_still_have_a_chunk() -> None:
    none = np.zeros(40, np.int32)
    found = chunks_of((none, none, none, none), 8, (16, 16), 1, 4)
    assert sum(chunk.row_tiles for chunk in found.chunks) == 3 and found.capacity == 0
    assert not found.row_table[:, 1].any()


def test_auto_takes_wide_for_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flash, "_hopper", lambda: type("Any", (), {"installed": staticmethod(lambda: True)}))
    gpu, half = torch.device("cuda"), torch.bfloat16
    names = {dim: core.choose.__wrapped__(gpu, half, dim, dim, False) for dim in (128, 256, 320, 512, 520)}
    assert names == {128: "flash", 256: "flash", 320: "wide", 512: "wide", 520: "reference"}
    assert core.choose.__wrapped__(gpu, torch.float32, 512, 512, False) == "reference"
    assert not flex.unusable(gpu, torch.bfloat16, 512, 512)


@pytest.mark.parametrize(("capability", "dtype", "dims", "triton", "word"), [
    ((8, 0), torch.bfloat16, (512, 512), True, "Hopper"), ((9, 0), torch.float32, (512, 512), True, "half precision"),
    ((9, 0), torch.float16, (512, 256), True, "head dims"), ((9, 0), torch.float16, (516, 516), True, "head dims"),
    ((9, 0), torch.float16, (512, 512), False, "triton is not installed"),
])
def test_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype,
                            dims: tuple[int, int], triton: bool, word: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    assert word in wide.unusable(torch.device("cuda"), dtype, *dims)
    assert "GPU" in wide.unusable(torch.device("cpu"), torch.float16, 512, 512)


@pytest.mark.parametrize(("tokens", "heads", "bytes_of_tile"), [(1000, 2, (0.2, 1.0)), (60000, 16, (1.0, 1.05))])
def test_the_estimated_workspace_is_the_one_of_a_backward(tokens: int, heads: int,
                                                          bytes_of_tile: tuple[float, float]) -> None:
    """All tiles where they are few, though not all are seen; else chunks of one size."""
    part = AttentionLayers(LayerKind(), 1, heads, heads, 512)
    plan = PackPlan(whole_pack([tokens], 32, noised=True), (part.kind,), 1)
    here = plan.rank_plan(0).kinds["full"].here
    job = wide.Tuning()
    found = chunks_of((here.prefix_start, here.prefix_end, here.block_start, here.block_end), 2 * tokens,
                      job.backward_tile, max(1, job.programs // (heads * 2)), job.chunk_tiles // heads)
    shape = ModelShape((part,), 64, 0, 100, True)
    said = [predict_memory(shape, count_plan(plan), np.zeros(1), settings).workspace[0]
            for settings in (Settings(1, "none", 2, wide=True), Settings(1, "none", 2))]
    low, high = bytes_of_tile
    assert low * said[0] <= 2 * 2 * heads * found.capacity * 128 * 128 <= high * said[0] and said[1] == 0


def test_no_rows_and_no_keys() -> None:
    none = np.zeros(0, np.int64)
    empty = IntervalMask.from_arrays(none, none, none, none)
    out, lse = wide.forward(torch.randn(0, 4, 16), k := torch.randn(5, 2, 16), k, empty, 1.0)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
    assert all(not g.any() for g in wide.backward(out, out, k, k, out, lse, empty, 1.0))
    blind, q = IntervalMask.from_arrays(*np.zeros((4, 3), np.int64)), torch.randn(3, 4, 16)
    out, lse = wide.forward(q, k[:0], k[:0], blind, 1.0)
    assert not out.any() and torch.all(lse == float("-inf")) and lse.shape == (3, 4)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", ["chunks", *(pytest.param(name, marks=pytest.mark.slow) for name in
                                              ("plain", "tiles", "tops", "strides", "part"))])
def test_kernels_against_float64(name: str) -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", str(Path(__file__).with_name("wide_interpreted.py")), name],
                         capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]
    assert all(float(error) < BOUND for error in run.stdout.split()), run.stdout

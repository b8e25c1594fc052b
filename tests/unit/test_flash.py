"""What the flash backend hands to its kernels, with a slow stand-in for them that visits tiles as they do."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from csbp.attention import flash, reference
from csbp.attention.mask import IntervalMask

WAYS: list[bool] = []  # of each backward: whether a thread block saw to a whole group of heads


class Visits(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def _tiles(count: Tensor, table: Tensor) -> list[list[int]]:
    rows = []
    for number, row in zip(count[0, 0].tolist(), table[0, 0].tolist(), strict=True):
        jumps = list(zip(row[1::2], row[2::2], strict=True))
        rows.append([i + row[0] + sum(jump for place, jump in jumps if place <= i) for i in range(number)])
    return rows


def _visible(bounds: Tensor, visits: Visits, rows: int, keys: int, *, by_key: bool) -> Tensor:
    """bool [rows, keys]: what a kernel sees that looks at the bounds in partial tiles only."""
    low, high, own, end = bounds[:rows].T[:, :, None]
    key = torch.arange(keys)
    looked = (key >= low) & (key < high) | (key >= own) & (key < end)
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for full, named in ((False, _tiles(visits.mask_block_cnt, visits.mask_block_idx)),
                        (True, _tiles(visits.full_block_cnt, visits.full_block_idx))):
        for x, others in enumerate(named):
            for y in others:
                m, c = (y, x) if by_key else (x, y)
                place = (slice(m * visits.block_size[0], (m + 1) * visits.block_size[0]),
                         slice(c * visits.block_size[1], (c + 1) * visits.block_size[1]))
                assert not seen[place].any(), "a tile is visited twice"
                seen[place] = True if full else looked[place]
    return seen


def _as_mask(seen: Tensor) -> IntervalMask:
    """The mask of rows that see at most two runs of keys."""
    out = np.zeros((len(seen), 4), np.int64)
    for row, line in enumerate(seen.int()):
        edges = torch.diff(torch.nn.functional.pad(line, (1, 1))).nonzero()[:, 0].tolist()
        assert len(edges) <= 4
        out[row, :len(edges)] = edges
    return IntervalMask.from_arrays(*out.T)


class Kernels:
    """In the place of FlashAttention-4's interface."""

    def __init__(self, by_group: bool) -> None:
        self.by_group = by_group

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask_mod: Any,
                        aux_tensors: list[Tensor], block_sparse_tensors: Visits,
                        return_lse: bool) -> tuple[Tensor, Tensor]:
        assert return_lse
        mask = _as_mask(_visible(aux_tensors[0], block_sparse_tensors, q.shape[1], k.shape[1], by_key=False))
        out, lse = reference.forward(q[0], k[0], v[0], mask, softmax_scale)
        return out[None], lse.t()[None].contiguous()

    def _flash_attn_bwd(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *,
                        softmax_scale: float, mask_mod: Any, aux_tensors: list[Tensor],
                        block_sparse_tensors: Visits, dlse: Tensor | None) -> list[Tensor]:
        assert lse.is_contiguous()
        assert mask_mod == ("to group" if self.by_group else "to head"), "what is compiled is kept by this name"
        WAYS.append(self.by_group)
        mask = _as_mask(_visible(aux_tensors[0], block_sparse_tensors, q.shape[1], k.shape[1], by_key=True))
        grads = reference.backward(dout[0], q[0], k[0], v[0], out[0], lse[0].t(), mask, softmax_scale,
                                   None if dlse is None else dlse[0].t())
        return [g[None] for g in grads]


@contextlib.contextmanager
def _told_runs(by_group: bool = False) -> Iterator[Kernels]:
    yield Kernels(by_group)


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(forward_tile=lambda *dims: (16, 8), backward_tile=lambda *dims: (8, 16),
                              KEY_RUNS=(6, 3), CACHED=40 * 64, MOST_TILES=32, PROCESSORS=50,
                              BlockSparseTensorsTorch=Visits, visible="to head", visible_to_group="to group",
                              told_runs=_told_runs)
    monkeypatch.setattr(flash, "_hopper", lambda: kernels)
    WAYS.clear()


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("seed", range(6))
def test_forward_and_backward_equal_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, clean, noised = int(rng.integers(1, 90)), int(rng.integers(1, 70)), int(rng.integers(0, 70))
    ends, own = np.sort(rng.integers(0, clean + 1, rows)), np.sort(rng.integers(clean, clean + noised + 1, rows))
    low, end = ends - rng.integers(0, ends + 1), np.minimum(own + rng.integers(0, 20, rows), clean + noised)
    mask = IntervalMask.from_arrays(low, ends, own, end)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal((n, heads, 4))) for n, heads in
                     ((rows, 6), (clean + noised, 2), (clean + noised, 2), (rows, 6)))
    out, lse = flash.forward(q, k, v, mask, 0.4)
    expected, expected_lse = reference.forward(q, k, v, mask, 0.4)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
    assert lse.stride() == expected_lse.stride()
    for dlse in (None, torch.from_numpy(rng.standard_normal((rows, 6))).float()):
        found = flash.backward(dout, q, k, v, out, lse, mask, 0.4, dlse)
        wanted = reference.backward(dout, q, k, v, out, lse, mask, 0.4, dlse)
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(("rows", "documents", "heads", "kv_heads", "by_group"), [
    (512, 32, 4, 2, True), (512, 1, 4, 2, False), (512, 32, 2, 2, False),
    (512, 32, 4, 1, False),  # 32 thread blocks on 50 processors
    (1024, 64, 4, 2, False),  # more tiles of keys than a grid can have
])
def test_heads_go_together_where_few_rows_see_a_key(rows: int, documents: int, heads: int, kv_heads: int,
                                                    by_group: bool) -> None:
    length, row, zero = rows // documents, np.arange(rows), np.zeros(rows, np.int64)
    mask = IntervalMask.from_arrays(row // length * length, row + 1, zero, zero)
    q, k = torch.randn(rows, heads, 4), torch.randn(rows, kv_heads, 4)
    flash.backward(q, q, k, k, *flash.forward(q, k, k, mask, 1.0), mask, 1.0)
    assert WAYS == [by_group]


@pytest.mark.usefixtures("_stand_in")
def test_no_rows_and_no_keys() -> None:
    none, zero = np.zeros(0, np.int64), np.zeros(5, np.int64)
    for rows, keys, bounds in ((0, 7, none), (5, 0, zero)):
        q, k = torch.randn(rows, 4, 8), torch.randn(keys, 2, 8)
        mask = IntervalMask.from_arrays(bounds, bounds, bounds, bounds)
        out, lse = flash.forward(q, k, k, mask, 1.0)
        assert not out.any() and bool((lse == float("-inf")).all()) and lse.shape == (rows, 4)
        assert all(not g.any() for g in flash.backward(out, q, k, k, out, lse, mask, 1.0))


def test_what_it_cannot_compute_is_said() -> None:
    assert "Hopper" in flash.unusable(torch.device("cpu"), torch.bfloat16, 128, 128, False)


def test_compiled_kernels_are_kept_by_the_sources_they_are_made_of(tmp_path: Path) -> None:
    """The library may keep them on disk: needs it installed, and no GPU."""
    utils = pytest.importorskip("flash_attn.cute.utils")
    package = Path(flash.__file__).parent

    def names(file: str, more: str) -> tuple[str, str]:
        changed = tmp_path / file
        changed.write_text((package / file).read_text() + more)
        if file == "hopper.py":
            spec = importlib.util.spec_from_file_location("hopper_again", changed)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            from csbp.attention import hopper_heads
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hopper_heads, "__file__", str(changed))
                return names("hopper.py", "")
        return utils.hash_callable(module.visible), utils.hash_callable(module.visible_to_group)

    found = [*names("hopper.py", ""), *names("hopper.py", "#\n"), *names("hopper_heads.py", "#\n")]
    assert len(set(found)) == 6 and names("hopper.py", "") == tuple(found[:2])

"""``interval_attention`` against dense attention in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from csbp.attention import IntervalMask, core, interval_attention, merge, usable


def dense(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("snd,tnd->snt", q, k) * scale
    scores = scores.masked_fill(~sees[:, None], float("-inf"))
    blind = ~sees.any(1)[:, None]
    out = torch.einsum("snt,tnd->snd", torch.softmax(scores.masked_fill(blind[..., None], 0.0), -1), v)
    return out.masked_fill(blind[..., None], 0.0), torch.logsumexp(scores, -1)


def random_case(seed: int, rows: int | None = None, dtype: torch.dtype = torch.float64,
                ordered: bool = False) -> tuple[list[Tensor], IntervalMask]:
    rng = np.random.default_rng(seed)
    rows, keys = rows or int(rng.integers(1, 400)), int(rng.integers(1, 300))
    cuts = np.sort(rng.integers(0, keys + 1, (rows, 4)), 1)
    if ordered:
        cuts = cuts[np.lexsort(cuts.T[::-1])]
    heads = int(rng.integers(1, 3))
    tensors = [torch.from_numpy(rng.standard_normal(shape)).to(dtype).requires_grad_()
               for shape in ((rows, heads * int(rng.integers(1, 4)), 8), (keys, heads, 8), (keys, heads, 5))]
    return tensors, IntervalMask.from_arrays(*cuts.T)


@pytest.mark.parametrize("seed", range(12))
def test_equals_dense_with_every_gradient(seed: int) -> None:
    (q, k, v), mask = random_case(seed, ordered=seed % 2 == 0)
    scale = None if seed % 3 else 0.37
    out, lse = interval_attention(q, k, v, mask, scale=scale)
    want, want_lse = dense(q, k, v, mask.dense(len(k)), scale or 8 ** -0.5)
    assert lse.dtype == torch.float64 and lse.shape == q.shape[:2]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    torch.manual_seed(seed)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    alive = torch.isfinite(want_lse)

    def loss(o: Tensor, l: Tensor) -> Tensor:
        return (o * dout).sum() + (l[alive] * dlse[alive]).sum()

    got = torch.autograd.grad(loss(out, lse), (q, k, v))
    expected = torch.autograd.grad(loss(want, want_lse), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, torch.nan_to_num(b), rtol=0, atol=1e-11)


def test_rows_that_see_nothing_are_clean() -> None:
    (q, k, v), _ = random_case(3, rows=9)
    zero = np.zeros(9, np.int32)
    out, lse = interval_attention(q, k, v, IntervalMask.from_arrays(zero + 5, zero, zero, zero))
    assert torch.all(out == 0) and torch.all(lse == float("-inf"))
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.all(grad == 0)


def test_no_rows_and_no_keys() -> None:
    none = np.zeros(0, np.int32)
    q, k = torch.zeros(0, 4, 8, requires_grad=True), torch.randn(3, 2, 8, requires_grad=True)
    out, lse = interval_attention(q, k, k, IntervalMask.from_arrays(none, none, none, none))
    out.sum().backward()
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4) and torch.all(k.grad == 0)
    zero = np.zeros(2, np.int32)
    out, _ = interval_attention(torch.randn(2, 4, 8), k[:0], k[:0], IntervalMask.from_arrays(zero, zero, zero, zero))
    assert torch.all(out == 0)


def test_half_precision_is_computed_in_float32() -> None:
    (q, k, v), mask = random_case(5, dtype=torch.bfloat16)
    out, lse = interval_attention(q, k, v, mask)
    want, _ = dense(*(x.double() for x in (q, k, v)), mask.dense(len(k)), 8 ** -0.5)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=2 ** -8, atol=1e-6)


def test_merge_of_disjoint_key_sets_is_the_whole() -> None:
    (q, k, v), mask = random_case(7)
    cut = len(k) // 2
    low, high, own, end = (getattr(mask, n).numpy() for n in ("prefix_start", "prefix_end", "block_start", "block_end"))
    parts = []
    for a, b in ((0, cut), (cut, len(k))):
        ranges = [np.clip(x, a, b) - a for x in (low, high, own, end)]
        parts.append(interval_attention(q, k[a:b], v[a:b], IntervalMask.from_arrays(*ranges)))
    out, lse = merge(parts)
    want, want_lse = interval_attention(q, k, v, mask)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)


def causal_documents(documents: int, length: int) -> IntervalMask:
    row = np.arange(documents * length)
    return IntervalMask.from_arrays(row // length * length, row + 1, row * 0, row * 0)


def test_tiles_of_different_documents_are_apart() -> None:
    """A tile whose hull spans two documents computes mostly masked scores; only tiny ones are put together."""
    assert [tile.prefix for tile in causal_documents(3, 120).tiles] == [(0, 120), (120, 240), (240, 360)]
    assert [tile.prefix for tile in causal_documents(6, 16).tiles] == [(0, 96)]


def test_tiles_cover_every_row_once() -> None:
    _, mask = random_case(11, rows=777)
    rows = np.concatenate([np.arange(777)[t.rows if isinstance(t.rows, slice) else t.rows.numpy()] for t in mask.tiles])
    assert sorted(rows) == list(np.flatnonzero(mask.dense(300).any(1).numpy()))
    assert max(len(np.arange(777)[t.rows]) for t in mask.tiles) <= 128


@pytest.mark.parametrize(("change", "word"), [
    (lambda q, k, v, m: (q[0], k, v, m), "rows, heads, dim"),
    (lambda q, k, v, m: (q, k[1:], v, m), "differ"),
    (lambda q, k, v, m: (q, k[..., 1:], v, m), "head dim"),
    (lambda q, k, v, m: (q[:, :1].expand(-1, 3, -1), k[:, :1].expand(-1, 2, -1), v[:, :1].expand(-1, 2, -1), m),
     "multiple"),
    (lambda q, k, v, m: (q[1:], k, v, m), "mask has"),
    (lambda q, k, v, m: (q.float(), k, v, m), "dtype"),
])
def test_wrong_shapes_are_refused(change, word: str) -> None:  # type: ignore[no-untyped-def]
    (q, k, v), mask = random_case(2)
    with pytest.raises(ValueError, match=word):
        interval_attention(*change(q, k, v, mask))


def test_unknown_backend_is_refused() -> None:
    (q, k, v), mask = random_case(2)
    with pytest.raises(ValueError, match="backend='fast'"):
        interval_attention(q, k, v, mask, backend="fast")


def test_what_auto_takes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(SimpleNamespace(head_dim=head_dim) for head_dim in (256, 512, 256))
    model: Any = SimpleNamespace(attention=parts)
    asked = model, torch.device("cpu"), torch.float32, False
    assert usable.taken("auto", *asked) == {"reference": "attention.backend=auto: reference for heads of 256. "
                                                         "attention.backend=auto: reference for heads of 512"}
    monkeypatch.setattr(core, "passed_over", lambda device, dtype, dim, *_: {"flash": "too wide"} if dim > 256 else
                        {"wide": "too narrow"})
    monkeypatch.setattr(usable, "passed_over", core.passed_over)
    core.choose.cache_clear()
    said = usable.taken("auto", model, torch.device("cuda"), torch.bfloat16, False)
    core.choose.cache_clear()
    assert said == {"flash": "attention.backend=auto: flash for heads of 256",
                    "wide": "attention.backend=auto: wide for heads of 512; not flash: too wide"}
    assert list(usable.taken("flex", model, torch.device("cuda"), torch.bfloat16, False)) == ["flex"]

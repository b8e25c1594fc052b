"""Sums of loss terms against torch's own cross entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from csbp.diffusion.loss import denominator, term_sums
from csbp.models.protocol import LocalBatch, LocalTerm


def term(name: str, index: list[int], labels: list[int], weights: list[float] | None = None,
         masked: list[bool] | None = None) -> LocalTerm:
    count = len(index)
    return LocalTerm(name, torch.tensor(index, dtype=torch.int64), torch.tensor(labels, dtype=torch.int64),
                     torch.tensor([1.0] * count if weights is None else weights, dtype=torch.float64),
                     torch.tensor([True] * count if masked is None else masked, dtype=torch.bool), 1.0)


def batch(rows: int, *terms: LocalTerm) -> LocalBatch:
    row = torch.arange(rows)
    return LocalBatch(row, row, rows, row, row, terms)


def logits(rows: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return (8 * torch.randn(rows, 11, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()


def test_sums_and_gradients_equal_torchs_cross_entropy():
    # Rows 1 and 3 are asked by both terms, row 0 by none.
    diffusion = term("diffusion", [1, 3, 4], [2, 7, 10], [0.5, 3.0, 1.0])
    ar = term("ar", [3, 1, 2], [1, 0, 5])
    ours, plain = logits(5), logits(5)
    sums = term_sums(ours, batch(5, diffusion, ar))
    assert list(sums) == ["diffusion", "ar"]
    total = 0.0
    for t, factor in ((diffusion, 1.0), (ar, 0.25)):
        loss = (F.cross_entropy(plain[t.index], t.labels, reduction="none") * t.weights).sum()
        torch.testing.assert_close(sums[t.name].loss, loss, rtol=1e-12, atol=1e-12)
        total = total + factor * loss
    total.backward()
    (sums["diffusion"].loss + 0.25 * sums["ar"].loss).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-12, atol=1e-12)
    assert plain.grad[0].eq(0).all() and plain.grad[1:].ne(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_logits_are_summed_in_float32(dtype):
    values, t = logits(64, dtype), term("diffusion", list(range(64)), [3] * 64)
    loss = term_sums(values, batch(64, t))["diffusion"].loss
    exact = F.cross_entropy(values.detach().double(), t.labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach().double(), exact, rtol=1e-5, atol=0)
    loss.backward()
    assert values.grad.dtype == dtype and values.grad.isfinite().all()


def test_accuracy_counts_hidden_labels_only():
    values = torch.zeros(4, 11)
    values[0, 3] = values[1, 5] = values[2, 1] = values[3, 2] = 1.0
    t = term("diffusion", [0, 1, 2, 3], [3, 5, 9, 2], masked=[True, False, True, True])
    _, correct, hidden = term_sums(values, batch(4, t))["diffusion"]
    assert (correct.item(), hidden.item()) == (2, 3)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_term_without_entries_is_0_and_still_connected(rows):
    values = logits(rows)
    loss, correct, hidden = term_sums(values, batch(rows, term("diffusion", [], [])))["diffusion"]
    loss.backward()
    assert loss.item() == 0 and correct.item() == hidden.item() == 0
    assert values.grad is not None and values.grad.eq(0).all()


def test_nothing_over_nothing_is_nothing():
    assert 0.0 / denominator(0.0) == 0.0
    assert denominator(7.0) == 7.0

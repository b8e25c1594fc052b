"""Cross entropy in chunks of rows against torch's own of all logits: loss, gradients and counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from csbp.diffusion.loss import (
    Head,
    Losses,
    _compiled,
    _gradient,
    _statistics,
    denominators,
    linear_cross_entropy,
)
from csbp.models.protocol import LocalTerm
from csbp.plan.estimate import logit_rows

ROWS, TOKENS, HIDDEN = 7, 11, 5
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def term(name: str, index: list[int], labels: list[int], weights: list[float] | None = None,
         masked: list[bool] | None = None) -> LocalTerm:
    count = len(index)
    return LocalTerm(name, torch.tensor(index, dtype=torch.int64), torch.tensor(labels, dtype=torch.int64),
                     torch.tensor([1.0] * count if weights is None else weights, dtype=torch.float64),
                     torch.tensor([True] * count if masked is None else masked, dtype=torch.bool), 1.0)


def drawn(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, columns, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()


# Rows 1 and 3 are asked by both terms, row 1 for the same token; row 0 by none; not in ascending order.
TERMS = (term("diffusion", [1, 3, 6, 4], [2, 7, 0, 10], [0.5, 3.0, 2.0, 0.0]), term("ar", [3, 1, 2], [1, 2, 5]))
FACTORS = torch.tensor([0.7, 0.25], dtype=torch.float64)


def loss(rows: Tensor, head: Tensor, terms=TERMS, at_once: int | None = None) -> Losses:
    return linear_cross_entropy(rows, Head(head), terms, FACTORS[:len(terms)], at_once)


def plain(rows: Tensor, head: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(total, sum of each term) from all logits."""
    logits = rows @ head.t()
    sums = [(F.cross_entropy(logits[t.index], t.labels, reduction="none") * t.weights).sum() for t in TERMS]
    return (torch.stack(sums) * FACTORS).sum(), sums


@pytest.mark.parametrize("at_once", [None, 1, 2, 3, ROWS, 100])
def test_any_chunks_have_the_loss_and_the_gradients_of_all_logits(at_once):
    rows, head = drawn(ROWS, HIDDEN, 0), drawn(TOKENS, HIDDEN, 1)
    (3 * loss(rows, head, at_once=at_once).total).backward()  # whoever scales the total scales its gradients
    with torch.no_grad():
        ours = loss(rows, head, at_once=at_once)
    other_rows, other_head = drawn(ROWS, HIDDEN, 0), drawn(TOKENS, HIDDEN, 1)
    total, sums = plain(other_rows, other_head)
    (3 * total).backward()
    torch.testing.assert_close(ours.total, total.detach(), **TIGHT)
    torch.testing.assert_close(ours.numbers[:, 0], torch.stack(sums).detach(), **TIGHT)
    torch.testing.assert_close(rows.grad, other_rows.grad, **TIGHT)
    torch.testing.assert_close(head.grad, other_head.grad, **TIGHT)
    assert rows.grad[0].eq(0).all() and rows.grad[1:4].ne(0).all()


def test_one_weight_for_embedding_and_head():
    """The gradient of the head adds to what the embedding gives the same weight."""
    found = []
    for whole in (False, True):
        weight = drawn(TOKENS, HIDDEN, 1)
        rows = torch.tanh(weight[torch.arange(ROWS)])
        total = plain(rows, weight)[0] if whole else loss(rows, weight, at_once=2).total
        found.append(torch.autograd.grad(total, weight)[0])
    torch.testing.assert_close(*found, **TIGHT)


def test_gradients_that_nobody_wants():
    rows, head = drawn(ROWS, HIDDEN, 0), drawn(TOKENS, HIDDEN, 1)
    loss(rows, head.detach()).total.backward()
    loss(rows.detach(), head).total.backward()
    wanted = torch.autograd.grad(plain(rows, head)[0], (rows, head))
    torch.testing.assert_close((rows.grad, head.grad), wanted, **TIGHT)
    with torch.no_grad():
        assert not loss(rows, head).total.requires_grad


@pytest.mark.parametrize("parts", [2, 4])
def test_tokens_in_parts_are_one_softmax(parts):
    """What the ranks of a tp axis do, one after the other: each with its tokens, and the statistics of all."""
    tokens = 12
    rows, head = drawn(ROWS, HIDDEN, 0), drawn(tokens, HIDDEN, 1)
    total, sums = plain(rows, head)
    wanted = torch.autograd.grad(total, (rows, head))
    pieces, width = head.detach().chunk(parts), tokens // parts
    labels = torch.zeros(2, ROWS, dtype=torch.int64)
    for labels_E, t in zip(labels, TERMS, strict=True):
        labels_E[t.index] = t.labels

    def gather(mine: Tensor) -> Tensor:  # at_once: all rows
        found = [_statistics(rows.detach() @ piece.t(), labels - width * i) for i, piece in enumerate(pieces)]
        for i, one in enumerate(found):
            one[1] += width * i
        assert any(torch.equal(mine, one) for one in found)
        return torch.stack(found)

    row_grads, head_grads = [], []
    for i, piece in enumerate(pieces):
        own_rows, own_head = rows.detach().requires_grad_(), piece.clone().requires_grad_()
        found = linear_cross_entropy(own_rows, Head(own_head, width * i, gather), TERMS, FACTORS)
        torch.testing.assert_close(found.total, total, **TIGHT)
        torch.testing.assert_close(found.numbers, loss(rows, head).numbers, **TIGHT)
        found.total.backward()
        row_grads.append(own_rows.grad)
        head_grads.append(own_head.grad)
    torch.testing.assert_close(sum(row_grads), wanted[0], **TIGHT)
    torch.testing.assert_close(torch.cat(head_grads), wanted[1], **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_rows_are_summed_in_float32(dtype):
    """512 chunks of one row: a gradient of the head that was added up in bfloat16 would be off by percents."""
    count = 512
    rows, head = drawn(count, HIDDEN, 0, dtype), drawn(TOKENS, HIDDEN, 1, dtype)
    one = term("diffusion", list(range(count)), [3] * count)
    found = loss(rows, head, (one,), 1)
    exact_rows, exact_head = (x.detach().double().requires_grad_() for x in (rows, head))
    # Logits and their gradient are rounded to the compute dtype, as those of a layer are.
    logits = (exact_rows @ exact_head.t()).to(dtype).double()
    exact = F.cross_entropy(logits, one.labels, reduction="sum")
    assert found.total.dtype == torch.float32
    torch.testing.assert_close(found.numbers[0, 0], exact.detach(), rtol=1e-3 if dtype == torch.bfloat16 else 1e-5,
                               atol=0)
    (found.total / 0.7).backward()
    exact.backward()
    assert rows.grad.dtype == head.grad.dtype == dtype
    error = (head.grad.double() - exact_head.grad).norm() / exact_head.grad.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_accuracy_counts_hidden_labels_only():
    head = torch.eye(TOKENS, dtype=torch.float64)
    rows = torch.zeros(4, TOKENS, dtype=torch.float64)
    rows[0, 3] = rows[1, 5] = rows[2, 1] = rows[3, 2] = 1.0
    t = term("diffusion", [0, 1, 2, 3], [3, 5, 9, 2], masked=[True, False, True, True])
    assert loss(rows, head, (t,), 3).numbers[0, 1:].tolist() == [2, 3]


@pytest.mark.parametrize("count", [0, 3])
def test_a_term_without_entries_is_0_and_still_connected(count):
    rows, head = drawn(count, HIDDEN, 0), drawn(TOKENS, HIDDEN, 1)
    total, numbers = loss(rows, head, (term("diffusion", [], []),))
    total.backward()
    assert total.item() == 0 and numbers.eq(0).all()
    assert rows.grad is not None and rows.grad.eq(0).all() and head.grad is not None and head.grad.eq(0).all()


def test_what_is_not_finite_is_seen_in_the_loss():
    rows, head = drawn(ROWS, HIDDEN, 0), drawn(TOKENS, HIDDEN, 1)
    with torch.no_grad():
        rows[3, 0] = float("nan")
    assert loss(rows, head).total.isnan()
    with torch.no_grad():
        rows[3, 0] = 0
        head[8, :] = float("inf")
    assert not loss(rows, head).total.isfinite()


def test_no_tensor_of_all_logits():
    """The largest tensor that any operation makes is that of one chunk, or the head's own size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            found = out if isinstance(out, tuple | list) else (out,)
            largest.append(max([x.untyped_storage().nbytes() for x in found if isinstance(x, Tensor)], default=0))
            return out

    rows, head = drawn(600, HIDDEN, 0), drawn(400, HIDDEN, 1)
    everywhere = term("diffusion", list(range(600)), [3] * 600)
    with Watch():
        loss(rows, head, (everywhere,), 10).total.backward()
    assert max(largest) <= 8 * max(10 * 400, 400 * HIDDEN, 600 * 8)


@pytest.mark.parametrize(("vocabulary", "itemsize", "asked", "rows"), [
    (151_936, 2, None, 832), (151_936, 2, 7, 7), (151_936 // 4, 2, None, 3520), (10**9, 4, None, 64)])
def test_rows_at_once(vocabulary, itemsize, asked, rows):
    assert logit_rows(vocabulary, itemsize, asked) == rows


def test_nothing_over_nothing_is_nothing():
    assert denominators(torch.tensor([0.0, 7.0])).tolist() == [1.0, 7.0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled_as_on_a_gpu(dtype):
    """The two passes over a chunk's logits give the same when they are compiled, for any number of rows."""
    weights = torch.tensor([0.5, 2.0], dtype=torch.promote_types(dtype, torch.float32))[:, None]
    for count in (8, 8, 5, 1):
        logits = drawn(count, TOKENS, count, dtype).detach()
        labels = torch.arange(2 * count).reshape(2, count) % (TOKENS + 2) - 1  # some outside
        found = [f(_statistics)(logits, labels) for f in (_compiled, lambda function: function)]
        torch.testing.assert_close(*found)
        args = (logits, found[0][0], labels, weights.expand(2, count))
        torch.testing.assert_close(_compiled(_gradient)(*args), _gradient(*args))

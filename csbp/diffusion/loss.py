"""Cross entropy of a rank's rows, straight from the rows: logits exist for a chunk of rows at a time.

The gradient of a row's loss is known as soon as its logits are, so it is computed with them: neither logits nor
softmax wait for a backward. Legend: E rows with a loss, H hidden channels, V tokens whose logits this rank computes
(of a tp axis: its part), T terms, N entries of a term, n rows of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from csbp.plan.estimate import logit_rows

if TYPE_CHECKING:
    from csbp.models.protocol import LocalTerm


@dataclass(frozen=True)
class Head:
    """The matrix that makes logits of rows, or the part of it that this rank has.

    Attributes:
        weight: [V, H]; gradients flow to it.
        first: the token of its first row.
        gather: stacks a tensor of every rank that has a part, [ranks, ...]; None where the matrix is whole.
    """

    weight: Tensor
    first: int = 0
    gather: Callable[[Tensor], Tensor] | None = None


class Losses(NamedTuple):
    """The terms of one rank's rows.

    Attributes:
        total: scalar, what to go backward from: every term's sum times its factor. Connected to the rows and to the
            head also where no row has a loss.
        numbers: float64 [T, 3], detached: sum of weight x cross entropy in nats, without the factor; entries with a
            hidden label that is the most likely token; entries with a hidden label.
    """

    total: Tensor
    numbers: Tensor


def denominators(counts: Tensor) -> Tensor:
    """What the terms' sums are divided by, from their counts over all packs of the optimizer step.

    Counts are whole numbers. A step whose noise hides nothing has count 0 and sum 0: its loss is 0.
    """
    return counts.clamp(min=1.0)


def linear_cross_entropy(rows_EH: Tensor, head: Head, terms: Sequence[LocalTerm], factors_T: Tensor,
                         rows_at_once: int | None = None) -> Losses:
    """Cross entropy of every term, in float32 (float64 for float64 rows), without the logits of all rows.

    The logits of a row are computed once, whatever the number of terms that ask it. Gradients of the head add up over
    the chunks in float32.

    Args:
        rows_EH: what goes into the head.
        terms: entry i of one asks row ``index[i]``; a term asks a row at most once.
        factors_T: of the terms in the total, on the device of the rows.
        rows_at_once: rows of a chunk; None: as ``plan.estimate.logit_rows`` has it.
    """
    wide = torch.promote_types(rows_EH.dtype, torch.float32)
    labels_TE = torch.zeros(len(terms), len(rows_EH), dtype=torch.int64, device=rows_EH.device)
    weights_TE = labels_TE.to(wide)
    for labels_E, weights_E, term, factor in zip(labels_TE, weights_TE, terms, factors_T, strict=True):
        labels_E.index_copy_(0, term.index, term.labels)
        weights_E.index_copy_(0, term.index, (term.weights * factor).to(wide))
    size = logit_rows(len(head.weight), rows_EH.element_size(), rows_at_once)
    total, nats_TE, best_E = _Loss.apply(rows_EH, head.weight, head, labels_TE, weights_TE, size,
                                         torch.is_grad_enabled())
    numbers = [((nats_E[term.index] * term.weights).sum(dtype=torch.float64),
                ((best_E[term.index] == term.labels) & term.masked).sum(), term.masked.sum())
               for nats_E, term in zip(nats_TE, terms, strict=True)]
    return Losses(total, torch.stack([value.double() for row in numbers for value in row]).view(-1, 3))


class _Loss(torch.autograd.Function):
    """Gives (weighted sum of nats, nats [T, E], most likely tokens [E]); only the first is differentiable."""

    @staticmethod
    def forward(ctx: Any, rows_EH: Tensor, weight_VH: Tensor, head: Head, labels_TE: Tensor, weights_TE: Tensor,
                size: int, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        rows, wide = wanted and ctx.needs_input_grad[0], weights_TE.dtype
        drows = torch.empty_like(rows_EH) if rows else None
        dweight = torch.zeros_like(weight_VH, dtype=wide) if wanted and ctx.needs_input_grad[1] else None
        statistics = _compiled(_statistics) if rows_EH.is_cuda else _statistics
        gradient = _compiled(_gradient) if rows_EH.is_cuda else _gradient
        found = [weights_TE.new_empty(len(labels_TE) + 3, 0)]
        for start in range(0, len(rows_EH), size):
            here = slice(start, start + size)
            rows_nH, labels_Tn = rows_EH[here], labels_TE[:, here] - head.first
            logits_nV = rows_nH @ weight_VH.t()
            found.append(statistics(logits_nV, labels_Tn))
            if head.gather is not None:
                found[-1][1] += head.first
                found[-1] = _joined(head.gather(found[-1]))
            if drows is not None or dweight is not None:
                dlogits_nV = gradient(logits_nV, found[-1][0], labels_Tn, weights_TE[:, here])
                if drows is not None:
                    torch.mm(dlogits_nV, weight_VH, out=drows[here])
                if dweight is not None:
                    _add_product(dweight, dlogits_nV, rows_nH)
        normaliser_E, best_E, _, *picked = torch.cat(found, 1)
        nats_TE = normaliser_E - torch.stack(picked)
        ctx.gradients = drows, None if dweight is None else dweight.to(weight_VH.dtype)
        ctx.mark_non_differentiable(nats_TE, best_E)
        return torch.where(weights_TE == 0, 0.0, nats_TE * weights_TE).sum(), nats_TE, best_E

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so good for one backward
        return (*(None if g is None else g.mul_(dtotal.to(g.dtype)) for g in gradients), *[None] * 5)


def _statistics(logits_nV: Tensor, labels_Tn: Tensor) -> Tensor:
    """[3 + T, n] of rows: log-sum-exp, most likely token (exact below 2^24 tokens), its logit, and the logit of each
    term's label, 0 where that lies outside these tokens."""
    wide_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    top_n, best_n = wide_nV.max(-1)
    normaliser_n = (wide_nV - top_n[:, None]).exp_().sum(-1).log() + top_n
    inside_Tn = (labels_Tn >= 0) & (labels_Tn < wide_nV.shape[1])
    picked_Tn = wide_nV.gather(1, torch.where(inside_Tn, labels_Tn, 0).t()).t()
    return torch.cat([torch.stack([normaliser_n, best_n.to(top_n.dtype), top_n]),
                      torch.where(inside_Tn, picked_Tn, 0.0)])


def _joined(parts_RPn: Tensor) -> Tensor:
    """The statistics of rows from those of each rank's part of the tokens."""
    normaliser_Rn, best_Rn, top_Rn = parts_RPn[:, :3].unbind(1)
    top_n, place_n = top_Rn.max(0)
    return torch.cat([torch.stack([normaliser_Rn.logsumexp(0), best_Rn.gather(0, place_n[None])[0], top_n]),
                      parts_RPn[:, 3:].sum(0)])


def _gradient(logits_nV: Tensor, normaliser_n: Tensor, labels_Tn: Tensor, weights_Tn: Tensor) -> Tensor:
    """d(weighted sum of nats) / d(logits): each row's softmax times its weights, less each weight at its label."""
    wide_nV = logits_nV.to(normaliser_n.dtype)
    slope_nV = (wide_nV - normaliser_n[:, None]).exp_().mul_(weights_Tn.sum(0)[:, None])
    tokens_V = torch.arange(wide_nV.shape[1], device=wide_nV.device)
    for labels_n, weights_n in zip(labels_Tn, weights_Tn, strict=True):
        slope_nV -= torch.where(tokens_V == labels_n[:, None], weights_n[:, None], 0.0)
    return slope_nV.to(logits_nV.dtype)


def _add_product(total_VH: Tensor, left_nV: Tensor, right_nH: Tensor) -> None:
    """total += left^T right, added in the dtype of the total."""
    if total_VH.dtype == left_nV.dtype:
        total_VH.addmm_(left_nV.t(), right_nH)
    elif left_nV.is_cuda:
        torch.addmm(total_VH, left_nV.t(), right_nH, out_dtype=total_VH.dtype, out=total_VH)
    else:  # the CPU has no such product
        total_VH += left_nV.t() @ right_nH


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # One pass over the logits for each, and no copy of them in float32. All chunks but the last have the same size.
    return torch.compile(function)

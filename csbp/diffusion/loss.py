"""Sums of the loss terms over one rank's rows. E rows with logits, V vocabulary, N entries of a term."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from csbp.models.protocol import LocalBatch


class TermSum(NamedTuple):
    """One term on one rank.

    Attributes:
        loss: scalar, sum of weight x cross entropy in nats, not yet divided by the term's denominator.
            Connected to the logits also when the term has no entry here.
        correct: int64 scalar, entries with a hidden label that is the most likely token.
        hidden: int64 scalar, entries with a hidden label.
    """

    loss: Tensor
    correct: Tensor
    hidden: Tensor


def term_sums(logits_EV: Tensor, batch: LocalBatch) -> dict[str, TermSum]:
    """Cross entropy of every term, in float32 (float64 for float64 logits).

    The normaliser of a row is computed once, whatever the number of terms that ask the row.

    Args:
        logits_EV: logits of ``batch.loss_rows``.
        batch: the rank's rows and terms.
    """
    wide_EV = logits_EV if logits_EV.dtype == torch.float64 else logits_EV.float()
    normaliser_E = torch.logsumexp(wide_EV, dim=-1)
    best_E = logits_EV.detach().argmax(dim=-1)
    sums = {}
    for term in batch.terms:
        nats_N = normaliser_E[term.index] - wide_EV[term.index, term.labels]
        right_N = (best_E[term.index] == term.labels) & term.masked
        sums[term.name] = TermSum((nats_N * term.weights.to(wide_EV.dtype)).sum(), right_N.sum(),
                                  term.masked.sum())
    return sums


def denominator(count: float) -> float:
    """What a term's sum is divided by, from its count over all packs of the optimizer step.

    Counts are whole numbers. A step whose noise hides nothing has count 0 and sum 0: its loss is 0.
    """
    return max(count, 1.0)

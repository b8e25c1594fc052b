"""A rank's tensors of one pack: the one place where global rows become local ones."""

from __future__ import annotations

import numpy as np
import torch

from csbp.comm.upload import upload
from csbp.diffusion.layout import LossTerm, StreamLayout
from csbp.models.protocol import LocalBatch, LocalTerm
from csbp.plan.plan import RankRows


def scatter(layout: StreamLayout, rows: RankRows, device: torch.device | str = "cpu") -> LocalBatch:
    """Tokens, positions and loss entries of the rows that a rank holds.

    Args:
        layout: the pack, T clean and M noised rows.
        rows: which of them the rank holds, and in what order; a dummy row (-1) becomes token 0 at position 0
            and no loss term names it.
        device: where the tensors go.
    """
    clean = layout.geometry.num_clean
    held = np.concatenate([rows.clean, np.where(rows.noised < 0, -1, clean + rows.noised)])
    real, safe = held >= 0, np.maximum(held, 0)
    place = np.full(len(layout.tokens) + 1, -1)
    place[held[real]] = np.flatnonzero(real)
    counts = place >= 0
    counts[rows.clean[~rows.answers]] = False  # computed here too, but another rank counts its loss
    mine = [counts[term.rows] for term in layout.terms]
    asked = [place[term.rows[own]] for term, own in zip(layout.terms, mine, strict=True)]
    loss_rows = np.unique(np.concatenate([*asked, np.zeros(0, np.int64)]))

    def local(values: np.ndarray) -> torch.Tensor:
        padded = values if len(values) else np.zeros(1, np.int64)
        return upload(np.where(real, padded[safe], 0).astype(np.int64), device)

    return LocalBatch(
        tokens=local(layout.tokens), positions=local(layout.positions), num_clean=len(rows.clean),
        clean_rows=upload(rows.clean, device), loss_rows=upload(loss_rows, device),
        terms=tuple(_term(term, own, np.searchsorted(loss_rows, at), device)
                    for term, own, at in zip(layout.terms, mine, asked, strict=True)))


def _term(term: LossTerm, own: np.ndarray, index: np.ndarray, device: torch.device | str) -> LocalTerm:
    assert len(np.unique(index)) == len(index), f"{term.name} asks a row twice"
    return LocalTerm(name=term.name, index=upload(index, device), labels=upload(term.labels[own], device),
                     weights=upload(term.weights[own], device), masked=upload(term.masked[own], device),
                     scale=term.scale)

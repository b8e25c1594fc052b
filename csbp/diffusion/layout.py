"""The two streams of one pack, and what is asked of their rows.

Rows are numbered over [clean rows 0..T-1 | noised rows T..T+M-1] wherever one index covers both streams.
Everything is NumPy and the same on every rank; ``plan`` later says which rank takes which row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry


@dataclass(frozen=True)
class LossTerm:
    """One term of the objective: E (row, label) pairs and the number that their weighted sum is divided by.

    Attributes:
        name: "diffusion" or "ar".
        rows: int64 [E], which row's logits (index over both streams). A row may appear in several terms,
            in each once.
        labels: int64 [E].
        weights: float64 [E].
        count: this pack's share of the term's denominator; denominators are summed over the optimizer step.
        scale: the term's factor in the total loss.
        masked: bool [E], True where the label was hidden from the model (for accuracy), all True for "ar".
    """

    name: str
    rows: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    count: float
    scale: float
    masked: np.ndarray


@dataclass(frozen=True)
class StreamLayout:
    """Geometry, tokens and loss of one pack. T clean rows, M noised rows.

    Attributes:
        geometry: what the planner needs.
        tokens: int64 [T + M], x_0 of the clean rows then x_t of the noised rows.
        positions: int64 [T + M], position within the document; a noised row has the position of its text.
        terms: the objective's terms.
        supervised: number of supervised tokens, for metrics.
    """

    geometry: Geometry
    tokens: np.ndarray
    positions: np.ndarray
    terms: tuple[LossTerm, ...]
    supervised: int

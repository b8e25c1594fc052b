"""Document lengths as corpora have them, drawn from a seed: mixtures of lognormal distributions.

The two have the median, mean, 99th percentile, longest document and share of the longest 1% in all attention of the
samples that "Efficient Long-context Language Model Training by Core Attention Disaggregation" (arXiv 2510.18121)
publishes with its code; mixtures were fitted to those numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lognormals:
    """A mixture.

    Attributes:
        parts: (share of the documents, median tokens, standard deviation of the logarithm) each.
        longest: longer ones are cut to this.
    """

    parts: tuple[tuple[float, float, float], ...]
    longest: int

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """int64 [count], tokens of documents."""
        share, median, spread = (np.array(column) for column in zip(*self.parts, strict=True))
        which = random.choice(len(share), count, p=share / share.sum())
        tokens = median[which] * np.exp(spread[which] * random.standard_normal(count))
        return np.clip(np.rint(tokens), 1, self.longest).astype(np.int64)


DISTRIBUTIONS = {
    "pretrain": Lognormals(((0.953, 3170.0, 0.11), (0.047, 7700.0, 1.54)), 125 << 10),
    "prolong": Lognormals(((0.987, 1900.0, 0.87), (0.013, 6000.0, 1.5)), 340 << 10),
}

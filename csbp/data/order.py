"""The order of the samples: a pure function of (seed, epoch), whatever the number of ranks.

Permutations come from the raw 64-bit words of NumPy's Philox, keyed by (purpose, seed, ...) and sorted:
NumPy promises that bit stream for ever, but not that ``Generator.permutation`` stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def permutation(size: int, *key: int | str) -> np.ndarray:
    """int64 [size], a permutation that is a function of the key alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(digest, np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable")  # equal words, however rare, sort alike everywhere


def shares(sizes: Sequence[int], weights: Sequence[float | None]) -> list[int]:
    """How many samples each source gives to one epoch.

    Without weights every sample once. With weights source s gives ``round(w_s / sum(w) * sum(sizes))``, and at
    least one if its weight is not 0; an epoch is then about as long as without. The weights are sound
    (``config.sources.check_weights``).
    """
    given = [w for w in weights if w is not None]
    if not given:
        return list(sizes)
    assert len(given) == len(weights) and sum(given) > 0, "all sources have weights, or none"
    total = sum(sizes)
    return [max(round(w / sum(given) * total), 1) if w > 0 else 0 for w in given]


class SampleOrder:
    """Which sample stands where in each epoch. P samples in all, numbered source after source.

    A weighted source gives its share of every epoch from an endless row of its own permutations, so a small one
    repeats and a large one goes on where it stopped.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float | None], *, seed: int, shuffle: bool) -> None:
        """
        Args:
            sizes: samples of each source; their sum is P.
            weights: ``SourceConfig.weight`` of each.
            seed: of the run.
            shuffle: otherwise every source gives its samples in their own order, source after source.
        """
        self.sizes, self.seed, self.shuffle = list(sizes), seed, shuffle
        self.weighted = any(w is not None for w in weights)
        self.shares = shares(sizes, weights)
        assert all(size or not share for size, share in zip(self.sizes, self.shares, strict=True)), "nothing to draw"
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one epoch."""
        return sum(self.shares)

    def epoch(self, epoch: int) -> np.ndarray:
        """int64 [samples_per_epoch], the samples (0..P-1) of an epoch in their order. The last epoch is kept."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._make(epoch))
        return self._cached[1]

    def _make(self, epoch: int) -> np.ndarray:
        if self.weighted:
            offsets = np.cumsum([0, *self.sizes])
            parts = [self._drawn(s, epoch) + offsets[s] for s in range(len(self.sizes))]
            samples = np.concatenate(parts)
        else:
            samples = np.arange(sum(self.sizes))
        if not self.shuffle:
            return samples
        shuffled: np.ndarray = samples[permutation(len(samples), "epoch", self.seed, epoch)]
        return shuffled

    def _drawn(self, source: int, epoch: int) -> np.ndarray:
        """Places [epoch * share, (epoch + 1) * share) of the source's endless row."""
        size, share = self.sizes[source], self.shares[source]
        if share == 0 or size == 0:
            return np.zeros(0, np.int64)
        begin, end = epoch * share, (epoch + 1) * share
        parts = []
        for lap in range(begin // size, -(-end // size)):
            row = permutation(size, "source", self.seed, source, lap) if self.shuffle else np.arange(size)
            parts.append(row[max(begin - lap * size, 0):end - lap * size])
        return np.concatenate(parts)

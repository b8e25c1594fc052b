"""The one product of ``data/``: documents laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedBatch:
    """One pack of D whole documents, T tokens in all. NumPy, never padded, the same on every rank.

    Attributes:
        tokens: int64 [T].
        document_starts: int64 [D + 1], first token of each document, then T.
        target_mask: bool [T], True where a token is supervised.
        sample_ids: int64 [D], unique in the whole run; they key the noise.
    """

    tokens: np.ndarray
    document_starts: np.ndarray
    target_mask: np.ndarray
    sample_ids: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """int64 [T], position within the document, from 0."""
        return np.arange(len(self.tokens)) - np.repeat(self.document_starts[:-1], np.diff(self.document_starts))


def join(packs: Sequence[PackedBatch]) -> PackedBatch:
    """Packs laid end to end, as one."""
    lengths = np.concatenate([np.diff(pack.document_starts) for pack in packs])
    return PackedBatch(np.concatenate([pack.tokens for pack in packs]),
                       np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
                       np.concatenate([pack.target_mask for pack in packs]),
                       np.concatenate([pack.sample_ids for pack in packs]))


def empty_batch() -> PackedBatch:
    """A pack with no document: what a data-parallel rank runs when the step has fewer packs than ranks."""
    none = np.zeros(0, np.int64)
    return PackedBatch(none, np.zeros(1, np.int64), np.zeros(0, bool), none)

"""From the documents of a corpus to the samples that are trained on: split of the data, and length limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from csbp.data.skips import Skips
from csbp.errors import ConfigError

NO_TARGET = "a piece of a long document without anything to learn"


@dataclass(frozen=True)
class Pieces:
    """P samples as ranges of a corpus's tokens.

    Attributes:
        start, length: int64 [P], ``length`` at least 1.
        parent: int64 [P], the sequence each is cut from.
        targets: int64 [P], supervised tokens, at least 1.
    """

    start: np.ndarray
    length: np.ndarray
    parent: np.ndarray
    targets: np.ndarray


def held_out(name_hash: np.ndarray, fraction: float) -> np.ndarray:
    """bool [N]: whether each name belongs to the held-out share.

    A larger fraction holds out the same names and more.
    """
    held: np.ndarray = name_hash.astype(np.float64) / 2.0**64 < fraction
    return held


def cut_pieces(starts: np.ndarray, target_mask: np.ndarray | None, target_counts: np.ndarray, keep: np.ndarray,
               limit: int, policy: str, name: Callable[[int], str], skips: Skips) -> Pieces:
    """Apply ``data.long_documents``.

    Args:
        starts: int64 [N + 1], where each sequence begins in the corpus.
        target_mask: bool [T] or None (all supervised); target_counts: int64 [N].
        keep: int64, ascending, the sequences to use.
        limit: longest piece in tokens.
        policy: "split" into pieces of ``limit`` and a shorter last one, "truncate" to the first, or "error".
        name: name of a sequence, for messages.
        skips: counts pieces that have lost all their targets.

    Raises:
        ConfigError: a longer sequence under "error", by name and length.
    """
    length = np.diff(starts)[keep]
    long = np.flatnonzero(length > limit)
    if policy == "error" and len(long):
        worst = int(long[np.argmax(length[long])])
        raise ConfigError("data.long_documents", "error",
                          f"{len(long)} documents are longer than {limit} tokens; the longest is "
                          f"{name(int(keep[worst]))} with {length[worst]} tokens; raise data.seq_len or "
                          "data.document_tokens, or choose split or truncate")
    pieces = -(-length // limit) if policy == "split" else np.ones(len(length), np.int64)
    owner = np.repeat(np.arange(len(keep)), pieces)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = starts[:-1][keep][owner] + place * limit
    size = np.minimum(length[owner] - place * limit, limit)
    counts = target_counts[keep][owner]
    cut = length[owner] > limit
    if target_mask is None:
        counts = np.where(cut, size, counts)
    else:
        for i in np.flatnonzero(cut):
            counts[i] = np.count_nonzero(target_mask[start[i]:start[i] + size[i]])
    used = np.flatnonzero(counts > 0)
    if len(used) < len(counts):
        first = int(np.flatnonzero(counts == 0)[0])
        skips.add(NO_TARGET, name(int(keep[owner[first]])), len(counts) - len(used))
    return Pieces(start[used], size[used], keep[owner[used]], counts[used])

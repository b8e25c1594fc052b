"""What a stream of packs draws from: windows of consecutive samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from csbp.data.corpus import Corpus
from csbp.data.order import SampleOrder
from csbp.data.pieces import Pieces, cut_pieces, held_out
from csbp.data.skips import Skips

_CHUNK = 1 << 24  # tokens looked at together when counting


@dataclass(frozen=True)
class Window:
    """W consecutive samples of an epoch.

    Attributes:
        lengths: int64 [W].
        sample_ids: int64 [W], unique in the run.
        read: sample's place in the window -> its tokens [length] and its target mask [length] or None (all).
    """

    lengths: np.ndarray
    sample_ids: np.ndarray
    read: Callable[[int], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class Totals:
    """Size of a split. A stream is not counted through: these are then of its first window (``exact`` False)."""

    documents: int
    samples: int
    tokens: int
    supervised: int
    target_bytes: float
    exact: bool = True
    skipped: list[str] = field(default_factory=list)


class SampleSource(Protocol):
    """Samples in the order of an epoch."""

    @property
    def samples_per_epoch(self) -> int | None:
        """None where it is not known."""
        ...

    def window(self, epoch: int, window: int, size: int) -> Window | None:
        """Samples [window * size, (window + 1) * size) of an epoch, or None past its end."""
        ...

    def totals(self) -> Totals:
        """Documents, samples and tokens of the split."""
        ...

    def token_counts(self, vocabulary: int) -> np.ndarray:
        """int64 [vocabulary], how often each token is a target."""
        ...

    def digest(self) -> str:
        """Differs where the samples or their order differ, as far as that can be known without reading them."""
        ...


@dataclass(frozen=True)
class FixedOrder:
    """The same order in every epoch."""

    samples: np.ndarray

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one epoch."""
        return len(self.samples)

    def epoch(self, epoch: int) -> np.ndarray:
        """int64 [samples_per_epoch]."""
        return self.samples


def select_pieces(corpus: Corpus, *, held: bool, fraction: float, limit: int, policy: str,
                  skips: Skips) -> Pieces:
    """The pieces of a corpus's held-out (or other) documents; ``fraction`` 0 gives all to ``held=False``."""
    keep = np.flatnonzero(held_out(corpus.name_hash, fraction) == held)
    return cut_pieces(corpus.starts, corpus.targets, corpus.target_counts, keep, limit, policy,
                      lambda n: corpus.name(int(corpus.document[n])), skips)


def spread_order(corpora: list[Corpus], pieces: list[Pieces]) -> FixedOrder:
    """An order by a hash of each piece's document name and place: any beginning of it is a fair sample, and it
    changes little when a few documents change."""
    keys = [_mix(c.name_hash[p.parent] + _mix((p.start - c.starts[p.parent]).astype(np.uint64)))
            for c, p in zip(corpora, pieces, strict=True)]
    return FixedOrder(np.argsort(np.concatenate(keys), kind="stable"))


def _mix(words: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014) on uint64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed


class IndexedSamples:
    """Samples of tokenized corpora, read where they lie."""

    def __init__(self, corpora: list[Corpus], pieces: list[Pieces], order: SampleOrder | FixedOrder,
                 skips: Skips) -> None:
        self.corpora, self.pieces, self.order, self.skips = corpora, pieces, order, skips
        self.first = np.cumsum([0, *(len(p.start) for p in pieces)])
        self.length = np.concatenate([p.length for p in pieces])
        self.samples_per_epoch = order.samples_per_epoch

    def window(self, epoch: int, window: int, size: int) -> Window | None:
        """See ``SampleSource``. Sample ids are epoch * samples_per_epoch + place in the order."""
        begin = window * size
        if begin >= self.samples_per_epoch:
            return None
        samples = self.order.epoch(epoch)[begin:begin + size]
        ids = epoch * self.samples_per_epoch + begin + np.arange(len(samples), dtype=np.int64)
        return Window(self.length[samples], ids, lambda i: self._read(int(samples[i])))

    def _read(self, sample: int) -> tuple[np.ndarray, np.ndarray | None]:
        source = int(np.searchsorted(self.first, sample, side="right")) - 1
        piece, corpus = sample - int(self.first[source]), self.corpora[source]
        begin = int(self.pieces[source].start[piece])
        end = begin + int(self.pieces[source].length[piece])
        return corpus.tokens[begin:end], None if corpus.targets is None else corpus.targets[begin:end]

    def totals(self) -> Totals:
        """See ``SampleSource``."""
        documents = sum(len(np.unique(c.document[p.parent])) for c, p in self._pairs())
        supervised = sum(int(p.targets.sum()) for p in self.pieces)
        size = sum(float((c.target_bytes[p.parent] * (p.targets / c.target_counts[p.parent])).sum())
                   for c, p in self._pairs())
        lines = [line for c in self.corpora for line in c.skips.lines()] + self.skips.lines()
        return Totals(documents, len(self.length), int(self.length.sum()), supervised, size, skipped=lines)

    def token_counts(self, vocabulary: int) -> np.ndarray:
        """See ``SampleSource``. Every sample once, whatever the sources' weights."""
        counts = np.zeros(vocabulary, np.int64)
        for corpus, pieces in self._pairs():
            for begin in range(0, len(corpus.tokens), _CHUNK):
                end = min(begin + _CHUNK, len(corpus.tokens))
                used = _covered(pieces, begin, end)
                if corpus.targets is not None:
                    used &= corpus.targets[begin:end]
                counts += np.bincount(corpus.tokens[begin:end][used], minlength=vocabulary)
        return counts

    def document_lengths(self) -> np.ndarray:
        """int64, tokens of the documents that epoch 0 begins, in its order, each before it was cut."""
        order = self.order.epoch(0)
        first = np.concatenate([np.diff(pieces.parent, prepend=-1) != 0 for pieces in self.pieces])
        whole = np.concatenate([np.diff(corpus.starts)[pieces.parent] for corpus, pieces in self._pairs()])
        found: np.ndarray = whole[order][first[order]]
        return found

    def digest(self) -> str:
        """See ``SampleSource``. From the corpora's checksums, the pieces cut from them and the first epoch's order."""
        digest = hashlib.sha256()
        for corpus, pieces in self._pairs():
            for part in (memoryview(corpus.digest.encode()), pieces.start.data, pieces.length.data):
                digest.update(part)
        digest.update(self.order.epoch(0).data)
        return digest.hexdigest()

    def _pairs(self) -> list[tuple[Corpus, Pieces]]:
        return list(zip(self.corpora, self.pieces, strict=True))


def _covered(pieces: Pieces, begin: int, end: int) -> np.ndarray:
    """bool [end - begin], which tokens of a range of the corpus belong to a piece. Pieces are ascending and apart."""
    stop = pieces.start + pieces.length
    inside = slice(np.searchsorted(stop, begin, side="right"), np.searchsorted(pieces.start, end, side="left"))
    change = np.zeros(end - begin + 1, np.int8)
    np.add.at(change, np.maximum(pieces.start[inside], begin) - begin, 1)
    np.add.at(change, np.minimum(stop[inside], end) - begin, -1)
    covered: np.ndarray = np.cumsum(change[:-1], dtype=np.int8).astype(bool)
    return covered

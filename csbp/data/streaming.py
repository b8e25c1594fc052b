"""Samples of streaming datasets: the same windows, tokenized as they come, with nothing kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from csbp.config.schema import DataConfig, SourceConfig
from csbp.data.chat import Sample
from csbp.data.encode import Encoder
from csbp.data.pieces import cut_pieces
from csbp.data.samples import Totals, Window
from csbp.data.skips import Skips
from csbp.data.sources import read_source
from csbp.data.tokenizer import tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_EPOCH_BITS = 40  # sample id = epoch, then the place in the epoch


class StreamedSamples:
    """Samples in the order in which the sources give them.

    Sources with weights are interleaved, a short one starting anew until every one has run out once; without
    weights they follow one another. Windows are cheap to read one after the other; a jump (resuming) reads and
    tokenizes all before it.
    """

    samples_per_epoch: int | None = None

    def __init__(self, sources: list[tuple[str, SourceConfig]], config: DataConfig,
                 tokenizer: PreTrainedTokenizerFast) -> None:
        self.sources, self.config = sources, config
        self.encoder = Encoder(tokenizer, config.append_eos)
        self.skips = Skips()
        self._epoch, self._next = -1, 0
        self._samples: Iterator[tuple[str, Sample]] = iter(())
        self._current: tuple[tuple[int, int, int], Window | None, list[tuple[str, Sample]]] | None = None

    def window(self, epoch: int, window: int, size: int) -> Window | None:
        """See ``SampleSource``."""
        return self._window(epoch, window, size)[0]

    def _window(self, epoch: int, window: int, size: int) -> tuple[Window | None, list[tuple[str, Sample]]]:
        key = (epoch, window, size)
        if self._current is None or self._current[0] != key:
            begin = window * size
            if epoch != self._epoch or self._next > begin:
                self._epoch, self._next, self._samples = epoch, 0, self._read_all()
            for _ in islice(self._samples, begin - self._next):
                pass
            named = list(islice(self._samples, size))
            self._next = begin + len(named)
            self._current = (key, self._as_window(named, (epoch << _EPOCH_BITS) + begin), named)
        return self._current[1], self._current[2]

    @staticmethod
    def _as_window(named: list[tuple[str, Sample]], first_id: int) -> Window | None:
        if not named:
            return None
        samples = [sample for _, sample in named]
        lengths = np.array([len(s.ids) for s in samples], np.int64)
        return Window(lengths, first_id + np.arange(len(samples), dtype=np.int64),
                      lambda i: (samples[i].ids, samples[i].targets))

    def _read_all(self) -> Iterator[tuple[str, Sample]]:
        weights = [source.weight for _, source in self.sources]
        if weights[0] is None:
            for field, source in self.sources:
                yield from self._read_one(field, source)
            return
        active = [s for s, weight in enumerate(weights) if weight]
        readers = {s: self._read_one(*self.sources[s]) for s in active}
        taken, finished = dict.fromkeys(active, 0), set[int]()
        while True:
            due = min(active, key=lambda s: ((taken[s] + 1) / (weights[s] or 1), s))  # furthest behind its share
            sample = next(readers[due], None)
            if sample is None:
                finished.add(due)
                if len(finished) == len(active):
                    return
                readers[due] = self._read_one(*self.sources[due])
                sample = next(readers[due])
            taken[due] += 1
            yield sample

    def _read_one(self, field: str, source: SourceConfig) -> Iterator[tuple[str, Sample]]:
        limit, found = self.config.document_tokens or self.config.seq_len, False
        for record, sample in self.encoder.encode(read_source(source, field, self.skips), field, self.skips):
            for piece in _cut(sample, record.name, limit, self.config.long_documents, self.skips):
                found = True
                yield record.name, piece
        if not found:
            raise self.skips.nothing_left(field, source.path)

    def totals(self) -> Totals:
        """Of the first window, because a stream's end is not known."""
        _, named = self._window(0, 0, self.config.pack_window)
        samples = [sample for _, sample in named]
        supervised = sum(_supervised(s) for s in samples)
        return Totals(len({name for name, _ in named}), len(samples), sum(len(s.ids) for s in samples), supervised,
                      float(sum(s.target_bytes for s in samples)), exact=False, skipped=self.skips.lines())

    def token_counts(self, vocabulary: int) -> np.ndarray:
        """Of the first window."""
        _, named = self._window(0, 0, self.config.pack_window)
        ids = [s.ids if s.targets is None else s.ids[s.targets] for _, s in named]
        return np.bincount(np.concatenate(ids), minlength=vocabulary)

    def digest(self) -> str:
        """Of the settings alone: what a stream will give is not known before it is read."""
        config = self.config
        content = [[asdict(source) for _, source in self.sources], config.document_tokens or config.seq_len,
                   config.long_documents, config.append_eos, tokenizer_digest(self.encoder.tokenizer)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _supervised(sample: Sample) -> int:
    return len(sample.ids) if sample.targets is None else int(sample.targets.sum())


def _cut(sample: Sample, name: str, limit: int, policy: str, skips: Skips) -> Iterator[Sample]:
    if len(sample.ids) <= limit:
        yield sample
        return
    total = _supervised(sample)
    pieces = cut_pieces(np.array([0, len(sample.ids)]), sample.targets, np.array([total]), np.zeros(1, np.int64),
                        limit, policy, lambda _: name, skips)
    for start, length, targets in zip(pieces.start, pieces.length, pieces.targets, strict=True):
        part = slice(start, start + length)
        yield Sample(sample.ids[part], None if sample.targets is None else sample.targets[part],
                     round(sample.target_bytes * targets / total))

"""The one global sequence of packs that a run trains on, and the cursor into it.

``PackStream`` knows nothing of ranks: whoever needs the packs of a step takes them all and keeps its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from csbp.data.batch import PackedBatch
from csbp.data.order import permutation
from csbp.data.packing import pack_documents
from csbp.data.samples import SampleSource, Totals, Window
from csbp.errors import UserError


@dataclass(frozen=True, order=True)
class Cursor:
    """The next pack: number ``pack`` of window ``window`` of epoch ``epoch``. The only state of the data."""

    epoch: int = 0
    window: int = 0
    pack: int = 0

    def to_json(self) -> dict[str, int]:
        """As plain numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Cursor:
        """From what ``to_json`` gave."""
        return cls(int(state["epoch"]), int(state["window"]), int(state["pack"]))


class PackStream:
    """Packs of whole documents, endlessly, as a pure function of the cursor.

    Each epoch's samples are looked at in windows of ``pack_window``; within a window documents are packed best-fit
    decreasing, and the packs are then shuffled, because that packing sorts them by length.
    """

    def __init__(self, samples: SampleSource, *, seq_len: int, pack_window: int, vocabulary: int,
                 shuffle_key: tuple[int | str, ...] | None) -> None:
        """
        Args:
            samples: what is packed.
            seq_len: token budget of a pack.
            pack_window: samples that are packed together.
            vocabulary: length of ``token_counts``.
            shuffle_key: shuffles the packs within each window; None leaves them in the order of their first samples.
        """
        self.samples, self.seq_len, self.pack_window = samples, seq_len, pack_window
        self.vocabulary, self.shuffle_key = vocabulary, shuffle_key
        self._cached: tuple[tuple[int, int], Window, list[np.ndarray]] | None = None

    def first(self) -> Cursor:
        """The beginning of epoch 0."""
        return Cursor()

    def take(self, cursor: Cursor, n: int) -> tuple[list[PackedBatch], Cursor]:
        """The next ``n`` packs and the cursor after them, across windows and epochs."""
        packs: list[PackedBatch] = []
        while len(packs) < n:
            found = self._plan(cursor.epoch, cursor.window)
            if found is None:
                if cursor.window == 0:
                    raise UserError("the data holds no document that can be learnt")
                cursor = Cursor(cursor.epoch + 1)
            elif cursor.pack >= len(found[1]):
                cursor = Cursor(cursor.epoch, cursor.window + 1)
            else:
                packs.append(_batch(found[0], found[1][cursor.pack]))
                cursor = dataclasses.replace(cursor, pack=cursor.pack + 1)
        return packs, cursor

    def head(self, n: int) -> list[PackedBatch]:
        """The first ``n`` packs of epoch 0, or fewer if it has fewer: what an evaluation reads."""
        packs: list[PackedBatch] = []
        window = 0
        while len(packs) < n and (found := self._plan(0, window)) is not None:
            packs += [_batch(found[0], members) for members in found[1][:n - len(packs)]]
            window += 1
        return packs

    def epoch_progress(self, cursor: Cursor) -> float | None:
        """Epochs done, e.g. 1.25; None for a stream of unknown length."""
        total = self.samples.samples_per_epoch
        if total is None:
            return None
        found = self._plan(cursor.epoch, cursor.window)
        if found is None:
            return float(cursor.epoch + 1)
        done = cursor.window * self.pack_window + len(found[0].lengths) * cursor.pack / len(found[1])
        return cursor.epoch + done / total

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits. Two streams with the same give the same packs at every cursor: same documents, tokens,
        targets and order. File names, times and places do not matter. A streaming dataset vouches for its settings
        only."""
        parts = (self.samples.digest(), self.seq_len, self.pack_window, self.shuffle_key)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def totals(self) -> Totals:
        """Documents, samples and tokens of the split."""
        return self.samples.totals()

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text per supervised token: nats per token / ln 2 / this is bits per byte. 0.0 where the
        supervised tokens stand for no text."""
        totals = self.totals
        return totals.target_bytes / max(totals.supervised, 1)

    def token_counts(self) -> np.ndarray:
        """int64 [V], how often each id is a target in the split (V: the tokenizer's ids, without a mask id)."""
        return self.samples.token_counts(self.vocabulary)

    def efficiency(self, windows: int = 4) -> float:
        """Tokens over budget in the packs of the first few windows of epoch 0."""
        plans = [found for w in range(windows) if (found := self._plan(0, w)) is not None]
        packs = sum(len(found[1]) for found in plans)
        return sum(int(found[0].lengths.sum()) for found in plans) / max(packs * self.seq_len, 1)

    def _plan(self, epoch: int, window: int) -> tuple[Window, list[np.ndarray]] | None:
        """A window and its packs (samples' places in the window), or None past the epoch's end. The last is kept."""
        if self._cached is None or self._cached[0] != (epoch, window):
            found = self.samples.window(epoch, window, self.pack_window)
            if found is None:
                return None
            packs = pack_documents(found.lengths, self.seq_len)
            if self.shuffle_key is not None:
                packs = [packs[i] for i in permutation(len(packs), "packs", *self.shuffle_key, epoch, window)]
            self._cached = ((epoch, window), found, packs)
        return self._cached[1], self._cached[2]


def _batch(window: Window, members: np.ndarray) -> PackedBatch:
    read = [window.read(int(i)) for i in members]
    masks = [np.ones(len(tokens), bool) if mask is None else mask for tokens, mask in read]
    return PackedBatch(tokens=np.concatenate([tokens for tokens, _ in read]).astype(np.int64),
                       document_starts=np.cumsum([0, *(len(tokens) for tokens, _ in read)]).astype(np.int64),
                       target_mask=np.concatenate(masks), sample_ids=window.sample_ids[members])

"""Records -> samples of token ids, whatever their format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from csbp.data.boundaries import encode_with_cuts
from csbp.data.chat import NO_BOUNDARY, Sample, chat_samples
from csbp.data.records import Record
from csbp.data.skips import SkipRecord, Skips
from csbp.data.tokenizer import special_ids
from csbp.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BATCH_CHARACTERS = 1 << 20  # texts tokenized in one call, which runs on all cores
EMPTY = "an empty document"


def no_chat_template(field: str) -> ConfigError:
    """For a source of chats, by its dotted name."""
    return ConfigError(f"{field}.format", "messages", "this tokenizer has no chat template; use a chat model's "
                       "tokenizer (data.tokenizer) or a source with format=text or prompt_completion")


class Encoder:
    """Turns records into samples with one tokenizer.

    Plain text and, without a chat template, prompt and completion end with EOS if ``append_eos``; a tokenizer
    that begins every text with BOS has it here too, never as a target.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, append_eos: bool) -> None:
        """
        Raises:
            ConfigError: ``append_eos`` with a tokenizer that has no EOS.
        """
        eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        if append_eos and eos is None:
            raise ConfigError("data.append_eos", True, "this tokenizer has no EOS token; set append_eos=false")
        self.tokenizer = tokenizer
        self.special = special_ids(tokenizer)
        self.tail = [int(eos)] if append_eos and eos is not None else []
        opens_with_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        self.head = [int(bos)] if opens_with_bos and bos is not None else []

    def encode(self, records: Iterable[Record], field: str, skips: Skips) -> Iterator[tuple[Record, Sample]]:
        """Samples in the order of the records; one record may give several, or none (counted in ``skips``).

        Args:
            field: dotted name of the source, for messages.

        Raises:
            ConfigError: chats for a tokenizer without a chat template.
        """
        batch: list[Record] = []
        characters = 0
        for record in records:
            if record.text is not None:
                batch.append(record)
                characters += len(record.text)
            if batch and (record.text is None or characters >= _BATCH_CHARACTERS):
                yield from self._texts(batch, skips)
                batch, characters = [], 0
            if record.text is None:
                yield from self._structured(record, field, skips)
        if batch:
            yield from self._texts(batch, skips)

    def _texts(self, records: list[Record], skips: Skips) -> Iterator[tuple[Record, Sample]]:
        encoded = self.tokenizer([r.text for r in records], add_special_tokens=False, verbose=False,
                                 return_attention_mask=False)["input_ids"]
        for record, ids in zip(records, encoded, strict=True):
            if not ids:
                skips.add(EMPTY, record.name)
                continue
            size = len((record.text or "").encode())
            yield record, self._wrap(ids, None, size)

    def _structured(self, record: Record, field: str, skips: Skips) -> Iterator[tuple[Record, Sample]]:
        try:
            for sample in self._chat(record, field) if self._is_chat(record) else [self._pair(record)]:
                yield record, sample
        except SkipRecord as skip:
            skips.add(skip.reason, f"{record.name}: {skip.detail}" if skip.detail else record.name)

    def _is_chat(self, record: Record) -> bool:
        return record.messages is not None or bool(self.tokenizer.chat_template)

    def _chat(self, record: Record, field: str) -> list[Sample]:
        if not self.tokenizer.chat_template:
            raise no_chat_template(field)
        messages: Any = record.messages
        if messages is None:
            assert record.pair is not None
            messages = [{"role": "user", "content": record.pair[0]}, {"role": "assistant", "content": record.pair[1]}]
        return chat_samples(self.tokenizer, messages, record.tools)

    def _pair(self, record: Record) -> Sample:
        """Prompt and completion laid end to end; the completion (and EOS) is learnt."""
        assert record.pair is not None
        prompt, completion = record.pair
        encoded = encode_with_cuts(self.tokenizer, prompt + completion, [len(prompt)])
        if encoded is None:
            raise SkipRecord(NO_BOUNDARY)
        if len(encoded.ids) + len(self.tail) == encoded.first[0]:
            raise SkipRecord("an empty completion")
        targets = np.arange(len(encoded.ids)) >= encoded.first[0]
        return self._wrap(encoded.ids, targets, len(completion.encode()))

    def _wrap(self, ids: Any, targets: np.ndarray | None, size: int) -> Sample:
        """Adds BOS and EOS."""
        ids_T = np.concatenate([self.head, ids, self.tail]).astype(np.int64)
        if targets is None and not self.head:
            return Sample(ids_T, None, size)
        body = np.ones(len(ids), bool) if targets is None else targets
        head, tail = np.zeros(len(self.head), bool), np.ones(len(self.tail), bool)
        return Sample(ids_T, np.concatenate([head, body, tail]), size)

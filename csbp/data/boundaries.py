"""Tokenizing a whole text once, and finding the token with which each answer begins.

A generating model is given the tokens of the prompt and appends to them, so a token may never lie across
the place where an answer begins. It can: GPT-like tokenizers join the newline that ends a prompt with a
newline that begins an answer. Such a text is cut there and its pieces are tokenized apart, as happens in
generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from csbp.data.tokenizer import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Encoded:
    """T tokens of a text, A answers.

    Attributes:
        ids: int64 [T].
        char_start, char_end: int64 [T], the characters that each token covers.
        special: bool [T].
        first: the index of the first token of each answer.
    """

    ids: np.ndarray
    char_start: np.ndarray
    char_end: np.ndarray
    special: np.ndarray
    first: tuple[int, ...]


def encode_with_cuts(tokenizer: PreTrainedTokenizerFast, text: str, starts: Sequence[int]) -> Encoded | None:
    """Tokenize ``text`` (no special tokens added) so that a token begins at each of ``starts``.

    Args:
        starts: ascending character positions where answers begin.

    Returns:
        None where even the pieces do not give the text back, as with tokenizers that put a space before a text.
    """
    whole = _encode(tokenizer, text, 0)
    first = [_token_at(tokenizer, whole, text, start) for start in starts]
    if None not in first:
        return _join([whole], first)
    cuts = [0, *(start for start, index in zip(starts, first, strict=True) if index is None), len(text)]
    pieces = [_encode(tokenizer, text[a:b], a) for a, b in zip(cuts, cuts[1:], strict=False)]
    begins = dict(zip(cuts, np.cumsum([0, *(len(p.ids) for p in pieces)]).tolist(), strict=True))
    joined = _join(pieces, ())
    if _decode(tokenizer, joined) != _decode(tokenizer, whole):
        return None
    found = [begins[s] if s in begins else _token_at(tokenizer, joined, text, s) for s in starts]
    return _join([joined], found) if None not in found else None


def _encode(tokenizer: PreTrainedTokenizerFast, text: str, offset: int) -> Encoded:
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(out["input_ids"], np.int64)
    spans = np.array(out["offset_mapping"], np.int64).reshape(-1, 2) + offset
    return Encoded(ids, spans[:, 0], spans[:, 1], np.isin(ids, list(special_ids(tokenizer))), ())


def _join(pieces: list[Encoded], first: Sequence[int | None]) -> Encoded:
    ids, start, end, special = (np.concatenate([getattr(p, name) for p in pieces])
                                for name in ("ids", "char_start", "char_end", "special"))
    return Encoded(ids, start, end, special, tuple(int(i) for i in first if i is not None))


def _token_at(tokenizer: PreTrainedTokenizerFast, encoded: Encoded, text: str, start: int) -> int | None:
    """Index of the token that begins at ``start``: the prompt tokenized alone must be a prefix of the whole.

    Offsets are not asked, because some tokenizers trim spaces off them. Added tokens are split off before
    anything else, so the comparison may begin at the last special one before ``start``.
    """
    before = np.flatnonzero(encoded.special & (encoded.char_start < start))
    for token in ([int(before[-1])] if len(before) else []) + [0]:
        begin = int(encoded.char_start[token]) if token else 0
        prompt = tokenizer(text[begin:start], add_special_tokens=False, verbose=False)["input_ids"]
        if encoded.ids[token:token + len(prompt)].tolist() == prompt:
            return token + len(prompt)
    return None


def _decode(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> str:
    return str(tokenizer.decode(encoded.ids.tolist(), clean_up_tokenization_spaces=False))

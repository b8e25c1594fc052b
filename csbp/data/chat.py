"""A conversation as token ids with the assistant's tokens as targets, by the tokenizer's own chat template.

Stock templates do not mark what the model writes, so it is found by comparing renderings: for the assistant
turn i, ``render(turns before i, with the generation prompt)`` is what the model is given and
``render(turns up to i)`` begins with it; the difference, up to and including the end-of-turn token, is what
the model must write. Templates with ``{% generation %}`` tags say it themselves and are believed.

Some templates rewrite earlier turns (they drop old reasoning), so that an answer is written in one text and
later read in another. Each answer is therefore learnt in the longest rendering that still begins with the
very text it was written in: one sample for a whole conversation if nothing is rewritten, else one for each
turn that is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from csbp.data.boundaries import Encoded, encode_with_cuts
from csbp.data.skips import SkipRecord
from csbp.data.tokenizer import special_strings
from csbp.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

NO_ANSWER = "a conversation without an assistant turn that can be learnt"
REFUSED = "the chat template refuses the conversation"
NO_PROMPT = "an answered turn does not begin with the template's generation prompt"
NO_BOUNDARY = "no token boundary where an answer begins"

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One sample of T tokens.

    Attributes:
        ids: int64 [T].
        targets: bool [T], or None where every token is one.
        target_bytes: length in UTF-8 of the text of the targets, special tokens counting nothing.
    """

    ids: np.ndarray
    targets: np.ndarray | None
    target_bytes: int


@dataclass(frozen=True)
class _Answer:
    """Turn i: ``text`` is the rendering up to it, of which [start, end) in characters is the model's."""

    turn: int
    text: str
    start: int
    end: int


def has_generation_tags(tokenizer: PreTrainedTokenizerFast, tools: Sequence[Any] | None = None) -> bool:
    """Whether the chat template marks the assistant's text itself.

    Raises:
        ConfigError: the tokenizer has several templates, and none for this.
    """
    try:
        return bool(_GENERATION_TAG.search(tokenizer.get_chat_template(None, _or_none(tools))))
    except ValueError as error:
        why = f"no chat template can be chosen: {error}"
        raise ConfigError("data.tokenizer", tokenizer.name_or_path, why) from error


def chat_samples(tokenizer: PreTrainedTokenizerFast, messages: Messages,
                 tools: Sequence[Any] | None = None) -> list[Sample]:
    """The samples of one conversation, in the order of their last turns.

    A sample ends with its last target: what the template writes after it (a newline, say) is nothing that the
    model is ever given, and would show a noised block where the answer stops.

    Args:
        tokenizer: with a chat template.
        messages: turns with ``role`` and ``content``; tool calls and tool answers pass through to the template.
        tools: tool schemas for the template.

    Returns:
        at least one sample, each with at least one target.

    Raises:
        SkipRecord: nothing of the conversation can be learnt, and why.
    """
    def render(turns: Messages, prompt: bool) -> str:
        return str(_apply_template(tokenizer, turns, tools, tokenize=False, add_generation_prompt=prompt))

    if has_generation_tags(tokenizer, tools):
        found = _tagged_samples(tokenizer, messages, tools, render)
    else:
        found = _compared_samples(tokenizer, messages, render)
    if not found:
        raise SkipRecord(NO_ANSWER)
    return found


Render = Callable[[Messages, bool], str]


def _apply_template(tokenizer: PreTrainedTokenizerFast, turns: Messages, tools: Sequence[Any] | None,
                    **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(turns), tools=_or_none(tools), **options)
    except Exception as error:  # a template is a program: its own checks, and whatever its expressions raise
        raise SkipRecord(REFUSED, f"{type(error).__name__}: {error!s:.200}") from error


def _compared_samples(tokenizer: PreTrainedTokenizerFast, messages: Messages, render: Render) -> list[Sample]:
    ends = special_strings(tokenizer)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    answers = [_answer(messages, i, render, ends) for i in turns]  # turn 0 opens the chat: nobody asked for it
    groups = _group([a for a in answers if a.end > a.start])
    return [_sample(tokenizer, group) for group in groups]


def _answer(messages: Messages, turn: int, render: Render, ends: tuple[str, ...]) -> _Answer:
    prompt, text = render(messages[:turn], True), render(messages[:turn + 1], False)
    if not text.startswith(prompt):
        raise SkipRecord(NO_PROMPT, f"{prompt[-40:]!r} against {text[max(len(prompt) - 40, 0):len(prompt) + 20]!r}")
    closed = text.rstrip()
    return _Answer(turn, text, len(prompt), len(closed) if closed.endswith(ends) else len(text))


def _group(answers: list[_Answer]) -> list[list[_Answer]]:
    """Answers that share a rendering, each group ending with the answer whose rendering it is."""
    groups: list[list[_Answer]] = []
    for answer in reversed(answers):
        if groups and groups[-1][-1].text.startswith(answer.text[:answer.end]):
            groups[-1].insert(0, answer)
        else:
            groups.append([answer])
    return groups[::-1]


def _sample(tokenizer: PreTrainedTokenizerFast, group: list[_Answer]) -> Sample:
    encoded = encode_with_cuts(tokenizer, group[-1].text, [a.start for a in group])
    if encoded is None:
        raise SkipRecord(NO_BOUNDARY, repr(group[-1].text[max(group[-1].start - 20, 0):group[-1].start + 20]))
    targets = np.zeros(len(encoded.ids), bool)
    for answer, first in zip(group, encoded.first, strict=True):
        targets[first:_last(encoded, answer.end)] = True
    return _finish(tokenizer, encoded.ids, targets)


def _last(encoded: Encoded, end: int) -> int:
    """Index past the last token of the text before character ``end``."""
    last = int(np.searchsorted(encoded.char_start, end, side="left"))
    straddles = last > 0 and encoded.char_end[last - 1] > end and not encoded.special[last - 1]
    return last - 1 if straddles else last


def _tagged_samples(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Sequence[Any] | None,
                    render: Render) -> list[Sample]:
    """By the template's own tags; an earlier turn counts only in a rendering that has not rewritten it."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = {i: render(messages[:i + 1], False) for i in turns}
    groups = _group([_Answer(i, texts[i], 0, len(texts[i].rstrip())) for i in turns])
    samples = []
    for group in groups:
        first, last = group[0].turn, group[-1].turn
        rendered = _apply_template(tokenizer, messages[:last + 1], tools, tokenize=True, return_dict=True,
                                   return_assistant_tokens_mask=True,
                                   tokenizer_kwargs={"return_offsets_mapping": True})
        ids, targets = np.array(rendered["input_ids"]), np.array(rendered["assistant_masks"], bool)
        if group is not groups[0]:  # earlier answers are learnt in samples of their own
            before = len(render(messages[:first], False))
            targets &= np.array([start for start, _ in rendered["offset_mapping"]]) >= before
        if targets.any():
            samples.append(_finish(tokenizer, ids, targets))
    return samples


def _finish(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray, targets: np.ndarray) -> Sample:
    length = int(np.flatnonzero(targets)[-1]) + 1
    ids, targets = ids[:length].astype(np.int64), targets[:length]
    return Sample(ids, targets, target_bytes(tokenizer, ids[targets]))


def target_bytes(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray) -> int:
    """Length in UTF-8 of the text of some tokens, special ones left out."""
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(str(text).encode())


def _or_none(tools: Sequence[Any] | None) -> list[Any] | None:
    return list(tools) if tools else None

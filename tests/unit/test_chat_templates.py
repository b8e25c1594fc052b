"""Assistant-only targets by the stock Qwen templates: exactly the answer's tokens, never none in silence."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from data_kit import TEMPLATES, qwen_like, with_template

from csbp.data.chat import NO_ANSWER, NO_PROMPT, REFUSED, Sample, chat_samples
from csbp.data.skips import SkipRecord
from csbp.errors import ConfigError

USER, ASKED = {"role": "user", "content": "Hi"}, {"role": "user", "content": "sum?"}
HELLO = {"role": "assistant", "content": "Hello!"}
FIVE = {"role": "assistant", "content": "five"}
SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"


def shown(sample: Sample, tokenizer: Any) -> str:
    """The sample's text with its targets in «»."""
    assert sample.targets is not None and len(sample.targets) == len(sample.ids)
    edges = np.diff(np.concatenate([[False], sample.targets, [False]]).astype(int))
    text, last = "", 0
    for place in np.flatnonzero(edges):
        text += tokenizer.decode(sample.ids[last:place]) + ("«" if edges[place] > 0 else "»")
        last = int(place)
    return text + tokenizer.decode(sample.ids[last:])


def samples(template: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[str]:
    tokenizer = qwen_like(template)
    return [shown(s, tokenizer) for s in chat_samples(tokenizer, messages, tools)]


def test_qwen2_5_one_turn() -> None:
    assert samples("qwen2_5", [USER, HELLO]) == [
        SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello!<|im_end|>»"]


def test_qwen2_5_keeps_a_conversation_in_one_sample() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert samples("qwen2_5", [system, USER, HELLO, ASKED, FIVE, USER]) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello!<|im_end|>»\n<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n«five<|im_end|>»"]


def test_qwen3_rewrites_history_so_every_turn_is_a_sample() -> None:
    thinks = {"role": "assistant", "content": "<think>\nsay hi\n</think>\n\nHello!"}
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    again = "<|im_end|>\n<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n"
    assert samples("qwen3", [USER, thinks, ASKED, FIVE]) == [
        turn + "«<think>\nsay hi\n</think>\n\nHello!<|im_end|>»",
        turn + "Hello!" + again + "«<think>\n\n</think>\n\nfive<|im_end|>»"]


def test_qwen3_reasoning_may_have_a_field_of_its_own() -> None:
    split = {"role": "assistant", "content": "Hello!", "reasoning_content": "say hi"}
    whole = {"role": "assistant", "content": "<think>\nsay hi\n</think>\n\nHello!"}
    assert samples("qwen3", [USER, split]) == samples("qwen3", [USER, whole])


def test_qwen3_keeps_reasoning_between_tool_calls_in_one_sample() -> None:
    """Reasoning since the last question stays, so both answers are learnt where they stand."""
    call = {"role": "assistant", "content": "<think>\nadd\n</think>\n\n",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    answer = {"role": "assistant", "content": "<think>\nok\n</think>\n\nfive"}
    (text,) = samples("qwen3", [ASKED, call, {"role": "tool", "content": "5"}, answer])
    assert text == (
        "<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n«<think>\nadd\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "«<think>\nok\n</think>\n\nfive<|im_end|>»")


def test_qwen2_5_tool_calls_and_schemas_pass_through() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    schema = {"type": "function", "function": {"name": "add"}}
    (text,) = samples("qwen2_5", [ASKED, call, {"role": "tool", "content": "5"}, FIVE], [schema])
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in text
    assert ('«<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>»\n<|im_start|>user\n'
            "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n«five<|im_end|>»") in text


@pytest.mark.parametrize(("template", "target"), [("qwen2_5", "<|im_end|>"),
                                                  ("qwen3", "<think>\n\n</think>\n\n<|im_end|>")])
def test_an_empty_answer_still_ends_its_turn(template: str, target: str) -> None:
    (text,) = samples(template, [USER, {"role": "assistant", "content": ""}])
    assert text.endswith(f"<|im_start|>assistant\n«{target}»")


@pytest.mark.parametrize("content", ["\nfive", "\n\n\nfive", " five", "é😀 中文", "five\n\n", "<|im_start|>", "\n"])
def test_the_prompt_is_tokenized_as_in_generation(content: str) -> None:
    """An answer that begins with a newline would share a token with the newline that ends the prompt."""
    tokenizer = qwen_like("qwen2_5")
    messages = [USER, {"role": "assistant", "content": content}]
    (sample,) = chat_samples(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert sample.targets is not None
    first = int(np.argmax(sample.targets))
    assert sample.ids[:first].tolist() == prompt and sample.targets[first:].all()
    assert tokenizer.decode(sample.ids[first:]) == content + "<|im_end|>"
    written = tokenizer.decode(sample.ids[first:], skip_special_tokens=True)
    assert sample.target_bytes == len(written.encode())


def test_only_a_straddled_answer_is_cut_from_the_whole_text() -> None:
    tokenizer = qwen_like("qwen2_5")
    (plain,) = chat_samples(tokenizer, [USER, HELLO])
    text = tokenizer.apply_chat_template([USER, HELLO], tokenize=False)
    assert plain.ids.tolist() == tokenizer(text)["input_ids"][:len(plain.ids)]
    (mixed,) = chat_samples(tokenizer, [USER, {"role": "assistant", "content": "\nHello!"}, ASKED, FIVE])
    assert shown(mixed, tokenizer).endswith("«\nHello!<|im_end|>»\n<|im_start|>user\nsum?<|im_end|>\n"
                                            "<|im_start|>assistant\n«five<|im_end|>»")


CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
          "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def test_generation_tags_are_believed() -> None:
    tokenizer = with_template(qwen_like("qwen2_5"), CHATML)
    (sample,) = chat_samples(tokenizer, [USER, HELLO, ASKED, FIVE])
    assert shown(sample, tokenizer) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello!<|im_end|>»\n"
        "<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n«five<|im_end|>»")


def test_generation_tags_with_a_rewritten_history() -> None:
    """Old answers in capitals: learnt as they were written, read as they are rewritten."""
    rewriting = CHATML.replace("{{ m.content + '<|im_end|>' }}{% endgeneration",
                               "{{ (m.content if loop.last else m.content|upper) + '<|im_end|>' }}{% endgeneration")
    tokenizer = with_template(qwen_like("qwen2_5"), rewriting)
    first, second = (shown(s, tokenizer) for s in chat_samples(tokenizer, [USER, HELLO, ASKED, FIVE]))
    assert first.endswith("assistant\n«Hello!<|im_end|>»")
    assert second.endswith("assistant\nHELLO!<|im_end|>\n<|im_start|>user\nsum?<|im_end|>\n"
                           "<|im_start|>assistant\n«five<|im_end|>»")


def test_a_template_without_an_end_token_teaches_the_whole_turn() -> None:
    plain = ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    tokenizer = with_template(qwen_like("qwen2_5"), plain)
    (sample,) = chat_samples(tokenizer, [USER, HELLO, ASKED, FIVE])
    assert shown(sample, tokenizer) == "user: Hi\nassistant: «Hello!\n»user: sum?\nassistant: «five\n»"


def test_a_token_shared_with_the_next_turn_is_not_learnt() -> None:
    """Without an end token the last newline of an answer joins the newline that separates it from the next turn."""
    bare = ("{% for m in messages %}{{ ('' if loop.first else '\n') + m.role + ': ' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}")
    tokenizer = with_template(qwen_like("qwen2_5"), bare)
    (sample,) = chat_samples(tokenizer, [USER, {"role": "assistant", "content": "Hello\n"}, ASKED, FIVE])
    assert shown(sample, tokenizer) == "user: Hi\nassistant: «Hello»\n\nuser: sum?\nassistant: «five»"


@pytest.mark.parametrize(("messages", "reason"), [
    ([USER], NO_ANSWER), ([], NO_ANSWER), ([HELLO], NO_ANSWER), ([HELLO, USER], NO_ANSWER),
    ([USER, {"role": "assistant", "content": 5}], REFUSED)])
def test_what_cannot_be_learnt_is_said(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(SkipRecord) as caught:
        chat_samples(qwen_like("qwen2_5"), messages)
    assert caught.value.reason == reason


@pytest.mark.parametrize("body", ["1 / 0", "messages.nothing.there", "'a' + 1", "range(10 ** 9)",
                                  "raise_exception('no')", "'%d' % 'a'", "'a' ~"])
@pytest.mark.parametrize("tags", ["", "{% generation %}{% endgeneration %}"])
def test_whatever_a_template_raises_refuses_the_conversation(body: str, tags: str) -> None:
    tokenizer = with_template(qwen_like("qwen2_5"), "{{ " + body + " }}" + tags)
    with pytest.raises(SkipRecord) as caught:
        chat_samples(tokenizer, [USER, HELLO])
    assert caught.value.reason == REFUSED and re.match(r"\w*(Error|Exception): ", caught.value.detail)


def test_several_templates_without_a_default_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer=.*no chat template can be chosen"):
        chat_samples(with_template(qwen_like("qwen2_5"), {"a": CHATML, "b": CHATML}), [USER, HELLO])


def test_a_greeting_is_context_only() -> None:
    (text,) = samples("qwen2_5", [HELLO, ASKED, FIVE])
    assert text == (SYSTEM + "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nsum?<|im_end|>\n"
                    "<|im_start|>assistant\n«five<|im_end|>»")


def test_a_template_that_forces_other_words_is_refused() -> None:
    forced = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "").replace(
        "'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\nSure: ' }}{% endif")
    with pytest.raises(SkipRecord) as caught:
        chat_samples(with_template(qwen_like("qwen2_5"), forced), [USER, HELLO])
    assert caught.value.reason == NO_PROMPT and "Sure" in caught.value.detail


def test_the_fixtures_are_the_stock_templates() -> None:
    import hashlib

    digests = {p.stem: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in TEMPLATES.glob("*.jinja")}
    assert digests == {"qwen2_5": "cd8e9439f0570856", "qwen3": "a55ee1b1660128b7"}
    assert not any("generation %}" in p.read_text() for p in TEMPLATES.glob("*.jinja"))


def test_chats_without_a_template_are_an_error() -> None:
    from csbp.data.encode import Encoder
    from csbp.data.records import Record
    from csbp.data.skips import Skips

    encoder = Encoder(qwen_like(None), append_eos=True)
    with pytest.raises(ConfigError, match=r"data.sources.0.format.*no chat template"):
        list(encoder.encode([Record("a", messages=(USER, HELLO))], "data.sources.0", Skips()))

"""Generation with a key/value cache against a loop that recomputes the whole text in every pass.

The loop runs the stock model with its stock attention and a dense mask; it shares no code with the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, nn

from csbp.diffusion.random import Purpose, uniform
from csbp.diffusion.sampler import BlockSampler, SamplerSettings, fill_block, generate, generate_blocks
from csbp.errors import ConfigError, UserError
from csbp.models.registry import get_adapter
from csbp.plan.geometry import Geometry, LayerKind

VOCAB, MASK, WINDOW = 40, 39, 5
ADAPTER = get_adapter("qwen3")


def tiny(window: bool) -> tuple[nn.Module, nn.Module]:
    """(csbp's model, the stock one with the same weights); every second layer has a window if asked."""
    shape: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, attention_dropout=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    if window:
        shape |= dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1,
                      layer_types=["full_attention", "sliding_attention"])
    ours, stock = (ADAPTER.build(None, shape, torch.float64).eval() for _ in range(2))
    ours.load_state_dict(oracle.tiny_model(vocab=VOCAB).state_dict())
    stock.load_state_dict(ours.state_dict())
    stock.set_attn_implementation("sdpa")
    return ours, stock


@pytest.fixture(autouse=True)
def _exact(exact_norms: None) -> Iterator[None]:
    yield


def recomputed(stock: nn.Module, text: list[int], block: list[int], settings: SamplerSettings) -> Tensor:
    """Logits [text + block, V] from scratch."""
    clean, rows = len(text), len(text) + len(block)
    cells = np.append(np.arange(0, clean, settings.block_size), clean)
    geometry = Geometry(np.array([0, clean]), cells, np.array([0]), np.array([-1]), np.array([clean]),
                        np.array([0, len(block)]))
    stream = settings.clean_stream
    kinds = {"full_attention": LayerKind("full", stream),
             "sliding_attention": LayerKind("sliding", stream, window=WINDOW)}
    masks = {name: torch.from_numpy(oracle.dense_mask(geometry, kind))[None, None] for name, kind in kinds.items()}
    with torch.no_grad():
        return stock(input_ids=torch.tensor([text + block]), position_ids=torch.arange(rows)[None],
                     attention_mask=masks).logits[0]


def uncached(stock: nn.Module, prompt: list[int], new_tokens: int, settings: SamplerSettings,
             eos: int | None = None) -> tuple[list[int], list[Tensor]]:
    """(the continuation, the logits of the hidden slots in every pass)."""
    size, text, passes = settings.block_size, list(prompt), []
    while True:
        start = len(text) // size * size
        block = text[start:] + [MASK] * (size - len(text[start:]))
        count = 0
        while MASK in block:
            logits = recomputed(stock, text[:start], block, settings)
            hidden = [i for i, token in enumerate(block) if token == MASK]
            logits = logits[[start + i - settings.label_shift for i in hidden]]
            passes.append(logits.clone())
            logits[:, MASK] = -math.inf
            chosen = []
            for slot, row in zip(hidden, logits, strict=True):
                probability = (row / (settings.temperature or 1.0)).softmax(0)
                token = int(probability.argmax())
                if settings.temperature:
                    u = uniform(settings.seed, count, 0, start // size, slot, Purpose.TOKEN)
                    token = next(i for i in range(VOCAB) if probability[:i + 1].sum() > u)
                chosen.append((float(probability[token]), slot, token))
            best = max(probability for probability, _, _ in chosen)
            for probability, slot, token in chosen:
                if probability >= settings.threshold or probability == best:
                    block[slot] = token
            count += 1
        text = text[:start] + block
        new = text[len(prompt):][:new_tokens]
        if eos in new:
            return new[:new.index(eos) + 1], passes
        if len(new) == new_tokens:
            return new, passes


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collects the hidden slots' logits of every denoising pass of the sampler."""
    seen: list[Tensor] = []
    choose = BlockSampler._choose

    def spy(self: BlockSampler, logits: Tensor, *args: Any) -> Any:
        seen.append(logits.clone())
        return choose(self, logits, *args)

    monkeypatch.setattr(BlockSampler, "_choose", spy)
    return seen


STREAMS = [("block_causal", False), ("token_causal", False), ("token_causal", True), ("block_causal", True)]
DRAWS = [(10, 4, 0.0, 0.4), (5, 8, 1.3, 0.2), (3, 4, 0.7, 0.4), (8, 4, 0.0, 2.0), (6, 1, 0.0, 0.9)]


@pytest.mark.parametrize("prompt_length, size, temperature, threshold, stream, shift, window", [
    pytest.param(*draw, *stream, window, marks=() if (i, window) == (j % 2, j > 1) else pytest.mark.slow)
    for i, draw in enumerate(DRAWS) for j, stream in enumerate(STREAMS) for window in (False, True)])
def test_cached_equals_uncached(monkeypatch, window, stream, shift, prompt_length, size, temperature, threshold):
    ours, stock = tiny(window)
    settings = SamplerSettings(size, MASK, stream, shift, threshold, temperature, seed=11)
    prompt = np.random.default_rng(prompt_length).integers(0, MASK, prompt_length).tolist()
    expected, expected_logits = uncached(stock, prompt, 17, settings)
    seen = recorded(monkeypatch)
    assert generate(ours, ADAPTER, prompt, block_size=size, mask_token_id=MASK, clean_stream=stream,
                    label_shift=shift, max_new_tokens=17, threshold=threshold, temperature=temperature,
                    seed=11) == expected
    assert len(seen) == len(expected_logits)
    for a, b in zip(seen, expected_logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def settings_of(**changes: Any) -> SamplerSettings:
    return SamplerSettings(**{"block_size": 4, "mask_token_id": MASK, "threshold": 0.4, **changes})


def test_an_empty_prompt_starts_from_nothing_and_is_refused_where_labels_are_shifted():
    ours, stock = tiny(False)
    expected, _ = uncached(stock, [], 8, settings_of())
    assert generate(ours, ADAPTER, [], block_size=4, mask_token_id=MASK, threshold=0.4, max_new_tokens=8) == expected
    with pytest.raises(ConfigError, match="prompt"):
        generate(ours, ADAPTER, [], block_size=4, mask_token_id=MASK, label_shift=True)
    with pytest.raises(ValueError, match="label_shift"):
        fill_block(ours, ADAPTER, [], [MASK, 1], settings_of(label_shift=True))


def test_generation_ends_with_the_first_eos():
    ours, stock = tiny(False)
    prompt = [1, 2, 3, 4, 5, 6]
    whole, _ = uncached(stock, prompt, 30, settings_of())
    eos = whole[13]
    short, _ = uncached(stock, prompt, 30, settings_of(), eos=eos)
    assert short == whole[:whole.index(eos) + 1] and len(short) < len(whole)
    blocks = list(generate_blocks(ours, ADAPTER, prompt, settings_of(), eos_token_id=eos, max_new_tokens=30))
    assert [token for block in blocks for token in block] == short
    assert len(blocks[0]) == 2 and all(len(block) <= 4 for block in blocks)  # the prompt leaves two slots


def test_the_mask_is_never_generated():
    ours, _ = tiny(False)
    with torch.no_grad():
        ours.lm_head.weight[MASK] *= 100  # by far the most and the least likely token
    for temperature in (0.0, 1.0):
        new = generate(ours, ADAPTER, [1, 2, 3], block_size=4, mask_token_id=MASK, temperature=temperature,
                       max_new_tokens=12)
        assert len(new) == 12 and MASK not in new


@pytest.mark.slow
def test_drawn_tokens_follow_seed_and_distribution():
    ours, _ = tiny(False)

    def draw(seed: int) -> list[int]:
        return generate(ours, ADAPTER, [1, 2, 3, 4], block_size=1, mask_token_id=MASK, temperature=2.0, seed=seed,
                        max_new_tokens=1)

    logits = []
    sampler = BlockSampler(ours, ADAPTER, settings_of(block_size=1))
    sampler.append([1, 2, 3, 4])
    logits = sampler._hidden_logits(np.array([MASK]), np.array([0]))[0].clone()
    logits[MASK] = -math.inf
    probability = (logits / 2.0).softmax(0).numpy()
    assert draw(5) == draw(5)
    counts = np.bincount([draw(seed)[0] for seed in range(400)], minlength=VOCAB)
    spread = 5 * np.sqrt(400 * probability * (1 - probability)) + 1
    assert (np.abs(counts - 400 * probability) <= spread).all() and (counts > 0).sum() > 5


def test_fill_block_keeps_what_is_there_and_takes_one_pass_for_each_hidden_token(monkeypatch):
    ours, stock = tiny(False)
    context, noised = [5, 6, 7, 8, 9, 10, 11, 12], [MASK, 3, MASK]  # the short last block of a text
    seen = recorded(monkeypatch)
    filled = fill_block(ours, ADAPTER, context, noised, settings_of(threshold=math.inf))
    assert len(seen) == 2 and filled[1] == 3 and MASK not in filled
    first = recomputed(stock, context, noised, settings_of())[8:]
    torch.testing.assert_close(seen[0], first[[0, 2]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_the_generation(value, temperature):
    ours, _ = tiny(False)
    with torch.no_grad():
        ours.lm_head.weight[3] = value
    with pytest.raises(UserError, match="not finite"):
        generate(ours, ADAPTER, [1, 2, 3], block_size=4, mask_token_id=MASK, temperature=temperature, max_new_tokens=4)


def test_the_smallest_temperature_takes_the_most_probable_token():
    ours, _ = tiny(False)
    cold, coldest = (generate(ours, ADAPTER, [1, 2, 3], block_size=1, mask_token_id=MASK, temperature=temperature,
                              max_new_tokens=12) for temperature in (0.0, 1e-310))
    assert coldest == cold and len(cold) == 12

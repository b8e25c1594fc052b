"""Block-wise generation: denoise one block at a time, keep the keys and values of what is finished.

The whole blocks of the prompt are prefilled; its rest joins the first block as tokens that are already
there. A block of [MASK] is filled in a few passes: each keeps every token whose probability reaches the
threshold, and at least the most probable one. Then one pass over the finished block, now clean, appends its
keys and values (the decoding loop published with SDAR). It works through a family's own adapter.

Legend: S rows of a pass, E rows with logits, V vocabulary, N hidden tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from csbp.attention.cache import CachedPlan, GenerationCache
from csbp.diffusion.random import Purpose, uniform
from csbp.errors import ConfigError, UserError
from csbp.models.protocol import LocalBatch, ModelAdapter


@dataclass(frozen=True)
class SamplerSettings:
    """How a model is asked. The first four are properties of the checkpoint.

    Attributes:
        block_size: rows of a block.
        mask_token_id: token that hides another; never generated.
        clean_stream: "block_causal" or "token_causal".
        label_shift: the row before a token predicts it; slot 0 of a block is read from the last clean row.
        threshold: a hidden token is kept once its probability reaches this. Above 1 every pass keeps exactly
            one, so that the number of passes is the number of hidden tokens.
        temperature: 0 takes the most probable token; else tokens are drawn from softmax(logits / temperature)
            and their probability there is what the threshold judges.
        seed: of the draws; they depend on nothing but (seed, pass, block, slot).
    """

    block_size: int
    mask_token_id: int
    clean_stream: str = "block_causal"
    label_shift: bool = False
    threshold: float = 0.9
    temperature: float = 0.0
    seed: int = 0


class BlockSampler:
    """One text that grows block by block. Gradients are never recorded.

    Args:
        model: in evaluation mode, on its device.
        adapter: the model's family.
        settings: see ``SamplerSettings``.
    """

    def __init__(self, model: nn.Module, adapter: ModelAdapter, settings: SamplerSettings) -> None:
        self._model, self._adapter, self._settings = model, adapter, settings
        self._device = next(model.parameters()).device
        kinds = adapter.layer_kinds(model, settings.clean_stream)
        self._cache = GenerationCache(kinds, settings.block_size, self._device)
        self._next_V: Tensor | None = None

    def append(self, tokens: Sequence[int]) -> None:
        """Add clean tokens to the text. It must consist of whole blocks when more is to follow."""
        if len(tokens) == 0:
            return
        start, rows = self._cache.length, len(tokens)
        assert start % self._settings.block_size == 0, "the text ends within a block"
        wanted = np.array([rows - 1] if self._settings.label_shift else [], np.int64)
        logits = self._forward(tokens, start, rows, wanted, self._cache.clean_pass(rows))
        if self._settings.label_shift:
            self._next_V = logits[0]

    def denoise(self, block: Sequence[int], before_each: Callable[[], None] = lambda: None) -> list[int]:
        """Fill the [MASK] tokens of the block that follows the text. The text does not change.

        Args:
            block: up to ``block_size`` tokens, of which those equal to ``mask_token_id`` are filled.
            before_each: called before each pass; what it raises ends the filling.

        Raises:
            ValueError: the first token of a text is hidden and labels are shifted, so nothing predicts it.
            UserError: the model's logits are not finite.
        """
        settings, start = self._settings, self._cache.length
        tokens = np.array(block, np.int64)
        assert len(tokens) <= settings.block_size, "longer than a block"
        if settings.label_shift and start == 0 and len(tokens) and tokens[0] == settings.mask_token_id:
            raise ValueError("with label_shift no row predicts the first token of a text: give a prompt")
        passes = 0
        while len(hidden := np.flatnonzero(tokens == settings.mask_token_id)):
            before_each()
            logits_NV = self._hidden_logits(tokens, hidden)
            found_N, probability_N = self._choose(logits_NV, hidden, passes)
            keep_N = probability_N >= settings.threshold
            keep_N[probability_N.argmax()] = True
            tokens[hidden[keep_N]] = found_N[keep_N]
            passes += 1
        return tokens.tolist()

    def _hidden_logits(self, tokens: np.ndarray, hidden: np.ndarray) -> Tensor:
        """Logits [N, V] of the hidden slots, from one pass over the noised block."""
        asked = hidden - 1 if self._settings.label_shift else hidden
        plan = self._cache.noised_pass(len(tokens))
        logits = self._forward(tokens, self._cache.length, 0, asked[asked >= 0], plan)
        if asked[0] < 0:
            assert self._next_V is not None
            logits = torch.cat([self._next_V[None], logits])
        return logits

    def _choose(self, logits_NV: Tensor, slots: np.ndarray, passes: int) -> tuple[np.ndarray, np.ndarray]:
        """A token and its probability for each hidden slot."""
        settings = self._settings
        logits_NV = logits_NV.to(torch.float64, copy=True)
        logits_NV[:, settings.mask_token_id] = -math.inf
        best_N1 = logits_NV.amax(-1, keepdim=True)  # nan where there is any
        if not best_N1.isfinite().all():
            raise UserError("the model's logits are not finite, so no token can be chosen: its weights are damaged, or "
                            "its training has diverged")
        logits_NV -= best_N1  # so that the smallest temperature divides 0 by itself
        if settings.temperature == 0:
            probability_N, token_N = logits_NV.softmax(-1).max(-1)
        else:
            probability_NV = (logits_NV / settings.temperature).softmax(-1)
            # Not torch's generator, whose numbers differ between devices.
            block = self._cache.length // settings.block_size
            u = uniform(settings.seed, passes, 0, block, slots, Purpose.TOKEN)
            total_NV = probability_NV.cumsum(-1)
            below_N1 = torch.from_numpy(u).to(total_NV.device)[:, None] * total_NV[:, -1:]
            token_N1 = torch.searchsorted(total_NV, below_N1, right=True).clamp_(max=total_NV.shape[1] - 1)
            token_N, probability_N = token_N1[:, 0], probability_NV.gather(1, token_N1)[:, 0]
        return token_N.cpu().numpy(), probability_N.cpu().numpy()

    def _forward(self, tokens: Sequence[int] | np.ndarray, start: int, num_clean: int, wanted: np.ndarray,
                 plan: CachedPlan) -> Tensor:
        """Logits [E, V] of the ``wanted`` rows of a pass over ``tokens``, the first at position ``start``."""
        position = torch.arange(start, start + len(tokens), device=self._device)
        batch = LocalBatch(tokens=torch.as_tensor(np.asarray(tokens, np.int64), device=self._device),
                           positions=position, num_clean=num_clean, clean_rows=position[:num_clean],
                           loss_rows=torch.as_tensor(wanted, device=self._device), terms=())
        with torch.no_grad():
            return self._adapter.forward(self._model, batch, plan)


def generate_blocks(model: nn.Module, adapter: ModelAdapter, prompt_ids: Sequence[int],
                    settings: SamplerSettings, *, eos_token_id: int | None,
                    max_new_tokens: int) -> Iterator[list[int]]:
    """Yield the new tokens block by block, up to and with the first EOS.

    Raises:
        ConfigError: an empty prompt where labels are shifted.
        UserError: the model's logits are not finite.
    """
    if settings.label_shift and not prompt_ids:
        raise ConfigError("prompt", "", "this model predicts a token from the one before it; give a prompt")
    sampler, size = BlockSampler(model, adapter, settings), settings.block_size
    whole = len(prompt_ids) // size * size
    sampler.append(prompt_ids[:whole])
    given, left = list(prompt_ids[whole:]), max_new_tokens
    while left > 0:
        # Always a whole block, as in training, even where fewer tokens are wanted.
        block = sampler.denoise(given + [settings.mask_token_id] * (size - len(given)))
        new = block[len(given):][:left]
        if eos_token_id in new:
            yield new[:new.index(eos_token_id) + 1]
            return
        yield new
        left -= len(new)
        given = []
        if left > 0:
            sampler.append(block)


def generate(model: nn.Module, adapter: ModelAdapter, prompt_ids: Sequence[int], *, block_size: int,
             mask_token_id: int, clean_stream: str = "block_causal", label_shift: bool = False,
             eos_token_id: int | None = None, max_new_tokens: int = 64, threshold: float = 0.9,
             temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The continuation of a prompt, at most ``max_new_tokens`` tokens, up to and with the first EOS.

    Args as in ``SamplerSettings``.

    Raises:
        ConfigError: an empty prompt where labels are shifted.
        UserError: the model's logits are not finite.
    """
    settings = SamplerSettings(block_size, mask_token_id, clean_stream, label_shift, threshold, temperature,
                               seed)
    blocks = generate_blocks(model, adapter, prompt_ids, settings, eos_token_id=eos_token_id,
                             max_new_tokens=max_new_tokens)
    return [token for block in blocks for token in block]


def fill_block(model: nn.Module, adapter: ModelAdapter, context: Sequence[int], noised: Sequence[int],
               settings: SamplerSettings, before_each: Callable[[], None] = lambda: None) -> list[int]:
    """One block of a known text, with its hidden tokens filled in by the model.

    Where the model is sharded, all its ranks must call this together; a threshold above 1 fixes the number
    of forward passes.

    Args:
        context: the clean text before the block, whole blocks.
        noised: the block, hidden tokens replaced by ``settings.mask_token_id``; may be short.
        before_each: as for ``BlockSampler.denoise``.

    Raises:
        ValueError: the first token of a text is hidden and labels are shifted.
    """
    sampler = BlockSampler(model, adapter, settings)
    sampler.append(context)
    return sampler.denoise(noised, before_each)

"""Held-out loss with fixed noise, and one held-out block as the model fills it in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from csbp.data.batch import PackedBatch
from csbp.diffusion.sampler import SamplerSettings, fill_block
from csbp.parallel.fsdp import reshard
from csbp.train.session import Session

# Above every probability: each pass then keeps exactly one token, so that all ranks run as many passes.
ONE_AT_A_TIME = 2.0


@dataclass(frozen=True)
class Evaluation:
    """Held-out numbers: nats per supervised token, bits per UTF-8 byte (NaN where the supervised tokens stand for no
    text), share of hidden tokens guessed right (NaN where none was hidden)."""

    loss: float
    bits_per_byte: float
    masked_accuracy: float


@dataclass(frozen=True)
class HeldOutBlock:
    """One block of held-out text with its context; ids, the same on every rank."""

    context: list[int]
    block: list[int]
    noised: list[int]


def held_out_packs(session: Session) -> list[PackedBatch]:
    """The packs that every evaluation of the run uses, fewer where the held-out text is shorter."""
    return session.held_out.head(session.config.train.eval_packs)


def evaluate(session: Session, packs: list[PackedBatch],
             before_each: Callable[[int, int], None] = lambda done, count: None) -> Evaluation:
    """Loss over the packs with noise that depends on train.eval_seed alone. Collective.

    Args:
        packs: of ``held_out_packs``.
        before_each: called before each micro-batch with how many are done and how many there are; what it raises, it
            raises on every rank.
    """
    with _evaluating(session):
        works = session.runner.prepare(packs, session.evaluation, step=0)
        result = session.runner.run(works, train=False, before_each=lambda done: before_each(done, len(works)))
    size = session.held_out.bytes_per_token
    return Evaluation(result.loss, result.loss / math.log(2) / size if size else math.nan, result.accuracy)


@contextmanager
def _evaluating(session: Session) -> Iterator[None]:
    """The model in evaluation mode, and its weights in shards again afterwards, however it ends."""
    session.model.eval()
    try:
        yield
    finally:
        session.model.train()
        reshard(session.model)


def unigram_loss(session: Session, packs: list[PackedBatch]) -> float:
    """Nats per supervised token of the held-out packs under training frequencies (add-one smoothed)."""
    counts = session.train_stream.token_counts().astype(np.float64) + 1.0
    nats = math.log(counts.sum()) - np.log(counts)
    targets = np.concatenate([pack.tokens[pack.target_mask] for pack in packs])
    return float(nats[targets].mean())


def pick_block(session: Session, packs: list[PackedBatch]) -> HeldOutBlock | None:
    """A block with enough context and about half of its tokens hidden; None if no block is hidden at all."""
    noising, best = session.evaluation, None
    for pack in packs:
        layout = noising.layout(pack, step=0)
        geometry = layout.geometry
        for block in range(geometry.num_blocks):
            first, end = geometry.block_starts[block:block + 2]
            noised = layout.tokens[geometry.num_clean + first:geometry.num_clean + end]
            start = int(geometry.document_starts[geometry.block_document[block]])
            prefix = int(geometry.block_prefix_end[block])
            hidden = float(np.mean(noised == noising.mask_token_id))
            # The first block that has 64 tokens before it and 3/4 of its own hidden is shown.
            score = (min(prefix - start, 64), len(noised), -abs(hidden - 0.75))
            if hidden > 0 and (best is None or score > best[0]):
                text = pack.tokens[start:prefix + len(noised)].tolist()
                best = (score, HeldOutBlock(text[:-len(noised)], text[-len(noised):], noised.tolist()))
    return best[1] if best else None


def fill(session: Session, block: HeldOutBlock, before_each: Callable[[], None] = lambda: None) -> list[int]:
    """The block's hidden tokens as the model guesses them, one a pass, each after ``before_each``. Collective."""
    noising = session.training
    settings = SamplerSettings(noising.objective.block_size, noising.mask_token_id, noising.objective.clean_stream,
                               noising.objective.label_shift, threshold=ONE_AT_A_TIME)
    with _evaluating(session):
        return fill_block(session.model, session.adapter, block.context, block.noised, settings, before_each)


def show(session: Session, block: HeldOutBlock, filled: list[int]) -> dict[str, Any]:
    """The block as text: context tail, original, noised ([MASK] as ▒), filled."""
    mask = session.training.mask_token_id

    def text(ids: list[int]) -> str:
        if mask not in ids:
            return str(session.tokenizer.decode(ids))
        return "".join("▒" if i == mask else str(session.tokenizer.decode([i])) for i in ids)

    return {"context": text(block.context[-48:]), "original": text(block.block), "noised": text(block.noised),
            "filled": text(filled)}

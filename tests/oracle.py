"""The slow and obviously right version of the objective, for tests: no plan, no interval, no own attention.

``oracle`` runs the stock model once for every target block, on that block's clean prefix and its own noised
rows, in float64. Who sees whom follows from the documents and the block size by two loops. The layout is
read only for what it says about data: tokens, positions, which block a noised row is in, labels, weights.

``dense_mask`` is the table of which rows see which keys, as a predicate on one (row, key).

Shapes: T clean rows and M noised rows of a pack, R = T + M; S rows of one run; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from csbp.diffusion.layout import StreamLayout
from csbp.plan.geometry import Geometry, LayerKind


@contextmanager
def exact_norms() -> Iterator[None]:
    """The stock RMSNorm in the dtype of its input: the library's own always computes in float32."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        mean_square = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(mean_square + self.variance_epsilon))

    library = Qwen3RMSNorm.forward
    Qwen3RMSNorm.forward = forward
    try:
        yield
    finally:
        Qwen3RMSNorm.forward = library


def tiny_model(seed: int = 0, *, vocab: int = 40, layers: int = 2, attention: str = "sdpa",
               **shape: object) -> nn.Module:
    """A stock float64 Qwen3ForCausalLM with weights so large that every key matters to the rows that see it.

    ``shape`` overrides fields of the model's config.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = {"vocab_size": vocab, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": layers,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 100.0,
              "max_position_embeddings": 512, "tie_word_embeddings": False, "use_cache": False}
    config = Qwen3Config(**{**fields, **shape})
    config._attn_implementation = attention
    model = Qwen3ForCausalLM(config).to(torch.float64).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.3 * noise)
    return model


@dataclass(frozen=True)
class Answer:
    """What the oracle says of one or more packs that share an optimizer step.

    Attributes:
        loss: the total loss.
        terms: each term's weighted mean, before its factor.
        logits: [R, V] of each pack; a noised row's come from its block's own run.
        grads: gradient of the total loss with respect to each parameter, by name.
    """

    loss: float
    terms: dict[str, float]
    logits: list[Tensor]
    grads: dict[str, Tensor]


def oracle(model: nn.Module, layouts: Sequence[StreamLayout], block_size: int,
           clean: str = "block_causal") -> Answer:
    """Loss, logits and every gradient of an optimizer step over ``layouts``, block by block.

    Args:
        model: stock float64 model with its stock attention; call inside ``exact_norms``.
        layouts: the packs of the step. Each term's denominator is the sum of its counts over all of them.
        block_size: rows of a block of the grid that restarts with every document.
        clean: "block_causal" or "token_causal".
    """
    counts: dict[str, float] = {}
    for layout in layouts:
        for term in layout.terms:
            counts[term.name] = counts.get(term.name, 0.0) + term.count
    total = torch.zeros((), dtype=torch.float64)
    terms = {name: 0.0 for name in counts}
    logits = []
    for layout in layouts:
        logits_RV = pack_logits(model, layout, block_size, clean)
        for term in layout.terms:
            for row, label, weight in zip(term.rows, term.labels, term.weights, strict=True):
                nats = torch.logsumexp(logits_RV[row], 0) - logits_RV[row, label]
                total = total + term.scale * weight * nats / counts[term.name]
                terms[term.name] += weight * nats.item() / counts[term.name]
        logits.append(logits_RV.detach())
    return Answer(total.item(), terms, logits, gradients(total, model))


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Gradient of every parameter, zeros where the loss does not reach."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    if not loss.requires_grad:
        return {name: torch.zeros_like(p) for name, p in zip(names, parameters, strict=True)}
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g
            for name, p, g in zip(names, parameters, found, strict=True)}


def pack_logits(model: nn.Module, layout: StreamLayout, block_size: int, clean: str) -> Tensor:
    """Logits [R, V] of every row of a pack: one run for each document, one for each of its target blocks."""
    starts, geometry = layout.geometry.document_starts, layout.geometry
    pieces = []
    for document in range(len(starts) - 1):
        text = layout.tokens[starts[document]:starts[document + 1]]
        pieces.append(run_alone(model, text, [], [], block_size, clean))
    for block in range(geometry.num_blocks):
        document = geometry.block_document[block]
        text = layout.tokens[starts[document]:starts[document + 1]]
        rows = slice(*(geometry.num_clean + geometry.block_starts[block:block + 2]))
        positions = layout.positions[rows]
        prefix = text[:positions[0] // block_size * block_size]
        logits_SV = run_alone(model, prefix, layout.tokens[rows], positions, block_size, clean)
        pieces.append(logits_SV[len(prefix):])
    return torch.cat(pieces) if pieces else torch.zeros(0, model.config.vocab_size, dtype=torch.float64)


def run_alone(model: nn.Module, prefix: Sequence[int], noised: Sequence[int], positions: Sequence[int],
              block_size: int, clean: str) -> Tensor:
    """The stock model on [clean prefix from position 0 | one noised block]: logits [S, V]."""
    size = len(prefix) + len(noised)
    if size == 0:
        return torch.zeros(0, model.config.vocab_size, dtype=torch.float64)

    def sees(row: int, key: int) -> bool:
        if row >= len(prefix):  # a noised row sees the prefix and its whole block
            return True
        if key >= len(prefix):  # a clean row sees no noise
            return False
        if clean == "block_causal":
            return key // block_size <= row // block_size
        if clean == "token_causal":
            return key <= row
        raise ValueError(f"clean={clean!r}")

    mask = torch.tensor([[sees(row, key) for key in range(size)] for row in range(size)])
    tokens = torch.tensor([*prefix, *noised], dtype=torch.int64)[None]
    where = torch.tensor([*range(len(prefix)), *positions], dtype=torch.int64)[None]
    return model(input_ids=tokens, position_ids=where, attention_mask=mask[None, None]).logits[0]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    """Attention [S, N, D] of query [S, N, D] over key and value [T, K, D] with the bool mask [S, T].

    A row that sees nothing gives 0.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("snd,tnd->nst", query, key) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~sees, float("-inf"))
    blind = ~sees.any(1)
    weights = torch.softmax(scores.masked_fill(blind[:, None], 0.0), -1).masked_fill(blind[:, None], 0.0)
    return torch.einsum("nst,tnd->snd", weights, value)


def dense_mask(geometry: Geometry, kind: LayerKind) -> np.ndarray:
    """bool [R, R] over [clean | noised] rows and keys: the table, one (row, key) at a time."""
    total = geometry.num_clean + geometry.num_noised
    rows = [_describe(geometry, index) for index in range(total)]
    sees = np.zeros((total, total), bool)
    for i, row in enumerate(rows):
        for j, key in enumerate(rows):
            sees[i, j] = row["document"] == key["document"] and _sees(row, key, kind)
    return sees


def _describe(geometry: Geometry, index: int) -> Mapping[str, int]:
    """A row in words: its document, and its place in the text or in its block."""
    if index < geometry.num_clean:
        document = max(d for d, start in enumerate(geometry.document_starts[:-1]) if start <= index)
        cell = max(c for c, start in enumerate(geometry.cell_starts[:-1]) if start <= index)
        return {"document": document, "row": index, "cell": cell, "block": -1}
    noised = index - geometry.num_clean
    block = max(b for b, start in enumerate(geometry.block_starts[:-1]) if start <= noised)
    if geometry.block_cell[block] >= 0:  # a block over text starts where its text does
        assert geometry.block_prefix_end[block] == geometry.cell_starts[geometry.block_cell[block]]
    return {"document": geometry.block_document[block], "block": block,
            "slot": noised - geometry.block_starts[block], "start": geometry.block_prefix_end[block]}


def _sees(row: Mapping[str, int], key: Mapping[str, int], kind: LayerKind) -> bool:
    """Whether a row sees a key of the same document."""
    if row["block"] >= 0 and not kind.noised:
        return False
    if row["block"] < 0 and key["block"] < 0:  # clean row, clean key
        if kind.clean == "absent":
            return False
        near = kind.window is None or row["row"] - key["row"] < kind.window
        if kind.clean == "block_causal":
            return key["cell"] <= row["cell"] and near
        return key["row"] <= row["row"] and near
    if row["block"] < 0:  # clean row, noised key
        return False
    if key["block"] < 0:  # noised row, clean key
        if key["row"] >= row["start"]:
            return False
        if kind.window is None:
            return True
        last = row["start"] + (row["slot"] if kind.window_anchor == "row" else 0)
        return last - key["row"] < kind.window
    if row["block"] != key["block"]:  # noise is seen by its own block only
        return False
    return kind.in_block == "bidirectional" or key["slot"] <= row["slot"]

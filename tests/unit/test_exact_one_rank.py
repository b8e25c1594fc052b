"""One packed pass on one rank, in this process: exact against the oracle, documents apart, labels shifted right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact import EXACT, assert_same_grads, csbp_model, expected, layouts, noising, only_document, step_here
from oracle import dense_mask, exact_norms, gradients, tiny_model
from packs import MASK, make_pack
from torch import nn

from csbp.plan.geometry import LayerKind

CASES = {
    "two documents": ([6, 10], 4, {}),
    "odd lengths": ([1, 3, 5, 13, 17], 4, {}),
    "odd lengths, token causal, next token too": ([1, 3, 5, 13, 17], 4, {
        "clean_stream": "token_causal", "ar_weight": 0.3, "weight": "inverse_t", "denominator": "supervised"}),
    "shifted": ([6, 10], 4, {"clean_stream": "token_causal", "label_shift": True}),
    "block of one": ([6, 5], 1, {}),
    "block of the document": ([9], 9, {}),
    "more rows than a tile": ([150, 40], 16, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_pass_is_the_oracle(case):
    lengths, block, options = CASES[case]
    packs, how = [make_pack(lengths)], noising(block, **options)
    answer, model = expected(packs, how), csbp_model()
    loss, logits = step_here(model, layouts(packs, how), how.objective.clean_stream)
    assert abs(loss.item() - answer.loss) <= 1e-10
    torch.testing.assert_close(logits[0], answer.logits[0], **EXACT)
    assert_same_grads(gradients(loss, model), answer.grads)


def with_windows(model: nn.Module, window: int) -> nn.Module:
    """The first layer gets a sliding window."""
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = window
    model.model.has_sliding_layers = True
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        layer.attention_type = layer.self_attn.layer_type = kind
        layer.self_attn.sliding_window = window if kind == "sliding_attention" else None
    return model


@pytest.mark.parametrize("clean", ["block_causal", "token_causal"])
def test_layers_with_windows_are_the_stock_model_with_dense_masks(clean):
    how, window = noising(4, clean_stream=clean), 5
    (layout,) = layouts([make_pack([9, 17])], how)
    model = with_windows(csbp_model(), window)
    loss, logits = step_here(model, [layout], clean)
    masks = {"full_attention": LayerKind(clean=clean), "sliding_attention": LayerKind(clean=clean, window=window)}
    masks = {name: torch.from_numpy(dense_mask(layout.geometry, kind))[None, None] for name, kind in masks.items()}
    assert not torch.equal(*masks.values())
    stock, term = with_windows(tiny_model(), window), layout.terms[0]
    with exact_norms():
        dense = stock(input_ids=torch.from_numpy(layout.tokens)[None], attention_mask=masks,
                      position_ids=torch.from_numpy(layout.positions)[None]).logits[0]
    torch.testing.assert_close(logits[0], dense, **EXACT)
    wanted = nn.functional.cross_entropy(dense[torch.from_numpy(term.rows)], torch.from_numpy(term.labels))
    assert_same_grads(gradients(loss, model), gradients(wanted, stock))


def test_scrambling_one_document_leaves_the_other_bit_identical():
    """Both documents are in the pass, clean and noised; the loss is the second one's."""
    how, results = noising(4), []
    for seed in (0, 1):
        pack = make_pack([13, 18], seed=seed)
        pack.tokens[13:] = make_pack([13, 18]).tokens[13:]
        model, (layout,) = csbp_model(), layouts([pack], how)
        loss, logits = step_here(model, [only_document(layout, 1)], "block_causal")
        results.append((loss.item(), logits[0], gradients(loss, model)))
    (loss, logits, grads), (other_loss, other_logits, other_grads) = results
    assert loss == other_loss > 0
    assert_same_grads(other_grads, grads, rtol=0.0, atol=0.0)
    rows = np.flatnonzero((logits != other_logits).any(1).numpy())
    assert set(rows) == {*range(13), *range(31, 44)}  # every row of document 1, and none of document 2


def test_shifted_blocks_of_one_are_the_next_token_loss():
    pack, model = make_pack([9, 1, 14]), csbp_model()
    shifted = layouts([pack], noising(1, clean_stream="token_causal", label_shift=True, t_min=1.0))
    ordinary = layouts([pack], noising(1, clean_stream="token_causal", kind="autoregressive"))
    loss, _ = step_here(model, shifted, "token_causal")
    ar, _ = step_here(model, ordinary, "token_causal")
    assert shifted[0].geometry.num_noised == 21 and ordinary[0].geometry.num_noised == 0
    assert abs(loss.item() - ar.item()) <= 1e-10
    assert_same_grads(gradients(loss, model), gradients(ar, model))
    # And the next-token loss is the stock causal model's, document by document.
    stock, nats = tiny_model(), []
    with exact_norms():
        for start, end in zip(pack.document_starts[:-1], pack.document_starts[1:], strict=True):
            tokens = torch.from_numpy(pack.tokens[start:end])
            logits = stock(input_ids=tokens[None]).logits[0, :-1]
            nats.append(nn.functional.cross_entropy(logits, tokens[1:], reduction="none"))
    assert abs(torch.cat(nats).mean().item() - ar.item()) <= 1e-10


@pytest.mark.slow
def test_without_the_shift_a_memorised_sequence_is_lost():
    """An autoregressive model that knows a text by heart tells it to shifted blocks, not to unshifted ones."""
    pack, model = make_pack([24]), csbp_model()
    ordinary = layouts([pack], noising(1, clean_stream="token_causal", kind="autoregressive"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss, _ = step_here(model, ordinary, "token_causal")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    blocks = {shift: layouts([pack], noising(1, clean_stream="token_causal", label_shift=shift, t_min=1.0))
              for shift in (True, False)}
    with torch.no_grad():
        nats = {shift: step_here(model, streams, "token_causal")[0].item() for shift, streams in blocks.items()}
    assert nats[True] < 0.1, "the text was not memorised"
    assert nats[False] > nats[True] + 1.0


@pytest.mark.parametrize("clean,shift,ar_weight", [
    ("block_causal", False, 0.0), ("token_causal", False, 0.5), ("token_causal", True, 0.5),
    ("block_causal", True, 0.0)])
def test_no_row_is_asked_for_a_token_that_it_sees(clean, shift, ar_weight):
    """In a text of distinct tokens, each label is found; the asked row stands on it, or one before if shifted."""
    pack, how = make_pack([11, 16]), noising(4, clean_stream=clean, label_shift=shift, ar_weight=ar_weight)
    pack.tokens[:] = np.random.default_rng(0).permutation(MASK)[:27]
    (layout,) = layouts([pack], how)
    sees = dense_mask(layout.geometry, LayerKind(clean=clean))
    entries = 0
    for term in layout.terms:
        for row, label in zip(term.rows, term.labels, strict=True):
            (at,) = np.flatnonzero(pack.tokens == label)
            assert layout.positions[row] == pack.positions[at] - (shift or term.name == "ar")
            assert not (sees[row] & (layout.tokens == label)).any()
            entries += 1
    assert entries > 10

"""The oracle is what everything is measured against, so it is held against pictures and the stock model."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from packs import MASK, anchor_geometry, make_layout, make_pack

from csbp.plan.geometry import LayerKind

pytestmark = pytest.mark.usefixtures("exact_norms")
EXACT = {"rtol": 0.0, "atol": 1e-11}


def picture(text: str) -> np.ndarray:
    return np.array([[c == "x" for c in line] for line in text.split()])


# Two documents of 3 and 2 tokens, blocks of 2: cells 01|2 and 34, one block over each.
PICTURES = {
    "block causal": (LayerKind(clean="block_causal"), """
        xx........
        xx........
        xxx.......
        ...xx.....
        ...xx.....
        .....xx...
        .....xx...
        xx.....x..
        ........xx
        ........xx"""),
    "token causal": (LayerKind(clean="token_causal"), """
        x.........
        xx........
        xxx.......
        ...x......
        ...xx.....
        .....xx...
        .....xx...
        xx.....x..
        ........xx
        ........xx"""),
    "window 2 at the block": (LayerKind(clean="token_causal", window=2), """
        x.........
        xx........
        .xx.......
        ...x......
        ...xx.....
        .....xx...
        .....xx...
        .x.....x..
        ........xx
        ........xx"""),
    "no clean queries, causal blocks": (LayerKind(clean="absent", in_block="causal"), """
        ..........
        ..........
        ..........
        ..........
        ..........
        .....x....
        .....xx...
        xx.....x..
        ........x.
        ........xx"""),
}


@pytest.mark.parametrize("name", PICTURES)
def test_dense_mask_of_a_grid(name):
    kind, text = PICTURES[name]
    geometry = make_layout(make_pack([3, 2]), 2).geometry
    np.testing.assert_array_equal(oracle.dense_mask(geometry, kind), picture(text))


def test_dense_mask_of_overlapping_anchors():
    geometry = anchor_geometry([1, 4], [(1, 3), (1, 1), (0, 1)], block_size=2)
    full = picture("...........\n" * 5 + """
        .xxx.xx....
        .xxx.xx....
        .x.....xx..
        .x.....xx..
        x........xx
        x........xx""")
    np.testing.assert_array_equal(oracle.dense_mask(geometry, LayerKind(clean="absent")), full)
    row_anchored = full.copy()
    row_anchored[5:7, 1:4] = picture("""
        .xx
        ..x""")
    kind = LayerKind(clean="absent", window=3, window_anchor="row")
    np.testing.assert_array_equal(oracle.dense_mask(geometry, kind), row_anchored)


def test_token_causal_clean_rows_are_the_stock_causal_model():
    model, pack = oracle.tiny_model(), make_pack([9])
    stock = model(input_ids=torch.from_numpy(pack.tokens)[None]).logits[0]
    logits = oracle.pack_logits(model, make_layout(pack, 4, clean_stream="token_causal"), 4, "token_causal")
    torch.testing.assert_close(logits[:9], stock, **EXACT)


@pytest.mark.parametrize("clean", ["block_causal", "token_causal"])
@pytest.mark.parametrize("lengths,block", [([6, 10], 4), ([1, 3, 5], 2), ([5], 8), ([4], 1)])
def test_block_by_block_runs_agree_with_one_dense_run(clean, lengths, block):
    """The two oracles were written apart: one from documents and positions, one from the geometry's table."""
    model = oracle.tiny_model()
    layout = make_layout(make_pack(lengths), block, clean_stream=clean)
    mask = torch.from_numpy(oracle.dense_mask(layout.geometry, LayerKind(clean=clean)))
    dense = model(input_ids=torch.from_numpy(layout.tokens)[None], attention_mask=mask[None, None],
                  position_ids=torch.from_numpy(layout.positions)[None]).logits[0]
    torch.testing.assert_close(oracle.pack_logits(model, layout, block, clean), dense, **EXACT)


def test_every_visible_token_matters_and_no_other():
    """Changing one token changes exactly the rows that the table says see it, directly or through a layer."""
    model = oracle.tiny_model()
    layout = make_layout(make_pack([5, 4]), 2)
    before = oracle.pack_logits(model, layout, 2, "block_causal")
    sees = oracle.dense_mask(layout.geometry, LayerKind())
    for changed in range(len(layout.tokens)):
        tokens = layout.tokens.copy()
        tokens[changed] = (tokens[changed] + 1) % MASK
        other = type(layout)(layout.geometry, tokens, layout.positions, layout.terms, layout.supervised)
        after = oracle.pack_logits(model, other, 2, "block_causal")
        differs = ((after - before).abs().amax(1) > 1e-6).numpy()
        np.testing.assert_array_equal(differs, sees[:, changed])


def test_loss_is_the_weighted_mean_and_gradients_are_its_own():
    model, lengths = oracle.tiny_model(), [6, 3]
    layout = make_layout(make_pack(lengths), 4, weight="inverse_t")
    answer = oracle.oracle(model, [layout], 4)
    term = layout.terms[0]
    logits = answer.logits[0][torch.from_numpy(term.rows)]
    nats = torch.nn.functional.cross_entropy(logits, torch.from_numpy(term.labels), reduction="none")
    expected = (nats * torch.from_numpy(term.weights)).sum().item() / term.count
    assert len(term.rows) > 1 and answer.loss == pytest.approx(expected, rel=1e-12)
    # A central difference along a random direction.
    random = torch.Generator().manual_seed(1)
    steps = {name: torch.randn(p.shape, generator=random, dtype=p.dtype) for name, p in model.named_parameters()}
    losses = []
    for sign in (1e-5, -1e-5):
        moved = oracle.tiny_model()
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                parameter += sign * steps[name]
        losses.append(oracle.oracle(moved, [layout], 4).loss)
    slope = sum((steps[name] * grad).sum().item() for name, grad in answer.grads.items())
    assert slope == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_two_packs_share_one_denominator():
    model = oracle.tiny_model()
    layouts = [make_layout(make_pack([n], first_id=n), 4) for n in (3, 8)]
    alone = [oracle.oracle(model, [layout], 4) for layout in layouts]
    both = oracle.oracle(model, layouts, 4)
    counts = [layout.terms[0].count for layout in layouts]
    assert counts[0] != counts[1]
    assert both.loss == pytest.approx(np.average([a.loss for a in alone], weights=counts), rel=1e-12)


def test_exact_norms_compute_in_float64_and_go_away_again():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = Qwen3RMSNorm(8).double()
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inside = norm(x)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(inside, expected, **EXACT)
    library = Qwen3RMSNorm.forward
    with oracle.exact_norms():
        pass
    assert Qwen3RMSNorm.forward is library

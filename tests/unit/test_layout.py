"""Layouts against a loop over documents, cells and tokens."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.config.schema import NoiseConfig, ObjectiveConfig
from csbp.data.batch import PackedBatch, empty_batch
from csbp.diffusion.build import build_layout
from csbp.diffusion.layout import StreamLayout
from csbp.diffusion.random import Purpose, uniform
from csbp.errors import ConfigError

MASK = 999


def pack_of(*documents: tuple[int, list[int], list[bool]]) -> PackedBatch:
    """(sample id, tokens, supervised) of each document."""
    tokens = [t for _, document, _ in documents for t in document]
    target = [m for _, _, mask in documents for m in mask]
    starts = np.cumsum([0] + [len(document) for _, document, _ in documents])
    return PackedBatch(np.array(tokens, np.int64), starts, np.array(target, bool),
                       np.array([sample for sample, _, _ in documents], np.int64))


def layout_of(pack: PackedBatch, objective: ObjectiveConfig | None = None, noise: NoiseConfig | None = None,
              seed: int = 3, step: int = 4) -> StreamLayout:
    return build_layout(pack, objective or ObjectiveConfig(), noise or NoiseConfig(), mask_token_id=MASK,
                        seed=seed, step=step)


@st.composite
def packs(draw: st.DrawFn) -> PackedBatch:
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=5))
    documents = []
    for i, length in enumerate(lengths):
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        documents.append((7 * i + 1, [100 * i + k for k in range(length)], mask))
    return pack_of(*documents)


OBJECTIVES = st.builds(
    ObjectiveConfig, kind=st.sampled_from(["block_diffusion", "block_diffusion", "autoregressive"]),
    block_size=st.integers(1, 6), clean_stream=st.just("token_causal"), label_shift=st.booleans(),
    weight=st.sampled_from(["none", "inverse_t"]), denominator=st.sampled_from(["masked", "supervised"]),
    ar_weight=st.sampled_from([0.0, 0.2]))
NOISES = st.builds(NoiseConfig, scope=st.sampled_from(["block", "document"]), t_min=st.just(0.2))


def expected(pack: PackedBatch, objective: ObjectiveConfig, noise: NoiseConfig, seed: int, step: int) -> dict:
    """The same layout, one token at a time."""
    size, diffusion = objective.block_size, objective.kind == "block_diffusion"
    cells, blocks, noised, noised_position, terms = [], [], [], [], {"diffusion": [], "ar": []}
    total, shifted = len(pack.tokens), objective.label_shift or not diffusion
    supervised = 0
    for document, sample in enumerate(pack.sample_ids):
        first, end = pack.document_starts[document:document + 2]
        for row in range(first + 1, end):
            if pack.target_mask[row]:
                terms["ar"].append((row - 1, pack.tokens[row], 1.0))
        for index, start in enumerate(range(first, end, size)):
            cells.append(start)
            rows = range(start, min(start + size, end))
            learnt = [row for row in rows if pack.target_mask[row] and not (shifted and row == first)]
            supervised += len(learnt)
            if not learnt or not diffusion:
                continue
            blocks.append((document, len(cells) - 1, start, len(noised)))
            u = uniform(seed, step, sample, index if noise.scope == "block" else 0, 0, Purpose.NOISE_LEVEL)
            level = noise.t_min + (noise.t_max - noise.t_min) * u
            begin = total + len(noised)
            for slot, row in enumerate(rows):
                hide = row in learnt and uniform(seed, step, sample, index, slot, Purpose.MASK) < level
                noised.append(MASK if hide else pack.tokens[row])
                noised_position.append(row - first)
                if hide:
                    asked = begin + slot
                    if shifted:
                        asked = begin + slot - 1 if slot else start - 1
                    weight = 1 / level if objective.weight == "inverse_t" else 1.0
                    terms["diffusion"].append((asked, pack.tokens[row], weight))
    return {"cells": cells, "blocks": blocks, "noised": noised, "noised_position": noised_position,
            "terms": terms, "supervised": supervised}


@settings(max_examples=150, deadline=None)
@given(packs(), OBJECTIVES, NOISES, st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_layout_equals_the_loop(pack, objective, noise, seed, step):
    layout = layout_of(pack, objective, noise, seed, step)
    loop = expected(pack, objective, noise, seed, step)
    geometry, total = layout.geometry, len(pack.tokens)
    assert geometry.document_starts.tolist() == pack.document_starts.tolist()
    assert geometry.cell_starts.tolist() == [*loop["cells"], total]
    assert list(zip(geometry.block_document, geometry.block_cell, geometry.block_prefix_end,
                    geometry.block_starts[:-1], strict=True)) == loop["blocks"]
    assert geometry.num_noised == len(loop["noised"])
    assert layout.tokens.tolist() == [*pack.tokens, *loop["noised"]]
    assert layout.positions.tolist() == [*pack.positions, *loop["noised_position"]]
    assert layout.supervised == loop["supervised"]
    names = {"autoregressive": ["ar"], "block_diffusion": ["diffusion"] + ["ar"] * (objective.ar_weight > 0)}
    assert [term.name for term in layout.terms] == names[objective.kind]
    for term in layout.terms:
        entries = sorted(zip(term.rows.tolist(), term.labels.tolist(), term.weights.tolist(), strict=True))
        assert entries == sorted(loop["terms"][term.name])
        assert term.masked.all() and len(term.masked) == len(entries)
        by_supervised = term.name == "diffusion" and objective.denominator == "supervised"
        assert term.count == (loop["supervised"] if by_supervised else len(entries))
        assert term.scale == (objective.ar_weight if objective.kind == "block_diffusion" and term.name == "ar" else 1)


def test_arrays_are_int64_and_float64():
    layout = layout_of(pack_of((1, [1, 2, 3], [True] * 3)))
    arrays = [getattr(layout.geometry, f.name) for f in fields(layout.geometry)]
    arrays += [layout.tokens, layout.positions, layout.terms[0].rows, layout.terms[0].labels]
    assert all(a.dtype == np.int64 for a in arrays)
    assert layout.terms[0].weights.dtype == np.float64


def test_only_cells_with_targets_become_blocks_and_prompt_tokens_stay_clean():
    prompt, answer = [False] * 6, [True] * 5
    pack = pack_of((1, list(range(11)), prompt + answer))
    layout = layout_of(pack, ObjectiveConfig(block_size=4), NoiseConfig(t_min=1.0))
    assert layout.geometry.block_cell.tolist() == [1, 2]
    assert layout.tokens[11:].tolist() == [4, 5, MASK, MASK, MASK, MASK, MASK]
    assert layout.positions[11:].tolist() == [4, 5, 6, 7, 8, 9, 10]


def test_shifted_slot_0_is_read_from_a_clean_row_without_a_block_of_its_own():
    pack = pack_of((1, list(range(8)), [False] * 4 + [True] * 4))
    layout = layout_of(pack, ObjectiveConfig(block_size=4, label_shift=True), NoiseConfig(t_min=1.0))
    assert layout.geometry.block_cell.tolist() == [1]
    term = layout.terms[0]
    assert dict(zip(term.labels.tolist(), term.rows.tolist(), strict=True)) == {4: 3, 5: 8, 6: 9, 7: 10}


def test_a_shifted_first_token_is_neither_hidden_nor_counted():
    pack = pack_of((1, [10, 11, 12], [True] * 3), (2, [20], [True]))
    layout = layout_of(pack, ObjectiveConfig(block_size=2, label_shift=True, denominator="supervised"),
                       NoiseConfig(t_min=1.0))
    assert layout.tokens[4:].tolist() == [10, MASK, MASK]  # the one-token document has no block at all
    assert layout.terms[0].count == layout.supervised == 2


def test_block_size_1_with_shift_and_full_noise_asks_what_the_autoregressive_loss_asks():
    pack = pack_of((1, list(range(9)), [False, *[True] * 8]), (2, list(range(20, 25)), [True] * 5))
    shift = ObjectiveConfig(block_size=1, label_shift=True, clean_stream="token_causal")
    diffusion = layout_of(pack, shift, NoiseConfig(t_min=1.0)).terms[0]
    ar = layout_of(pack, replace(shift, kind="autoregressive")).terms[0]
    for name in ("rows", "labels", "weights", "count"):
        assert np.array_equal(getattr(diffusion, name), getattr(ar, name))


def noise_of(layout: StreamLayout, pack: PackedBatch, document: int) -> tuple:
    """x_t and the weights (1/t) of one document."""
    geometry, total = layout.geometry, len(pack.tokens)
    rows = np.repeat(geometry.block_document == document, np.diff(geometry.block_starts))
    term = layout.terms[0]
    mine = rows[term.rows - total]
    return layout.tokens[total:][rows].tolist(), term.labels[mine].tolist(), term.weights[mine].tolist()


def test_noise_does_not_depend_on_the_pack():
    documents = [(2**40 + i, list(range(100 * i, 100 * i + 13 + i)), [True] * (13 + i)) for i in range(4)]
    objective = ObjectiveConfig(block_size=4, weight="inverse_t")
    together, turned = pack_of(*documents), pack_of(*documents[::-1])
    for i, document in enumerate(documents):
        alone = pack_of(document)
        answer = noise_of(layout_of(alone, objective), alone, 0)
        assert len(answer[1]) > 0
        assert noise_of(layout_of(together, objective), together, i) == answer
        assert noise_of(layout_of(turned, objective), turned, 3 - i) == answer
        for other in (layout_of(alone, objective, step=5), layout_of(alone, objective, seed=4)):
            assert noise_of(other, alone, 0) != answer
    renamed = pack_of((5, *documents[0][1:]))
    assert noise_of(layout_of(renamed, objective), renamed, 0) != noise_of(layout_of(together, objective), together, 0)


@pytest.mark.parametrize("objective", [
    ObjectiveConfig(), ObjectiveConfig(label_shift=True, denominator="supervised"),
    ObjectiveConfig(clean_stream="token_causal", ar_weight=1.0),
    ObjectiveConfig(kind="autoregressive", clean_stream="token_causal")])
def test_an_empty_pack_has_the_same_terms_without_entries(objective):
    full, empty = layout_of(pack_of((1, [1, 2, 3], [True] * 3)), objective), layout_of(empty_batch(), objective)
    assert [t.name for t in empty.terms] == [t.name for t in full.terms]
    assert [t.scale for t in empty.terms] == [t.scale for t in full.terms]
    assert all(len(t.rows) == 0 and t.count == 0 for t in empty.terms)
    assert empty.geometry.num_clean == empty.geometry.num_blocks == empty.geometry.num_noised == 0


@pytest.mark.parametrize("objective", [ObjectiveConfig(kind="autoregressive"), ObjectiveConfig(ar_weight=0.5)])
def test_a_next_token_loss_on_a_clean_stream_that_sees_ahead_is_refused(objective):
    with pytest.raises(ConfigError, match="objective.clean_stream='block_causal'.*token_causal"):
        layout_of(pack_of((1, [1, 2], [True, True])), objective)


def test_a_step_without_any_hidden_token_has_count_0():
    layout = layout_of(pack_of((1, [1, 2, 3], [True] * 3)), noise=NoiseConfig(t_min=0.0, t_max=0.0))
    assert layout.terms[0].count == 0 and len(layout.terms[0].rows) == 0 and layout.supervised == 3

"""Bytes and FLOPs against published measurements, closed forms and counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from moved import with_moves
from packs import make_layout, make_pack

from csbp.config.compose import compose_run
from csbp.observe.accounting import (
    block_over_csbp,
    exact_bytes,
    formula_bytes,
    model_flops,
    utilisation,
)
from csbp.plan.counts import attended_pairs, count_plan
from csbp.plan.estimate import Settings, predict_memory
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import Ownership, assign_owners
from csbp.plan.plan import SCHEMES, PackPlan
from csbp.plan.shapes import AttentionLayers, ModelShape, model_shape
from csbp.plan.wire import buffer_bytes

GIB = 2**30
L = 256 * 1024
SMALL = ModelShape((AttentionLayers(LayerKind(), 3, heads=4, kv_heads=2, head_dim=8),
                    AttentionLayers(LayerKind("near", window=12), 2, heads=4, kv_heads=1, head_dim=16)),
                   hidden=32, ffn=64, vocabulary=100, tied=True)


def shape_of(experiment: str) -> ModelShape:
    config = compose_run([f"experiment={experiment}"])
    return model_shape(config.model.shape, config.objective.clean_stream)


def one_document(length: int, block: int) -> Geometry:
    return make_layout(make_pack([length]), block).geometry


@pytest.mark.parametrize(("experiment", "scheme", "gib"), [
    ("nemotron_14b_sft", "csbp", 105.00), ("nemotron_14b_sft", "context", 210.00),
    ("diffusion_gemma_26b_a4b_sft", "csbp", 28.30), ("diffusion_gemma_26b_a4b_sft", "context", 433.13),
    ("nemotron_14b_sft", "block", 0.0), ("nemotron_14b_sft", "data", 0.0)])
def test_published_bytes(experiment: str, scheme: str, gib: float) -> None:
    assert round(formula_bytes(shape_of(experiment), L, L, 8, scheme) / GIB + 1e-9, 2) == gib


@pytest.mark.parametrize(("experiment", "billions", "active"), [
    ("nemotron_8b_sft", 8.5, 8.5), ("nemotron_14b_sft", 13.5, 13.5), ("nemotron_3b_sft", 3.85, 3.85),
    ("diffusion_gemma_26b_a4b_sft", 25.2, 3.8), ("qwen3_8b_sdar", 8.19, 8.19)])
def test_parameters_are_those_of_the_names(experiment: str, billions: float, active: float) -> None:
    shape = shape_of(experiment)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_formula_is_the_all_gather_plan(world: int) -> None:
    """Two trips and the gradients are the formula's three, on any rank count, packed or not."""
    full = ModelShape(SMALL.attention[:1], 32, 64, 100, True)
    geometry = make_layout(make_pack([50, 7, 64]), 8).geometry
    for scheme in ("csbp", "context"):
        counts = count_plan(PackPlan(geometry, full.kinds, world, scheme, "all_gather"))
        (traffic,) = exact_bytes(full, counts, checkpointing="attention", itemsize=2).values()
        assert traffic.received.mean() == pytest.approx(formula_bytes(full, 121, 121, world, scheme), rel=1e-12)
        assert traffic.received.sum() == traffic.sent.sum()


def test_exact_exchange_of_a_long_document() -> None:
    """A rank reads 1 - (N - 1) / 4N of the clean rows on average and owns 1 / N of them."""
    shape, world = shape_of("nemotron_14b_sft"), 8
    geometry = one_document(L // 16, 32)
    counts = count_plan(PackPlan(geometry, shape.kinds, world))
    (traffic,) = exact_bytes(shape, counts, checkpointing="attention", itemsize=2).values()
    assert traffic.received.mean() * 16 / GIB == pytest.approx(78.75, rel=0.01)


def test_gradients_and_policies_on_the_wire() -> None:
    counts = count_plan(PackPlan(one_document(64, 8), SMALL.kinds, 2))
    kind, row = counts.kinds["full"], 3 * 2 * 2 * 8  # layers x (K and V) x heads x head dim

    def bytes_in(**settings: object) -> np.ndarray:
        return exact_bytes(SMALL, counts, itemsize=2, **settings)["full"].received  # type: ignore[arg-type]

    np.testing.assert_array_equal(bytes_in(checkpointing="none"), row * 2 * (2 * kind.received + kind.sent))
    np.testing.assert_array_equal(bytes_in(checkpointing="full"), row * 2 * (3 * kind.received + kind.sent))
    np.testing.assert_array_equal(bytes_in(checkpointing="none", gradient_itemsize=4),
                                  row * (4 * kind.received + 4 * kind.sent))


@pytest.mark.parametrize("length", [64, 61])
def test_model_flops_by_hand(length: int) -> None:
    geometry = one_document(length, 8)
    pairs = {kind.name: attended_pairs(geometry, kind) for kind in SMALL.kinds}
    cells = [range(s, min(s + 8, length)) for s in range(0, length, 8)]
    full = sum(len(c) * c.stop + len(c) * (c.start + len(c)) for c in cells)
    near = sum(sum(c.stop - max(0, p - 11) for p in c) + len(c) * (min(c.start, 11) + len(c)) for c in cells)
    assert pairs == {"full": full, "near": near}
    if length == 64:
        assert full == length * (length + 8)  # L (L + B)
    linear = 3 * (32 * 32 + 2 * 32 * 16 + 32 * 32) + 2 * (32 * 64 + 2 * 32 * 16 + 64 * 32) + 5 * 3 * 32 * 64
    attention = 3 * 4 * 4 * 8 * full + 2 * 4 * 4 * 16 * near
    expected = 3.5 * attention + 6 * linear * 2 * length + 6 * 32 * 100 * 17
    assert model_flops(SMALL, pairs, 2 * length, 17) == expected
    assert utilisation(expected, 2.0, 4, expected / 8) == 1.0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_utilisation_does_not_know_the_topology(scheme: str) -> None:
    """The ranks' pairs add up to the model's, replicated rows apart."""
    geometry = make_layout(make_pack([50, 7, 64]), 8).geometry
    pairs = {kind.name: attended_pairs(geometry, kind) for kind in SMALL.kinds}
    for world in (1, 3, 5):
        counts = count_plan(PackPlan(geometry, SMALL.kinds, world, scheme))
        for name, total in pairs.items():
            summed = counts.kinds[name].pairs.sum()
            assert summed >= total if scheme == "block" and world > 1 else summed == total


def test_contiguous_blocks_are_unbalanced_and_pairs_are_not() -> None:
    """(3N - 1) / 2N where only the clean half is balanced: 1.375 on 4 ranks."""
    geometry, kinds, world = one_document(2**14, 8), (LayerKind(),), 4
    paired = assign_owners(geometry, kinds, world)
    runs = np.arange(geometry.num_blocks) * world // geometry.num_blocks

    def imbalance(owners: Ownership) -> float:
        pairs = count_plan(PackPlan(geometry, kinds, world, owners=owners)).kinds["full"].pairs
        return float(pairs.max() / pairs.mean())

    assert imbalance(Ownership(paired.cell_rank, runs)) == pytest.approx(1.375, abs=1e-3)
    assert imbalance(paired) == pytest.approx(1.0, abs=1e-3)


def test_block_parallelism_computes_the_clean_stream_everywhere() -> None:
    assert block_over_csbp(2) == 1.5
    assert block_over_csbp(8) == 4.5
    geometry = one_document(2**12, 8)
    rows = [count_plan(PackPlan(geometry, (LayerKind(),), 2, scheme)).rows.max() for scheme in ("block", "csbp")]
    assert rows[0] / rows[1] == pytest.approx(1.5, rel=0.01)


def test_memory_for_what_moves_stays_beside_the_logits() -> None:
    home = PackPlan(make_layout(make_pack([150, 7, 64]), 8).geometry, SMALL.kinds, 3)
    moved, settings = with_moves(home, 3), Settings(3, "full", 2)
    plain, beside = (predict_memory(SMALL, count_plan(plan), np.zeros(3, np.int64), settings).logits
                     for plan in (home, moved))
    counts = count_plan(moved)
    stays = [buffer_bytes(counts.kinds[part.kind.name], counts.clean, part, 2) for part in SMALL.attention]
    np.testing.assert_array_equal(beside - plain, np.max(stays, 0))
    assert (beside > plain).all()

"""Models that mix kinds of layers: training balances what their layers cost together, as ``csbp plan`` says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from exact import noising
from oracle import tiny_model
from packs import make_pack
from simulated import LoopbackRuntime

from csbp.attention import interface
from csbp.comm.loopback import LoopbackWorld
from csbp.models.registry import get_adapter
from csbp.plan.balance import CLOSE
from csbp.plan.counts import count_plan
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.shapes import AttentionLayers, ModelShape, model_shape
from csbp.train.step import StepRunner

WORLD, WINDOW = 8, 32
LAYERS = Counter(sliding=9, full=1)
PACK, HOW = make_pack([30_000, 15_000, 7_000, 3_500, 1_500, 700, 300]), noising(32)


def test_a_kind_weighs_as_much_as_its_layers() -> None:
    def part(name: str, count: int, heads: int, head_dim: int) -> AttentionLayers:
        return AttentionLayers(LayerKind(name), count, heads, 1, head_dim)

    mixed = ModelShape((part("near", 25, 16, 256), part("far", 5, 16, 512)), 1, 1, 1, True)
    assert mixed.weights(mixed.kinds) == (5, 2) and mixed.weights(mixed.kinds[::-1]) == (2, 5)
    plain = ModelShape((part("full", 40, 32, 128),), 1, 1, 1, True)
    assert plain.weights(plain.kinds) == (1,)
    with pytest.raises(KeyError, match="other"):
        plain.weights([LayerKind("other")])


def trained_costs(shaped: bool) -> tuple[np.ndarray, Geometry, ModelShape]:
    """What each rank's rows and pairs cost over all layers, in the plans that training makes with or without the
    model's shape."""
    interface.register()
    model = tiny_model(layers=LAYERS.total(), attention=interface.NAME, use_sliding_window=True,
                       sliding_window=WINDOW, layer_types=[f"{name}_attention" for name in LAYERS.elements()])
    adapter, world, costs = get_adapter("qwen3"), LoopbackWorld(WORLD), []
    shape = model_shape(adapter.export_config(model, {}), HOW.objective.clean_stream)
    for transport in world.transports:
        runner = StepRunner(model, adapter, LoopbackRuntime(transport), "reference", shape if shaped else None)
        [work] = runner.prepare([PACK], HOW, step=0)
        costs.append(shape.row_pairs * LAYERS.total() * len(work.batch.tokens)
                     + sum(LAYERS[name] * kind.pairs for name, kind in work.plan.rank_plan.kinds.items()))
    return np.array(costs), work.layout.geometry, shape


def test_training_balances_by_the_models_layers() -> None:
    costs, geometry, shape = trained_costs(True)
    plan = PackPlan(geometry, shape.kinds, WORLD, weights=shape.weights(shape.kinds), row_pairs=shape.row_pairs)
    assert np.array_equal(costs, count_plan(plan).cost), "as csbp plan says"
    bound = costs.sum() // WORLD
    assert costs.max() <= bound + bound // CLOSE
    alike, _, _ = trained_costs(False)
    assert shape.row_pairs < 4096 / 10, "a tiny model's rows weigh little"
    assert alike.max() > 1.05 * bound, "kinds and rows that weighed alike would leave a rank fuller"

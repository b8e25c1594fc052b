"""Times that 64 bits of femtoseconds do not hold, and costs of less than one: plans and prices as they should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cad import LEVEL, head_tail, packed, sizes_of

from csbp.plan.cad import Cad
from csbp.plan.cost import CostModel, PassCost
from csbp.plan.disaggregate import CadSettings, disaggregate
from csbp.plan.estimate import DEVICES
from csbp.plan.geometry import LayerKind
from csbp.plan.pieces import find_pieces
from csbp.plan.plan import PackPlan
from csbp.plan.priced import attention_passes, kept_seconds
from csbp.plan.shapes import AttentionLayers, ModelShape
from csbp.plan.work import home_times, time_unit

FULL = LayerKind()
RATES = PassCost(20_000, 90_000, 3)
DEAR = 2**36  # times as much: all ranks together then take more than 2**63 femtoseconds
HUGE = 2**73  # bytes
PLAN = PackPlan(packed([30_000, 700, 9_000, 1, 4_000], 64), (FULL,), 8)
UNEVEN = replace(PLAN, owners=head_tail(PLAN.geometry, 8))


def cad(costs: PassCost, settings: CadSettings = LEVEL, row_seconds: float = 0.0) -> Cad:
    shape = ModelShape((AttentionLayers(FULL, 2, 4, 2, 64),), 256, 512, 1000, True)
    return Cad(settings, CostModel("any", 64, 2, costs, costs, 0), shape, 4, 4, 1, DEVICES["cpu"],
               row_seconds=row_seconds)


def test_a_femtosecond_is_the_unit_where_64_bits_hold_all():
    pieces = find_pieces(UNEVEN, FULL)
    total = int(home_times(UNEVEN, FULL, pieces, RATES).sum())
    assert time_unit(UNEVEN, FULL, pieces, RATES) == 1
    assert total * DEAR > 2**63
    unit = time_unit(UNEVEN, FULL, pieces, RATES.times(DEAR))
    assert unit & (unit - 1) == 0 and 2**57 <= total * DEAR / unit < 2**60


@pytest.mark.parametrize("link", [None, 1e18])
@pytest.mark.parametrize("beside", [None, 5e17])
def test_long_packs_on_slow_devices_are_levelled(link, beside):
    pieces = find_pieces(UNEVEN, FULL)
    options = replace(LEVEL, max_send_bytes=HUGE, max_receive_bytes=HUGE, max_buffer_bytes=HUGE)
    moves = disaggregate(UNEVEN, FULL, pieces, RATES.times(DEAR), sizes_of(), options, bytes_per_second=link,
                         beside=None if beside is None else np.full(8, beside))
    before, after = (home_times(UNEVEN, FULL, pieces, RATES, some) for some in (None, moves))
    assert after.max() <= 1.03 * after.mean() < before.max()


def test_their_prices_are_as_many_times_as_high():
    few, many = cad(RATES), cad(RATES.times(DEAR))
    for ship in (True, False):
        kept = [kept_seconds(UNEVEN, replace(one, settings=replace(LEVEL, ship_queries=ship)))["full"]
                for one in (few, many)]
        np.testing.assert_allclose(kept[1], kept[0] * DEAR, rtol=1e-9)
    for name in ("forward", "backward"):
        cheap, dear = (getattr(attention_passes(UNEVEN, one)["full"], name) for one in (few, many))
        np.testing.assert_allclose(dear, cheap * DEAR, rtol=1e-9)


def test_other_work_may_take_any_time():
    """What the rows take beside attention is more femtoseconds than 64 bits hold."""
    one = cad(RATES, row_seconds=1e3)
    with np.errstate(all="raise"):
        assert one.step_seconds(one.moved(UNEVEN)) <= one.step_seconds(UNEVEN)


def test_what_costs_something_is_never_free():
    costs = CostModel("wide heads", 10**6, 1, PassCost(0, 0, 1), PassCost(1, 0, 0), 0)
    scaled = costs.for_heads(64)
    assert scaled.forward == PassCost(0, 0, 1) and scaled.backward == PassCost(1, 0, 0)
    one = replace(cad(RATES), cost=costs)
    assert attention_passes(UNEVEN, one)["full"].forward.min() > 0
    assert one.step_seconds(one.moved(UNEVEN)) <= one.step_seconds(UNEVEN)


def test_what_stays_at_home_is_found_once():
    one = cad(RATES.times(DEAR))
    moved = one.moved(UNEVEN)
    assert moved is not UNEVEN and moved.own_work is UNEVEN.own_work

"""How level attention gets, in pairs, on packs of the sizes that csbp is for: with ownership alone and with moves."""

from __future__ import annotations

import numpy as np
import pytest
from cad import LEVEL, PAIRS, anchored, head_tail, packed, replicas, sizes_of

from csbp.plan.disaggregate import CadSettings, count_moved, disaggregate
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import Ownership
from csbp.plan.pieces import find_pieces
from csbp.plan.plan import PackPlan
from csbp.plan.work import home_times

FULL, DRAFT = LayerKind(), LayerKind("draft", clean="absent")
SIZES = sizes_of()  # 32 heads over 8 of size 128, two bytes a number
LIMIT = 6 << 30  # a twentieth of the memory of a large device


def draw_lengths(total: int, seed: int) -> list[int]:
    """Most documents have a few thousand tokens, one in fifty is drawn from up to a quarter of a million."""
    random, lengths = np.random.default_rng(seed), []
    while (room := total - sum(lengths)) > 0:
        length = random.lognormal(np.log(2000), 1.2) if random.random() < 0.98 else 2 ** random.uniform(14, 18)
        lengths.append(min(int(np.clip(length, 16, total)), room))
    return lengths


def level(geometry: Geometry, kind: LayerKind, world: int, owners: Ownership | None,
          settings: CadSettings) -> tuple[float, float]:
    """Most pairs of a rank over the mean, without moves and with them; every limit holds."""
    plan = PackPlan(geometry, (kind,), world, owners=owners)
    pieces = find_pieces(plan, kind)
    moves = disaggregate(plan, kind, pieces, PAIRS, SIZES, settings)
    before, after = home_times(plan, kind, pieces, PAIRS), home_times(plan, kind, pieces, PAIRS, moves)
    assert before.sum() == after.sum()
    moved = count_moved(plan, kind, pieces, moves, SIZES)
    for counted, limit in ((moved.sent, settings.max_send_bytes), (moved.received, settings.max_receive_bytes),
                           (moved.buffered, settings.max_buffer_bytes)):
        assert limit is None or counted.max() <= limit
    found = float(before.max() / before.mean()), float(after.max() / after.mean())
    print(f"{len(pieces)} pieces, {len(moves)} tasks, max/mean {found[0]:.3f} -> {found[1]:.3f}, most bytes sent "
          f"{moved.sent.max() / 2**30:.2f}, received {moved.received.max() / 2**30:.2f}, buffered "
          f"{moved.buffered.max() / 2**30:.2f} GiB")
    return found


@pytest.mark.parametrize("block", [32, 256])
def test_packed_documents_of_a_head_tail_layout(block: int) -> None:
    geometry = packed(draw_lengths(1 << 19, 0), block)
    before, after = level(geometry, FULL, 64, head_tail(geometry, 64), LEVEL)
    assert before > 2 and after <= 1.02


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_packed_documents(block: int, seed: int) -> None:
    geometry = packed(draw_lengths(1 << 19, seed), block)
    _, after = level(geometry, FULL, 64, None, LEVEL)
    assert after <= 1.02


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_few_large_blocks(seed: int) -> None:
    geometry = anchored(draw_lengths(1 << 19, seed), 256, share=0.05, seed=seed)
    before, after = level(geometry, DRAFT, 64, None, LEVEL)
    assert before > 1.3 and after <= 1.03


LARGE = [pytest.param(count, tokens, 8, marks=pytest.mark.slow)
         for count in (2, 4, 8, 16) for tokens in (1 << 18, 1 << 19)]


@pytest.mark.parametrize("count, tokens, ranks", [
    (2, 1 << 17, 4), (4, 1 << 17, 4), (8, 1 << 17, 2), (16, 1 << 17, 2), *LARGE])
def test_replicas(count: int, tokens: int, ranks: int) -> None:
    geometry, owners = replicas([draw_lengths(tokens, 10 + number) for number in range(count)], 32, ranks)
    before, after = level(geometry, FULL, count * ranks, owners, CadSettings(0.02, 0.0, True, LIMIT, LIMIT, LIMIT))
    assert before > 1.05 and after <= 1.05

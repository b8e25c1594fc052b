"""Random moves of query rows on 2 to 64 simulated ranks against dense attention in float64.

Of each: every (query, key) pair is covered exactly once over all ranks, at home or where the row is a guest; out, dq,
dk and dv to 1e-12; the bytes that were counted are those of the plan; no noised key leaves its rank. What travels lies
in memory that is used again and again, and is poisoned between. Legend as in ``test_random_layouts``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import test_random_layouts as layouts
import torch
from drawn import Case, draw_case, mask_of_pack
from moved import with_moves
from packs import make_layout, make_pack
from test_random_layouts import EXACT, Rank, inputs, plan_of, planned, seen, wanted
from torch import Tensor

from csbp.attention.operator import BoundPlan
from csbp.bench.resident import ResidentTransport
from csbp.comm.buffers import Buffers
from csbp.comm.loopback import LoopbackTransport, LoopbackWorld, run_threads
from csbp.plan import pieces
from csbp.plan.counts import count_plan
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.tasks import TILE

SAMPLE = [pytest.param(seed, id=str(seed)) for seed in range(24)]
PROOF = [pytest.param(seed, id=str(seed), marks=pytest.mark.slow) for seed in range(24, 324)]


class Poisoned(Buffers):
    """All that is taken is NaN at first, as numbers of any size."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = super().take(shape, dtype)
        found.view(torch.uint8).fill_(0xFF)
        return found


def draw(seed: int) -> tuple[Case, PackPlan]:
    """A case of two ranks or more whose plan moves something, if anything can be."""
    case = draw_case(seed)
    case = replace(case, world=max(case.world, 2))
    return case, with_moves(plan_of(case, "csbp", "all_gather" if seed % 6 == 5 else "exact"), seed)


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of a few hundred rows are cut into more pieces than those of 128 rows."""
    seed = request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0
    monkeypatch.setattr(pieces, "TILE", (128, 32, 8, 3)[seed % 4])


def check_pairs(ranks: list[Rank], plan: PackPlan, sees: np.ndarray) -> None:
    """Each pair is attended once, by whom the plan says; what arrives is seen there; servers hold no noised row of
    others."""
    (kind,), total, sent = plan.kinds, np.zeros(sees.shape, int), []
    for rank in ranks:
        part = rank.plan.kinds[kind.name].guests
        sent.append(np.split(rank.queries[part.send], np.cumsum(part.send_counts)[:-1]) if part else [])
    pairs = count_plan(plan).kinds[kind.name].pairs
    for number, rank in enumerate(ranks):
        mine, counted = rank.plan.kinds[kind.name], 0
        work = [(rank.queries, mine.here, rank.keys), (rank.queries, mine.arrived, rank.arrived)]
        if mine.guests is not None:
            own = rank.plan.rows.clean
            keys = np.concatenate([rank.arrived] * mine.guests.received + [own] * mine.guests.own + [own[:0]])
            work.append((np.concatenate([rows[number] for rows in sent])[mine.guests.order], mine.guests.ranges, keys))
        useful = np.zeros(len(sees) + 1, bool)
        for queries, ranges, keys in work:
            found = seen(ranges, len(keys))
            np.add.at(total, np.ix_(queries[queries >= 0], keys[keys >= 0]), found[queries >= 0][:, keys >= 0])
            useful[keys[found.any(0)]] = True
            counted += found.sum()
        assert counted == mine.pairs == pairs[number]
        assert (rank.arrived < plan.geometry.num_clean).all(), "a noised row is in a list"
        assert plan.exchange == "all_gather" or useful[rank.arrived].all(), "sent for nothing"
    np.testing.assert_array_equal(total, sees)


@pytest.mark.parametrize("seed", SAMPLE + PROOF)
def test_moved_rows_equal_dense_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plan = draw(seed)
    sees, tensors, ranks = mask_of_pack(case.geometry, case.kind), inputs(case, seed), planned(plan)
    exact = wanted(case, sees, tensors)
    check_pairs(ranks, plan, sees)
    memory = [Poisoned() for _ in ranks]

    class World(LoopbackWorld):
        def __init__(self, world: int) -> None:
            super().__init__(world)
            for transport, mine in zip(self.transports, memory, strict=True):
                transport.buffers = mine

    monkeypatch.setattr(layouts, "LoopbackWorld", World)
    for _ in range(2):  # the second time, all that is taken lies in the same memory
        found = layouts.run(ranks, case, tensors, True)
        for mine, right in zip(found, exact, strict=True):
            torch.testing.assert_close(mine, right, **EXACT)


def test_the_drawn_moves_hold_what_they_promise() -> None:
    """All that the proof is to cover does occur, in the default cases already."""
    cases = []
    for seed in range(24):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "TILE", (128, 32, 8, 3)[seed % 4])
            case, plan = draw(seed)
            cases.append((case, plan, list(plan.served.values()), planned(plan)))
    served = [(case, *parts, ranks) for case, _, parts, ranks in cases if parts]
    assert len(served) > 15
    kinds = [[rank.plan.kinds[case.kind.name] for rank in ranks] for case, _, ranks in served]
    guests = [part.guests for parts in kinds for part in parts]
    assert {(g.received, g.own) for g in guests} == {(False, False), (True, False), (False, True), (True, True)}
    assert any(len(g.rounds) > 1 for g in guests), "a row on two servers"
    assert any(len(g.send) and not g.ranges.pairs.any() for g in guests), "a rank that serves none, and is served"
    assert any(not len(g.send) and g.ranges.pairs.any() for g in guests), "a rank that only serves"
    idle = [not part.here.pairs.any() and not part.arrived.pairs.any() for parts in kinds for part in parts]
    assert any(none and g.pairs for none, g in zip(idle, guests, strict=True)), "a rank whose only work is others'"
    moves = [(part.pieces, part.moves) for _, part, _ in served]
    for noised in (False, True):
        assert any((p.noised[m.piece] == noised).any() for p, m in moves)
    assert any((m.home_high <= m.home_low)[m.piece].any() for _, m in moves), "a whole piece"
    assert any(((m.low == p.low[m.piece]) & (m.high < p.high[m.piece])).any() for p, m in moves)
    assert any(((m.low > p.low[m.piece]) & (m.high == p.high[m.piece])).any() for p, m in moves)


def operator(plan: PackPlan, dtype: torch.dtype, overlap: bool = True,
             reuse: bool = True) -> list[list[tuple[Tensor, ...]]]:
    """Of every rank, out, dq, dk and dv of every kind of layer, two of each in a row."""
    world = LoopbackWorld(plan.world)

    def work(transport: LoopbackTransport) -> list[tuple[Tensor, ...]]:
        transport.buffers = Poisoned(reuse)
        bound = BoundPlan(plan.rank_plan(transport.rank), transport, backend="reference", overlap=overlap)
        random, found = torch.Generator().manual_seed(transport.rank), []
        for kind in [*plan.kinds, *plan.kinds]:
            rows = bound.num_clean + bound.num_noised
            q, k, v, dout = (torch.randn(rows, heads, dim, generator=random).bfloat16().to(dtype)
                             for heads, dim in ((4, 3), (2, 3), (2, 5), (4, 5)))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = bound.attend(kind.name, *leaves, layer=0)
            found.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
        return found

    return run_threads(world, work)


MIXED = PackPlan(make_layout(make_pack([70, 33, 5, 150]), 8).geometry,
                 (LayerKind(), LayerKind("near", window=20)), 4)


def flat(found: list[list[tuple[Tensor, ...]]]) -> list[Tensor]:
    return [x for rank in found for layer in rank for x in layer]


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_that_is_used_again_changes_no_bit(overlap: bool) -> None:
    plan = with_moves(MIXED, 3)
    first, second = (flat(operator(plan, torch.bfloat16, overlap, reuse)) for reuse in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_overlap_changes_nothing_but_the_order_of_sums() -> None:
    plan = with_moves(MIXED, 3)
    first, second = (flat(operator(plan, torch.float64, overlap)) for overlap in (True, False))
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_in_bfloat16_moving_rows_costs_no_precision() -> None:
    exact = flat(operator(MIXED, torch.float64))
    home, moved = (flat(operator(plan, torch.bfloat16)) for plan in (MIXED, with_moves(MIXED, 3)))
    assert not all(torch.equal(a, b) for a, b in zip(home, moved, strict=True))
    errors = [float(torch.cat([(a.double() - b).flatten() for a, b in zip(found, exact, strict=True)]).norm())
              for found in (home, moved)]
    assert 0 < errors[1] < 1.1 * errors[0], errors


def test_whole_tiles_are_attended_before_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TILE", TILE)
    plan = with_moves(PackPlan(make_layout(make_pack([900, 300, 90, 500]), 32).geometry, (LayerKind(),), 3), 1)
    found, moves = plan.served["full"].pieces, plan.moves["full"]
    mixed = False
    for rank in range(plan.world):
        rows = found.rows[moves.piece[moves.server == rank]]
        order = plan.rank_plan(rank).kinds["full"].guests.order
        whole = np.repeat(rows == TILE, rows)[order]
        assert sorted(order) == list(range(rows.sum())) and (np.diff(whole.astype(int)) <= 0).all()
        assert (order[whole].reshape(-1, TILE) == order[whole][::TILE, None] + np.arange(TILE)).all()
        mixed |= bool(whole.any() and not whole.all())
    assert mixed


def test_what_is_resident_needs_no_other_rank() -> None:
    """What a benchmark measures attention without a network by."""
    plan, transport = with_moves(MIXED, 3), ResidentTransport(1, MIXED.world)
    bound = BoundPlan(plan.rank_plan(1), transport, backend="reference")
    rows = bound.num_clean + bound.num_noised
    q, k, v = (torch.randn(rows, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    bound.attend("full", q, k, v, layer=0).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape
    assert set(transport.sent_rows) == {"keys", "queries", "outputs", "query_gradients", "gradients"}

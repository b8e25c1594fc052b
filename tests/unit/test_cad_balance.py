"""Moves of attention: what they cover, what they cost, what they never do, whatever the pack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cad import LEVEL, PAIRS, anchored, head_tail, packed, replicas, sizes_of
from drawn import draw_case, mask_of_pack
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.plan.cost import PassCost
from csbp.plan.disaggregate import CadSettings, count_moved, disaggregate
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import Ownership
from csbp.plan.pieces import find_pieces
from csbp.plan.plan import PackPlan
from csbp.plan.remains import Items, Remains
from csbp.plan.resident import Resident
from csbp.plan.tasks import Moves, Pieces
from csbp.plan.work import MovedBytes, home_times

FULL = LayerKind()
RATES = [PAIRS, PassCost(0, 0, 7), PassCost(16384, 2000, 0), PassCost(900, 40, 3)]
SIZES = sizes_of(heads=8, kv_heads=2, head_dim=64)


def check_form(plan: PackPlan, pieces: Pieces, moves: Moves) -> None:
    """Tasks lie where ``Moves`` says, and cut pieces only where they may be cut, on the grid of keys."""
    order = moves.server * (len(pieces) + 1) + moves.piece
    assert np.all(np.diff(order) > 0), "by server, then piece, each pair once"
    assert np.all((moves.server >= 0) & (moves.server < plan.world))
    assert np.all(pieces.owner[moves.piece] != moves.server)
    assert np.all(moves.low < moves.high)
    for piece in np.unique(moves.piece):
        mine = np.flatnonzero(moves.piece == piece)
        parts = sorted([(moves.low[i], moves.high[i]) for i in mine]
                       + [(moves.home_low[piece], moves.home_high[piece])] * bool(
                           moves.home_high[piece] > moves.home_low[piece]))
        assert parts[0][0] == pieces.low[piece] and parts[-1][1] == pieces.high[piece]
        for (_, end), (start, _) in zip(parts[:-1], parts[1:], strict=True):
            assert end == start and end % 128 == 0
            assert pieces.dense_low[piece] <= end <= pieces.dense_high[piece]
    untouched = np.setdiff1d(np.arange(len(pieces)), moves.piece)
    assert np.array_equal(moves.home_low[untouched], pieces.low[untouched])
    assert np.array_equal(moves.home_high[untouched], pieces.high[untouched])


def check_cover(plan: PackPlan, kind: LayerKind, pieces: Pieces, moves: Moves) -> None:
    """Every pair once: what is left at home, own blocks and tasks, against the table."""
    geometry, expected = plan.geometry, mask_of_pack(plan.geometry, kind).astype(int)
    found = np.zeros_like(expected)
    clean = geometry.num_clean
    queries = []
    for rows in plan.rows:
        parts = ([rows.clean] if kind.clean != "absent" else []) + ([clean + rows.noised] if kind.noised else [])
        queries.append(np.concatenate(parts))
    ranges = [(i, int(moves.home_low[i]), int(moves.home_high[i])) for i in range(len(pieces))]
    ranges += list(zip(moves.piece.tolist(), moves.low.tolist(), moves.high.tolist(), strict=True))
    for piece, low, high in ranges:
        first = pieces.first[piece]
        rows = queries[pieces.owner[piece]][first:first + pieces.rows[piece]]
        if high > low:
            found[rows, low:high] += expected[rows, low:high]
    found[clean:, clean:] += expected[clean:, clean:]
    np.testing.assert_array_equal(found, expected)


def draw(seed: int) -> tuple[PackPlan, LayerKind, PassCost, CadSettings]:
    case, random = draw_case(seed, longest=600, most_rows=1200), np.random.default_rng(seed + 7)
    owners = None
    if random.random() < 0.5:  # owners that nobody would choose
        ranks = random.integers(0, max(case.world // 2, 1), len(case.geometry.cell_starts) - 1)
        block = np.where(case.geometry.block_cell >= 0, np.append(ranks, 0)[case.geometry.block_cell],
                         random.integers(0, case.world, case.geometry.num_blocks))
        owners = Ownership(ranks, block)
    limit = None if random.random() < 0.5 else int(2 ** random.uniform(10, 24))
    options = CadSettings(tolerance=float(random.choice([0, 0.02, 0.2])), min_gain=0.0,
                          ship_queries=bool(random.random() < 0.8), max_send_bytes=limit,
                          max_receive_bytes=limit and 2 * limit, max_buffer_bytes=limit and 3 * limit)
    plan = PackPlan(case.geometry, (case.kind,), case.world, exchange=("exact", "all_gather")[random.integers(2)],
                    owners=owners)
    return plan, case.kind, RATES[random.integers(len(RATES))], options


def check(seed: int) -> None:
    plan, kind, rates, options = draw(seed)
    pieces = find_pieces(plan, kind)
    moves = disaggregate(plan, kind, pieces, rates, SIZES, options)
    again = disaggregate(replace(plan), kind, find_pieces(replace(plan), kind), rates, SIZES, options)
    assert all(np.array_equal(getattr(moves, name), getattr(again, name)) for name in vars(moves))
    check_form(plan, pieces, moves)
    check_cover(plan, kind, pieces, moves)
    before, after = home_times(plan, kind, pieces, rates), home_times(plan, kind, pieces, rates, moves)
    assert after.max() < before.max() if len(moves) else np.array_equal(after, before)
    if rates.tile == rates.segment == 0:
        assert after.sum() == before.sum()
    assert options.ship_queries or not pieces.noised[moves.piece].any()
    moved = count_moved(plan, kind, pieces, moves, SIZES)
    for counted, limit in ((moved.sent, options.max_send_bytes), (moved.received, options.max_receive_bytes),
                           (moved.buffered, options.max_buffer_bytes)):
        assert limit is None or counted.max() <= limit
    assert moved.sent.sum() == moved.received.sum()
    check_bytes(plan, kind, moves, moved)


def check_bytes(plan: PackPlan, kind: LayerKind, moves: Moves, moved: MovedBytes) -> None:
    """A plan with these moves sends what was counted, at most: owners may need fewer keys themselves."""
    after = replace(plan, moves={kind.name: moves})
    queries = after.served[kind.name].matrix if len(moves) else np.zeros((plan.world, plan.world), np.int64)
    keys, before = after.traffic[kind.name], plan.traffic[kind.name]
    for axis, there, back, counted in ((1, SIZES.lent, SIZES.returned, moved.sent),
                                       (0, SIZES.returned, SIZES.lent, moved.received)):
        fetched, home = (SIZES.fetched, SIZES.key_gradient) if axis else (SIZES.key_gradient, SIZES.fetched)
        sent = queries.sum(1) * there + queries.sum(0) * back + keys.sum(1) * fetched + keys.sum(0) * home
        base = before.sum(1) * fetched + before.sum(0) * home
        assert np.all(sent <= base + counted)
        if plan.exchange == "all_gather":
            assert np.array_equal(sent, base + counted)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9))
def test_moves_of_any_pack(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 10**9))
def test_moves_at_length(seed: int) -> None:
    check(seed)


def moved(geometry: Geometry, world: int, owners: Ownership | None = None, kind: LayerKind = FULL,
          options: CadSettings = LEVEL, **how: object) -> tuple[np.ndarray, np.ndarray, Moves]:
    """Times without and with moves, and the moves, where time is pairs."""
    plan = PackPlan(geometry, (kind,), world, owners=owners)
    pieces = find_pieces(plan, kind)
    moves = disaggregate(plan, kind, pieces, PAIRS, SIZES, options, **how)  # type: ignore[arg-type]
    check_form(plan, pieces, moves)
    return home_times(plan, kind, pieces, PAIRS), home_times(plan, kind, pieces, PAIRS, moves), moves


def on_one_rank(geometry: Geometry) -> Ownership:
    return Ownership(np.zeros(len(geometry.cell_starts) - 1, np.int64), np.zeros(geometry.num_blocks, np.int64))


def test_ranks_that_own_nothing_serve():
    geometry = packed([4000, 700], 64)
    before, after, moves = moved(geometry, 4, on_one_rank(geometry))
    assert before.tolist()[1:] == [0, 0, 0]
    assert after.max() <= 1.02 * after.mean() and set(moves.server.tolist()) == {1, 2, 3}


def test_one_giant_document_among_crumbs():
    geometry = packed([30, 20, 50_000, 7, 1, 100], 256)
    before, after, _ = moved(geometry, 16, head_tail(geometry, 16))
    assert after.max() <= 1.011 * after.mean() and after.sum() == before.sum()


@pytest.mark.parametrize("kind", [FULL, LayerKind("draft", clean="absent")], ids=lambda kind: kind.name)
def test_a_pack_without_targets(kind):
    geometry = anchored([3000, 50], 32, share=0.0, seed=0)
    assert geometry.num_blocks == 0
    owners = Ownership(np.zeros(len(geometry.cell_starts) - 1, np.int64), np.zeros(0, np.int64))
    before, after, moves = moved(geometry, 3, owners, kind)
    if kind.clean == "absent":
        assert len(moves) == 0 and before.max() == 0
    else:
        assert after.max() <= 1.02 * after.mean() < before.max()


def test_more_ranks_than_tasks():
    geometry = packed([300], 300)
    before, after, moves = moved(geometry, 64, on_one_rank(geometry))
    assert len(moves) < 64 and after.max() < before.max() and np.count_nonzero(after) > 2


def test_tolerance_saves_what_travels():
    geometry = packed([9000, 300, 5000, 1200, 2500], 64)
    lent, most = [], []
    for tolerance in (0.0, 0.02, 0.05, 0.1, 0.3):
        before, after, moves = moved(geometry, 8, head_tail(geometry, 8), options=replace(LEVEL, tolerance=tolerance))
        lent.append(int(np.maximum(before - after, 0).sum()))
        most.append(after.max() / after.mean())
        assert tolerance == 0 or after.max() <= before.mean() * (1 + tolerance)
    assert lent == sorted(lent, reverse=True) and most == sorted(most) and lent[0] > lent[-1]


@pytest.mark.parametrize("tolerance", [0.0, 0.3])
def test_too_little_gain_moves_nothing(tolerance):
    geometry = packed([9000, 300, 5000, 1200, 2500], 64)
    owners, options = head_tail(geometry, 8), replace(LEVEL, tolerance=tolerance)
    before, after, _ = moved(geometry, 8, owners, options=options)
    gain = 1 - after.max() / before.max()
    assert len(moved(geometry, 8, owners, options=replace(options, min_gain=gain - 0.01))[2])
    assert not len(moved(geometry, 8, owners, options=replace(options, min_gain=gain + 0.01))[2])


def test_a_server_keeps_one_task_of_a_piece():
    """Whoever has a part of a piece may take what lies beside it, not what lies beyond another's."""
    plan = PackPlan(packed([4096], 64), (FULL,), 4, owners=on_one_rank(packed([4096], 64)))
    pieces = find_pieces(plan, FULL)
    remains = Remains(pieces, np.ones(len(pieces), bool), PAIRS, SIZES, Resident(plan, "full"), 4)
    piece = len(pieces) - 1  # noised rows that see [0, 3968) at least

    def take(taker: int, low: int, high: int) -> None:
        key = [np.array([x]) for x in (piece, low, high)]
        pairs = pieces.pairs_within(*key)
        remains.take(taker, Items(*key, pairs, pairs, pairs, np.zeros(1, np.int64)))

    def cuts(taker: int) -> set[tuple[bool, bool]]:
        """Whether what the taker could take begins where the rest does, and ends where it does."""
        moves, found = remains.moves(), set()
        for need in (20_000, 10**9):
            items = remains.last(taker, np.array([piece]), need, need)
            found |= {(bool(low == moves.home_low[piece]), bool(high == moves.home_high[piece]))
                      for low, high in zip(items.low, items.high, strict=True)}
        return found

    take(1, 0, 1024)
    take(2, 1024, 1280)
    assert piece not in remains.candidates(0, 1) and {piece} <= {*remains.candidates(0, 2), *remains.candidates(0, 3)}
    take(3, 3840, int(pieces.high[piece]))
    assert (True, False) in cuts(2) and (False, True) not in cuts(2)
    assert (False, True) in cuts(3) and (True, False) not in cuts(3)
    take(3, 1280, 3840)
    moves = remains.moves()
    assert moves.home_low[piece] == moves.home_high[piece] and len(moves) == 3
    check_form(plan, pieces, moves)


def test_noised_rows_stay_where_they_may_not_move():
    geometry = packed([9000, 300, 5000, 1200, 2500], 64)
    plan = PackPlan(geometry, (FULL,), 8, owners=head_tail(geometry, 8))
    pieces = find_pieces(plan, FULL)
    _, after, moves = moved(geometry, 8, plan.owners, options=replace(LEVEL, ship_queries=False))
    assert len(moves) and not pieces.noised[moves.piece].any()
    draft = LayerKind("draft", clean="absent")
    assert not len(moved(geometry, 8, plan.owners, draft, replace(LEVEL, ship_queries=False))[2])


def test_a_slow_link_moves_less_and_a_very_slow_one_nothing():
    """In time for transfers: the layer never takes longer than without moves."""
    lengths = [[9000], [600] * 15, [300] * 30, [2000] * 4]
    geometry, owners = replicas(lengths, 64, 2)
    plan = PackPlan(geometry, (FULL,), 8, owners=owners)
    pieces, found = find_pieces(plan, FULL), []
    for speed in (1e25, 1e15, 5e14, 1e13):  # bytes per second, where a pair takes a femtosecond
        before, after, moves = moved(geometry, 8, owners, bytes_per_second=speed)
        traffic = count_moved(plan, FULL, pieces, moves, SIZES)
        base = plan.traffic["full"]
        received = base.sum(0) * SIZES.fetched + base.sum(1) * SIZES.key_gradient
        allowed = max(before.max(), received.max() / speed * 1e15)
        assert max(after.max(), (received + traffic.received).max() / speed * 1e15) <= allowed
        found.append(int(traffic.sent.sum()))
    assert found == sorted(found, reverse=True) and found[0] > found[1] > found[-1] == 0


def test_other_work_is_levelled_with_attention():
    geometry = packed([9000, 300, 5000, 1200, 2500], 64)
    before, _, _ = moved(geometry, 8, head_tail(geometry, 8))
    beside = before.max() - before
    assert not len(moved(geometry, 8, head_tail(geometry, 8), beside=beside)[2])


@pytest.mark.parametrize("limit, left", [(30, 0.85), (20, 0.95)])
def test_limits_are_shared_by_those_who_give(limit: int, left: float) -> None:
    """The four owners of a long document all send its keys: none of them may use up what the others may send."""
    geometry, owners = replicas([[20_000], *[[600] * 15, [300] * 30, [2000] * 4] * 3], 64, 4)
    _, free, _ = moved(geometry, 40, owners)
    before, after, _ = moved(geometry, 40, owners, options=replace(LEVEL, max_send_bytes=limit << 20))
    assert free.max() < after.max() < left * before.max()
    assert after[:4].max() < 1.2 * after[:4].min()


def test_a_plan_with_moves_is_the_plan_made_anew():
    geometry = packed([9000, 300, 5000, 1200, 2500], 64)
    plan = PackPlan(geometry, (FULL,), 8, owners=head_tail(geometry, 8))
    moves = {"full": moved(geometry, 8, plan.owners)[2]}
    anew = PackPlan(geometry, (FULL,), 8, owners=plan.owners, moves=moves)
    found = plan.with_moves(moves)
    assert found.digest() == anew.digest() != plan.digest()
    assert np.array_equal(found.traffic["full"], anew.traffic["full"])
    assert not np.array_equal(found.traffic["full"], plan.traffic["full"])
    for rank in range(8):
        mine, other = found.rank_plan(rank).kinds["full"], anew.rank_plan(rank).kinds["full"]
        assert mine.pairs == other.pairs
        assert np.array_equal(mine.exchange.send, other.exchange.send)

"""Pieces found from stretches against the same rule applied row by row, and their pairs counted one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cad import packed
from drawn import draw_case
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.plan import pieces as pieces_module
from csbp.plan.geometry import LayerKind
from csbp.plan.holding import RankRows
from csbp.plan.pieces import find_pieces, own_work
from csbp.plan.plan import PackPlan
from csbp.plan.ranges import RowRanges, index_of


def query_rows(plan: PackPlan, kind: LayerKind, rows: RankRows) -> tuple[np.ndarray, np.ndarray, RowRanges]:
    """Of a rank's query rows: which are noised, their documents (-1: a dummy) and what they see."""
    geometry, clean = plan.geometry, rows.clean if kind.clean != "absent" else rows.clean[:0]
    noised = rows.noised if kind.noised else rows.noised[:0]
    document = np.concatenate([
        index_of(geometry.document_starts, clean),
        np.where(noised < 0, -1, np.append(geometry.block_document, -1)[index_of(geometry.block_starts, noised)])])
    return np.arange(len(document)) >= len(clean), document, plan.queries(kind, rows)


def pieces_of(plan: PackPlan, kind: LayerKind, rank: int, tile: int) -> list[list[int]]:
    """A rank's pieces as lists of query rows, one row after another."""
    noised, document, sees = query_rows(plan, kind, plan.rows[rank])
    found: list[list[int]] = []
    for row in range(len(document)):
        low, high = sees.prefix_start[row], sees.prefix_end[row]
        if low >= high:
            continue
        last = found[-1][-1] if found else -2
        together = (last == row - 1 and row % tile and noised[last] == noised[row] and document[last] == document[row])
        if together:
            mine = found[-1]
            together = (low <= max(sees.prefix_end[r] for r in mine)
                        and high >= min(sees.prefix_start[r] for r in mine))
        found[-1].append(row) if together else found.append([row])
    return found


def check(seed: int, tile: int) -> None:
    case = draw_case(seed)
    plan, random = PackPlan(case.geometry, (case.kind,), case.world), np.random.default_rng(seed)
    found = find_pieces(plan, case.kind)
    assert np.all(np.diff(found.owner) >= 0)
    at, own_pairs = 0, np.zeros(plan.world, np.int64)
    for rank in range(plan.world):
        noised, _, sees = query_rows(plan, case.kind, plan.rows[rank])
        own_pairs[rank] = np.maximum(sees.block_end - sees.block_start, 0).sum()
        for rows in pieces_of(plan, case.kind, rank, tile):
            low, high = sees.prefix_start[rows], sees.prefix_end[rows]
            assert (found.owner[at], found.first[at], found.rows[at]) == (rank, rows[0], len(rows))
            assert found.noised[at] == noised[rows[0]]
            assert (found.low[at], found.high[at]) == (low.min(), high.max())
            dense = (low.max(), high.min())
            assert (found.dense_low[at], found.dense_high[at]) == dense
            assert found.pairs[at] == (high - low).sum()
            edges = [low.min() - 3, low.min(), high.max(), high.max() + 3]
            if dense[0] < dense[1]:
                edges += random.integers(dense[0], dense[1] + 1, 3).tolist()
            a, b = np.array(list(itertools.product(edges, edges))).T
            expected = np.maximum(np.minimum(high[:, None], b) - np.maximum(low[:, None], a), 0).sum(0) * (b > a)
            np.testing.assert_array_equal(found.pairs_within(np.full(len(a), at), a, b), expected)
            at += 1
    assert at == len(found)
    np.testing.assert_array_equal(own_work(plan, case.kind)[2], own_pairs)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([1, 7, 16, 128]))
def test_pieces_are_the_rule_row_by_row(seed: int, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "TILE", tile)
        check(seed, tile)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=250, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([1, 7, 16, 128]))
def test_pieces_at_length(seed: int, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "TILE", tile)
        check(seed, tile)


def test_own_blocks_fill_tiles_together():
    """64 blocks of 4 noised rows on one rank: two tiles of query rows that visit one tile of keys each."""
    plan = PackPlan(packed([256], 4), (LayerKind(),), 1)
    tiles, segments, pairs = own_work(plan, LayerKind())
    assert (tiles[0], segments[0], pairs[0]) == (2, 2, 64 * 16)
    tiles, segments, pairs = own_work(PackPlan(packed([512], 256), (LayerKind(),), 1), LayerKind())
    assert (tiles[0], segments[0], pairs[0]) == (8, 4, 2 * 256 * 256)

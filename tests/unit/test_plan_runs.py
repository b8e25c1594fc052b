"""Sets of rows as runs, against sets; pairs in closed form, against the rows' ranges."""

from __future__ import annotations

import numpy as np
from drawn import draw_geometry, draw_kind
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.plan.ranges import clean_pairs, clean_ranges, noised_pairs, noised_ranges
from csbp.plan.runs import Runs, cut, expand, sums, union, unions

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def as_set(pairs: list[tuple[int, int]]) -> set[int]:
    return {row for a, b in pairs for row in range(a, b)}


@given(ranges)
def test_union_rows_and_places(pairs: list[tuple[int, int]]) -> None:
    found, rows = union(*columns(pairs)), sorted(as_set(pairs))
    assert found.rows().tolist() == rows
    assert np.all(found.end > found.start) and np.all(found.start[1:] > found.end[:-1]), "a run is whole"
    assert found.below(np.arange(33)).tolist() == [sum(row < r for row in rows) for r in range(33)]


@given(ranges, st.lists(st.integers(0, 30), max_size=8, unique=True))
def test_cut(pairs: list[tuple[int, int]], edges: list[int]) -> None:
    at = Runs(*columns(list(zip(sorted(edges)[:-1], sorted(edges)[1:], strict=True))))  # runs may adjoin
    of, run, start, end = cut(*columns(pairs), at)
    assert np.all(end > start) and np.all(np.diff(of) >= 0)
    for i, pair in enumerate(pairs):
        mine = np.flatnonzero(of == i)
        expected = sorted(as_set([pair]) & set(at.rows().tolist()))
        assert expand(start[mine], end[mine] - start[mine]).tolist() == expected
        assert np.all(at.start[run[mine]] <= start[mine]) and np.all(end[mine] <= at.end[run[mine]])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_pairs_of_parts_of_cells_and_blocks(seed: int, first: float, last: float) -> None:
    random = np.random.default_rng(seed)
    geometry = draw_geometry(random, random.integers(1, 60, random.integers(1, 5)).tolist(),
                             int(random.integers(1, 40)))
    kind = draw_kind(random, 60)
    for asks, edges, ranges_of, pairs_of in (
            (kind.clean != "absent", geometry.cell_starts, clean_ranges, clean_pairs),
            (kind.noised, geometry.block_starts, noised_ranges, noised_pairs)):
        low, rows = edges[:-1], np.diff(edges)
        start = low + (min(first, last) * rows).astype(np.int64)
        end = low + np.ceil(max(first, last) * rows).astype(np.int64)
        found = pairs_of(geometry, kind, np.arange(len(low)), start, end)
        if not asks:
            assert not found.any()
            continue
        before = np.concatenate([[0], np.cumsum(ranges_of(geometry, kind).pairs)])
        assert np.array_equal(found, before[end] - before[start])


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from([0, 0, 1, 2, 40, 90])), max_size=6))
def test_runs_of_any_length_are_expanded(parts: list[tuple[int, int]]) -> None:
    assert expand(*columns(parts)).tolist() == [row for start, count in parts for row in range(start, start + count)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_rows_and_sums_of_each_rank(parts: list[tuple[int, int, int]]) -> None:
    rank, start, end = np.array(parts, np.int64).reshape(-1, 3).T
    for number, runs in enumerate(unions(rank, start, end, 5)):
        assert runs.rows().tolist() == sorted(as_set([(a, b) for r, a, b in parts if r == number]))
    order = np.argsort(rank, kind="stable")
    found = sums(rank[order], 5, start[order], end[order])
    assert [part.tolist() for part in found] == [[sum(part[column] for part in parts if part[0] == number)
                                                  for number in range(5)] for column in (1, 2)]

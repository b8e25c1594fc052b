"""Tile visits against the dense mask."""

from __future__ import annotations

import numpy as np
import pytest

from csbp.attention.mask import IntervalMask, Ranges
from csbp.attention.tiles import Runs, key_visits, row_visits


def _random_ranges(rng: np.random.Generator, rows: int, keys: int, arrangement: str) -> Ranges:
    border = int(rng.integers(0, keys + 1))
    wild = arrangement == "wild"
    ends, own = rng.integers(0, border + 1, rows), rng.integers(border, keys + 1, rows)
    if not wild:
        ends, own = np.sort(ends), np.sort(own)
    width = ends if arrangement == "prefix" else rng.integers(0, border + 1, rows)
    low, end = np.maximum(ends - width, 0), np.minimum(own + rng.integers(0, 60, rows), keys)
    empty = rng.random(rows) < (0.3 if wild else 0.02)
    low[empty], own[empty] = ends[empty], end[empty]
    return (low, ends, own, end) if rng.random() < 0.8 else (own, end, low, ends)


def _named(runs: Runs) -> list[list[int]]:
    """The tiles of every row of runs, by the table that a kernel reads."""
    out = []
    for row, count in zip(runs.table().tolist(), runs.count.tolist(), strict=True):
        places = list(zip(row[1::2], row[2::2], strict=True))
        out.append([i + row[0] + sum(jump for place, jump in places if place <= i) for i in range(count)])
    return out


def _check(partial: list[list[int]], full: list[list[int]], dense: np.ndarray, tile: tuple[int, int]) -> int:
    """Hold visits against the mask; how many full tiles there were."""
    seen = 0
    assert len(partial) == len(full) == -(-dense.shape[0] // tile[0])
    for m, (some, every) in enumerate(zip(partial, full, strict=True)):
        assert some == sorted(set(some)) and every == sorted(set(every)) and not set(some) & set(every)
        for c in range(-(-dense.shape[1] // tile[1])):
            part = dense[m * tile[0]:(m + 1) * tile[0], c * tile[1]:(c + 1) * tile[1]]
            assert not part.any() or c in some or c in every, (m, c)
            if c in every:
                assert part.all()
                seen += 1
    return seen


@pytest.mark.parametrize("arrangement", ["prefix", "window", "wild"])
def test_visits_of_both_sides_are_those_of_the_dense_mask(arrangement: str) -> None:
    rng = np.random.default_rng(3)
    rows_full = keys_full = too_many = 0
    for _ in range(80):
        rows, keys = int(rng.integers(1, 90)), int(rng.integers(1, 120))
        tile = (int(rng.choice([4, 8])), int(rng.choice([4, 8, 16])))
        ranges = _random_ranges(rng, rows, keys, arrangement)
        mask = IntervalMask.from_arrays(*ranges)
        dense, visits = mask.dense(keys).numpy(), row_visits(mask.host, keys, tile)
        rows_full += _check(_named(visits.partial), _named(visits.full), dense, tile)
        tiles = -(-keys // tile[1])
        exact = key_visits(visits, tiles, 40, 40)
        assert {(m, c) for m, row in enumerate(_named(visits.partial)) for c in row} == {
            (m, c) for c, row in enumerate(_named(exact.partial)) for m in row}
        few = key_visits(visits, tiles, 3, 2)
        too_many += int((few.partial.count != exact.partial.count).sum())
        keys_full += _check(_named(few.partial), _named(few.full), dense.T, tile[::-1])
    assert arrangement == "wild" or (rows_full > 50 and keys_full > 50)
    assert arrangement != "wild" or too_many > 50


def test_a_causal_mask_is_partial_on_the_diagonal_only() -> None:
    end = np.arange(1, 1025)
    zero = np.zeros_like(end)
    rows = row_visits((zero, end, zero, zero), 1024, (128, 128))
    assert _named(rows.partial) == [[m] for m in range(8)]
    assert _named(rows.full) == [list(range(m)) for m in range(8)]
    keys = key_visits(rows, 8, 2, 2)
    assert _named(keys.partial) == [[c] for c in range(8)]
    assert _named(keys.full) == [list(range(c + 1, 8)) for c in range(8)]


def test_a_ragged_last_key_tile_is_never_full() -> None:
    zero, all_keys = np.zeros(8, np.int64), np.full(8, 12)
    assert _named(row_visits((zero, all_keys, zero, zero), 12, (8, 8)).full) == [[0]]


def test_no_rows_and_no_keys() -> None:
    none = np.zeros(0, np.int64)
    rows = row_visits((none, none, none, none), 8, (8, 8))
    assert _named(rows.partial) == [] and _named(key_visits(rows, 1, 2, 2).partial) == [[]]
    zero = np.zeros(5, np.int64)
    assert _named(row_visits((zero, zero, zero, zero), 0, (8, 8)).partial) == [[]]

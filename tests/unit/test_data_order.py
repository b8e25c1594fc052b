"""The order of the samples: every sample where it belongs, as a function of (seed, epoch)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.config.schema import DataConfig, SourceConfig
from csbp.config.sources import check_sources
from csbp.data.order import SampleOrder, permutation, shares
from csbp.errors import ConfigError

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(st.integers(0, 300), st.integers(0, 5))
def test_a_permutation_holds_every_number_once(size: int, key: int) -> None:
    assert sorted(permutation(size, "k", key).tolist()) == list(range(size))


def test_permutations_depend_on_every_part_of_their_key() -> None:
    base = permutation(50, "epoch", 3, 1).tolist()
    assert base == permutation(50, "epoch", 3, 1).tolist()
    for other in (("epoch", 3, 2), ("epoch", 1, 3), ("packs", 3, 1), ("epoch", 31,)):
        assert permutation(50, *other).tolist() != base


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must find the order that it was started with, also under another NumPy."""
    assert permutation(8, "epoch", 0, 0).tolist() == [1, 4, 5, 0, 2, 6, 3, 7]


@settings(max_examples=50)
@given(sizes, st.integers(0, 3), st.integers(0, 2**40), st.booleans())
def test_without_weights_every_sample_once_an_epoch(counts: list[int], epoch: int, seed: int, shuffle: bool) -> None:
    order = SampleOrder(counts, [None] * len(counts), seed=seed, shuffle=shuffle)
    assert order.samples_per_epoch == sum(counts)
    assert sorted(order.epoch(epoch).tolist()) == list(range(sum(counts)))
    if not shuffle:
        assert order.epoch(epoch).tolist() == list(range(sum(counts)))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 9)), min_size=1, max_size=4), st.integers(0, 9),
       st.booleans())
def test_weighted_sources_give_their_share_and_go_on_where_they_stopped(pairs: list[tuple[int, float]], seed: int,
                                                                        shuffle: bool) -> None:
    counts, weights = [n for n, _ in pairs], [w for _, w in pairs]
    order = SampleOrder(counts, weights, seed=seed, shuffle=shuffle)
    offsets = np.cumsum([0, *counts])
    seen: list[Counter[int]] = [Counter() for _ in counts]
    for epoch in range(4):
        samples = order.epoch(epoch)
        assert len(samples) == order.samples_per_epoch == sum(order.shares)
        for s in range(len(counts)):
            mine = samples[(samples >= offsets[s]) & (samples < offsets[s + 1])]
            assert len(mine) == order.shares[s]
            seen[s].update((mine - offsets[s]).tolist())
    for s, size in enumerate(counts):  # no sample is drawn twice more often than another
        laps = [seen[s].get(i, 0) for i in range(size)]
        assert sum(laps) == 4 * order.shares[s] and max(laps) - min(laps) <= 1


def test_shares_are_the_rounded_weights() -> None:
    assert shares([100, 300], [1.0, 1.0]) == [200, 200]
    assert shares([10, 90], [3.0, 7.0]) == [30, 70]
    assert shares([10, 90], [0.0, 2.0]) == [0, 100]
    assert shares([10, 90], [1e-9, 2.0]) == [1, 100]  # a source with a weight is never forgotten
    assert shares([10, 90], [None, None]) == [10, 90]


@pytest.mark.parametrize("group", ["sources", "validation"])
@pytest.mark.parametrize(("weights", "message"), [
    ([1.0, None], r"data.\w+.1.weight=null: give every source a weight"),
    ([0.0, 0.0], r"data.\w+.0.weight=0.0: at least one weight must be above 0"),
    ([1e308, 1e308], r"data.\w+.0.weight=1e\+308: .*their sum finite"),
    ([1.0, math.nan], r"data.\w+.1.weight=nan: must be a finite number"),
    ([math.inf, 1.0], r"data.\w+.0.weight=inf: must be a finite number"),
    ([1.0, -1.0], r"data.\w+.1.weight=-1.0: must be a finite number, at least 0")])
def test_weights_that_give_no_mixture_are_refused(group: str, weights: list[float | None], message: str) -> None:
    mixed = [SourceConfig(path="x", weight=weight) for weight in weights]
    with pytest.raises(ConfigError, match=message):
        check_sources(DataConfig(**{"sources": [SourceConfig(path="x")], group: mixed}))


def test_epochs_differ_and_seeds_differ() -> None:
    order = SampleOrder([60], [None], seed=1, shuffle=True)
    first, second = order.epoch(0).tolist(), order.epoch(1).tolist()
    assert first != second and first == order.epoch(0).tolist()
    assert SampleOrder([60], [None], seed=2, shuffle=True).epoch(0).tolist() != first

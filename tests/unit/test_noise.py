"""Keyed random numbers and absorbing noise."""

from __future__ import annotations

import numpy as np
import pytest

from csbp.config.schema import NoiseConfig
from csbp.diffusion.noise import hidden_rows, noise_levels
from csbp.diffusion.random import Purpose, philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize("counter, key, expected", [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
])
def test_philox_gives_the_published_vectors(counter, key, expected):
    # Random123's kat_vectors, philox4x32 with 10 rounds.
    words = philox4x32(tuple(np.uint64(c) for c in counter), tuple(np.uint64(k) for k in key))
    assert " ".join(f"{int(w):08x}" for w in words) == expected


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    for i in range(10):
        if i:
            key = [(key[0] + 0x9E3779B9) & ONES, (key[1] + 0xBB67AE85) & ONES]
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & ONES,
                   first >> 32 ^ counter[3] ^ key[1], first & ONES]
    return counter


def plain_uniform(seed: int, step: int, sample: int, block: int, slot: int, purpose: int) -> float:
    """The documented keying in Python integers."""
    key = plain_philox([step & ONES, step >> 32, purpose, 0], [seed & ONES, seed >> 32])[:2]
    high, low, _, _ = plain_philox([sample & ONES, sample >> 32, block, slot], key)
    return ((high << 32 | low) >> 11) / 2**53


def test_uniform_is_the_documented_function_of_its_key():
    random = np.random.default_rng(3)
    keys = random.integers(0, 2**63, (20, 3)).tolist()
    keys += [[2**64 - 1, 0, 2**64 - 1], [0, 2**64 - 1, 0]]
    for seed, step, sample in keys:
        for block, slot in ((0, 0), (2**32 - 1, 5), (7, 2**32 - 1)):
            for purpose in Purpose:
                assert uniform(seed, step, sample, block, slot, purpose) == plain_uniform(
                    seed, step, sample, block, slot, purpose)


def test_uniform_broadcasts_and_one_element_does_not_depend_on_the_others():
    samples, slots = np.array([[5], [2**62], [9]]), np.arange(4)
    whole = uniform(1, 2, samples, 3, slots, Purpose.MASK)
    assert whole.shape == (3, 4) and whole.dtype == np.float64
    for i in range(3):
        for j in range(4):
            assert uniform(1, 2, samples[i, 0], 3, slots[j], Purpose.MASK) == whole[i, j]
    assert uniform(1, 2, np.zeros(0, np.int64), 3, 4, Purpose.MASK).shape == (0,)


def test_every_part_of_the_key_matters():
    base = (1, 2, 3, 4, 5)
    draws = [uniform(*base[:i], base[i] + change, *base[i + 1:], Purpose.MASK).item()
             for i in range(5) for change in (1, 2)]
    draws += [uniform(*base, purpose).item() for purpose in Purpose]
    # the upper halves of the 64-bit parts too
    draws += [uniform(*base[:i], base[i] + 2**40, *base[i + 1:], Purpose.MASK).item() for i in range(3)]
    assert len(set(draws)) == len(draws)


def test_a_block_or_slot_past_32_bits_is_refused_instead_of_cut():
    with pytest.raises(AssertionError):
        uniform(0, 0, 0, 2**32, 0, Purpose.MASK)
    with pytest.raises(AssertionError):
        uniform(0, 0, 0, 0, -1, Purpose.MASK)


def test_uniform_is_uniform_and_neighbours_are_uncorrelated():
    n = 1 << 16
    for draws in (uniform(7, 0, np.arange(n), 0, 0, Purpose.MASK), uniform(7, 0, 1, 0, np.arange(n), Purpose.MASK),
                  uniform(7, np.arange(n), 1, 0, 0, Purpose.MASK)):
        assert 0 <= draws.min() and draws.max() < 1
        counts = np.histogram(draws, 64, (0, 1))[0]
        chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()  # 63 degrees of freedom
        assert 63 - 5 * 126**0.5 < chi2 < 63 + 5 * 126**0.5
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 5 / n**0.5


def test_levels_are_uniform_in_their_bounds_and_belong_to_block_or_document():
    samples, blocks = np.repeat(np.arange(500), 8), np.tile(np.arange(8), 500)
    level = noise_levels(NoiseConfig(t_min=0.3, t_max=0.8), samples, blocks, seed=0, step=0)
    assert len(np.unique(level)) == len(level)
    assert level.min() >= 0.3 and level.max() < 0.8 and abs(level.mean() - 0.55) < 0.01
    shared = noise_levels(NoiseConfig(scope="document"), samples, blocks, seed=0, step=0).reshape(500, 8)
    assert (shared == shared[:, :1]).all() and len(np.unique(shared)) == 500


def test_tokens_are_hidden_with_their_level_and_none_is_forced():
    n = 40_000
    slots = np.arange(n)
    for level in (0.0, 0.1, 0.7, 1.0):
        hidden = hidden_rows(np.full(n, level), np.zeros(n, int), np.zeros(n, int), slots, seed=5, step=9)
        assert abs(hidden.mean() - level) <= 5 * (level * (1 - level) / n) ** 0.5
    few = hidden_rows(np.full(n, 0.001), np.arange(n), np.zeros(n, int), np.zeros(n, int), seed=5, step=9)
    assert not few.all() and few.any()

"""Random numbers that belong to a token, not to a process.

Every draw is a pure function of (seed, step, sample id, block, slot, purpose): Philox4x32-10, the
counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). There
is no state to save, and neither the rank, nor the place of a document in its pack, nor the order of the
calls enters, so any number of ranks, any micro-batch split and any resume draw the same numbers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike

_ROUNDS = 10
_MULTIPLY_0, _MULTIPLY_2 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)

Word = np.ndarray | np.uint64
Words = tuple[Word, ...]


class Purpose(IntEnum):
    """What a draw decides. The numbers are part of the noise: never renumber, only append."""

    NOISE_LEVEL = 0
    MASK = 1
    TOKEN = 2


def philox4x32(counter: Words, key: Words) -> Words:
    """Philox4x32-10, element by element.

    Args:
        counter: four uint64 arrays that hold 32-bit words; they broadcast against one another.
        key: two such arrays.

    Returns:
        four uint64 arrays of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(_ROUNDS):
        if i:
            k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
        p0, p2 = _MULTIPLY_0 * c0, _MULTIPLY_2 * c2  # 32 x 32 bits fit in 64
        c0, c1, c2, c3 = (p2 >> _32) ^ c1 ^ k0, p2 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
    return c0, c1, c2, c3


def uniform(seed: ArrayLike, step: ArrayLike, sample_id: ArrayLike, block: ArrayLike, slot: ArrayLike,
            purpose: Purpose) -> np.ndarray:
    """Independent uniform numbers in [0, 1), one for each element of the broadcast arguments.

    The counter is (sample id, block, slot) itself, so two draws of a step never share one; the key is another
    Philox word of (seed, step, purpose), because all six do not fit in 192 bits.

    Args:
        seed, step, sample_id: any 64-bit integers; a negative one stands for its two's complement.
        block: index of the block within its document, below 2**32.
        slot: index of the token within its block, below 2**32.
        purpose: what the number decides.

    Returns:
        float64, multiples of 2**-53.
    """
    zero = np.uint64(0)
    step_low, step_high = _halves(step)
    k0, k1, _, _ = philox4x32((step_low, step_high, np.uint64(purpose), zero), _halves(seed))
    block_low, block_high = _halves(block)
    slot_low, slot_high = _halves(slot)
    assert not (block_high.any() or slot_high.any()), "block and slot are 32-bit"
    high, low, _, _ = philox4x32((*_halves(sample_id), block_low, slot_low), (k0, k1))
    return np.asarray((high << np.uint64(21)) | (low >> np.uint64(11))) * 2.0**-53


def _halves(value: ArrayLike) -> Words:
    """A 64-bit integer as its low and high 32-bit words."""
    bits = np.asarray(value).astype(np.uint64)
    return bits & _LOW, bits >> _32

"""Absorbing noise: each supervised token of a block is replaced by [MASK] with the block's probability t.

No mask is forced. Some published trainers hide at least one token per row; that changes the probability with
which a token is hidden, so 1/t would no longer be its inverse and the loss no longer a bound on the
likelihood. A block in which nothing was hidden simply has no term (its supervised tokens still count where
the denominator is the number of supervised tokens).
"""

from __future__ import annotations

import numpy as np

from csbp.config.schema import NoiseConfig
from csbp.diffusion.random import Purpose, uniform


def noise_levels(noise: NoiseConfig, sample_ids: np.ndarray, blocks: np.ndarray, *, seed: int,
                 step: int) -> np.ndarray:
    """The probability t with which each block hides a token, uniform in [t_min, t_max].

    Args:
        noise: ``scope`` says whether the blocks of one document share a level.
        sample_ids: [NB] sample id of each block's document.
        blocks: [NB] index of each block within its document's grid.
        seed, step: the run's seed and the optimizer step.

    Returns:
        float64 [NB].
    """
    key = blocks if noise.scope == "block" else np.zeros_like(blocks)
    u = uniform(seed, step, sample_ids, key, 0, Purpose.NOISE_LEVEL)
    return noise.t_min + (noise.t_max - noise.t_min) * u


def hidden_rows(levels: np.ndarray, sample_ids: np.ndarray, blocks: np.ndarray, slots: np.ndarray, *,
                seed: int, step: int) -> np.ndarray:
    """Which tokens the noise hides: bool [M], True with probability ``levels``.

    Args:
        levels: [M] noise level of each row's block.
        sample_ids, blocks, slots: [M] what identifies each token, see ``uniform``.
        seed, step: the run's seed and the optimizer step.
    """
    return uniform(seed, step, sample_ids, blocks, slots, Purpose.MASK) < levels

"""Small packs and geometries for tests. T clean rows, D documents, NB blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csbp.config.schema import NoiseConfig, ObjectiveConfig
from csbp.data.batch import PackedBatch
from csbp.diffusion.build import build_layout
from csbp.diffusion.layout import StreamLayout
from csbp.plan.geometry import Geometry

VOCAB = 40
MASK = VOCAB - 1


def make_pack(lengths: Sequence[int], *, seed: int = 0, targets: Sequence[Sequence[int]] | None = None,
              first_id: int = 0) -> PackedBatch:
    """Documents of random tokens below ``MASK``.

    Args:
        lengths: tokens of each document.
        seed: of the tokens.
        targets: supervised positions of each document; all by default.
        first_id: sample id of the first document.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.random.default_rng(seed).integers(0, MASK, int(starts[-1]))
    mask = np.full(len(tokens), targets is None)
    for start, positions in zip(starts, targets or (), strict=False):
        mask[start + np.asarray(positions, np.int64)] = True
    return PackedBatch(tokens, starts, mask, first_id + np.arange(len(lengths)))


def make_layout(pack: PackedBatch, block_size: int, *, noise: NoiseConfig | None = None, seed: int = 0,
                step: int = 0, **objective: object) -> StreamLayout:
    """The pack's layout; ``objective`` overrides fields of ``ObjectiveConfig``."""
    settings = ObjectiveConfig(**{"block_size": block_size, **objective})  # type: ignore[arg-type]
    return build_layout(pack, settings, noise or NoiseConfig(t_min=0.3), mask_token_id=MASK, seed=seed, step=step)


def anchor_geometry(lengths: Sequence[int], anchors: Sequence[tuple[int, int]], block_size: int) -> Geometry:
    """Blocks that see [document, anchor) and may overlap in the text, as a draft model's do.

    Args:
        lengths: tokens of each document.
        anchors: (document, position within it) of each block.
        block_size: noised rows of a block.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    document = np.array([d for d, _ in anchors], np.int64)
    position = np.array([p for _, p in anchors], np.int64)
    return Geometry(starts, np.arange(starts[-1] + 1), document, np.full(len(anchors), -1),
                    starts[document] + position, np.arange(len(anchors) + 1) * block_size)

"""Random packs and layer kinds of every shape that the project allows, and the table of who sees whom as arrays.

Legend: T clean and M noised rows of a pack, R = T + M, D documents, NB blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind


@dataclass(frozen=True)
class Case:
    """A pack, one layer kind, and the ranks to plan it for."""

    geometry: Geometry
    kind: LayerKind
    world: int


def draw_case(seed: int, longest: int = 200, most_rows: int = 500) -> Case:
    """Documents of 1 to ``longest`` tokens (at most ``most_rows`` clean rows in all), blocks of 1 to 64, 1 to 64
    ranks."""
    random = np.random.default_rng(seed)
    lengths = [int(random.integers(1, longest + 1) if random.random() < 0.6 else random.integers(1, 12))
               for _ in range(random.integers(1, 8))]
    while len(lengths) > 1 and sum(lengths) > most_rows:
        lengths.pop()
    block = int(2 ** random.uniform(0, 6)) if random.random() < 0.9 else 64
    world = int(np.clip(2 ** random.uniform(0, 6.2), 1, 64))
    return Case(draw_geometry(random, lengths, block), draw_kind(random, longest), world)


def draw_geometry(random: np.random.Generator, lengths: list[int], block: int) -> Geometry:
    """A grid that restarts with every document; over it a mixture of blocks with their text, two views of the same
    text, blocks filled up beyond the document's end, and anchors anywhere, which may overlap."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    cells = [(d, first) for d in range(len(lengths)) for first in range(starts[d], starts[d + 1], block)]
    cell_starts = np.array([first for _, first in cells] + [starts[-1]])
    targets, views, fills, anchors = random.choice([0.0, 0.3, 1.0], 4, p=[0.25, 0.35, 0.4])
    blocks: list[tuple[int, int, int, int]] = []  # document, cell, prefix end, rows
    for cell, (document, first) in enumerate(cells):
        size = int(cell_starts[cell + 1] - first)
        if random.random() < targets:
            filled = size < block and random.random() < fills
            copies = 2 if random.random() < views else 1
            blocks += [(document, -1 if filled else cell, first, block if filled else size)] * copies
    for _ in range(int(anchors * random.integers(0, 2 + 40 // block))):
        document = int(random.integers(len(lengths)))
        blocks.append((document, -1, int(random.integers(starts[document], starts[document + 1] + 1)), block))
    if random.random() < 0.5:
        blocks.sort(key=lambda b: (b[0], b[2]))
    elif random.random() < 0.2:
        blocks = [blocks[i] for i in random.permutation(len(blocks))]
    table = np.array(blocks, np.int64).reshape(-1, 4)
    return Geometry(starts, cell_starts, table[:, 0], table[:, 1], table[:, 2],
                    np.concatenate([[0], np.cumsum(table[:, 3])]))


def draw_kind(random: np.random.Generator, longest: int) -> LayerKind:
    """Any layer kind that the planner knows."""
    window = None if random.random() < 0.5 else int(random.integers(1, longest + 20))
    clean = ("block_causal", "token_causal", "absent")[random.choice(3, p=[0.4, 0.4, 0.2])]
    return LayerKind("drawn", clean=clean, noised=clean == "absent" or random.random() < 0.9, window=window,
                     window_anchor=("block", "row")[random.integers(2)],
                     in_block=("bidirectional", "causal")[random.integers(2)])


def mask_of_pack(geometry: Geometry, kind: LayerKind) -> np.ndarray:
    """bool [R, R] over [clean | noised] rows and keys: the same as ``oracle.dense_mask``, which goes pair by pair,
    fast enough for larger packs (and checked against it)."""
    clean, noised = geometry.num_clean, geometry.num_noised
    block = np.repeat(np.arange(geometry.num_blocks), np.diff(geometry.block_starts))
    document = np.concatenate([np.repeat(np.arange(len(geometry.document_starts) - 1),
                                         np.diff(geometry.document_starts)), geometry.block_document[block]])
    cell = np.repeat(np.arange(len(geometry.cell_starts) - 1), np.diff(geometry.cell_starts))
    slot = np.arange(noised) - geometry.block_starts[:-1][block]
    start = geometry.block_prefix_end[block]
    text, window = np.arange(clean), kind.window or clean + noised + 1
    sees = np.zeros((clean + noised, clean + noised), bool)
    if kind.clean == "block_causal":
        sees[:clean, :clean] = cell[None, :] <= cell[:, None]
    elif kind.clean == "token_causal":
        sees[:clean, :clean] = text[None, :] <= text[:, None]
    sees[:clean, :clean] &= text[:, None] - text[None, :] < window
    if kind.noised:
        reach = start + (slot if kind.window_anchor == "row" else 0)
        sees[clean:, :clean] = (text[None, :] < start[:, None]) & (reach[:, None] - text[None, :] < window)
        sees[clean:, clean:] = block[None, :] == block[:, None]
        if kind.in_block == "causal":
            sees[clean:, clean:] &= slot[None, :] <= slot[:, None]
    return sees & (document[:, None] == document[None, :])

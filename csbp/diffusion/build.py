"""From a pack of documents to the two streams and the loss terms (docs/objectives.md has the formulas).

Shapes: D documents, T clean rows (tokens of the pack), C grid cells, NB target blocks, M noised rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.config.schema import NoiseConfig, ObjectiveConfig
from csbp.data.batch import PackedBatch
from csbp.diffusion.layout import LossTerm, StreamLayout
from csbp.diffusion.noise import hidden_rows, noise_levels
from csbp.errors import ConfigError
from csbp.plan.geometry import Geometry


def build_layout(pack: PackedBatch, objective: ObjectiveConfig, noise: NoiseConfig, *, mask_token_id: int,
                 seed: int, step: int) -> StreamLayout:
    """Lay out one pack: grid, target blocks, noise, labels and weights.

    The grid restarts with every document. A cell becomes a target block if it holds a token to learn, so the
    noised stream lists only the answers of a chat, and blocks stand in document order. Within a block the
    tokens that are not learnt (the prompt's part of a straddling block) stay clean.

    Args:
        pack: the documents; the empty pack gives an empty layout with the same terms.
        objective: what is learnt.
        noise: how blocks are corrupted; unused by an autoregressive objective.
        mask_token_id: token that hides another.
        seed, step: the noise is a function of these, of the sample ids and of the places in the documents.

    Raises:
        ConfigError: for a next-token loss on a clean stream that sees its own future.
    """
    autoregressive = objective.kind == "autoregressive"
    if (autoregressive or objective.ar_weight > 0) and objective.clean_stream != "token_causal":
        raise ConfigError("objective.clean_stream", objective.clean_stream,
                          "a next-token loss would read its own answer; use token_causal")
    grid = _grid(pack, objective.block_size)
    learnt_T = _learnt(pack, needs_predecessor=autoregressive or objective.label_shift)
    blocks = _blocks(pack, grid, learnt_T & (not autoregressive))
    level_NB = noise_levels(noise, pack.sample_ids[blocks.document], blocks.index, seed=seed, step=step)
    level_M = level_NB[blocks.of_row]
    hidden_M = learnt_T[blocks.text] & hidden_rows(
        level_M, pack.sample_ids[blocks.document][blocks.of_row], blocks.index[blocks.of_row], blocks.slot,
        seed=seed, step=step)

    terms = []
    if not autoregressive:
        terms.append(_diffusion_term(pack, objective, blocks, hidden_M, level_M, int(learnt_T.sum())))
    if autoregressive or objective.ar_weight > 0:
        terms.append(_next_token_term(pack, 1.0 if autoregressive else objective.ar_weight))
    noised_M = np.where(hidden_M, mask_token_id, pack.tokens[blocks.text])
    positions_T = pack.positions
    return StreamLayout(
        geometry=Geometry(pack.document_starts, grid.starts, blocks.document, blocks.cell,
                          grid.starts[blocks.cell], blocks.starts),
        tokens=np.concatenate([pack.tokens, noised_M]),
        positions=np.concatenate([positions_T, positions_T[blocks.text]]),
        terms=tuple(terms), supervised=int(learnt_T.sum()))


def learnt_tokens(pack: PackedBatch, objective: ObjectiveConfig) -> int:
    """Supervised tokens of a pack that the objective can learn: ``supervised`` of its layout, whatever the noise."""
    shifted = objective.kind == "autoregressive" or objective.label_shift
    return int(_learnt(pack, needs_predecessor=shifted).sum())


@dataclass(frozen=True)
class _Grid:
    """starts [C + 1] (then T), document [C], index [C] within the document."""

    starts: np.ndarray
    document: np.ndarray
    index: np.ndarray


@dataclass(frozen=True)
class _Blocks:
    """Per block [NB]: cell, document, index within the document; starts [NB + 1] (then M).
    Per noised row [M]: of_row (its block), slot, text (the clean row that it covers)."""

    cell: np.ndarray
    document: np.ndarray
    index: np.ndarray
    starts: np.ndarray
    of_row: np.ndarray
    slot: np.ndarray
    text: np.ndarray


def _grid(pack: PackedBatch, block_size: int) -> _Grid:
    """Cells of ``block_size`` tokens from each document's first; a document's last cell may be short."""
    cells_D = -(-np.diff(pack.document_starts) // block_size)
    document = np.repeat(np.arange(len(cells_D)), cells_D)
    index = np.arange(len(document)) - np.repeat(np.cumsum(cells_D) - cells_D, cells_D)
    starts = pack.document_starts[document] + index * block_size
    return _Grid(np.append(starts, len(pack.tokens)), document, index)


def _learnt(pack: PackedBatch, needs_predecessor: bool) -> np.ndarray:
    """bool [T], supervised tokens that some row predicts.

    Where the row before a token predicts it, a document's first token has no predictor: it is not learnt,
    and not hidden either, as a sampler never has to guess it.
    """
    if not needs_predecessor:
        return pack.target_mask
    return pack.target_mask & (pack.positions > 0)


def _blocks(pack: PackedBatch, grid: _Grid, learnt_T: np.ndarray) -> _Blocks:
    """One block for each cell that holds a token to learn."""
    learnt_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(learnt_T)])
    cell = np.flatnonzero(np.diff(learnt_before[grid.starts]))
    length = np.diff(grid.starts)[cell]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    of_row = np.repeat(np.arange(len(cell)), length)
    slot = np.arange(starts[-1]) - starts[of_row]
    return _Blocks(cell, grid.document[cell], grid.index[cell], starts, of_row, slot,
                   grid.starts[cell][of_row] + slot)


def _diffusion_term(pack: PackedBatch, objective: ObjectiveConfig, blocks: _Blocks, hidden_M: np.ndarray,
                    level_M: np.ndarray, learnt: int) -> LossTerm:
    """The loss of the hidden tokens.

    With ``label_shift`` a token is predicted by the row before it: by its block's previous slot, or, for slot
    0, by the clean row before the block, whether or not the cell of that row has a block of its own.
    """
    row_E = np.flatnonzero(hidden_M)
    asked_E = row_E + len(pack.tokens)
    if objective.label_shift:
        asked_E = np.where(blocks.slot[row_E] > 0, asked_E - 1, blocks.text[row_E] - 1)
    weights_E = 1.0 / level_M[row_E] if objective.weight == "inverse_t" else np.ones(len(row_E))
    count = len(row_E) if objective.denominator == "masked" else learnt
    return LossTerm("diffusion", asked_E, pack.tokens[blocks.text[row_E]], weights_E, float(count), 1.0,
                    np.ones(len(row_E), bool))


def _next_token_term(pack: PackedBatch, scale: float) -> LossTerm:
    """Clean row p predicts token p + 1 of its document, where that token is supervised."""
    label_row_E = np.flatnonzero(_learnt(pack, needs_predecessor=True))
    entries = len(label_row_E)
    return LossTerm("ar", label_row_E - 1, pack.tokens[label_row_E], np.ones(entries), float(entries), scale,
                    np.ones(entries, bool))

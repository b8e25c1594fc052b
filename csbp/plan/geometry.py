"""What the planner knows of a pack: lengths and blocks, no tokens.

Shapes: D documents, T clean rows, C grid cells, NB target blocks, M noised rows. All arrays are int64 and
all row numbers are global: clean rows 0..T-1 in pack order, noised rows 0..M-1 block after block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerKind:
    """How the rows of one kind of layer see keys (docs/attention.md). A model has one or a few.

    Attributes:
        name: key of ``Plan`` lookups, e.g. "full" or "sliding".
        clean: "block_causal" (a clean row sees to the end of its grid cell), "token_causal" (to itself) or
            "absent" (clean rows are keys only: DFlash, or a pass of noised queries over kept clean K/V).
        noised: False for a pass over the clean rows alone, whose keys and values are kept for later passes.
        window: sliding window in tokens, or None.
        window_anchor: for noised rows, "block": the same range for the whole block, [s - W + 1, s), or
            "row": slot k sees [s + k - W + 1, s).
        in_block: "bidirectional" or "causal" within the own noised block.
    """

    name: str = "full"
    clean: str = "block_causal"
    noised: bool = True
    window: int | None = None
    window_anchor: str = "block"
    in_block: str = "bidirectional"


@dataclass(frozen=True)
class Geometry:
    """One pack.

    Attributes:
        document_starts: [D + 1] clean row where each document starts, then T.
        cell_starts: [C + 1] grid cells over the clean rows, then T. Cells restart with each document; the
            last of a document may be short. A cell is never cut between ranks.
        block_document: [NB] document of each target block.
        block_cell: [NB] the cell whose text the block covers, or -1 if it covers none (EOS fill, anchors).
        block_prefix_end: [NB] the block sees clean rows [its document's start, prefix_end).
        block_starts: [NB + 1] first noised row of each block, then M.
    """

    document_starts: np.ndarray
    cell_starts: np.ndarray
    block_document: np.ndarray
    block_cell: np.ndarray
    block_prefix_end: np.ndarray
    block_starts: np.ndarray

    @property
    def num_clean(self) -> int:
        """T."""
        return int(self.document_starts[-1])

    @property
    def num_noised(self) -> int:
        """M."""
        return int(self.block_starts[-1])

    @property
    def num_blocks(self) -> int:
        """NB."""
        return len(self.block_document)

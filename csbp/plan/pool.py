"""Several replicas' packs planned as one, so that any rank may attend for any other (``cad.pool=dp``).

The packs are laid end to end. Each document stays whole in one replica: its rows belong to that replica's ranks alone.
Everything else (exchange, masks, moves) then is as in one pack. D documents, C cells, NB blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import PAIRS_PER_ROW, Ownership, assign_owners, make_units


def share_documents(geometry: Geometry, kinds: tuple[LayerKind, ...], weights: tuple[int, ...] | None,
                    packs: np.ndarray, replicas: int, row_pairs: int = PAIRS_PER_ROW) -> np.ndarray:
    """Which replica trains each document: by longest processing time, none with more tokens than the longest pack has.

    Args:
        geometry: of all packs, end to end.
        kinds, weights, row_pairs: as ``PackPlan`` has them.
        packs: int64 [D], the pack that each document came in, below ``replicas``.

    Returns:
        int64 [D]; ``packs`` where the fullest replica would not have less to do.
    """
    units, tokens = make_units(geometry, kinds, weights, row_pairs), np.diff(geometry.document_starts)
    cost = np.zeros(len(tokens), np.int64)
    np.add.at(cost, units.document, units.cost)
    before, room, load = np.zeros((3, replicas), np.int64)
    np.add.at(before, packs, cost)
    np.add.at(room, packs, tokens)
    room[:] = room.max(initial=0)
    found = np.empty(len(tokens), np.int64)
    for document in np.lexsort((np.arange(len(cost)), -cost)).tolist():
        fits = np.flatnonzero(room >= tokens[document])
        if not len(fits):
            return packs
        replica = fits[np.argmin(load[fits])]
        found[document] = replica
        load[replica] += cost[document]
        room[replica] -= tokens[document]
    return found if load.max(initial=0) < before.max(initial=0) else packs


def pool_owners(geometry: Geometry, kinds: tuple[LayerKind, ...], weights: tuple[int, ...] | None,
                replica: np.ndarray, replicas: int, ranks: int, row_pairs: int = PAIRS_PER_ROW) -> Ownership:
    """Owners among ``replicas * ranks`` ranks, those of a replica side by side.

    Args:
        replica: int64 [D], which replica trains each document.
        ranks: of one replica.
    """
    cell_document = np.searchsorted(geometry.document_starts, geometry.cell_starts[:-1], "right") - 1
    owners = Ownership(np.zeros(len(cell_document), np.int64), np.zeros(geometry.num_blocks, np.int64))
    for number in range(replicas):
        documents = replica == number
        cells, blocks = documents[cell_document], documents[geometry.block_document]
        part = assign_owners(_part(geometry, documents, cell_document), kinds, ranks, weights, row_pairs)
        owners.cell_rank[cells] = part.cell_rank + number * ranks
        owners.block_rank[blocks] = part.block_rank + number * ranks
    return owners


def pack_of(packs: Sequence[int]) -> np.ndarray:
    """int64 [D], which pack each document came in, of packs with so many documents each."""
    return np.repeat(np.arange(len(packs)), packs)


def _part(geometry: Geometry, documents: np.ndarray, cell_document: np.ndarray) -> Geometry:
    """The documents where ``documents`` [D] is True, as a pack of their own."""
    cells, blocks = documents[cell_document], documents[geometry.block_document]

    def starts(edges: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.diff(edges)[kept])])

    begins, document, cell = starts(geometry.document_starts, documents), np.cumsum(documents) - 1, np.cumsum(cells) - 1
    of_block, over = geometry.block_document[blocks], geometry.block_cell[blocks]
    shift = begins[document[of_block]] - geometry.document_starts[of_block]
    return Geometry(begins, starts(geometry.cell_starts, cells), document[of_block],
                    np.where(over >= 0, cell[over], -1), geometry.block_prefix_end[blocks] + shift,
                    starts(geometry.block_starts, blocks))

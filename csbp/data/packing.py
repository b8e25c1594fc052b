"""Filling packs: whole documents into a token budget."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack_documents(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Best-fit decreasing: longest documents first, each into the fullest pack that still has room.

    A pure function of its arguments. Uses at most 11/9 of the fewest packs possible plus one (Johnson 1974).

    Args:
        lengths: int64 [W], each from 1 to ``budget``.
        budget: tokens of one pack.

    Returns:
        one ascending int64 array of document numbers a pack; packs by their first document. Every document
        once.
    """
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= budget), "documents that fit a pack"
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, pack = room.pop(place)
        else:
            left, pack = budget, len(packs)
            packs.append([])
        packs[pack].append(document)
        if left > length:
            insort(room, (left - length, pack))
    return sorted((np.array(sorted(pack), np.int64) for pack in packs), key=lambda pack: int(pack[0]))

"""Packing: every document once, no pack over its budget, close to full."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from csbp.data.packing import pack_documents


@st.composite
def documents(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    budget = draw(st.integers(1, 64))
    return np.array(draw(st.lists(st.integers(1, budget), max_size=60)), np.int64), budget


@given(documents())
def test_every_document_once_within_the_budget(case: tuple[np.ndarray, int]) -> None:
    lengths, budget = case
    packs = pack_documents(lengths, budget)
    assert sorted(np.concatenate([*packs, np.zeros(0, np.int64)]).tolist()) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) and lengths[pack].sum() <= budget
        assert (np.diff(pack) > 0).all()
    assert [int(p[0]) for p in packs] == sorted(int(p[0]) for p in packs)


@given(documents())
def test_no_two_packs_could_be_one(case: tuple[np.ndarray, int]) -> None:
    """Best fit opens a pack only when a document fits none, so any two packs together exceed the budget."""
    lengths, budget = case
    filled = sorted(int(lengths[p].sum()) for p in pack_documents(lengths, budget))
    assert len(filled) < 2 or filled[0] + filled[1] > budget


def test_the_fullest_pack_with_room_is_taken() -> None:
    packs = pack_documents(np.array([6, 5, 3, 4]), 10)  # 6+4, 5+3; first-fit in this order would give 6+3, 5+4
    assert [p.tolist() for p in packs] == [[0, 3], [1, 2]]

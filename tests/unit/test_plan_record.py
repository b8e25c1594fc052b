"""A plan's digest, and a plan written down and read again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from moved import with_moves
from packs import make_layout, make_pack

from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import Ownership
from csbp.plan.plan import PackPlan
from csbp.plan.tasks import Moves

KINDS = (LayerKind(), LayerKind("near", window=7))


def geometry() -> Geometry:
    return make_layout(make_pack([37, 5, 90, 1]), 8).geometry


def plan(**changes: object) -> PackPlan:
    return replace(PackPlan(geometry(), KINDS, 3), **changes)  # type: ignore[arg-type]


def test_every_process_finds_the_same_digest() -> None:
    code = "from test_plan_record import plan; print(plan().digest())"
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": folders, "PYTHONHASHSEED": seed}).stdout.strip()
    assert found == plan().digest()


def test_the_digest_changes_with_everything_that_decides_the_plan() -> None:
    owners = plan().ownership
    elsewhere = replace(owners, cell_rank=(owners.cell_rank + 1) % 3)
    plans = [plan(), plan(world=4), plan(scheme="block"), plan(scheme="context"), plan(exchange="all_gather"),
             plan(weights=(3, 1)), plan(owners=elsewhere), plan(kinds=KINDS[:1]), plan(kinds=KINDS[::-1])]
    for field, value in (("window", 8), ("name", "other"), ("clean", "token_causal"), ("window_anchor", "row"),
                         ("in_block", "causal"), ("noised", False)):
        plans.append(plan(kinds=(KINDS[0], replace(KINDS[1], **{field: value}))))
    moved = with_moves(plan(), seed=1)
    plans.append(moved)
    for field in fields(Moves):
        values = getattr(moved.moves["near"], field.name).copy()
        values[0] += 1
        near = replace(moved.moves["near"], **{field.name: values})
        plans.append(replace(moved, moves={**moved.moves, "near": near}))
    for field in fields(Geometry):
        values = getattr(geometry(), field.name).copy()
        values[-1] -= 1
        plans.append(plan(geometry=replace(geometry(), **{field.name: values}), owners=owners))
    digests = [p.digest() for p in plans]
    assert len(set(digests)) == len(plans)
    assert plan(owners=owners).digest() == digests[0], "the same owners, given or found"


@pytest.mark.parametrize("owners", [None, Ownership(np.arange(19) % 3, np.arange(19) % 2)])
@pytest.mark.parametrize("weights", [None, (5, 25)])
def test_round_trip(owners: Ownership | None, weights: tuple[int, ...] | None) -> None:
    first = plan(owners=owners, weights=weights, scheme="csbp", exchange="all_gather")
    text = first.to_json()
    again = PackPlan.from_json(text)
    assert again.to_json() == text and again.digest() == first.digest() and again.weights == weights
    assert (again.owners is None) == (owners is None)
    assert repr(again.rank_plan(1)) == repr(first.rank_plan(1))


def test_round_trip_with_moves() -> None:
    first = with_moves(plan(), seed=1)
    again = PackPlan.from_json(first.to_json())
    assert len(first.moves["full"]) and len(first.moves["near"]) and again.to_json() == first.to_json()
    assert again.digest() == first.digest() and repr(again.rank_plan(1)) == repr(first.rank_plan(1))


def test_another_format_is_refused() -> None:
    text = json.dumps({**json.loads(plan().to_json()), "format": 0})
    with pytest.raises(ValueError, match="plan format 0: this csbp reads format 1"):
        PackPlan.from_json(text)

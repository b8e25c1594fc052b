"""What ``csbp plan`` says of the steps that were measured on H200s, beside what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from csbp.bench.cases import step_cases
from csbp.config.schema import RunConfig
from csbp.plan_cli import plan_result

SEEN = json.loads((Path(__file__).parents[2] / "tools" / "results" / "step-h200.json").read_text())


def measured() -> list[tuple[dict[str, Any], RunConfig]]:
    """Rows of the results, each with its run; those over a slow link have none."""
    runs = {(f"{case.bench.name}, {variant}", world): config
            for preset in ("h200", "scaling") for world in (1, 2)
            for case in step_cases([f"preset={preset}"], world) for variant, config in case.runs.items()}
    return [(row, runs[row["name"], row["gpus"]]) for row in SEEN if (row["name"], row["gpus"]) in runs]


@pytest.fixture(scope="module", name="rows")
def _rows() -> list[tuple[dict[str, Any], RunConfig]]:
    found = measured()
    assert len(found) > 15
    return found


def test_memory_is_enough_and_not_far_too_much(rows: list[tuple[dict[str, Any], RunConfig]]) -> None:
    wrong = {}
    for row, config in rows:
        said = plan_result(config).chosen.memory.total.max() / 2**30
        if not 1 <= said / row["peak_gib"] <= 1.2:
            wrong[row["name"], row["gpus"]] = said, row["peak_gib"]
    assert not wrong


def test_steps_take_about_as_long(rows: list[tuple[dict[str, Any], RunConfig]]) -> None:
    wrong, compared = {}, 0
    for row, config in rows:
        # The rates are those of compiled layers and FlashAttention; disaggregation is told by its own costs.
        if not row["compile"] or config.cad.enabled or row["kind"] == "data":
            continue
        said, compared = 1e3 * plan_result(config).chosen.seconds.step * config.train.packs_per_step, compared + 1
        if abs(said / row["step_ms"] - 1) > 0.1:
            wrong[row["name"], row["gpus"]] = said, row["step_ms"]
    assert not wrong and compared > 8

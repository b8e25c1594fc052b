"""The generated files are those that the code would write now."""

from __future__ import annotations

from pathlib import Path

import pytest

from csbp.config.fields import fields_of
from csbp.config.reference import reference_files, reference_page
from csbp.config.schema import GenerateConfig, RunConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", list(reference_files()))
def test_generated_files_are_current(name: str) -> None:
    assert (ROOT / name).read_text() == reference_files()[name], "run python -m csbp.config.reference"


def test_the_page_has_every_setting() -> None:
    page = reference_page()
    for field in (*fields_of(RunConfig), *fields_of(GenerateConfig)):
        if not field.is_section and not field.key.startswith("data.validation."):
            assert f"| `{field.key}` |" in page
            assert field.help, field.key

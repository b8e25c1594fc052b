"""What makes runs repeat is in force before ranks meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_corpus, tiny_run

from csbp.parallel import runtime
from csbp.worker import run_rank


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch._inductor import config as inductor

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what the run sets is taken back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with inductor.patch(deterministic=False):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("words", "fixed", "untimed"), [
    ({}, False, False), ({"train": {"deterministic": True}}, True, True),
    ({"parallel": {"tp": 2}}, False, False), ({"parallel": {"tp": 2, "compile": True}}, False, True)])
def test_comes_before_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], fixed: bool,
                                 untimed: bool) -> None:
    from torch._inductor import config as inductor

    class Met(Exception):
        pass

    def start(*given: Any) -> None:
        assert torch.are_deterministic_algorithms_enabled() == fixed
        assert inductor.deterministic == untimed
        raise Met

    monkeypatch.setattr(runtime, "start_runtime", start)
    config = tiny_run(make_corpus(tmp_path), tmp_path / "run", **words)
    with pytest.raises(Met):
        run_rank(config, lambda: tmp_path)

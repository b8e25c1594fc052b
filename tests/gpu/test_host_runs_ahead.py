"""A training step never makes the host wait for the device before its numbers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from csbp.bench.step import run_step
from csbp.train.step import StepRunner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("words", [[], ["attention.backend=flex"], ["parallel.checkpointing=attention"],
                                   ["parallel.compile=true"]], ids=lambda words: " ".join(words) or "as it is")
def test_the_host_runs_ahead(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real, turns = StepRunner.run, []

    def run(self: StepRunner, works: Any, *, meanwhile: Callable[[], None], **rest: Any) -> Any:
        def freely() -> None:
            torch.cuda.set_sync_debug_mode("default")
            meanwhile()

        turns.append(len(turns))
        torch.cuda.set_sync_debug_mode("error" if len(turns) > 2 else "default")
        return real(self, works, meanwhile=freely, **rest)

    monkeypatch.setattr(StepRunner, "run", run)
    try:
        code = run_step(["experiment=quickstart", "data.seq_len=512", "train.dtype=bfloat16", "parallel.device=cuda",
                         "warmup=2", "repeats=2", *words])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert code == 0 and len(turns) > 3

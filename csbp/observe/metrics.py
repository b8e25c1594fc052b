"""What a run records in its folder: one JSON object a line, readable while the run goes on.

    metrics.jsonl   one object for each optimizer step
    eval.jsonl      one for each evaluation
    samples.jsonl   one for each filled-in held-out block

Step k is the k-th optimizer step; what is recorded at step 0 comes from the untrained model.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from csbp.errors import writing

METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "eval.jsonl", "samples.jsonl"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file in order; none if there is no file. A torn line, which a crash leaves last, is skipped."""
    if not path.exists():
        return []
    records = []
    # Not splitlines(), which also ends a line inside of a text that holds U+2028 or U+0085.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class MetricsWriter:
    """Appends records to a run folder. One process writes (rank 0).

    Args:
        run_dir: the run folder.
        resumed_at: None for a fresh run, which starts with empty files. Otherwise steps done by the
            checkpoint that the run goes on from: later records are dropped, since those steps come again.

    Raises:
        UserError: here and in every method that records: a file cannot be written.
    """

    def __init__(self, run_dir: Path, resumed_at: int | None = None) -> None:
        last = -1 if resumed_at is None else resumed_at
        self._files: dict[str, TextIO] = {}
        for name in (METRICS, EVALUATIONS, SAMPLES):
            path = run_dir / name
            with writing(path):
                run_dir.mkdir(parents=True, exist_ok=True)
                _keep_through(path, last)
                self._files[name] = path.open("a", encoding="utf-8", buffering=1)

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Record an optimizer step. Numbers that are not finite are written as null, which JSON can hold."""
        self._append(METRICS, step, record)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Record an evaluation after ``step`` steps."""
        self._append(EVALUATIONS, step, record)

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Record a filled-in block after ``step`` steps."""
        self._append(SAMPLES, step, record)

    def close(self) -> None:
        """Close the files; may be called again."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # of a line that could not be written, which was told then
                file.close()

    def _append(self, name: str, step: int, record: Mapping[str, Any]) -> None:
        values = {"step": step, **{key: finite(value) for key, value in record.items()}}
        with writing(self._files[name].name):
            self._files[name].write(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """``value`` with every float in it that is not finite replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _keep_through(path: Path, last: int) -> None:
    """Rewrite a file with its records up to step ``last``, whole, also if this is interrupted."""
    kept = [record for record in read_records(path) if record["step"] <= last]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)

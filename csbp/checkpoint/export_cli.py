"""``csbp export``: the newest checkpoint of a run as a Hugging Face folder, in one process on the CPU."""

from __future__ import annotations

from pathlib import Path

from csbp.checkpoint.card import read_summary, run_facts
from csbp.checkpoint.huggingface import export_model
from csbp.checkpoint.reading import EXPORT, newest_checkpoint, open_model
from csbp.errors import ConfigError


def run_export(run_dir: Path, out: Path | None = None) -> int:
    """Export the newest undamaged checkpoint of ``run_dir`` to ``out`` (default: ``run_dir/export``).

    Returns:
        0, the exit code.

    Raises:
        ConfigError: the run has no undamaged checkpoint.
    """
    from transformers import AutoTokenizer

    newest = newest_checkpoint(run_dir)
    if newest is None:
        raise ConfigError("run_dir", str(run_dir), "give the folder of a run that has an undamaged checkpoint")
    opened = open_model(newest)
    tokenizer = AutoTokenizer.from_pretrained(opened.files)
    summary = read_summary(run_dir)
    # The run's results are those of its last step; an earlier or later checkpoint has none.
    facts = {**run_facts(run_dir, summary if summary.get("steps") == opened.step else {}),
             "step of the checkpoint": opened.step}
    folder = export_model(opened.model, opened.adapter, tokenizer, out or run_dir / EXPORT, opened.diffusion,
                          facts=facts, step=opened.step)
    print(f"{newest} exported to {folder}")
    return 0

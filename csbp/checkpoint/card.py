"""The README of an exported model, written from what the run recorded and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# summary.json key -> what the card calls it.
_RESULTS = {
    "steps": "optimizer steps",
    "eval_loss_before": "held-out loss before training (nats per supervised token)",
    "eval_loss_after": "held-out loss after training",
    "eval_loss_unigram": "held-out loss of a unigram model",
    "eval_loss_random_start": "held-out loss from random weights (recorded earlier)",
    "random_start_steps": "steps from random weights",
    "bits_per_byte_before": "bits per byte before training",
    "bits_per_byte_after": "bits per byte after training",
    "masked_accuracy_before": "masked-token accuracy before training",
    "masked_accuracy_after": "masked-token accuracy after training",
    "seconds": "seconds of the run",
}
# Key of config.yaml -> what the card calls it.
_SETTINGS = {
    "experiment": "experiment",
    "seed": "seed",
    "model.path": "started from",
    "model.init": "initial weights",
    "objective.kind": "objective",
    "data.seq_len": "tokens of a pack",
    "train.packs_per_step": "packs of a step",
    "train.dtype": "compute dtype",
    "parallel.nproc": "ranks",
}


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json of a run; empty if there is none yet."""
    path = run_dir / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def run_facts(run_dir: Path, summary: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What ``config.yaml`` and the summary of a run say, under readable names. What is missing says nothing.

    Args:
        summary: values of summary.json, if it is not written yet; None: read it.
    """
    facts: dict[str, Any] = {}
    if (run_dir / "config.yaml").exists():
        from omegaconf import OmegaConf

        config = OmegaConf.load(run_dir / "config.yaml")
        facts |= {label: OmegaConf.select(config, key) for key, label in _SETTINGS.items()}
    if summary is None:
        summary = read_summary(run_dir)
    facts |= {label: summary.get(key) for key, label in _RESULTS.items()}
    return {label: value for label, value in facts.items() if value not in (None, "")}


def render_card(name: str, config: Mapping[str, Any], diffusion: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The card's text.

    Args:
        name: title.
        config: config.json of the export.
        diffusion: its diffusion properties; empty for an autoregressive model.
        facts: rows of the table of the run; keys of summary.json get readable names.
    """
    facts = {_RESULTS.get(key, key): value for key, value in facts.items() if value is not None}
    kind = "block-diffusion" if diffusion else "autoregressive"
    lines = ["---", "library_name: transformers", f"tags: [csbp, {kind}]", "---", "", f"# {name}", ""]
    if not diffusion:
        facts = {label.replace("masked-token", "next-token"): value for label, value in facts.items()}
    article, family = "A" if diffusion else "An", config.get("model_type", "unknown")
    lines += [f"{article} {kind} language model of type `{family}`, trained with csbp.", ""]
    if diffusion:
        lines += [
            f"It fills blocks of {diffusion['block_size']} tokens that start as the mask token (id "
            f"{diffusion['mask_token_id']}). The weights load in stock transformers, but its `generate` goes from "
            "left to right, which this model was not trained for. Sample with", "",
            "    csbp generate model=THIS_FOLDER 'prompt=...'", "",
            *_table(diffusion),
        ]
    if facts:
        lines += ["## The run", "", *_table(facts)]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Mapping[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        return shown.replace("|", "\\|").replace("\n", " ")

    return ["| | |", "|---|---|", *(f"| {label} | {text(value)} |" for label, value in rows.items()), ""]

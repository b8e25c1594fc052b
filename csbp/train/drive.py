"""What every training recipe does: open, train, compare, export, report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch

from csbp.checkpoint.card import run_facts
from csbp.checkpoint.huggingface import export_model, write_model_files
from csbp.checkpoint.reading import EXPORT, MODEL_FILES
from csbp.config.schema import RunConfig
from csbp.observe.summary import write_summary
from csbp.parallel.runtime import Runtime
from csbp.train.evaluate import held_out_packs, unigram_loss
from csbp.train.progress import Progress, resume
from csbp.train.recorder import Recorder
from csbp.train.session import Session, open_session
from csbp.train.trainer import Trainer

STOPPED_EARLY = 1


def run_training(config: RunConfig, runtime: Runtime) -> int:
    """Train to the last step, then evaluate, export and report. Collective.

    Returns:
        0, or 1 where the run was asked to stop early and has saved its state.
    """
    session = open_session(config, runtime)
    # What a checkpoint needs beside its tensors to become a model again: csbp generate, csbp export.
    runtime.on_main(lambda: write_model_files(session.model, session.adapter, session.tokenizer,
                                              runtime.run_dir / MODEL_FILES, session.diffusion))
    held_out = held_out_packs(session)
    unigram = unigram_loss(session, held_out)
    progress = resume(session) if config.resume == "auto" else None
    recorder = Recorder(config, runtime.run_dir, main=runtime.main, resumed_at=progress.step if progress else None,
                        earlier=progress.seconds if progress else 0.0)
    if config.parallel.compile:
        recorder.note("layers are compiled when they first run, which takes a minute or two")
    try:
        trainer = Trainer(session, held_out, recorder, progress)
        if not trainer.train():
            saved = "everything is saved" if trainer.progress.step else "there is nothing to save yet"
            recorder.note(f"stopped at step {trainer.progress.step}; {saved}")
            return STOPPED_EARLY
        # The numbers first: an export may fail, and can be made again from the checkpoint.
        summary = summarise(session, trainer.progress, unigram)
        runtime.on_main(lambda: write_summary(runtime.run_dir, summary))
        if config.checkpoint.export:
            summary["export_dir"] = str(export(session, summary))
            runtime.on_main(lambda: write_summary(runtime.run_dir, summary))
        recorder.finish(summary, trainer.progress.sample_before, trainer.sample_after)
    finally:
        recorder.close()
    return 0


def export(session: Session, summary: dict[str, Any]) -> Path:
    """The trained model as a Hugging Face folder in the run folder. Collective."""
    run_dir = session.runtime.run_dir
    dtype = torch.bfloat16 if session.config.checkpoint.export_dtype == "bfloat16" else torch.float32
    return export_model(session.model, session.adapter, session.tokenizer, run_dir / EXPORT, session.diffusion,
                        facts=run_facts(run_dir, summary), dtype=dtype, step=summary["steps"])


def comparison_digest(config: RunConfig) -> str:
    """Of everything that a held-out loss depends on, beside the weights and how many steps they had: two runs with
    the same digest measure the same thing."""
    parts = {name: dataclasses.asdict(getattr(config, name)) for name in ("data", "model", "objective", "noise")}
    for name in ("cache_dir", "document_lengths"):
        parts["data"].pop(name)
    parts["model"].pop("init")
    parts["evaluation"] = {name: getattr(config.train, name) for name in ("eval_packs", "eval_seed", "eval_t_min")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def summarise(session: Session, progress: Progress, unigram: float) -> dict[str, Any]:
    """The numbers of summary.json; held-out losses in nats per supervised token, all with the same noise."""
    config = session.config
    before, after = progress.before, progress.last
    assert before is not None and after is not None
    values: dict[str, Any] = {"objective": config.objective.kind, "steps": progress.step,
                              "seconds": progress.seconds, "nproc": session.runtime.world}
    for name, found in (("before", before), ("after", after)):
        values |= {f"eval_loss_{name}": found.loss, f"bits_per_byte_{name}": found.bits_per_byte,
                   f"masked_accuracy_{name}": found.masked_accuracy}
    recorded = config.observe
    holds = recorded.random_start_for == comparison_digest(config)
    values |= {"eval_loss_unigram": unigram, "eval_loss_random_start": recorded.random_start_loss if holds else None,
               "random_start_steps": recorded.random_start_steps if holds else None, "eval_loss_best": progress.best,
               "export_dir": None}
    if config.cad.enabled:
        values["cad_bytes"] = progress.cad_bytes
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}

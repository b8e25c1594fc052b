"""Whole small training runs, as functions that ranks of the pool can call."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from csbp.config.cad import pooled
from csbp.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    NoiseConfig,
    ObjectiveConfig,
    ObserveConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320, "tie_word_embeddings": True}


def make_corpus(folder: Path) -> Path:
    """A folder with documents of very different lengths and a byte-level tokenizer; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = folder / "texts"
    texts.mkdir(parents=True)
    for i, words in enumerate((1, 2, 3, 5, 8, 13, 21, 34, 55, 3, 1, 60, 12, 7, 30, 44)):
        (texts / f"{i:02d}.txt").write_text(" ".join(f"w{(i * j) % 17}" for j in range(words)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: n for n, c in enumerate(["<eos>", *alphabet])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(folder / "tokenizer")
    return folder


def tiny_run(corpus: Path, run_dir: Path, **changes: Any) -> RunConfig:
    """A run of ten steps that takes a second; ``changes`` override sections, as dicts, or top-level fields."""
    config = RunConfig(
        experiment="tiny", run_dir=str(run_dir), seed=3, model=ModelConfig(init="random", shape=SHAPE),
        objective=ObjectiveConfig(block_size=4), noise=NoiseConfig(t_min=0.2),
        data=DataConfig(sources=[SourceConfig(path=str(corpus / "texts"))], tokenizer=str(corpus / "tokenizer"),
                        seq_len=96, document_tokens=64, validation_fraction=0.25, cache_dir=str(corpus / "cache")),
        parallel=ParallelConfig(device="cpu", timeout_seconds=60),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, schedule="constant"),
        train=TrainConfig(steps=10, packs_per_step=3, eval_packs=2),
        checkpoint=CheckpointConfig(keep=3, export=False), observe=ObserveConfig(progress="off", plot=False))
    for name, value in changes.items():
        value = replace(getattr(config, name), **value) if isinstance(value, dict) else value
        config = replace(config, **{name: value})
    return config


def train_here(config: RunConfig, disturb: Callable[[Any], None] | None = None) -> int:
    """Run the configuration on this rank of an initialised world; ``disturb`` gets the session before it trains."""
    import torch.distributed as dist

    from csbp.parallel.runtime import start_runtime
    from csbp.train import drive

    assert config.run_dir is not None
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config, parallel=replace(config.parallel, nproc=dist.get_world_size()))
    runtime = start_runtime(config.parallel, lambda: folder, pooled=pooled(config))
    opened = drive.open_session

    def open_and_disturb(*args: Any) -> Any:
        session = opened(*args)
        if disturb:
            disturb(session)
        return session

    drive.open_session = open_and_disturb
    try:
        return drive.run_training(config, runtime)
    finally:
        drive.open_session = opened


def on_steps(session: Any, call: Callable[[int, Callable[[], Any]], Any]) -> None:
    """Have ``call`` run each optimizer step, by its number from 0; an evaluation's packs run as they are."""
    prepare, run, training = session.runner.prepare, session.runner.run, {}

    def prepared(packs: Any, noising: Any, step: int) -> Any:
        works = prepare(packs, noising, step)
        if noising is session.training:
            training[id(works)] = works, step  # kept, so that no other works have its id
        return works

    def running(works: Any, **named: Any) -> Any:
        if id(works) not in training:
            return run(works, **named)
        return call(training.pop(id(works))[1], lambda: run(works, **named))

    session.runner.prepare, session.runner.run = prepared, running


def at_step(session: Any, rank: int, when: int, action: Callable[[], None]) -> None:
    """Call ``action`` on one rank before it comes to optimizer step ``when`` (from 0)."""
    prepare, run = session.runner.prepare, session.runner.run
    busy, due = [False], []

    def prepared(packs: Any, noising: Any, step: int) -> Any:
        if session.runtime.rank == rank and step == when and noising is session.training:
            due.append(action)
        if not busy[0]:
            act()
        return prepare(packs, noising, step)

    def running(works: Any, **named: Any) -> Any:
        busy[0] = True  # the next step is prepared meanwhile
        result = run(works, **named)
        busy[0] = False
        act()
        return result

    def act() -> None:
        while due:
            due.pop()()

    session.runner.prepare, session.runner.run = prepared, running


def ask_to_stop() -> None:
    """What a scheduler does before it takes a machine away."""
    os.kill(os.getpid(), signal.SIGTERM)


def steps_of(run_dir: Path | str) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().split("\n") if line]


def losses(run_dir: Path | str) -> list[float]:
    """Losses by step; fails if a step is missing or twice."""
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def final_weights(run_dir: Path | str) -> dict[str, bytes]:
    """The bytes of every tensor, the optimizer's too, of the newest checkpoint. (The files' headers hold maps whose
    order is not fixed, so files are not compared.)"""
    from safetensors.numpy import load_file

    newest = sorted((Path(run_dir) / "checkpoints").glob("step-*"))[-1]
    return {f"{file.name}/{name}": value.tobytes() for file in newest.glob("*.safetensors")
            for name, value in load_file(file).items()}

"""A run made ready: everything that a recipe works with, built in one order on every rank."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from csbp.attention.usable import taken
from csbp.checkpoint.reading import model_files, open_model, resolve_model_folder
from csbp.checkpoint.store import CheckpointStore
from csbp.config.schema import SELECTIVE, NoiseConfig, ObjectiveConfig, RunConfig
from csbp.data.stream import PackStream, open_stream
from csbp.data.tokenizer import load_tokenizer, next_free_id
from csbp.errors import ConfigError, met_by_all
from csbp.models.protocol import ModelAdapter
from csbp.models.registry import get_adapter
from csbp.parallel.apply import parallelize
from csbp.parallel.runtime import Runtime
from csbp.plan.cad import cad_of
from csbp.plan.shapes import model_shape
from csbp.train.optimizer import build_optimizer
from csbp.train.step import Noising, StepRunner


@dataclass
class Session:
    """One run on one rank. The model is sharded; ``training`` and ``evaluation`` say what is asked of packs."""

    config: RunConfig
    runtime: Runtime
    tokenizer: PreTrainedTokenizerFast
    adapter: ModelAdapter
    model: nn.Module
    optimizer: torch.optim.AdamW
    runner: StepRunner
    training: Noising
    evaluation: Noising
    train_stream: PackStream
    held_out: PackStream
    store: CheckpointStore

    @property
    def diffusion(self) -> dict[str, Any]:
        """The properties of the checkpoint that a sampler must know; empty for an autoregressive model."""
        objective = self.config.objective
        if objective.kind == "autoregressive":
            return {}
        return {"block_size": objective.block_size, "mask_token_id": self.training.mask_token_id,
                "label_shift": objective.label_shift, "clean_stream": objective.clean_stream}


def evaluation_of(objective: ObjectiveConfig, noise: NoiseConfig, t_min: float) -> tuple[ObjectiveConfig, NoiseConfig]:
    """What held-out loss means: the likelihood bound in nats per supervised token (weight 1/t), or plain cross
    entropy for an autoregressive model; comparable between runs whatever their training weights are."""
    return (replace(objective, weight="inverse_t", denominator="supervised", ar_weight=0.0),
            replace(noise, t_min=t_min, t_max=1.0))


def open_session(config: RunConfig, runtime: Runtime) -> Session:
    """Tokenizer, data, model, optimizer. Collective.

    Raises:
        ConfigError: something in the configuration cannot work with this tokenizer, data or model, or hosts have
            different ones.
    """
    adapter = get_adapter(config.model.family)
    tokenizer = run_tokenizer(config)
    streams = {split: open_stream(config.data, seed=config.seed, tokenizer=tokenizer, split=split)
               for split in ("train", "validation")}
    expect_same_documents(config, runtime, list(streams.values()), next_free_id(tokenizer))
    model = build_model(config, adapter)
    mask = mask_token(config, tokenizer, rows=model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    optimizer, runner = make_ready(config, runtime, adapter, model)
    objective, noise = evaluation_of(config.objective, config.noise, config.train.eval_t_min)
    return Session(
        config, runtime, tokenizer, adapter, model, optimizer, runner,
        training=Noising(config.objective, config.noise, mask, config.seed),
        evaluation=Noising(objective, noise, mask, config.train.eval_seed),
        train_stream=streams["train"], held_out=streams["validation"],
        store=CheckpointStore(runtime.run_dir, keep=config.checkpoint.keep))


def expect_same_documents(config: RunConfig, runtime: Runtime, streams: Sequence[PackStream],
                          vocabulary: int) -> None:
    """Refuse hosts whose documents or tokenizers differ: ranks would plan different packs and wait for each other.
    Collective.

    Args:
        vocabulary: ids of this rank's tokenizer.

    Raises:
        ConfigError: on every rank.
    """
    same_ids, same_packs = runtime.alike(vocabulary), runtime.alike([stream.digest for stream in streams])
    with met_by_all():
        if not same_packs:
            raise ConfigError("data.sources", [source.path for source in config.data.sources], "some host reads other "
                              "documents than rank 0's, here or in data.validation; give all hosts the same files")
        if not same_ids:
            raise ConfigError("data.tokenizer", config.data.tokenizer or config.model.path, "some host has another "
                              f"tokenizer than rank 0's, here of {vocabulary} ids; give all hosts the same files")


def expect_same_weights(config: RunConfig, runtime: Runtime, model: nn.Module) -> None:
    """Refuse hosts whose models differ in shape, or in weights that were read: each rank keeps a part of its own.
    Collective.

    Raises:
        ConfigError: on every rank.
    """
    if not runtime.alike(_weights_digest(model, read=config.model.init == "pretrained")):
        with met_by_all():
            raise ConfigError("model.path", config.model.path, "some host has another model than rank 0's; give all "
                                                               "hosts the same files")


def _weights_digest(model: nn.Module, read: bool) -> str:
    """Of names, shapes and, of weights that were read, about a thousand numbers of each. Random ones may differ in
    their last bits between processors."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(repr((name, tuple(value.shape))).encode())
        if read:
            flat = value.flatten()
            digest.update(flat[::max(1, len(flat) // 1024)].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def make_ready(config: RunConfig, runtime: Runtime, adapter: ModelAdapter,
               model: nn.Module) -> tuple[torch.optim.AdamW, StepRunner]:
    """Move a full-size model, equal on every rank, to its device and shard it there; its optimizer and its runner.
    Collective."""
    expect_same_weights(config, runtime, model)
    model.to(runtime.device)
    compute = compute_dtype(config)
    parallelize(model, adapter.units(model), config.parallel, runtime, compute, adapter.tp_plan(model))
    shape = model_shape(adapter.export_config(model, {}), config.objective.clean_stream)
    if runtime.main and config.attention.backend == "auto":
        for said in taken("auto", shape, runtime.device, compute, config.train.deterministic).values():
            print(f"csbp: {said}", file=sys.stderr, flush=True)
    # What hosts have in a profile may differ; plans may not.
    cad = runtime.on_main(lambda: cad_of(config, shape, "h200" if runtime.device.type == "cuda" else "cpu"))
    cad = cad and replace(cad, device=replace(cad.device, node=runtime.node()))
    return (build_optimizer(model, config.optim),
            StepRunner(model, adapter, runtime, config.attention.backend, shape, config.train.logit_rows,
                       native=not config.parallel.compile and config.parallel.checkpointing not in SELECTIVE,
                       cad=cad, overlap=config.cad.overlap != "none"))


def compute_dtype(config: RunConfig) -> torch.dtype:
    """What activations are computed in."""
    return torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32


def run_tokenizer(config: RunConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of data.tokenizer, or the model's own."""
    family, named = config.model.family, config.data.tokenizer
    if named:
        return load_tokenizer(named, family)
    return load_tokenizer(str(model_files(resolve_model_folder(config.model.path, family))), family, "model.path")


def build_model(config: RunConfig, adapter: ModelAdapter) -> nn.Module:
    """The full-size float32 model, equal on every rank: pretrained, or random from the run's seed."""
    family, folder = config.model.family, None
    if config.model.path:
        folder = resolve_model_folder(config.model.path, family)
    if config.model.init == "random":
        torch.manual_seed(config.seed)
        return adapter.build(folder and model_files(folder), config.model.shape, torch.float32)
    if folder is None:
        raise ConfigError("model.path", config.model.path, "name a Hugging Face folder, or set model.init=random")
    opened = open_model(folder)
    if opened.adapter.family != adapter.family:
        raise ConfigError("model.family", adapter.family, f"{folder} holds a {opened.adapter.family} model")
    check_expected_shape(config.model.shape, opened.model.config)
    return opened.model.train()


def check_expected_shape(expected: Mapping[str, Any], config: Any) -> None:
    """Hold the shape that a run was planned by against the loaded weights' configuration.

    Raises:
        ConfigError: a field differs, or the weights' configuration does not have it.
    """
    for name, value in expected.items():
        if not hasattr(config, name):
            raise ConfigError(f"model.shape.{name}", value, "the weights' configuration has no such field; leave it "
                                                            "out")
        found = getattr(config, name)
        if found != value:
            raise ConfigError(f"model.shape.{name}", value, f"the weights have {found!r}; write that, or leave it out")


def mask_token(config: RunConfig, tokenizer: PreTrainedTokenizerFast, rows: int) -> int:
    """The id of [MASK]: configured, or the first past the tokenizer's last.

    Raises:
        ConfigError: the model has no embedding row for it, or it is an ordinary token.
    """
    chosen = config.model.mask_token_id
    mask = next_free_id(tokenizer) if chosen is None else chosen
    if config.objective.kind == "autoregressive":
        return mask
    if mask >= rows:
        raise ConfigError("model.mask_token_id", chosen, f"the mask id would be {mask}, but the model has {rows} "
                          "embedding rows; name a reserved token's id")
    if mask < next_free_id(tokenizer) and mask not in tokenizer.all_special_ids:
        raise ConfigError("model.mask_token_id", mask, f"is the ordinary token {tokenizer.decode([mask])!r}; leave "
                          f"it out to use {next_free_id(tokenizer)}, the first free id")
    return mask

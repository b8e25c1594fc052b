"""``csbp generate``: go on from a prompt with a trained model, in one process, printing block by block."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TextStreamer

from csbp.checkpoint.huggingface import DIFFUSION_KEYS
from csbp.checkpoint.reading import open_model, resolve_model_folder
from csbp.config.places import builtin_models, families
from csbp.config.schema import GenerateConfig
from csbp.data.tokenizer import load_tokenizer
from csbp.diffusion.sampler import SamplerSettings, generate_blocks
from csbp.errors import ConfigError


def run_generate(config: GenerateConfig) -> int:
    """Print the prompt and its continuation to stdout.

    Returns:
        0, the exit code.

    Raises:
        ConfigError: no such model, or one that was not trained by block diffusion; a device that is not there.
        UserError: the model's files are missing or damaged.
    """
    device = _device(config.device)
    folder = resolve_model_folder(config.model, _family_of_builtin(config.model), field="model")
    opened = open_model(folder, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if set(opened.diffusion) != set(DIFFUSION_KEYS):
        raise ConfigError("model", config.model, "is not a block-diffusion model (its config.json has no block size "
                                                 "and mask id); convert it first: csbp train experiment=quickstart")
    tokenizer = load_tokenizer(str(opened.files), opened.adapter.family, field="model")
    prompt = tokenizer(config.prompt, add_special_tokens=False)["input_ids"]
    rows: int = opened.model.get_input_embeddings().num_embeddings  # type: ignore[assignment, operator]
    _expect_usable(config.model, opened.diffusion, rows)
    settings = SamplerSettings(**opened.diffusion, threshold=config.threshold, temperature=config.temperature,
                               seed=config.seed)
    limit = getattr(opened.model.config, "max_position_embeddings", math.inf)
    if len(prompt) + config.max_new_tokens > limit:
        print(f"csbp: warning: {len(prompt)} tokens of prompt and {config.max_new_tokens} new ones go beyond the "
              f"model's max_position_embeddings={limit}", file=sys.stderr)
    # The streamer holds back what is not yet a whole word or character.
    stream = TextStreamer(tokenizer, skip_special_tokens=True)
    stream.put(torch.tensor(prompt, dtype=torch.int64))
    for block in generate_blocks(opened.model.to(device), opened.adapter, prompt, settings,
                                 eos_token_id=tokenizer.eos_token_id, max_new_tokens=config.max_new_tokens):
        stream.put(torch.tensor(block))
    stream.end()
    return 0


def _expect_usable(model: str, diffusion: Mapping[str, Any], rows: int) -> None:
    """Refuse a config.json, perhaps edited, by which nothing can be generated."""

    def whole(name: str, low: int, end: float) -> bool:
        value = diffusion[name]
        return isinstance(value, int) and not isinstance(value, bool) and low <= value < end

    usable = {"block_size": whole("block_size", 1, math.inf), "mask_token_id": whole("mask_token_id", 0, rows),
              "label_shift": isinstance(diffusion["label_shift"], bool),
              "clean_stream": diffusion["clean_stream"] in ("block_causal", "token_causal")}
    for name, good in usable.items():
        if not good:
            raise ConfigError("model", model, f"its config.json has {name}={diffusion[name]!r}, which a model with "
                                              f"{rows} embedding rows cannot have; export the run again")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "torch finds no CUDA device here; use device=cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _family_of_builtin(model: str) -> str:
    """The family that ships ``builtin:NAME``; any for other models, where it is not asked."""
    name = model.removeprefix("builtin:")
    return next((family for family in families() if name in builtin_models(family)), families()[0])

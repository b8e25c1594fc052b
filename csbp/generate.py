"""``csbp generate``: go on from a prompt with a trained model, in one process, printing block by block."""

from __future__ import annotations

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
    settings = SamplerSettings(**opened.diffusion, threshold=config.threshold, temperature=config.temperature,
                               seed=config.seed)
    # The streamer holds back what is not yet a whole word or character.
    stream = TextStreamer(tokenizer, skip_special_tokens=True)
    stream.put(torch.tensor(prompt, dtype=torch.int64))
    for block in generate_blocks(opened.model.to(device), opened.adapter, prompt, settings,
                                 eos_token_id=tokenizer.eos_token_id, max_new_tokens=config.max_new_tokens):
        stream.put(torch.tensor(block))
    stream.end()
    return 0


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "torch finds no CUDA device here; use device=cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _family_of_builtin(model: str) -> str:
    """The family that ships ``builtin:NAME``; any for other models, where it is not asked."""
    name = model.removeprefix("builtin:")
    return next((family for family in families() if name in builtin_models(family)), families()[0])

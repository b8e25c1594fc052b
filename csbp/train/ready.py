"""Can this run start? Tokenizer, model and data, as far as they can be known without the weights.

``csbp check`` shows what is found here; ``csbp train`` goes through it before its ranks start (``csbp.prepare``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from csbp.attention.usable import check_backend
from csbp.checkpoint.huggingface import read_config
from csbp.checkpoint.reading import model_files, resolve_model_folder
from csbp.checkpoint.target import FAMILY_KEY
from csbp.checkpoint.weights import expect_weights
from csbp.config.cad import pooled
from csbp.config.mesh import axis_sizes
from csbp.config.schema import RunConfig
from csbp.data.stream import PackStream, open_stream, prepare_corpora
from csbp.data.tokenizer import next_free_id
from csbp.errors import ConfigError
from csbp.models.protocol import ModelAdapter
from csbp.models.registry import get_adapter
from csbp.plan.cad import cad_of
from csbp.plan.limits import check_pool, check_split, check_windows
from csbp.plan.shapes import ModelShape, model_shape
from csbp.train.learnable import expect_blocks, expect_learnable
from csbp.train.session import check_expected_shape, compute_dtype, mask_token, run_tokenizer
from csbp.train.surprises import surprises

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class ReadyModel:
    """A model whose weights are still to come.

    Attributes:
        adapter: of its family.
        tokenizer: the run's.
        model: shapes without numbers, on the meta device.
        shape: what planning knows of it.
        rows: of its embedding.
        mask: id of [MASK].
        notes: what the user should know although the run can start.
    """

    adapter: ModelAdapter
    tokenizer: PreTrainedTokenizerFast
    model: nn.Module
    shape: ModelShape
    rows: int
    mask: int
    notes: list[str]


def check_model(config: RunConfig) -> ReadyModel:
    """Tokenizer and model, and whether they fit each other.

    Raises:
        ConfigError, UserError: the first thing that would stop the run.
    """
    adapter = get_adapter(config.model.family)
    tokenizer = run_tokenizer(config)
    model = build_on_meta(config, adapter)
    shape = model_shape(adapter.export_config(model, {}), config.objective.clean_stream)
    check_split(config.parallel.tp, shape)
    check_windows(adapter.layer_kinds(model, config.objective.clean_stream), config.objective)
    replicas, ranks, _ = axis_sizes(config.parallel)
    check_pool(ranks, replicas if pooled(config) else 1)
    cad_of(config, shape, "cpu")  # reads the profile that it is given
    rows: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment, operator]
    mask, last = mask_token(config, tokenizer, rows), next_free_id(tokenizer) - 1
    if last >= rows:
        named = config.data.tokenizer
        raise ConfigError("data.tokenizer" if named else "model.path", named or config.model.path,
                          f"its tokenizer's last id is {last}, but the model has only {rows} embedding rows; set "
                          "data.tokenizer to the model's own")
    kept = {"EOS": tokenizer.eos_token_id, "BOS": tokenizer.bos_token_id, "PAD": tokenizer.pad_token_id}
    for name, index in kept.items():
        if config.objective.kind != "autoregressive" and mask == index:
            raise ConfigError("model.mask_token_id", mask, f"is the tokenizer's {name} token, which text contains; "
                                                           "name another reserved id, or null")
    return ReadyModel(adapter, tokenizer, model, shape, rows, mask, surprises(config, model.config, mask))


def check_kernels(config: RunConfig, shape: ModelShape, device: torch.device) -> None:
    """Whether attention.backend can compute the run on a device of its ranks.

    Raises:
        ConfigError: it cannot.
    """
    check_backend(config.attention.backend, shape, device, compute_dtype(config), config.train.deterministic)


def build_on_meta(config: RunConfig, adapter: ModelAdapter) -> nn.Module:
    """The model as shapes without numbers.

    Raises:
        ConfigError: there is no such model, it is of another family or shape, or its weights are not there as
            safetensors.
    """
    path = found = None
    pretrained = config.model.init == "pretrained"
    if config.model.path:
        found = resolve_model_folder(config.model.path, config.model.family)
        path = model_files(found)
        about = read_config(path)
        family = about.get(FAMILY_KEY, about.get("model_type", adapter.family))
        if family != adapter.family:
            raise ConfigError("model.family", adapter.family, f"{found} holds a {family} model")
    with torch.device("meta"):
        model = adapter.build(path, {} if pretrained else config.model.shape, torch.float32)
    if pretrained:
        check_expected_shape(config.model.shape, model.config)
        if path is not None and found == path:  # a checkpoint's files have digests instead
            tied: Iterable[str] = getattr(model, "all_tied_weights_keys", None) or ()
            expect_weights(path, {name: value.shape for name, value in model.state_dict().items()}, list(tied))
    return model


def open_data(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> dict[str, PackStream]:
    """Tokenize what is not in the cache yet, and open both splits.

    Raises:
        ConfigError, UserError: the data cannot be had as asked for, or there is nothing to learn.
    """
    prepare_corpora(config.data, tokenizer)
    streams = {split: open_stream(config.data, seed=config.seed, tokenizer=tokenizer, split=split) for split in SPLITS}
    expect_learnable(config, streams["train"], streams["validation"])
    expect_blocks(config, streams["train"])
    return streams

"""Hugging Face folders: writing a trained model as one, and finding one.

An export is an ordinary model folder (safetensors, config.json, tokenizer, generation_config.json, README.md)
whose config.json also says what a sampler must know. It appears by one rename, so it is whole or absent.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from csbp.checkpoint import folder as folders
from csbp.checkpoint import ranks
from csbp.checkpoint.card import render_card
from csbp.checkpoint.files import sync, write_json, write_text
from csbp.checkpoint.target import FAMILY_KEY, NOT_OURS, may_export_to
from csbp.checkpoint.tensors import plain_name
from csbp.data.tokenizer import special_ids
from csbp.errors import UserError, writing

if TYPE_CHECKING:
    from csbp.models.protocol import ModelAdapter

# Top-level keys of an export's config.json, beside FAMILY_KEY and the family's own.
DIFFUSION_KEYS = ("block_size", "mask_token_id", "label_shift", "clean_stream")
STEP_KEY = "csbp_step"


def export_model(model: nn.Module, adapter: ModelAdapter, tokenizer: Any, folder: Path, diffusion: Mapping[str, Any],
                 *, facts: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None,
                 step: int | None = None, max_shard_size: str = "5GB") -> Path:
    """Write a model as a Hugging Face folder. Every rank calls it; rank 0 writes.

    Args:
        model: a transformers model, sharded by FSDP or whole.
        tokenizer: anything with ``save_pretrained``.
        folder: the export; one that is there already is replaced.
        diffusion: exactly ``DIFFUSION_KEYS``, or empty for an autoregressive model.
        facts: rows for the README's table, from ``card.run_facts``.
        dtype: of the exported weights; None: as they are (float32 masters).
        step: optimizer steps behind these weights, noted in config.json.

    Raises:
        UserError: the folder cannot be written, or holds something else.
    """
    assert not diffusion or set(diffusion) == set(DIFFUSION_KEYS), sorted(diffusion)
    folder = Path(folder)
    weights = full_weights(model, dtype)

    def write() -> None:
        if not may_export_to(folder):
            raise UserError(NOT_OURS)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f"{folders.WRITING}{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            # transformers splits large models, leaves tied weights out and restores the names of the family's files.
            with no_progress_bar():
                model.save_pretrained(temporary, is_main_process=True, state_dict=weights,  # type: ignore[operator]
                                      max_shard_size=max_shard_size)
            config = write_model_files(model, adapter, tokenizer, temporary, diffusion, dtype=dtype, step=step)
            write_text(temporary / "README.md", render_card(folder.name, config, diffusion, facts or {}))
            for path in temporary.rglob("*"):
                path.chmod((temporary / "config.json").stat().st_mode)  # the weights' writer makes them private
                sync(path)
            folders.publish(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    ranks.together(f"export to {folder}", write, only_first=True)
    return folder


def write_model_files(model: nn.Module, adapter: ModelAdapter, tokenizer: Any, folder: Path,
                      diffusion: Mapping[str, Any], *, dtype: torch.dtype | None = None,
                      step: int | None = None) -> dict[str, Any]:
    """All of an export but weights and README: enough to build the model again around a checkpoint's weights.

    One process calls it. Returns what config.json holds.

    Raises:
        UserError: the folder cannot be written.
    """
    weight = next(model.parameters())
    config = {**adapter.export_config(model, diffusion), **diffusion, FAMILY_KEY: adapter.family,
              "dtype": str(dtype or weight.dtype).removeprefix("torch.")}
    if step is not None:
        config[STEP_KEY] = step
    generation = getattr(model, "generation_config", None)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        _with_mask(tokenizer, diffusion.get("mask_token_id")).save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)
    return config


def _with_mask(tokenizer: Any, mask: int | None) -> Any:
    """The tokenizer with [MASK] named, where it is one of its reserved tokens. An id past its last stays in config.json
    alone: no text has it, and a token for it could be written in one."""
    if mask is None or mask not in special_ids(tokenizer) or tokenizer.mask_token_id == mask:
        return tokenizer
    named = copy.deepcopy(tokenizer)  # the run's own goes on as it is: its corpora are kept by what it says
    named.mask_token = tokenizer.convert_ids_to_tokens(mask)
    return named


def full_weights(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The whole state dict on rank 0's CPU, an empty one on the others. A collective, one tensor at a time.

    Tied weights stay one tensor under several names, which is how the writer finds them.
    """
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, value in tensors.items():
        names.setdefault(id(value), []).append(name)
    weights: dict[str, Tensor] = {}
    for first, *others in names.values():
        value = tensors[first]
        whole = whole_tensor(value.detach())
        if ranks.rank() == 0:
            whole = whole.to(device="cpu", dtype=dtype if whole.is_floating_point() else None)
            weights |= {plain_name(name): whole for name in (first, *others)}
    return weights


def whole_tensor(value: Tensor) -> Tensor:
    """A sharded tensor whole, on every rank. A collective.

    Gathered axis by axis, the last cut first, as DTensor does too, which warns of several gathers in a row.
    """
    while isinstance(value, DTensor) and (cut := [a for a, p in enumerate(value.placements) if not p.is_replicate()]):
        value = value.redistribute(placements=[
            Replicate() if axis == cut[0] else p for axis, p in enumerate(value.placements)])
    return value.to_local() if isinstance(value, DTensor) else value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} is not a JSON object")
    return config


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """transformers' own bar would tear the run's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

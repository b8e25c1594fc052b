"""Finding and opening a trained model in one process: what ``csbp generate`` and ``csbp export`` stand on.

No collectives: any single process, or each rank by itself, may call these.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from csbp.checkpoint.files import MANIFEST, find_damage
from csbp.checkpoint.folder import list_checkpoints, step_of
from csbp.checkpoint.huggingface import DIFFUSION_KEYS, STEP_KEY, no_progress_bar, read_config
from csbp.checkpoint.shards import load_model
from csbp.checkpoint.target import FAMILY_KEY
from csbp.data.hub import MODEL_FILES as HUB_FILES
from csbp.data.hub import hub_folder, is_hub_name
from csbp.data.tokenizer import BUILTIN, resolve_folder
from csbp.errors import ConfigError, UserError

if TYPE_CHECKING:
    from csbp.models.protocol import ModelAdapter

log = logging.getLogger(__name__)

EXPORT, MODEL_FILES = "export", "model"  # subfolders of a run folder


@dataclass(frozen=True)
class OpenedModel:
    """A model ready for evaluation, on the CPU.

    Attributes:
        model: in eval mode.
        adapter: of its family.
        files: the folder with its config.json and tokenizer.
        diffusion: ``DIFFUSION_KEYS``; empty for an autoregressive model.
        step: optimizer steps of the checkpoint; None for an exported model.
    """

    model: nn.Module
    adapter: ModelAdapter
    files: Path
    diffusion: dict[str, Any]
    step: int | None


def resolve_model_folder(path: str, family: str, *, field: str = "model.path") -> Path:
    """The folder that a ``model`` setting means.

    Args:
        path: "builtin:NAME", a Hugging Face folder, a checkpoint, a run folder (its export, unless there is none or
            a newer undamaged checkpoint), or a name on the Hugging Face hub, which is downloaded once.
        family: where built-in models are looked for; not used otherwise.
        field: the setting's name, for the message.

    Raises:
        ConfigError: there is no such model.
    """
    if path.startswith(BUILTIN):
        return Path(resolve_folder(path, family, field))
    folder = Path(path).expanduser()
    if is_hub_name(path):
        return hub_folder(path, field, HUB_FILES)
    if not path or not folder.is_dir():
        raise ConfigError(field, path, f"give a model folder, a run folder or {BUILTIN}NAME; there is no such folder")
    if (folder / "config.json").exists() or (folder / MANIFEST).exists():
        return folder
    newest, exported = newest_checkpoint(folder), folder / EXPORT
    if (exported / "config.json").exists() and (newest is None or step_of(newest) <= _step_of_export(exported)):
        return exported
    if newest is None:
        raise ConfigError(field, path, "give a folder with a config.json, or a run folder with an undamaged checkpoint")
    return newest


def _step_of_export(folder: Path) -> float:
    """Optimizer steps behind an export; one that does not say is taken as the newest there is."""
    return float(read_config(folder).get(STEP_KEY, float("inf")))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest undamaged checkpoint of a run folder, verified by this process alone."""
    for path in list_checkpoints(run_dir / "checkpoints"):
        problem = find_damage(path)
        if problem is None:
            return path
        log.warning("checkpoint %s is damaged and passed over: %s", path, problem)
    return None


def model_files(folder: Path) -> Path:
    """Where the config.json and the tokenizer of a folder from ``resolve_model_folder`` are: there, or, for a
    checkpoint, in its run folder.

    Raises:
        UserError: they are missing.
    """
    if not (folder / MANIFEST).exists():
        return folder
    files = folder.parent.parent / MODEL_FILES
    if not files.is_dir():
        raise UserError(f"{files} is missing: the configuration and the tokenizer that {folder} was trained with")
    return files


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> OpenedModel:
    """The model in a folder from ``resolve_model_folder``: a checkpoint or a Hugging Face folder.

    Raises:
        UserError: files are missing or damaged.
    """
    from csbp.models.registry import get_adapter

    step = step_of(folder) if (folder / MANIFEST).exists() else None
    files = model_files(folder)
    config = read_config(files)
    adapter = get_adapter(config.get(FAMILY_KEY, config.get("model_type", "")))
    if step is None:
        with no_progress_bar():
            model = adapter.load(files, dtype)
    else:
        model = adapter.build(files, {}, dtype)
        load_model(folder, model)
    diffusion = {key: config[key] for key in DIFFUSION_KEYS if key in config}
    return OpenedModel(model.eval(), adapter, files, diffusion, step)

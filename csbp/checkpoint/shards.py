"""A checkpoint's tensors on the disk: safetensors shards, written by all ranks and read in slices on any number."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from csbp.checkpoint import ranks
from csbp.checkpoint.files import FileEntry, describe_files, find_damage, sync
from csbp.checkpoint.tensors import (
    check_model,
    empty_optimizer_tensors,
    file_numbers,
    install_optimizer_tensors,
    model_tensors,
)
from csbp.errors import UserError, refused_by_system

STATE = "state.json"
FILE_BYTES = 1 << 30  # of one file of one rank


def load_model(path: Path, model: nn.Module) -> dict[str, Any]:
    """``CheckpointStore.load_model`` for one process by itself: an unsharded model, no collectives.

    Raises:
        UserError: the checkpoint is damaged, or of another model.
    """
    if problem := find_damage(path):
        raise UserError(f"checkpoint {path} is damaged: {problem}")
    return read_checkpoint(path, model, None, alone=True)


def read_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None, *, alone: bool) -> dict[str, Any]:
    """Read a verified checkpoint in place: the slices that this rank's shards need.

    Args:
        path: of the checkpoint.
        optimizer: None leaves its state alone, and its files unread.
        alone: without collectives, this process by itself.

    Returns:
        What state.json holds.

    Raises:
        UserError: it is of another model.
    """
    reader = HuggingFaceStorageReader(str(path))
    reader.fs = _VisibleFiles()
    saved: dict[str, TensorStorageMetadata] = reader.read_metadata().state_dict_metadata  # type: ignore[assignment]
    tensors = model_tensors(model)
    check_model(tensors, saved)
    moments = {} if optimizer is None else empty_optimizer_tensors(model, optimizer, saved)
    try:
        with _quiet():
            dcp.load({**tensors, **moments}, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:  # not an Exception, so it would pass every handler
        raise RuntimeError(f"could not read {path}: {error}") from error
    if optimizer is not None:
        install_optimizer_tensors(model, optimizer, moments)
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


class _VisibleFiles(FileSystem):
    """The reader takes every ``*.safetensors``; a hidden one (``._shard...``, ``.nfs...``) is the system's."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [name for name in super().ls(path) if not os.path.basename(name).startswith(".")]


@contextmanager
def _quiet() -> Iterator[None]:
    """One process without a process group is an ordinary case here, and needs no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def write_tensors(temporary: Path, tensors: dict[str, Tensor], task: str) -> None:
    """Write each rank's shards as shard-<rank + 1>-model-<file>-of-<files>.safetensors. Every rank calls it.

    Args:
        temporary: the folder, there already.
        tensors: from ``tensors``.
        task: for the message.

    Raises:
        UserError: on every rank, if the system refused one.
    """
    writer = HuggingFaceStorageWriter(
        str(temporary), fqn_to_index_mapping=file_numbers(tensors, FILE_BYTES * ranks.world_size()),
        save_distributed=True,
    )
    try:
        with _quiet():
            dcp.save(tensors, storage_writer=writer, no_dist=not ranks.initialised())
    except CheckpointException as error:  # raised on all ranks, whichever failed
        number, (cause, _) = next(iter(error.failures.items()))
        kind = UserError if refused_by_system(cause) else RuntimeError
        raise kind(f"could not {task} on rank {number}: {cause}") from error


def describe_shards(temporary: Path) -> dict[str, FileEntry]:
    """This rank's files in ``temporary``, durable now, with sizes and digests."""
    shards = sorted(temporary.glob(f"shard-{ranks.rank() + 1:05d}-*.safetensors"))
    for path in shards:
        sync(path)  # the writer syncs before its own buffer is flushed, which leaves small files out
    return describe_files(shards)

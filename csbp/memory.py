"""How much memory a rank will need, from shapes alone.

Legend: S local rows, E rows with logits, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from csbp.config.schema import ParallelConfig
from csbp.errors import ConfigError
from csbp.parallel.runtime import choose_device
from csbp.parallel.tensor import part_of
from csbp.plan.estimate import loss_bytes

# Beside the inputs and outputs of its linear layers, a decoder layer keeps norms, rotated queries and keys and the
# activation function for its backward; about half as much again.
_BESIDE_LINEAR = 1.5


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank. The first three are exact, the others rough.

    Attributes:
        weights, gradients, optimizer: this rank's float32 shards.
        gathered: the unit being computed and the one after it, and what belongs to no unit, whole.
        activations: kept for the backward of one pack.
        logits: of as many rows as have them at once, and what else the loss takes (``plan.estimate.loss_bytes``).
        loading: the whole float32 model, which every rank builds before it keeps its shard (host memory).
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    loading: int

    @property
    def certain(self) -> int:
        """What no setting of the data changes."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All that is there at once in a step."""
        return self.certain + self.gathered + self.activations + self.logits


def estimate_memory(model: nn.Module, units: Sequence[nn.Module], *, world: int, rows: int, loss_rows: int,
                    vocabulary: int, hidden: int, compute: torch.dtype, tp: int = 1, copies: int = 1,
                    plan: Mapping[str, str] | None = None, logit_rows: int | None = None) -> MemoryEstimate:
    """Of one rank with AdamW, each copy of the weights sharded over its ranks and no activation checkpointing.

    Args:
        model: on any device, also meta.
        units: its decoder layers, which are gathered one by one.
        world: all ranks.
        rows: S, clean and noised rows of a pack on one rank.
        loss_rows: E on one rank.
        vocabulary, hidden: V, and the channels that go into the head.
        compute: dtype of the forward.
        tp, plan: ranks that share the heads of the same rows, and how the family splits its matrices over them.
        copies: ``parallel.dp_replicate``.
        logit_rows: ``train.logit_rows``.
    """
    cut = _cuts(model, tp, plan)
    parameters, in_units = _held(model, cut), [_held(unit, cut) for unit in units]
    shards = world // tp // copies
    shard = -(-parameters // shards)
    width = sum(layer.in_features // cut[id(layer)][0] + layer.out_features // cut[id(layer)][1]
                for unit in units for layer in unit.modules() if isinstance(layer, nn.Linear))
    gathered = parameters - sum(in_units) + 2 * max(in_units, default=0)
    return MemoryEstimate(
        weights=4 * shard, gradients=4 * shard, optimizer=8 * shard,
        gathered=compute.itemsize * gathered if shards > 1 or compute != torch.float32 else 0,
        activations=round(_BESIDE_LINEAR * rows * width * compute.itemsize),
        logits=int(loss_bytes(np.array(loss_rows), vocabulary // tp, hidden, compute.itemsize, logit_rows)),
        loading=4 * sum(p.numel() for p in model.parameters()))


def _cuts(model: nn.Module, tp: int, plan: Mapping[str, str] | None) -> dict[int, tuple[int, int]]:
    """Into how many parts a tp axis cuts each module's inputs and outputs, by the module's id."""
    return {id(module): part_of(name, plan or {}, tp) for name, module in model.named_modules()}


def _held(module: nn.Module, cut: Mapping[int, tuple[int, int]]) -> int:
    """Parameters that one rank of a tp axis has of a module; a shared one counts once."""
    seen: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            seen[id(parameter)] = parameter.numel() // math.prod(cut[id(part)])
    return sum(seen.values())


def expect_room(model: nn.Module, parallel: ParallelConfig, plan: Mapping[str, str]) -> None:
    """Refuse a model whose weights, gradients and optimizer alone are more than what is free to a rank here.

    Args:
        model: on any device, also meta.
        plan: how the family splits its matrices over a tp axis.

    Raises:
        ConfigError: naming what they need.
    """
    shards = parallel.nproc // parallel.tp // parallel.dp_replicate
    shard = -(-_held(model, _cuts(model, parallel.tp, plan)) // shards)
    refuse_without_room(parallel.nproc, 16 * shard, _room_of_rank(parallel))


def refuse_without_room(world: int, need: int, there: int) -> None:
    """Refuse where ``need`` bytes, ``MemoryEstimate.certain``, are more than ``there`` are.

    Raises:
        ConfigError: naming both.
    """
    if need > there:
        raise ConfigError("parallel.nproc", world, f"weights, gradients and optimizer need {size_text(need)} a rank, "
                                                   f"{size_text(there)} are free; use more devices or a smaller model")


def size_text(count: float) -> str:
    """Bytes for people."""
    if not count:
        return "0"
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def _room_of_rank(parallel: ParallelConfig) -> int:
    """Bytes free to the rank that has least, before the ranks start; in a started rank: to that one."""
    started = os.environ.get("LOCAL_RANK", os.environ.get("RANK"))
    # Without LOCAL_WORLD_SIZE it is not known how many of the ranks share this host.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", parallel.nproc if started is None else 1))
    device = choose_device(parallel.device, here - 1 if started is None else int(started))
    if device.type == "cuda" and started is not None:
        return int(torch.cuda.mem_get_info(device)[0])  # of its own alone: looking at one takes some of its memory
    return free_memory(device) // (1 if device.type == "cuda" else here)


def free_memory(device: torch.device) -> int:
    """Bytes free now: of the least free GPU up to this one, or of this host (or container)."""
    if device.type == "cuda":
        return min(torch.cuda.mem_get_info(torch.device("cuda", i))[0] for i in range((device.index or 0) + 1))
    import psutil

    return min(int(psutil.virtual_memory().available), _container_room())


def _container_room(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container's limit leaves, without the file cache, which gives way; a huge number where there is none."""
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        cache = dict(line.split() for line in (root / "memory.stat").read_text().splitlines()).get("file", "0")
        return limit - used + int(cache)
    except (OSError, ValueError):  # no container, or no limit ("max")
        return 1 << 62

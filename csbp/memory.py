"""How much memory a rank will need: the parameters of the model as it is, and a plan of the packs that come first.

What is counted, and how, is that of ``csbp plan`` (``plan.estimate``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from csbp.config.cad import pooled
from csbp.config.mesh import axis_sizes
from csbp.config.schema import ParallelConfig, RunConfig
from csbp.data.batch import PackedBatch, empty_batch, join
from csbp.data.packs import PackStream
from csbp.diffusion.build import build_layout
from csbp.errors import ConfigError
from csbp.parallel.runtime import choose_device
from csbp.parallel.tensor import part_of
from csbp.plan.cad import Cad, cad_of
from csbp.plan.counts import count_plan
from csbp.plan.estimate import Memory, Parameters, Settings, predict_memory
from csbp.plan.forecast import Case, plan_case
from csbp.plan.plan import PackPlan
from csbp.plan.shapes import ModelShape

_PACKS = 8  # of the first step that are planned, where each is planned alone


@dataclass(frozen=True)
class FirstStep:
    """The first packs of a run, planned as training plans them: each alone, at most eight, or at least those of one
    micro-batch of all replicas where they are planned as one.

    Attributes:
        packs: how many they are.
        memory: of the ranks, with the packs that take most.
        plans: with what moves.
        cad: what may move; None: nothing.
    """

    packs: int
    memory: Memory
    plans: list[PackPlan]
    cad: Cad | None


def plan_first_step(config: RunConfig, shape: ModelShape, parameters: Parameters | None, stream: PackStream,
                    device: str) -> FirstStep:
    """Plan the first packs of a run.

    Args:
        shape: of the whole model.
        parameters: as ``predict_memory`` has them.
        stream: the training packs.
        device: name in ``plan.estimate.DEVICES`` of what ranks compute on.
    """
    (replicas, ranks, _), together, parallel = axis_sizes(config.parallel), pooled(config), config.parallel
    size = replicas if together else 1
    packs, _ = stream.take(stream.first(), min(config.train.packs_per_step, max(_PACKS // size, 1) * size))
    groups: list[list[PackedBatch]] = [packs[start:start + size] for start in range(0, len(packs), size)]
    groups[-1] = groups[-1] + [empty_batch()] * (size - len(groups[-1]))
    cad, settings = cad_of(config, shape, device), Settings.of(config, device)
    found, plans = list[Memory](), list[PackPlan]()
    for group in groups:
        geometry = build_layout(join(group), config.objective, config.noise, mask_token_id=0, seed=config.seed,
                                step=0).geometry
        case = Case.of(config, shape, geometry, tuple(len(pack.sample_ids) for pack in group) if together else ())
        plan = plan_case(case, parallel.kind, ranks, parallel.exchange)
        plans.append(cad.moved(plan) if cad else plan)
        counts = count_plan(plans[-1])
        found.append(predict_memory(shape, counts, case.loss_rows(counts), settings, parameters))
    return FirstStep(len(packs), max(found, key=lambda memory: float(memory.total.max())), plans, cad)


def count_parameters(model: nn.Module, units: Sequence[nn.Module], tp: int = 1,
                     plan: Mapping[str, str] | None = None) -> Parameters:
    """What one rank of a tp axis has of a model.

    Args:
        model: on any device, also meta.
        units: its decoder layers, which are gathered one by one.
        tp, plan: ranks that share the heads of the same rows, and how the family splits its matrices over them.
    """
    cut = _cuts(model, tp, plan)
    total, layers = _held(model, cut), [_held(unit, cut) for unit in units]
    return Parameters(total, total - sum(layers), max(layers, default=0))


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


def refuse_without_room(world: int, need: float, there: int) -> None:
    """Refuse where ``need`` bytes, ``Memory.certain``, are more than ``there`` are.

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

"""The ranks of a run: process group, mesh, device, and the few collectives that the trainer asks for.

Ranks are numbered tp fastest, then csbp: rank = (dp_rank * csbp + csbp_rank) * tp + tp_rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from csbp.comm.groups import make_transport
from csbp.comm.transport import Transport
from csbp.comm.upload import upload
from csbp.config.mesh import axis_sizes, check_mesh
from csbp.config.schema import ParallelConfig
from csbp.errors import ConfigError, met_by_all
from csbp.parallel.rendezvous import expect_alike, open_store, prepare_in_turn
from csbp.plan.estimate import DEVICES
from csbp.plan.stages import Stages


@dataclass
class Runtime:
    """One rank's place in the run.

    Attributes:
        rank, world, local_rank: as torchrun numbers them.
        device: where this rank computes.
        dp, csbp, tp: sizes of the mesh axes; dp_rank, csbp_rank, tp_rank: this rank's place on them.
        shard_mesh: for FSDP: one axis over all ranks of equal tp_rank, or two where weights are also replicated.
        transport: moves rows along the csbp axis, each rank its own heads.
        scheme, exchange: how packs are planned over the csbp axis (see ``PackPlan``).
        gradient_wire: dtype in which gradients of keys travel home; None: the compute dtype.
        run_dir: the run folder, the same on every rank.
        tp_mesh: the tp axis, whose ranks hold the same rows; None where it has one rank.
        pooled: the packs of all replicas are planned as one; ``transport`` then moves rows among all their ranks.
        stages: in how many shares keys travel where no query rows do.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    dp: int
    csbp: int
    shard_mesh: DeviceMesh
    transport: Transport
    run_dir: Path
    scheme: str = "csbp"
    exchange: str = "exact"
    gradient_wire: torch.dtype | None = None
    tp: int = 1
    tp_mesh: DeviceMesh | None = None
    pooled: bool = False
    stages: Stages = Stages()

    @property
    def dp_rank(self) -> int:
        """Which data-parallel replica this rank belongs to."""
        return self.rank // (self.csbp * self.tp)

    @property
    def csbp_rank(self) -> int:
        """This rank's place on the sequence axis."""
        return self.rank // self.tp % self.csbp

    @property
    def tp_rank(self) -> int:
        """This rank's place among those that hold the same rows."""
        return self.rank % self.tp

    @property
    def plan_ranks(self) -> int:
        """Ranks among which a pack is planned."""
        return self.csbp * (self.dp if self.pooled else 1)

    @property
    def plan_rank(self) -> int:
        """This rank's place among them."""
        return self.rank // self.tp % self.plan_ranks

    @property
    def first_of_pack(self) -> bool:
        """True on one of the ranks among which a pack is planned: the one that counts what all of them know."""
        return self.rank % (self.plan_ranks * self.tp) == 0

    @property
    def main(self) -> bool:
        """True on the rank that writes files and owns the terminal."""
        return self.rank == 0

    def total(self, values: Iterable[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        found: list[float] = self.summed(self.upload(values)).tolist()
        return found

    def upload(self, values: Iterable[float]) -> Tensor:
        """float64 on this rank's device, without waiting for it."""
        return upload(np.fromiter(values, np.float64), self.device)

    def summed(self, values: Tensor) -> Tensor:
        """Sums over all ranks of float64 values on the device. The host does not wait for them."""
        found = values.clone()
        dist.all_reduce(found)
        return found

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (a picklable object), on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Run something on rank 0 while the others wait; its value, or its error, reaches every rank."""
        value, error = None, None
        if self.main:
            try:
                value = function()
            except Exception as caught:
                error = caught
        value, error = self.broadcast((value, error))
        if error is not None:
            with met_by_all():
                raise error
        return value

    def alike(self, value: Any) -> bool:
        """Whether every rank has rank 0's value (a picklable object)."""
        return self.total([float(value != self.broadcast(value))]) == [0.0]

    def node(self) -> int:
        """Ranks of the smallest host, as each was told how many it has; of a usual one, where one was not told.
        Collective."""
        here = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE") or 0), device=self.device)
        dist.all_reduce(here, dist.ReduceOp.MIN)
        return int(here) or DEVICES["h200" if self.device.type == "cuda" else "cpu"].node

    def barrier(self) -> None:
        """Wait for every rank."""
        self.total([0.0])

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        ConfigError: CUDA was asked for and there is none, or there are more ranks than GPUs on this host.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("parallel.device", name, "no CUDA device is visible here; start it on a machine with GPUs, "
                          "or use cpu, for small models")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError("parallel.nproc", local_rank + 1, f"this machine has {torch.cuda.device_count()} GPU(s); "
                          "start no more ranks here than that")
    return torch.device("cuda", local_rank)


def mesh_sizes(config: ParallelConfig, world: int) -> tuple[int, int, int]:
    """(dp, csbp, tp) for ``world`` ranks.

    Raises:
        ConfigError: the axes do not multiply to the number of ranks.
    """
    if config.nproc != world:
        raise ConfigError("parallel.nproc", config.nproc, f"WORLD_SIZE is {world}; set parallel.nproc={world}")
    check_mesh(config)
    return axis_sizes(config)


def start_runtime(config: ParallelConfig, run_dir: Callable[[], Path],
                  prepare_host: Callable[[], None] | None = None, pooled: bool = False,
                  settings: Mapping[str, Any] | None = None) -> Runtime:
    """Join the other ranks, as RANK, WORLD_SIZE and LOCAL_RANK say (one rank where they are unset).

    Args:
        config: mesh sizes, device, threads.
        run_dir: called on rank 0 only; where its answer comes from, and how long that takes, is the caller's business.
        prepare_host: called after it on the first rank of every other host.
        pooled: see ``Runtime``.
        settings: what every rank must have been given alike, by name; compared before anything else.

    Raises:
        ConfigError: ranks have different settings or devices, or what ``run_dir`` or ``prepare_host`` refuse. On each.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    dp, csbp, tp = mesh_sizes(config, world)

    def given() -> dict[str, Any]:
        return {**(settings or {}), "parallel.device": choose_device(config.device, local_rank).type}

    def prepare() -> str:
        if rank and local_rank == 0 and prepare_host:
            prepare_host()
        return "" if rank else str(run_dir())

    folder, timeout = None, timedelta(seconds=config.timeout_seconds)
    if not dist.is_initialized():
        store = open_store(rank, world, timeout)
        expect_alike(store, rank, world, given, timeout)
        folder = prepare_in_turn(store, rank, world, prepare)
    device = choose_device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(config.threads)
    if folder is not None:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world, store=store, timeout=timeout,
            device_id=device if device.type == "cuda" else None)
    # Two views of the same ranks: rows travel along csbp; weights are sharded over dp x csbp, copies apart.
    copies = config.dp_replicate
    weights = init_device_mesh(device.type, (copies, world // tp // copies, tp),
                               mesh_dim_names=("replicate", "shard", "tp"))
    # Last: DTensor remembers names of a mesh's groups, which are numbers, beyond the run that made them.
    transport = make_transport(np.arange(world).reshape((1, -1, tp) if pooled else (dp, csbp, tp)), device, timeout)
    runtime = Runtime(rank, world, local_rank, device, dp, csbp,
                      weights["shard"] if copies == 1 else weights["replicate", "shard"], transport, Path(),
                      scheme="csbp" if config.kind == "data" else config.kind, exchange=config.exchange,
                      gradient_wire=torch.float32 if config.gradient_wire == "float32" else None, tp=tp,
                      tp_mesh=weights["tp"] if tp > 1 else None, pooled=pooled)
    runtime.stages = Stages.choose(config.exchange_stages, runtime.plan_ranks * tp, runtime.node())
    runtime.run_dir = Path(runtime.on_main(run_dir) if folder is None else folder)
    return runtime

"""Checkpoints of CUDA tensors over NCCL, fused AdamW included, on as many GPUs as there are (two are enough)."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from csbp.checkpoint import shards
from csbp.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.gpu


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, 96)
        self.inner = nn.Linear(96, 97)
        self.head = nn.Linear(97, 11)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.arange(96.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens) + self.offset)) * self.scale


def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(seed)
    model = Uneven().cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (model.inner, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        tokens = torch.randint(1001, (4, 64), generator=torch.Generator().manual_seed(step)).cuda()
        model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).cpu() for name, v in found.items()}


def worker(rank: int, world: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.use_deterministic_algorithms(True)
    model, optimizer = start(0)
    train(model, optimizer, 0, 10)
    straight = whole(model, optimizer)
    model, optimizer = start(0)
    train(model, optimizer, 0, 3)
    CheckpointStore(Path(folder), 2).save(3, model, optimizer, {"cursor": 7})
    third = whole(model, optimizer)
    model, optimizer = start(1)
    saved = CheckpointStore(Path(folder), 2)
    assert saved.load(saved.newest_valid(), model, optimizer) == {"step": 3, "cursor": 7}
    train(model, optimizer, 3, 10)
    resumed = whole(model, optimizer)
    assert straight.keys() == resumed.keys() and len(straight) == 25
    different = [name for name in straight if not torch.equal(straight[name], resumed[name])]
    assert not different, different
    if rank == 0:
        torch.save({name: value for name, value in third.items() if "/" not in name}, Path(folder) / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_resumed_steps_equal_straight_ones_and_one_cpu_process_reads_them(tmp_path):
    from torch.multiprocessing import spawn

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    world = min(2, torch.cuda.device_count())
    spawn(worker, args=(world, port, str(tmp_path)), nprocs=world)
    model = Uneven()
    shards.load_model(tmp_path / "checkpoints" / "step-00000003", model)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

"""The fused AdamW on sharded weights is the plain one on whole weights, and goes on bit for bit after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from csbp.checkpoint.store import CheckpointStore
from csbp.config.schema import OptimConfig, ParallelConfig
from csbp.parallel.fsdp import shard_model
from csbp.parallel.gradients import clip, global_norm
from csbp.parallel.runtime import start_runtime
from csbp.train.optimizer import build_optimizer

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.3)


def net() -> nn.Module:
    """A layer with fewer rows than ranks, odd sizes, and vectors, which do not decay."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1)).double()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, share: float) -> None:
    for step in range(first, last):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        (share * 30 * model(x).square().sum()).backward()
        norm = float(global_norm(model.parameters()))
        assert norm > 1.0
        clip(model.parameters(), norm, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def sharded() -> tuple[nn.Module, torch.optim.Optimizer, float]:
    world = dist.get_world_size()
    runtime = start_runtime(ParallelConfig(nproc=world, device="cpu"), lambda: Path("unused"))
    model = shard_model(net(), [], runtime.shard_mesh, torch.float64)
    return model, build_optimizer(model, CONFIG), 1 / world


def trained(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """(weights after six steps, weights after three, a checkpoint and three more, names of the moments)."""
    whole, parts = sharded(), sharded()
    steps(*whole[:2], 0, 6, whole[2])
    steps(*parts[:2], 0, 3, parts[2])
    CheckpointStore(Path(folder)).save(3, parts[0], parts[1], {})
    model, optimizer, share = sharded()
    store = CheckpointStore(Path(folder))
    store.load(store.newest_valid(), model, optimizer)
    steps(model, optimizer, 3, 6, share)
    return (*({name: p.full_tensor() for name, p in m.named_parameters()} for m in (whole[0], model)),
            sorted(next(iter(optimizer.state.values()))))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_fused_steps(ranks, tmp_path, world):
    once, resumed, moments = ranks(world, trained, str(tmp_path))[0]
    assert moments == ["exp_avg", "exp_avg_sq", "step"]
    assert all(torch.equal(once[name], value) for name, value in resumed.items())
    plain = net()
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in plain.parameters() if p.dim() > 1], "weight_decay": 0.3},
         {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0}],
        lr=1e-2, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.eps, fused=False, foreach=False)
    for step in range(6):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        (30 * plain(x).square().sum()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(once[name], value.detach(), rtol=1e-5, atol=0)  # clipping adds 1e-6 to the norm

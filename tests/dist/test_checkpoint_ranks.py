"""Sharded checkpoints over gloo: bitwise on the same ranks, exact on others, one rank's trouble told to all."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from csbp.checkpoint import shards, store
from csbp.checkpoint.huggingface import full_weights
from csbp.checkpoint.store import CheckpointStore
from csbp.errors import UserError


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, a weight smaller than the ranks are many, a tied one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((1,), 2.0))  # empty on all ranks but the first
        self.register_buffer("offset", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens) + self.offset)) * self.scale


def start(seed: int, sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Uneven()
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (model.inner, model):
            fully_shard(unit, mesh=mesh)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        tokens = torch.randint(7, (2, 3), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors, gathered: equal on all ranks, and comparable between world sizes."""
    found = {name: value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in found.items()}


def save_after(folder: str, steps: int) -> dict[str, torch.Tensor]:
    model, optimizer = start(0)
    train(model, optimizer, 0, steps)
    CheckpointStore(Path(folder), 2).save(steps, model, optimizer, {"cursor": {"taken": steps}})
    return whole(model, optimizer)


def load_newest(folder: str, sharded: bool = True) -> dict[str, torch.Tensor]:
    model, optimizer = start(1, sharded)
    saved = CheckpointStore(Path(folder), 2)
    path = saved.newest_valid()
    state = saved.load(path, model, optimizer)
    assert state["cursor"] == {"taken": state["step"]}
    return whole(model, optimizer)


def resume_and_go_on(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = start(0)
    train(model, optimizer, 0, 5)
    straight = whole(model, optimizer)
    model, optimizer = start(0)
    train(model, optimizer, 0, 3)
    CheckpointStore(Path(folder), 2).save(3, model, optimizer, {})
    model, optimizer = start(1)
    saved = CheckpointStore(Path(folder), 2)
    saved.load(saved.newest_valid(), model, optimizer)
    train(model, optimizer, 3, 5)
    return straight, whole(model, optimizer)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("n", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_three_steps_saved_and_two_resumed_are_five_steps(ranks, tmp_path, n):
    for straight, resumed in ranks(n, resume_and_go_on, str(tmp_path)):
        assert len(straight) == 18 and same(straight, resumed)


@pytest.mark.parametrize("n, others", [(3, (2,)), pytest.param(3, (1, 3, 4), marks=pytest.mark.slow),
                                       pytest.param(1, (3,), marks=pytest.mark.slow)])
def test_other_numbers_of_ranks_load_the_same_values(ranks, tmp_path, n, others):
    written = ranks(n, save_after, str(tmp_path), 2)[0]
    for number in others:
        for read in ranks(number, load_newest, str(tmp_path)):
            assert same(written, read)
    for read in ranks(2, load_newest, str(tmp_path), False):  # whole on every rank
        assert same(written, read)
    model = Uneven()  # and here, without a process group
    shards.load_model(tmp_path / "checkpoints" / "step-00000002", model)
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())


def save_damage_and_load(folder: str, shard: str) -> tuple[str, list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    store.log.addHandler(handler)
    model, optimizer = start(0)
    train(model, optimizer, 0, 1)
    saved = CheckpointStore(Path(folder), 2)
    paths = [saved.save(step, model, optimizer, {}) for step in (1, 2)]
    if dist.get_rank() == 0:
        raw = bytearray((paths[1] / shard).read_bytes())
        raw[len(raw) // 2] ^= 1
        (paths[1] / shard).write_bytes(raw)
    dist.barrier()
    reader = CheckpointStore(Path(folder), 2)
    found = reader.newest_valid()
    reader.newest_valid()
    try:
        reader.load(paths[1], model, optimizer)
    except UserError:
        return found.name, told
    raise AssertionError("a damaged checkpoint was loaded")


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_flipped_bit_in_any_ranks_shard_is_found_by_all(ranks, tmp_path, rank):
    shard = f"shard-{rank:05d}-model-00002-of-00002.safetensors"
    (first, told), (second, silent) = ranks(2, save_damage_and_load, str(tmp_path), shard)
    assert first == second == "step-00000001"
    assert len(told) == 1 and shard in told[0] and silent == []


def fail_on_one(folder: str, where: str, culprit: int) -> tuple[str, bool]:
    model, optimizer = start(0)
    train(model, optimizer, 0, 1)
    saved = CheckpointStore(Path(folder), 1)
    path = saved.save(1, model, optimizer, {})
    before = whole(model, optimizer)

    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = store if where == "describe_shards" else shards.HuggingFaceStorageWriter
    real = getattr(owner, where)
    if dist.get_rank() == culprit:
        setattr(owner, where, refuse)
    try:
        saved.save(2, model, optimizer, {})
        raise AssertionError("a failed save went unnoticed")
    except UserError as error:
        message = str(error)
    finally:
        setattr(owner, where, real)
    assert saved.newest_valid() == path and [p.name for p in saved.root.iterdir()] == [path.name]
    return message, same(before, whole(model, optimizer))


@pytest.mark.parametrize("where", ["write_data", pytest.param("describe_shards", marks=pytest.mark.slow)])
def test_full_disk_of_one_rank_is_an_error_on_all(ranks, tmp_path, where):
    for message, intact in ranks(2, fail_on_one, str(tmp_path), where, 1):
        assert "on rank 1" in message and "No space left" in message and intact


def gathered(folder: str) -> dict[str, torch.Tensor]:
    model, _ = start(0)
    return full_weights(model, torch.bfloat16)


def test_export_gathers_whole_weights_on_rank_0_only(ranks, tmp_path):
    first, second = ranks(2, gathered, str(tmp_path))
    torch.manual_seed(0)
    expected = Uneven().state_dict()
    assert second == {} and first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name].bfloat16()) for name in first)

"""The ranks that distributed tests stand on: results, errors, hangs and deaths come back as they should."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool


def total_of_ranks(weight: float) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank() + 1)) * weight
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def raise_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("the culprit")
    dist.barrier()


class TwoWords(Exception):
    """Does not come back from a pickle: its constructor wants two arguments, its args hold one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def raise_unpicklable() -> None:
    raise TwoWords("one", "another")


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        time.sleep(60)


def die(code: int) -> None:
    if dist.get_rank() == 1:
        os._exit(code)
    dist.barrier()


def collective_too_many() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3))


def sharded_gradient() -> torch.Tensor:
    """Exact sums of FSDP2 on gloo; called more than once, because DTensor caches meshes across groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    model(torch.full((2, 6), float(dist.get_rank() + 1))).sum().backward()
    return model.weight.grad.full_tensor()


def process_id() -> int:
    return os.getpid()


def test_results_come_back_by_rank_for_every_world_size(ranks):
    for n in (3, 1, 4, 2):
        assert ranks(n, total_of_ranks, 0.5) == [(rank, n, n * (n + 1) / 4) for rank in range(n)]


def test_workers_are_kept_between_calls(ranks):
    first = ranks(2, process_id)
    assert ranks(2, process_id) == first and os.getpid() not in first


def test_fsdp_sums_are_exact_in_every_call(ranks):
    for n in (2, 3, 2):
        for gradient in ranks(n, sharded_gradient):
            assert torch.equal(gradient, torch.full((4, 6), 2.0 * sum(range(1, n + 1))))


def test_exception_is_raised_here_with_its_rank(ranks):
    with pytest.raises(KeyError, match="the culprit") as caught:
        ranks(3, raise_on_last)
    assert "on rank 2" in caught.value.__notes__[0] and "raise_on_last" in caught.value.__notes__[0]
    with pytest.raises(RankError, match=r"(?s)rank .*TwoWords.*one and another"):
        ranks(2, raise_unpicklable)
    assert ranks(2, total_of_ranks, 1.0)[1] == (1, 2, 3.0)


def test_death_is_reported_and_the_pool_goes_on(ranks):
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        ranks(3, die, 7)
    assert len(ranks(3, total_of_ranks, 1.0)) == 3


@pytest.mark.slow
def test_hang_ends_with_the_stacks_of_every_stuck_rank(ranks):
    with pytest.raises(RankError, match=r"(?s)ranks \[0, 1\] of 2.*rank 0.*barrier.*rank 1.*wait_for_nobody"):
        ranks(2, wait_for_nobody, timeout=1)
    assert len(ranks(2, total_of_ranks, 1.0)) == 2


@pytest.mark.slow
def test_one_collective_too_many_fails(ranks):
    with pytest.raises((RankError, RuntimeError)):
        ranks(2, collective_too_many, timeout=1)


def test_nothing_starts_before_the_first_call():
    with RankPool() as pool:
        assert pool._workers == [] and pool._folder is None

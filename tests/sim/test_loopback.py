"""The simulated network itself: rows arrive where they should, and ranks that do not fit together are told how."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor

from csbp.comm import loopback
from csbp.comm.loopback import LoopbackError, LoopbackTransport, LoopbackWorld, run_threads
from csbp.comm.transport import Outgoing, Transport

Steps = Generator[Outgoing | None, Tensor | None, Tensor]


def parcel(rank: int, world: int, label: str = "keys") -> Outgoing:
    """Rank r sends r + t rows to rank t, each [r, t, number]; none to itself."""
    rows = [[rank, to, i] for to in range(world) if to != rank for i in range(rank + to)]
    counts = tuple(0 if to == rank else rank + to for to in range(world))
    return Outgoing(torch.tensor(rows, dtype=torch.float64).reshape(-1, 3), counts, counts, label)


def delivery(rank: int, world: int) -> list[list[float]]:
    """What rank r then has: source after source, in the order sent."""
    return [[source, rank, i] for source in range(world) if source != rank for i in range(source + rank)]


def sent(rank: int, world: int) -> int:
    return sum(rank + to for to in range(world) if to != rank)


@pytest.mark.parametrize("world", [1, 2, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_lock_step_carries_and_counts(world: int) -> None:
    ranks = LoopbackWorld(world)

    def steps(rank: int) -> Steps:
        yield parcel(rank, world)
        yield parcel(rank, world, "gradients")  # two in flight: they arrive in the order sent
        first = yield None
        assert first is not None
        second = yield None
        assert second is not None
        first += 100  # a rank's memory is its own
        return second

    for rank, rows in enumerate(ranks.lock_step([steps(r) for r in range(world)])):
        assert rows.tolist() == delivery(rank, world)
        assert ranks.transport(rank).sent_rows == {"keys": sent(rank, world), "gradients": sent(rank, world)}
        assert ranks.transport(rank).sent_bytes["keys"] == sent(rank, world) * 3 * 8


def test_threads_carry_and_count() -> None:
    def work(transport: LoopbackTransport) -> list[list[list[float]]]:
        protocol: Transport = transport
        time.sleep(0.01 * (protocol.rank % 3))  # ranks come at different times, also to the second exchange
        pending = [protocol.start(parcel(protocol.rank, protocol.world, f"number {i}")) for i in range(3)]
        assert transport.gather(transport.rank) == [0, 1, 2, 3, 4, 5, 6, 7]
        return [one.wait().tolist() for one in pending]

    world = LoopbackWorld(8)
    assert run_threads(world, work) == [[delivery(rank, 8)] * 3 for rank in range(8)]
    for rank in range(8):
        assert world.transport(rank).sent_rows == {f"number {i}": sent(rank, 8) for i in range(3)}


def fails_in_threads(function: Callable[[LoopbackTransport], object], error: type[BaseException], match: str,
                     world: int = 3, timeout: float = 60.0) -> BaseException:
    """Run it, expect that error, and no thread left behind."""
    with pytest.raises(error, match=match) as caught:
        run_threads(LoopbackWorld(world, timeout), function)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank")]
    return caught.value


def test_one_failing_rank_ends_all() -> None:
    ended = []

    def work(transport: LoopbackTransport) -> None:
        transport.start(parcel(transport.rank, 3)).wait()
        if transport.rank == 1:
            raise KeyError("a rank's own mistake")
        try:
            transport.start(parcel(transport.rank, 3)).wait()
        except LoopbackError as error:
            ended.append((transport.rank, str(error)))
            raise

    error = fails_in_threads(work, KeyError, "a rank's own mistake")
    assert error.__notes__ == ["on simulated rank 1 of 3"]
    assert sorted(ended) == [(rank, "rank 1 failed: KeyError: \"a rank's own mistake\"") for rank in (0, 2)]


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_rank_with_fewer_exchanges_is_named(early: int) -> None:
    def work(transport: LoopbackTransport) -> None:
        for _ in range(1 if transport.rank == early else 2):
            transport.start(parcel(transport.rank, 3)).wait()

    fails_in_threads(work, LoopbackError, f"exchange 1: rank {early} finished after 1 exchanges")


def test_a_rank_that_leaves_while_others_still_compute() -> None:
    def work(transport: LoopbackTransport) -> None:
        if transport.rank:
            time.sleep(0.05)
            transport.start(parcel(transport.rank, 2)).wait()

    fails_in_threads(work, LoopbackError, "exchange 0: rank 0 finished after 0 exchanges, ranks .1. wait", world=2)


def test_different_orders_are_named() -> None:
    def work(transport: LoopbackTransport) -> None:
        for label in ("keys", "gradients") if transport.rank != 2 else ("gradients", "keys"):
            transport.start(parcel(transport.rank, 3, label)).wait()

    fails_in_threads(work, LoopbackError, "exchange 0: rank . is at an exchange of '.*', rank . at an exchange of '")


def test_a_collective_is_no_exchange() -> None:
    def work(transport: LoopbackTransport) -> None:
        if transport.rank:
            transport.gather(1.0, "a sum")
        else:
            transport.start(parcel(transport.rank, 3)).wait()

    fails_in_threads(work, LoopbackError, "a gathering of 'a sum'")


@pytest.mark.slow
def test_a_rank_that_never_comes() -> None:
    release = threading.Event()

    def work(transport: LoopbackTransport) -> None:
        if transport.rank == 2:
            release.wait(1.0)
        transport.start(parcel(transport.rank, 3)).wait()

    fails_in_threads(work, LoopbackError, r"waited 0.1 s at an exchange of 'keys' for ranks \[2\]", timeout=0.1)


def test_a_failed_world_stays_failed() -> None:
    world = LoopbackWorld(2)
    world.meetings.abort(1, ValueError("broken"))
    with pytest.raises(LoopbackError, match="rank 1 failed: ValueError: broken"):
        world.transport(0).start(parcel(0, 2))


def misfits() -> list[tuple[Outgoing, str]]:
    """What rank 1 of 2 may bring, where rank 0 brings ``parcel(0, 2)``."""
    fine = parcel(1, 2)
    return [
        (Outgoing(fine.rows, fine.send_counts, (2, 0), "keys"), "rank 0 sends 1 rows of 'keys' to rank 1, which .* 2"),
        (Outgoing(fine.rows[:0], (0, 0), fine.receive_counts, "keys"), "rank 1 sends 0 rows .* to rank 0, .* awaits 1"),
        (Outgoing(fine.rows, (2, 0), fine.receive_counts, "keys"), "rank 1 of 2 sends 1 rows by counts"),
        (Outgoing(fine.rows.float(), fine.send_counts, fine.receive_counts, "keys"), "dtype torch.float64, rank 1"),
        (Outgoing(fine.rows[:, :2], fine.send_counts, fine.receive_counts, "keys"), r"row shape \(3,\), rank 1 \(2,\)"),
        (parcel(1, 2, "gradients"), "label keys, rank 1 gradients"),
    ]


@pytest.mark.parametrize(("other", "match"), misfits())
def test_exchanges_that_do_not_fit(other: Outgoing, match: str) -> None:
    with pytest.raises(LoopbackError, match=match):
        loopback.carry([parcel(0, 2), other])


def test_lock_step_names_the_rank_that_goes_its_own_way() -> None:
    def steps(rank: int) -> Steps:
        yield parcel(rank, 2)
        if rank == 1:
            return torch.zeros(1)
        yield None
        return torch.zeros(1)

    with pytest.raises(LoopbackError, match="rank 0 is to receive, rank 1 to finish"):
        LoopbackWorld(2).lock_step([steps(0), steps(1)])

    def impatient() -> Steps:
        yield None
        return torch.zeros(1)

    with pytest.raises(LoopbackError, match="an exchange that none has started"):
        LoopbackWorld(2).lock_step([impatient(), impatient()])

"""What ranks do before they have a process group. Ranks are threads here, each with a store of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from csbp.errors import ConfigError, UserError
from csbp.launch import train
from csbp.parallel.rendezvous import RENDEZVOUS_FILE, expect_alike, lost_peer, open_store, prepare_in_turn

SHORT = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", RENDEZVOUS_FILE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["file", "tcp"])
def meeting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under csbp's own launcher, in a folder whose name would not survive in a URL; or as under a script."""
    if request.param == "file":
        folder = tmp_path / "a?b#c%20d e"
        folder.mkdir()
        monkeypatch.setenv(RENDEZVOUS_FILE, str(folder / "rendezvous"))
        return
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def meet(world: int, work: Callable[[int], str]) -> list[Any]:
    """Each rank's answer or error. As a process would, a rank that fails takes its store along; one that does not
    keeps it."""
    kept = []

    def one(rank: int) -> Any:
        store = open_store(rank, world, SHORT)
        try:
            answer = prepare_in_turn(store, rank, world, lambda: work(rank))
        except Exception as error:
            return error.with_traceback(None)  # which would hold the store
        kept.append(store)
        return answer

    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(one, range(world)))


@pytest.mark.slow
def test_rank_0_goes_first_however_long_it_takes(meeting: None) -> None:
    done = []

    def work(rank: int) -> str:
        if rank == 0:
            time.sleep(1.2 * SHORT.total_seconds())
        done.append(rank)
        return f"of {rank}"

    assert meet(3, work) == ["of 0"] * 3
    assert done[0] == 0 and sorted(done) == [0, 1, 2]


@pytest.mark.slow
def test_nobody_goes_on_before_all_are_ready(meeting: None) -> None:
    done, kept = [], []

    def work(rank: int) -> str:
        if rank == 2:
            time.sleep(1.2 * SHORT.total_seconds())
        done.append(rank)
        return ""

    def one(rank: int) -> int:
        kept.append(store := open_store(rank, 3, SHORT))
        prepare_in_turn(store, rank, 3, lambda: work(rank))
        return len(done)

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(one, range(3))) == [3, 3, 3]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("error", [ConfigError("data.sources.0.path", "/x", "no such file"), UserError("so sad")])
def test_every_rank_says_why(meeting: None, bad: int, error: UserError) -> None:
    def work(rank: int) -> str:
        if rank == bad:
            time.sleep(0.2)
            raise error
        return ""

    for found in meet(3, work):
        assert type(found) is type(error) and str(found) == str(error)


def test_an_unforeseen_error_is_named_too(meeting: None) -> None:
    def work(rank: int) -> str:
        raise KeyError("oh")

    first, second = meet(2, work)
    assert isinstance(first, KeyError)
    assert isinstance(second, UserError) and str(second) == "rank 0: KeyError: 'oh'"


def test_one_rank_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet(1, lambda rank: "here") == ["here"]


def test_rank_0_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher that would notice: the store ends with rank 0."""
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset")

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection reset")

    with pytest.raises(UserError, match="rank 0 has ended"):
        prepare_in_turn(Gone(), 1, 2, lambda: "")  # type: ignore[arg-type]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def test_ranks_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RENDEZVOUS_FILE, str(tmp_path / "rendezvous"))
    with pytest.raises(UserError, match=r"have not come within 1 seconds .*: 1, 2$"):
        expect_alike(open_store(0, 3, SHORT), 0, 3, dict, SHORT)
    monkeypatch.delenv(RENDEZVOUS_FILE)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(UserError, match="rank 0 cannot meet the others at localhost"):
        open_store(0, 2, SHORT)


@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize(("words", "said"), [
    (["experiment=quickstart", "parallel.nproc=2", "parallel.csbp=3"], r"parallel.csbp=3: must divide"),
    (["experiment=quickstart", "parallel.nproc=4"], r"parallel.nproc=4: 2 rank\(s\) were started"),
    ([], "experiment: say which"),
])
def test_a_host_with_unusable_words_tells_the_others(monkeypatch: pytest.MonkeyPatch, refused: int, words: list[str],
                                                     said: str) -> None:
    """Two hosts of one rank under torchrun, whose agent holds the store."""
    waits = 1 - refused
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": agent.port, "TORCHELASTIC_USE_AGENT_STORE": True,
             "TORCHELASTIC_RUN_ID": "none", "RANK": refused, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0,
             "GROUP_WORLD_SIZE": 2}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    store = open_store(waits, 2, timedelta(seconds=60))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(expect_alike, store, waits, 2, dict, timedelta(seconds=60))
        with pytest.raises(ConfigError, match=said):
            train(words)
        with pytest.raises(ConfigError, match=rf"{said}.*\(so it is on rank {refused}\)"):
            waiting.result()


def leave_one() -> str:
    """On a rank of the pool: rank 1 stays away from a collective of a group that it then leaves."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    dist.barrier(group)  # both have met
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        return ""
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        return str(error) if not lost_peer(error) else "lost"
    return "no error"


def test_a_lost_peer_is_told_from_other_failures(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, leave_one)[0] == "lost"
    assert not lost_peer(RuntimeError("Timed out waiting 60000ms for recv operation to complete"))
    assert not lost_peer(ValueError("Connection closed by peer"))

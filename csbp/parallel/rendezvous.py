"""How ranks meet: through a store that all of them reach, before there is a process group.

What has to be done once, and may take long, is done here: a collective ends when its timeout is over, but nobody
minds how long a key of the store is waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from csbp.errors import ConfigError, UserError, met_by_all, written

# The path of a file that the ranks of one host share, where csbp has started them.
RENDEZVOUS_FILE = "CSBP_RENDEZVOUS_FILE"
_FIRST, _FAILED, _SETTINGS = "first", "failed", "settings"
# What gloo and NCCL say then; their errors have no type of their own.
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
_LONGEST_PAUSE = 0.5
_TELLING_SECONDS = 10.0


def open_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store of these ranks: a file's where csbp started them, otherwise the one at MASTER_ADDR, MASTER_PORT.

    Args:
        timeout: longest wait for the store to be there, and later for one of its keys.

    Raises:
        UserError: it is not there, or not all ranks have come to it.
    """
    path = os.environ.get(RENDEZVOUS_FILE)
    if path:
        store: dist.Store = dist.FileStore(path, world)
    elif world == 1 and "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
    else:
        try:
            store = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))[0]
        except dist.DistError as error:
            at = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise UserError(f"rank {rank} cannot meet the others at {at}, within {timeout.total_seconds():g} seconds "
                            f"(parallel.timeout_seconds): {str(error).splitlines()[0]}") from error
    store.set_timeout(timeout)
    return dist.PrefixStore("csbp", store)


def prepare_in_turn(store: dist.Store, rank: int, world: int, work: Callable[[], str],
                    patience: timedelta = timedelta.max) -> str:
    """Do what comes before a run: on rank 0, then on all the others, however long it takes.

    Args:
        store: of all ranks.
        rank, world: as torchrun numbers them.
        work: this rank's part.
        patience: longest wait for rank 0, and for the others.

    Returns:
        Rank 0's answer, on every rank, once all are ready.

    Raises:
        ConfigError, UserError: some rank's part failed; the same error on each.
    """
    try:
        if rank:
            _wait(store, [_FIRST], patience)
        answer = work()
        store.set(f"ready-{rank}", "")
        if rank == 0:
            store.set(_FIRST, answer)
        _wait(store, [f"ready-{other}" for other in range(world)], patience)
    except _Told as told:
        _leave(store, rank, world)
        with met_by_all():
            raise told.error from None
    except Exception as error:
        if isinstance(error, UserError):
            error.shared = True
        _leave(store, rank, world, error)
        raise
    return store.get(_FIRST).decode()


def expect_alike(store: dist.Store, rank: int, world: int, settings: Callable[[], Mapping[str, Any]],
                 patience: timedelta) -> None:
    """Refuse ranks that were given different settings, before any of them does anything else.

    Args:
        store, rank, world: as ``prepare_in_turn``.
        settings: gives this rank's, by name, as JSON holds them.
        patience: longest wait for the others to come.

    Raises:
        ConfigError: names the first that differs, with its value on some rank and on rank 0; the same on each.
        UserError: some rank has not come. What ``tell_others`` was given elsewhere.
    """
    store = dist.PrefixStore(_SETTINGS, store)

    def compare() -> str:
        mine = json.dumps(settings(), default=str)
        if rank:
            first, own = json.loads(store.get(_FIRST)), json.loads(mine)
            for name in {**first, **own}:
                if first.get(name) != own.get(name):
                    raise ConfigError(name, own.get(name), f"so it is on rank {rank}, but {written(first.get(name))} "
                                                           "on rank 0; start all ranks with the same settings")
        return mine

    prepare_in_turn(store, rank, world, compare, patience)


def tell_others(error: UserError) -> None:
    """Tell ranks on other hosts that this one will not come to ``expect_alike``, or give up after a few seconds.

    Only where torchrun holds the store: another one may not be there.
    """
    rank, world, here = (int(os.environ.get(name) or 1) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world == here or _keeps_store():
        return
    with contextlib.suppress(dist.DistError, UserError):
        store = dist.PrefixStore(_SETTINGS, open_store(rank, world, timedelta(seconds=_TELLING_SECONDS)))
        if isinstance(error, ConfigError):
            error = ConfigError(error.field, error.value, f"{error.fix} (so it is on rank {rank})")
        _leave(store, rank, world, error)
        if rank < here:  # torchrun's store ends with the first rank of this host
            _linger(store, range(here, world))


def lost_peer(error: BaseException) -> bool:
    """Whether a collective failed only because another rank is no longer there."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)


class _Told(Exception):
    def __init__(self, error: UserError) -> None:
        self.error = error


def _wait(store: dist.Store, keys: list[str], patience: timedelta) -> None:
    pause, begun = 0.01, time.monotonic()
    try:
        while not store.check(keys):
            if store.check([_FAILED]):
                raise _Told(_read(store.get(_FAILED)))
            if time.monotonic() - begun > patience.total_seconds():
                missing = [key.removeprefix("ready-").replace(_FIRST, "0") for key in keys if not store.check([key])]
                raise UserError(f"these ranks have not come within {patience.total_seconds():g} seconds "
                                f"(parallel.timeout_seconds), their hosts may say why: {', '.join(missing)}")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
    except dist.DistNetworkError as error:
        raise _Told(UserError("rank 0 has ended before this rank could join it; rank 0 says why")) from error


def _keeps_store() -> bool:
    """Whether the store of several ranks ends with rank 0."""
    return RENDEZVOUS_FILE not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _leave(store: dist.Store, rank: int, world: int, error: Exception | None = None) -> None:
    """Say why, if that is known here, and that this rank knows. Rank 0 gives the others the time to read it."""
    with contextlib.suppress(dist.DistNetworkError):
        if error is not None:
            store.set(_FAILED, _written(error, rank))
        store.set(f"told-{rank}", "")
        if rank == 0 and _keeps_store():
            _linger(store, range(1, world))


def _linger(store: dist.Store, ranks: range) -> None:
    others = [f"told-{rank}" for rank in ranks]
    until = time.monotonic() + _TELLING_SECONDS
    while others and time.monotonic() < until and not store.check(others):
        time.sleep(0.05)


def _written(error: Exception, rank: int) -> str:
    if isinstance(error, ConfigError):
        value = [] if error.value is ... else [error.value]
        return json.dumps([error.field, *value, error.fix], default=str)
    return json.dumps([str(error) if isinstance(error, UserError) else f"rank {rank}: {type(error).__name__}: {error}"])


def _read(written: bytes) -> UserError:
    parts = json.loads(written)
    if len(parts) == 1:
        return UserError(*parts)
    field, *value, fix = parts
    return ConfigError(field, value[0] if value else ..., fix)

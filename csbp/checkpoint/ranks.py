"""The few things that ranks tell each other while a checkpoint is written or read.

Everything works without a process group too: then this process is rank 0 of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from csbp.errors import UserError, refused_by_system

Value = TypeVar("Value")


def initialised() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number, 0 without a process group."""
    return dist.get_rank() if initialised() else 0


def world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if initialised() else 1


def gather(value: Value) -> list[Value]:
    """Every rank's ``value`` (any small picklable thing), by rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Value] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def together(task: str, function: Callable[[], Value], *, only_first: bool = False) -> list[Value | None]:
    """Run ``function`` on every rank (or on rank 0 alone) and fail on all ranks if it failed on one.

    A disk that is full for one rank must not leave the others waiting in the next collective.

    Args:
        task: what is being done, for the message: "write step-00000100".

    Returns:
        The results by rank; None for the ranks that had nothing to do.

    Raises:
        UserError: on every rank, if any rank met one or was refused something by the system (a full disk).
        RuntimeError: on every rank, if any rank met another error (chained to it where it happened).
    """
    result: Value | None = None
    caught: Exception | None = None
    if rank() == 0 or not only_first:
        try:
            result = function()
        except Exception as error:
            caught = error
    known = caught is not None and (isinstance(caught, UserError) or refused_by_system(caught))
    mine = None if caught is None else (known, f"{type(caught).__name__}: {caught}" if not known else str(caught))
    answers = gather((result, mine))
    for number, (_, failure) in enumerate(answers):
        if failure is not None:
            where = f" on rank {number}" if len(answers) > 1 else ""
            kind = UserError if failure[0] else RuntimeError
            raise kind(f"could not {task}{where}: {failure[1]}") from caught
    return [answer for answer, _ in answers]

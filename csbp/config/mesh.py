"""The mesh: sizes of its axes, and whether they fit the ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from csbp.config.schema import ParallelConfig
from csbp.errors import ConfigError


def axis_sizes(parallel: ParallelConfig) -> tuple[int, int, int]:
    """(dp, csbp, tp) of a mesh that ``check_mesh`` has passed."""
    rest = parallel.nproc // parallel.tp
    csbp = 1 if parallel.kind == "data" else parallel.csbp or rest
    return rest // csbp, csbp, parallel.tp


def check_mesh(parallel: ParallelConfig) -> None:
    """Refuse axes that do not multiply to the ranks.

    Raises:
        ConfigError: naming the first axis that does not divide what is left for it.
    """
    nproc, tp = parallel.nproc, parallel.tp
    if nproc % tp:
        raise ConfigError("parallel.tp", tp, f"must divide parallel.nproc={nproc}: one of {divisors([nproc])}")
    rest, left = nproc // tp, f"parallel.nproc={nproc}" if tp == 1 else f"parallel.nproc / parallel.tp = {nproc // tp}"
    if parallel.csbp is not None and rest % parallel.csbp:
        raise ConfigError("parallel.csbp", parallel.csbp, f"must divide {left}: one of {divisors([rest])}")
    if parallel.kind == "data" and parallel.csbp not in (None, 1):
        raise ConfigError("parallel.csbp", parallel.csbp, "parallel.kind=data has no sequence axis; leave it out")
    replicas = axis_sizes(parallel)[0]
    if replicas % parallel.dp_replicate:
        raise ConfigError("parallel.dp_replicate", parallel.dp_replicate,
                          f"must divide the {replicas} data-parallel replicas (nproc / csbp / tp)")


def divisors(numbers: Iterable[int]) -> str:
    """What divides all of them, in words."""
    common = gcd(*numbers)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)

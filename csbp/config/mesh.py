"""The mesh: sizes of its axes, and whether they fit the ranks and the model. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

from csbp.config.schema import ParallelConfig
from csbp.errors import ConfigError

# Fields of a Hugging Face configuration -> what a tp axis splits evenly.
_SPLIT = {"num_attention_heads": "query heads", "num_key_value_heads": "key/value heads",
          "num_global_key_value_heads": "key/value heads of layers without a window",
          "intermediate_size": "MLP columns", "moe_intermediate_size": "columns of an expert",
          "vocab_size": "vocabulary rows"}


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
        raise ConfigError("parallel.tp", tp, f"must divide parallel.nproc={nproc}: one of {_divisors([nproc])}")
    rest, left = nproc // tp, f"parallel.nproc={nproc}" if tp == 1 else f"parallel.nproc / parallel.tp = {nproc // tp}"
    if parallel.csbp is not None and rest % parallel.csbp:
        raise ConfigError("parallel.csbp", parallel.csbp, f"must divide {left}: one of {_divisors([rest])}")
    if parallel.kind == "data" and parallel.csbp not in (None, 1):
        raise ConfigError("parallel.csbp", parallel.csbp, "parallel.kind=data has no sequence axis; leave it out")
    replicas = axis_sizes(parallel)[0]
    if replicas % parallel.dp_replicate:
        raise ConfigError("parallel.dp_replicate", parallel.dp_replicate,
                          f"must divide the {replicas} data-parallel replicas (nproc / csbp / tp)")


def check_split(tp: int, fields: Mapping[str, Any]) -> None:
    """Refuse a tp axis that does not divide a model.

    Args:
        fields: the model's config.json.

    Raises:
        ConfigError: naming what it does not divide, and the values that divide all.
    """
    sizes = {words: fields[name] for name, words in _SPLIT.items() if fields.get(name)}
    uneven = [f"{number:,} {words}" for words, number in sizes.items() if number % tp]
    if uneven:
        raise ConfigError("parallel.tp", tp, f"must divide the model's {' and '.join(uneven)}: one of "
                                             f"{_divisors(sizes.values())}")


def _divisors(numbers: Iterable[int]) -> str:
    common = gcd(*numbers)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)

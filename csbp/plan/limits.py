"""What a run may not ask for: windows smaller than a block, more ranks than blocks, heads that do not divide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from csbp.config.mesh import axis_sizes, divisors
from csbp.config.schema import ObjectiveConfig, ParallelConfig
from csbp.errors import ConfigError
from csbp.plan.geometry import LayerKind
from csbp.plan.shapes import ModelShape

# A plan has a table of all ranks of a sequence axis by all, and a row of arrays for each block.
MAX_AXIS = 4096
MAX_BLOCKS = 2**23
# Ownership multiplies the cost of a pack by less than 64, in 64 bits.
_MAX_COST = 2**57


def check_windows(kinds: Iterable[LayerKind], objective: ObjectiveConfig) -> None:
    """A target block must fit into every window, or its first row would be out of its last one's sight.

    Raises:
        ConfigError: naming the window.
    """
    for kind in kinds:
        if objective.kind == "block_diffusion" and kind.window is not None and kind.window < objective.block_size:
            raise ConfigError("model.shape.sliding_window", kind.window, "smaller than a block; use at most "
                              f"objective.block_size={kind.window}, or a wider window")


def check_ranks(parallel: ParallelConfig, blocks: int, pack: str) -> None:
    """Every rank of the sequence axis must be able to get a block.

    Args:
        blocks: of the pack that has most.
        pack: which one that is, in words.

    Raises:
        ConfigError: there are fewer blocks than ranks.
    """
    ranks = axis_sizes(parallel)[1]
    field = "parallel.csbp" if parallel.csbp else "parallel.nproc"
    if ranks > blocks:
        raise ConfigError(field, ranks,
                          f"more ranks than blocks: {pack} has {blocks}; use at most {blocks} on the sequence axis "
                          "(parallel.csbp), a longer data.seq_len, or a smaller objective.block_size")
    if ranks > MAX_AXIS:
        raise ConfigError(field, ranks, f"more ranks than a sequence axis can have; use at most {MAX_AXIS} "
                                        "(parallel.csbp), and data-parallel replicas beside them")


def check_pool(ranks: int, replicas: int) -> None:
    """Refuse more replicas than can be planned together.

    Args:
        ranks: of one sequence axis.
        replicas: whose packs are planned as one.

    Raises:
        ConfigError: a plan cannot have so many ranks.
    """
    if replicas > 1 and ranks * replicas > MAX_AXIS:
        raise ConfigError("cad.pool", "dp", f"{replicas} replicas of {ranks} ranks are more than a plan can have; use "
                                            f"at most {MAX_AXIS} ranks, or cad.pool=csbp")


def check_split(tp: int, shape: ModelShape) -> None:
    """Refuse a tp axis that does not divide a model.

    Raises:
        ConfigError: naming what it does not divide, and the values that divide all.
    """
    sizes = {"query heads": {part.heads for part in shape.attention},
             "key/value heads": {part.kv_heads for part in shape.attention}, "MLP columns": {shape.ffn},
             "columns of an expert": {shape.expert_ffn}, "vocabulary rows": {shape.vocabulary}}
    uneven = [f"{number:,} {words}" for words, found in sizes.items() for number in sorted(found) if number % tp]
    if uneven:
        raise ConfigError("parallel.tp", tp, f"must divide the model's {' and '.join(uneven)}: one of "
                                             f"{divisors(number for found in sizes.values() for number in found)}")


def check_size(lengths: Sequence[int], block_size: int, shape: ModelShape) -> None:
    """Refuse packs that are too large to be planned, before there is an array of them.

    Args:
        lengths: tokens of each document.

    Raises:
        ConfigError: more blocks, or more attended pairs, than can be counted.
    """
    blocks = sum(-(-length // block_size) for length in lengths)
    if blocks > MAX_BLOCKS:
        raise ConfigError("data.seq_len", sum(lengths), f"too much to plan: {blocks:,} blocks; use a larger "
                          f"objective.block_size, or fewer tokens, for at most {MAX_BLOCKS:,}")
    weights = max(sum(shape.weights(shape.kinds)), shape.layers)
    if sum(length * (length + 2 * shape.row_pairs) for length in lengths) * weights > _MAX_COST:
        raise ConfigError("data.seq_len", sum(lengths), "too much to plan: there are more attended pairs than 64 bits "
                          "count; use shorter documents (data.document_tokens)")

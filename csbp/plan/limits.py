"""What a run may not ask for: windows smaller than a block, more ranks than blocks."""

from __future__ import annotations

from collections.abc import Iterable

from csbp.config.mesh import axis_sizes
from csbp.config.schema import ObjectiveConfig, ParallelConfig
from csbp.errors import ConfigError
from csbp.plan.geometry import LayerKind


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
    if ranks > blocks:
        raise ConfigError("parallel.csbp" if parallel.csbp else "parallel.nproc", ranks,
                          f"more ranks than blocks: {pack} has {blocks}; use at most {blocks} on the sequence axis "
                          "(parallel.csbp), a longer data.seq_len, or a smaller objective.block_size")

"""Whether a run can learn anything, known before its first step."""

from __future__ import annotations

import numpy as np

from csbp.config.mesh import axis_sizes
from csbp.config.schema import DataConfig, RunConfig
from csbp.config.sources import named_sources
from csbp.data.stream import PackStream
from csbp.diffusion.build import learnt_tokens
from csbp.errors import ConfigError
from csbp.plan.limits import check_ranks


def expect_learnable(config: RunConfig, train: PackStream, held_out: PackStream) -> None:
    """Refuse data without a single token to learn. Single packs or steps without one are fine.

    Reads training packs up to the first with such a token, at most one epoch; every epoch has the same documents.

    Raises:
        ConfigError: there is none in the training data, or none in the packs of an evaluation.
    """
    cursor, targets = train.first(), 0
    while cursor.epoch == 0:
        (pack,), cursor = train.take(cursor, 1)
        if learnt_tokens(pack, config.objective):
            break
        targets += int(pack.target_mask.sum())
    else:
        raise ConfigError("data.sources", _paths(config.data, "train"), f"nothing to learn in a whole epoch: "
                          f"{_cause(targets)}")
    packs = held_out.head(config.train.eval_packs)
    if not any(learnt_tokens(pack, config.objective) for pack in packs):
        cause = _cause(sum(int(pack.target_mask.sum()) for pack in packs))
        raise ConfigError("train.eval_packs", config.train.eval_packs, f"nothing to learn in the {len(packs)} held-out "
                          f"packs of an evaluation: {cause}; evaluate more packs, or hold out other documents "
                          "(data.validation, data.validation_fraction)")


def expect_blocks(config: RunConfig, train: PackStream) -> None:
    """Refuse a sequence axis of more ranks than any training pack has blocks; single packs with fewer are fine.

    Reads packs up to the first with enough, at most one epoch.

    Raises:
        ConfigError: some ranks would never have a block.
    """
    ranks, most, cursor = axis_sizes(config.parallel)[1], 0, train.first()
    while most < ranks and cursor.epoch == 0:
        (pack,), cursor = train.take(cursor, 1)
        most = max(most, int((-(-np.diff(pack.document_starts) // config.objective.block_size)).sum()))
    check_ranks(config.parallel, most, "the training pack with most of them")


def _paths(data: DataConfig, split: str) -> list[str]:
    return [source.path for _, source in named_sources(data, split)]


def _cause(targets: int) -> str:
    if targets:
        return ("each document is a single token, and this objective predicts a token from the one before it. Give "
                "longer documents, or set data.append_eos=true")
    return "no token is a target (prompts without an answer). Check the format of the source and the roles of its chats"

"""Whether a run can learn anything, known before its first step."""

from __future__ import annotations

from csbp.config.schema import DataConfig, RunConfig
from csbp.config.sources import named_sources
from csbp.data.stream import PackStream
from csbp.diffusion.build import learnt_tokens
from csbp.errors import ConfigError


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


def _paths(data: DataConfig, split: str) -> list[str]:
    return [source.path for _, source in named_sources(data, split)]


def _cause(targets: int) -> str:
    if targets:
        return ("each document is a single token, and this objective predicts a token from the one before it. Give "
                "longer documents, or set data.append_eos=true")
    return "no token is a target (prompts without an answer). Check the format of the source and the roles of its chats"

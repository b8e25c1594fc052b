"""The packs that are measured: document lengths and geometry. No torch."""

from __future__ import annotations

import itertools

import numpy as np

from csbp.config.bench import BenchAttentionConfig
from csbp.errors import ConfigError
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.lengths import read_lengths


def document_lengths(case: BenchAttentionConfig, total: int) -> list[int]:
    """Tokens of each document of a pack of ``total``; the last one taken is cut to fit.

    Raises:
        ConfigError: the file of lengths cannot be read.
    """
    if case.documents == "one":
        return [total]
    random = np.random.default_rng(case.seed)
    if case.documents == "packed":
        drawn = random.lognormal(np.log(case.median), case.spread, total)
        lengths = [case.longest, *np.clip(np.rint(drawn), 1, case.longest).astype(int).tolist()]
    else:
        lengths = _of_file(case.documents)
    found: list[int] = []
    room = total
    for length in itertools.cycle(lengths):
        found.append(min(length, room))
        room -= found[-1]
        if not room:
            break
    if case.documents == "packed":
        random.shuffle(found)  # the longest is drawn first only to have it for sure
    return found


def _of_file(path: str) -> list[int]:
    try:
        return read_lengths(path)
    except ConfigError as error:
        raise ConfigError("documents", path, error.fix) from error


def geometry_of(case: BenchAttentionConfig, total: int) -> tuple[Geometry, LayerKind]:
    """The pack, every block of it a target, and what its rows see."""
    kind = LayerKind("full" if case.window is None else "window", case.clean_stream, window=case.window)
    return whole_pack(document_lengths(case, total), case.block_size, noised=True), kind

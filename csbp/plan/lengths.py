"""Tokens of the documents that are planned, from a file of lengths or as one document a pack."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from csbp.config.cad import pooled
from csbp.config.fields import nearest_name
from csbp.config.mesh import axis_sizes
from csbp.config.schema import DataConfig, RunConfig
from csbp.errors import ConfigError
from csbp.plan.documents import DISTRIBUTIONS
from csbp.plan.limits import MAX_BLOCKS

_DRAWN = 1 << 16  # documents
_LENGTH = re.compile("(?=0*[1-9])[0-9]{1,18}")


@dataclass(frozen=True)
class Filled:
    """Packs, and where their documents are from.

    Attributes:
        packs: tokens of the documents of each, as ``document_lengths`` has them.
        room: tokens that the packs could hold.
        source: ``data.document_lengths``.
        given: documents that it holds; 0 where it is empty.
        used: how many of these were taken, in order; more than ``given`` where it was read again.
    """

    packs: list[list[int]]
    room: int
    source: str = ""
    given: int = 0
    used: int = 0


def stand_in(packs: Sequence[Sequence[int]], *, alone: bool) -> Sequence[int]:
    """The pack that other kinds are shown with: the one with most attention, which all replicas wait for, or the most
    usual one if there is one replica ``alone``. Empty packs, of replicas that are one short, stand for nothing."""
    filled = [pack for pack in packs if pack]
    work = [sum(length * length for length in pack) for pack in filled]
    meant = sum(work) / len(work) if alone else max(work)
    return min(zip(work, filled, strict=True), key=lambda pair: abs(pair[0] - meant))[1]


def planned(config: RunConfig) -> Filled:
    """What is planned: one pack, or, where those of all replicas are planned as one, a step's first packs; a replica
    that is a pack short has an empty one.

    Raises:
        ConfigError: as ``document_lengths``.
    """
    if not pooled(config):
        return fill(config.data, 1)
    replicas = axis_sizes(config.parallel)[0]
    filled = fill(config.data, min(replicas, config.train.packs_per_step))
    return replace(filled, packs=filled.packs + [[]] * (replicas - len(filled.packs)))


def document_lengths(data: DataConfig) -> list[int]:
    """Tokens of each document of a planned pack, cut as training would cut them.

    Raises:
        ConfigError: the file cannot be read, a line of it is no length, or there are too many documents to plan.
    """
    return packs_of(data, 1)[0]


def packs_of(data: DataConfig, count: int) -> list[list[int]]:
    """Tokens of the documents of some packs, see ``fill``."""
    return fill(data, count).packs


def fill(data: DataConfig, count: int) -> Filled:
    """Some packs, one after another, each as ``document_lengths`` has one. Where there are several, what is left of a
    long document begins the next one, and a file that ends is read again from its beginning.

    Raises:
        ConfigError: as ``document_lengths``; of the whole file, whatever is used of it.
    """
    source, room = data.document_lengths, count * data.seq_len
    if not source:
        return Filled([_one_pack(data, iter([data.seq_len]), 0)[0] for _ in range(count)], room)
    lengths, limit = read_lengths(source), longest(data)
    if data.long_documents == "error" and max(lengths) > limit:
        raise ConfigError("data.document_lengths", source, f"holds a document of {max(lengths):,} tokens, and "
                          f"data.long_documents=error; at most {limit:,}, or choose split or truncate")
    taken = itertools.count()
    documents = (length for length, _ in zip(lengths if count == 1 else itertools.cycle(lengths), taken, strict=False))
    packs: list[list[int]] = []
    left = 0
    for _ in range(count):
        begun = itertools.chain([left] if left else [], documents)
        pack, left = _one_pack(data, begun, sum(map(len, packs)))
        packs.append(pack)
    return Filled(packs, room, source, len(lengths), next(taken))


def longest(data: DataConfig) -> int:
    """Tokens of the longest document that is neither cut nor refused."""
    return min(data.document_tokens or data.seq_len, data.seq_len)


def _one_pack(data: DataConfig, lengths: Iterator[int], before: int) -> tuple[list[int], int]:
    """Documents until the pack is full, or there are no more, and how much is left of the last one in whole pieces;
    ``before``: documents that were planned already."""
    limit = longest(data)
    pack: list[int] = []
    room, left = data.seq_len, 0
    for whole in lengths:
        whole = whole if data.long_documents == "split" else min(whole, limit)
        length = min(whole, room)
        if before + len(pack) + length // limit > MAX_BLOCKS:
            raise ConfigError("data.seq_len", data.seq_len, f"too much to plan: more than {MAX_BLOCKS:,} documents; "
                                                            "use longer ones (data.document_tokens), or fewer tokens")
        pack += [limit] * (length // limit) + ([length % limit] if length % limit else [])
        room -= length
        if room == 0:
            left = max(whole - -(-length // limit) * limit, 0)
            break
    return pack, left


def distribution(named: str) -> str:
    """The distribution that is named, with an @ before it or not; "" where it is none."""
    name = named.removeprefix("@")
    return name if name in DISTRIBUTIONS else ""


def _drawn(field: str, named: str) -> list[int]:
    if not distribution(named):
        raise ConfigError(field, named, nearest_name(named, [f"@{name}" for name in DISTRIBUTIONS], "distributions"))
    found: list[int] = DISTRIBUTIONS[distribution(named)].draw(_DRAWN, np.random.default_rng(0)).tolist()
    return found


def read_lengths(path: str) -> list[int]:
    """The numbers of a file, one a line; empty lines are skipped. Or, of a distribution's name, with an @ before
    it or not, lengths drawn from it, the same each time."""
    field = "data.document_lengths"
    if path.startswith("@") or distribution(path):
        return _drawn(field, path)
    if not path:
        raise ConfigError(field, path, "names no file; give one with a document's tokens a line")
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(field, path, f"cannot be read: {reason}") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not _LENGTH.fullmatch(text):
            raise ConfigError(field, path, f"line {number} is {text[:40]!r}; write one document's tokens a line, as a "
                                           "whole number above 0 of at most 18 digits")
        found += [int(text)] if text else []
    if not found:
        raise ConfigError(field, path, "holds no length; write one document's tokens a line")
    return found

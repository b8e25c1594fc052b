"""Opening the data of a run: from ``DataConfig`` to the stream of packs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from csbp.config.schema import DataConfig, SourceConfig
from csbp.config.sources import check_sources, named_sources
from csbp.data.corpus import Corpus, open_corpus
from csbp.data.order import SampleOrder
from csbp.data.packs import Cursor, PackStream
from csbp.data.pieces import held_out
from csbp.data.samples import IndexedSamples, SampleSource, select_pieces, spread_order
from csbp.data.skips import Skips
from csbp.data.streaming import StreamedSamples
from csbp.data.tokenizer import next_free_id
from csbp.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Cursor", "PackStream", "open_stream", "prepare_corpora"]


def open_stream(config: DataConfig, *, seed: int, tokenizer: PreTrainedTokenizerFast, split: str) -> PackStream:
    """The packs of the training or the held-out documents.

    Args:
        config: what to read and how to pack it.
        seed: of the run; the held-out order does not depend on it.
        tokenizer: the model's.
        split: "train" or "validation".

    Raises:
        ConfigError, UserError: the data cannot be had as asked for.
    """
    check_sources(config)
    assert split in ("train", "validation"), split
    held = split == "validation" and not config.validation
    sources = named_sources(config, "validation" if split == "validation" and not held else "train")
    if held and config.validation_fraction == 0:
        raise ConfigError("data.validation_fraction", 0.0, "nothing is held out; raise it or give data.validation")
    if any(source.streaming for _, source in sources):
        samples: SampleSource = StreamedSamples(sources, config, tokenizer)
    else:
        samples = _indexed(config, sources, seed, tokenizer, split, held)
    # Held-out packs are shuffled by a fixed key, so that the first few are a fair sample too.
    key = ("validation",) if split == "validation" else ("train", seed) if config.shuffle else None
    return PackStream(samples, seq_len=config.seq_len, pack_window=config.pack_window,
                      vocabulary=next_free_id(tokenizer), shuffle_key=key)


def _indexed(config: DataConfig, sources: list[tuple[str, SourceConfig]], seed: int,
             tokenizer: PreTrainedTokenizerFast, split: str, held: bool) -> IndexedSamples:
    fraction = 0.0 if config.validation else config.validation_fraction
    limit, skips = config.document_tokens or config.seq_len, Skips()
    corpora = [open_corpus(source, field, config, tokenizer) for field, source in sources]
    pieces = [select_pieces(corpus, held=held, fraction=fraction, limit=limit, policy=config.long_documents,
                            skips=skips) for corpus in corpora]
    sizes = [len(p.start) for p in pieces]
    if sum(sizes) == 0:
        key, value, why = _emptied_by(config, corpora, held, fraction, limit)
        raise ConfigError(key, value, f"the {split} split is empty: {why}")
    if split == "validation":
        return IndexedSamples(corpora, pieces, spread_order(corpora, pieces), skips)
    for (field, source), corpus, size in zip(sources, corpora, sizes, strict=True):
        if size == 0 and source.weight != 0:
            key, value, why = _emptied_by(config, [corpus], held, fraction, limit)
            raise ConfigError(field, source.path, f"nothing of it is left to train on ({key}={value}): {why}; or take "
                                                  "the source out")
    order = SampleOrder(sizes, [source.weight for _, source in sources], seed=seed, shuffle=config.shuffle)
    return IndexedSamples(corpora, pieces, order, skips)


def _emptied_by(config: DataConfig, corpora: list[Corpus], held: bool, fraction: float,
                limit: int) -> tuple[str, Any, str]:
    """The setting, its value and how it left no sample of these corpora: no document was meant for this split, or
    all were cut before their first target."""
    documents = sum(len(c.name_starts) - 1 for c in corpora)
    meant = sum(len(np.unique(c.document[held_out(c.name_hash, fraction) == held])) for c in corpora)
    if meant:
        longer = "document_tokens" if config.document_tokens else "seq_len"
        return ("data.long_documents", config.long_documents,
                f"cut to {limit} tokens, all of its {meant} documents end before anything that is learnt; choose "
                f"split, or raise data.{longer}")
    return ("data.validation_fraction", config.validation_fraction,
            f"{fraction:g} of {documents} documents by a hash of their names left it none; change it or give "
            "data.validation")


def prepare_corpora(config: DataConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Tokenize whatever is not in the cache yet, and check what is. To be called by one process of a machine before
    the others open their streams.

    Raises:
        ConfigError, UserError: as ``open_stream``.
    """
    check_sources(config)
    for field, source in named_sources(config, "train") + named_sources(config, "validation"):
        if not source.streaming:
            open_corpus(source, field, config, tokenizer, checksums=True)

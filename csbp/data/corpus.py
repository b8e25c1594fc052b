"""The tokenized form of a source, made once and kept on disk.

A corpus is a folder of flat arrays under ``data.cache_dir``, named by a digest of everything that decides its
content. It holds whole documents: the train / held-out split, and what happens to long documents, are decided
when it is opened and cost no new tokenization. It is built in a folder of its own and renamed into place, so a
reader sees all of it or nothing, and two processes that build the same one do not harm each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from csbp.config.schema import DataConfig, SourceConfig
from csbp.data.arrays import ArrayFolder, map_array, read_meta
from csbp.data.building import building_folder
from csbp.data.encode import Encoder
from csbp.data.skips import Skips
from csbp.data.sources import read_source, source_stamp
from csbp.data.tokenizer import next_free_id, tokenizer_digest
from csbp.errors import ConfigError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 2  # raise when the arrays or their meaning change
_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Corpus:
    """The tokenized documents of one source. N sequences, T tokens in all.

    A record gives one sequence, a chat whose template rewrites history several; they share name and document.

    Attributes:
        tokens: [T], the smallest unsigned type that holds the vocabulary.
        starts: int64 [N + 1], first token of each sequence, then T.
        targets: bool [T], or None where every token is supervised.
        target_counts: int64 [N], supervised tokens.
        target_bytes: int64 [N], UTF-8 bytes of the supervised text.
        document: int64 [N], which record a sequence comes from, ascending.
        name_hash: uint64 [N], hash of the record's name.
        names: uint8, the records' names in UTF-8, and name_starts: int64 [documents + 1].
        skips: what was left out when it was built.
        digest: of tokens, starts and targets.
    """

    tokens: np.ndarray
    starts: np.ndarray
    targets: np.ndarray | None
    target_counts: np.ndarray
    target_bytes: np.ndarray
    document: np.ndarray
    name_hash: np.ndarray
    names: np.ndarray
    name_starts: np.ndarray
    skips: Skips
    digest: str

    def name(self, document: int) -> str:
        """The name of a record."""
        return bytes(self.names[self.name_starts[document]:self.name_starts[document + 1]]).decode()


def name_hash(name: str) -> int:
    """64 bits that depend on the name alone, alike on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def open_corpus(source: SourceConfig, field: str, config: DataConfig, tokenizer: PreTrainedTokenizerFast, *,
                checksums: bool = False) -> Corpus:
    """The corpus of a source, tokenized now if the cache has no sound copy.

    Args:
        source: not a streaming one.
        field: dotted name of the source, for messages.
        checksums: read the cached files through and compare; else only their sizes are looked at.

    Raises:
        ConfigError, UserError: the source cannot be read, or holds nothing that can be learnt.
    """
    cache = Path(config.cache_dir).expanduser()
    folder = cache / _digest(source, field, config, tokenizer)
    corpus = _load(folder, checksums=checksums)
    if corpus is None:
        _build(folder, source, field, config, tokenizer)
        corpus = _load(folder, checksums=False)
    if corpus is None:
        raise UserError(f"{folder}: cannot be read, though it has just been written; give another data.cache_dir")
    return corpus


def _load(folder: Path, *, checksums: bool) -> Corpus | None:
    """The corpus of a finished folder, or None where anything of it is missing or damaged. Its digest is of checksums:
    the same for the same training text, whatever its files are called and when they changed."""
    meta = read_meta(folder, checksums=checksums)
    if meta is None:
        return None
    try:
        files, skips = meta["files"], Skips(**meta["skips"])
        skips.lines()  # raises for anything but counted reasons
        masked = (folder / "targets.npy").exists()
        read = {name: files[f"{name}.npy"] for name in _dtypes(1) if name != "targets" or masked}
        arrays: dict[str, Any] = {"targets": None, **{name: map_array(folder, name) for name in read}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    learnt = {name: read.get(name) for name in ("tokens", "starts", "targets")}
    return Corpus(**arrays, skips=skips, digest=hashlib.sha256(json.dumps(learnt, sort_keys=True).encode()).hexdigest())


def _digest(source: SourceConfig, field: str, config: DataConfig, tokenizer: PreTrainedTokenizerFast) -> str:
    settings = {key: value for key, value in asdict(source).items() if key != "weight"}
    content = [FORMAT, settings, source_stamp(source, field), tokenizer_digest(tokenizer), config.append_eos]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _dtypes(vocabulary: int) -> dict[str, Any]:
    return {"tokens": np.uint16 if vocabulary <= 1 << 16 else np.uint32, "starts": np.int64, "targets": np.bool_,
            "target_counts": np.int64, "target_bytes": np.int64, "document": np.int64, "name_hash": np.uint64,
            "names": np.uint8, "name_starts": np.int64}


def _build(folder: Path, source: SourceConfig, field: str, config: DataConfig,
           tokenizer: PreTrainedTokenizerFast) -> None:
    with ExitStack() as stack:
        try:
            building = stack.enter_context(building_folder(folder))
        except OSError as error:
            raise ConfigError("data.cache_dir", config.cache_dir, f"cannot be written to: {error}") from error
        try:
            _fill(building, source, field, Encoder(tokenizer, config.append_eos))
            _publish(building, folder)
        except OSError as error:
            raise UserError(f"data.cache_dir={config.cache_dir}: the corpus cannot be written: {error}") from error


def _fill(building: Path, source: SourceConfig, field: str, encoder: Encoder) -> None:
    """Tokenizes the source into a folder. Whatever goes wrong with the source is no OSError."""
    skips = Skips()
    out = ArrayFolder(building, _dtypes(next_free_id(encoder.tokenizer)))
    out.append("starts", 0)
    out.append("name_starts", 0)
    documents, named, last, masked = 0, 0, None, False
    reported = time.monotonic()
    for record, sample in encoder.encode(read_source(source, field, skips), field, skips):
        if record is not last:
            last, name = record, record.name.encode()
            documents, named = documents + 1, named + len(name)
            out.append("names", np.frombuffer(name, np.uint8))
            out.append("name_starts", named)
        masked = masked or sample.targets is not None
        targets = np.ones(len(sample.ids), bool) if sample.targets is None else sample.targets
        out.append("tokens", sample.ids)
        out.append("targets", targets)
        out.append("starts", out.sizes["tokens"])
        out.append("target_counts", int(targets.sum()))
        out.append("target_bytes", sample.target_bytes)
        out.append("document", documents - 1)
        out.append("name_hash", name_hash(record.name))
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            print(f"csbp: tokenizing {field}: {documents:,} documents, {out.sizes['tokens']:,} tokens",
                  file=sys.stderr, flush=True)
    skips.warn(field)
    if not documents:
        raise skips.nothing_left(field, source.path)
    about = {"format": FORMAT, "source": asdict(source), "skips": asdict(skips)}
    out.finish(about, drop=() if masked else ("targets",))


def _publish(building: Path, folder: Path) -> None:
    """Move a finished folder into place; whoever comes second keeps the first one's, if that is sound. Anything else
    of that name (a damaged folder, a file, a link) goes."""
    for _ in range(3):
        try:
            os.rename(building, folder)
            return
        except OSError:
            if not os.path.lexists(folder):
                raise
            if _load(folder, checksums=True) is not None:
                return
            aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.broken-", dir=folder.parent))
            try:
                os.rename(folder, aside / folder.name)
            except OSError:
                continue  # another process has just moved it
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    raise UserError(f"{folder}: cannot be replaced; remove it")

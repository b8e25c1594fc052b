"""Documents of a source, one after another, in an order that does not depend on the machine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from csbp.config.schema import SourceConfig
from csbp.config.sources import column_names
from csbp.data.files import STDLIB, SourceFile, list_files
from csbp.data.records import Record, check_columns, record_from_row
from csbp.data.skips import Skips
from csbp.errors import ConfigError, UserError

_SAVED_DATASET = ("state.json", "dataset_dict.json")  # what datasets.save_to_disk writes


def read_source(source: SourceConfig, field: str, skips: Skips) -> Iterator[Record]:
    """Every document of a source.

    Args:
        source: what to read.
        field: dotted name, e.g. ``data.sources.0``, for messages.
        skips: counts what cannot be read (text files that are not UTF-8).

    Raises:
        ConfigError: nothing there, a missing column, a format that the kind cannot hold.
        UserError: a file that breaks its own format, by file and line.
    """
    if source.kind == "text":
        if source.format != "text":
            raise ConfigError(f"{field}.format", source.format, "kind=text reads whole files; use format=text or "
                              "another kind")
        return _read_text(list_files(source, field), skips)
    if source.kind == "dataset":
        return _read_dataset(source, field)
    reader = _read_jsonl if source.kind == "jsonl" else _read_parquet
    return _read_tables(source, field, reader)


def source_stamp(source: SourceConfig, field: str) -> list[Any]:
    """What changes when the source's content does: the files' stamps, or a dataset's fingerprint. JSON-able."""
    local = Path(source.path).expanduser()
    if source.kind != "dataset":
        return [list(f.stamp()) for f in list_files(source, field)]
    if local.exists():
        files = [p for p in (local.rglob("*") if local.is_dir() else [local]) if p.is_file()]
        return [list(SourceFile(p.as_posix(), p.absolute()).stamp()) for p in sorted(files)]
    return [_open_dataset(source, field)._fingerprint]


def _read_text(files: list[SourceFile], skips: Skips) -> Iterator[Record]:
    for file in files:
        try:
            text = file.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skips.add("not UTF-8 text", file.name)
            continue
        yield Record(file.name, text=text)


Reader = Callable[[SourceFile, SourceConfig, str], Iterator[tuple[int, dict[str, Any]]]]


def _read_tables(source: SourceConfig, field: str, reader: Reader) -> Iterator[Record]:
    if source.path == STDLIB:
        raise ConfigError(f"{field}.kind", source.kind, f"{STDLIB} is a folder of text files; use kind=text")
    for file in list_files(source, field):
        for index, row in reader(file, source, field):
            where = f"{file.path}, {'line' if source.kind == 'jsonl' else 'row'} {index + 1}"
            yield record_from_row(row, source, field, f"{file.name}:{index}", where)


def _read_jsonl(file: SourceFile, source: SourceConfig, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    opened = gzip.open(file.path, "rb") if file.path.suffix == ".gz" else file.path.open("rb")
    with opened as lines:
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                hint = "; a file that starts with '[' is one JSON array: write one object a line" \
                    if index == 0 and line.lstrip().startswith(b"[") else ""
                raise UserError(f"{file.path}, line {index + 1}: not a JSON line ({error}){hint}") from error
            if not isinstance(row, dict):
                raise UserError(f"{file.path}, line {index + 1}: every line must be a JSON object, "
                                f"not {type(row).__name__}")
            yield index, row


def _read_parquet(file: SourceFile, source: SourceConfig, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: not a parquet file ({error})") from error
    available = table.schema_arrow.names
    check_columns(source, field, available, str(file.path))
    wanted = [theirs for theirs in column_names(source, field).values() if theirs in available]
    index = 0
    for batch in table.iter_batches(batch_size=1024, columns=wanted):
        for row in batch.to_pylist():
            yield index, row
            index += 1


def _read_dataset(source: SourceConfig, field: str) -> Iterator[Record]:
    label = Path(source.path).name or source.path
    for index, row in enumerate(_open_dataset(source, field)):
        yield record_from_row(row, source, field, f"{label}/{source.split}:{index}",
                              f"{source.path} ({source.split}), row {index + 1}")


def _open_dataset(source: SourceConfig, field: str) -> Any:
    """The split as a ``datasets.Dataset`` or, with streaming, an ``IterableDataset``.

    A path is a folder of ``save_to_disk``, a folder or file that ``load_dataset`` knows, or a name on the hub;
    ``NAME:SUBSET`` picks a configuration of it.
    """
    import datasets

    if not source.path:
        raise ConfigError(f"{field}.path", source.path, "name a dataset or its folder")
    local = Path(source.path).expanduser()
    try:
        if any((local / name).is_file() for name in _SAVED_DATASET):
            return _open_saved(local, source, field)
        name, _, subset = source.path.partition(":") if not local.exists() else (str(local), "", "")
        return datasets.load_dataset(name, subset or None, split=source.split, streaming=source.streaming)
    except (FileNotFoundError, datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        raise ConfigError(f"{field}.path", source.path, f"datasets finds nothing there: {error}") from error
    except datasets.exceptions.DatasetGenerationError as error:
        raise UserError(f"{field}.path={source.path!r}: datasets cannot read it: {error}") from error
    except ValueError as error:  # an unknown split or subset; the message lists those there are
        raise ConfigError(f"{field}.split", source.split, str(error)) from error


def _open_saved(folder: Path, source: SourceConfig, field: str) -> Any:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise ConfigError(f"{field}.split", source.split, f"{folder} has {', '.join(sorted(loaded))}")
        loaded = loaded[source.split]
    return loaded.to_iterable_dataset() if source.streaming else loaded

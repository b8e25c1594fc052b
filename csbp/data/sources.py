"""Documents of a source, one after another, in an order that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from csbp.config.schema import SourceConfig
from csbp.data.files import SourceFile, list_files, local_path, unreadable
from csbp.data.records import Record
from csbp.data.skips import Skips
from csbp.data.tables import read_tables, rows_to_records
from csbp.errors import ConfigError, UserError

_SAVED_DATASET = ("state.json", "dataset_dict.json")  # what datasets.save_to_disk writes


def read_source(source: SourceConfig, field: str, skips: Skips) -> Iterator[Record]:
    """Every document of a source.

    Args:
        source: what to read; ``config.sources.check_sources`` has seen it.
        field: dotted name, e.g. ``data.sources.0``, for messages.
        skips: counts what is left out: what is no text in a folder of texts, rows that are no Unicode.

    Raises:
        ConfigError: nothing there, a missing column, a file that cannot be read or breaks its own format, by file and
            line.
    """
    if source.kind == "text":
        return _read_text(source, field, skips)
    return (_read_dataset if source.kind == "dataset" else read_tables)(source, field, skips)


def source_stamp(source: SourceConfig, field: str) -> list[Any]:
    """What changes when the source's content does: the files' stamps, or a dataset's fingerprint. JSON-able.

    Raises:
        ConfigError: nothing there, or a file cannot be read.
    """
    local = local_path(source)
    try:
        if source.kind != "dataset":
            return [list(f.stamp()) for f in list_files(source, field)]
        if local.exists():
            files = [p for p in (local.rglob("*") if local.is_dir() else [local]) if p.is_file()]
            return [list(SourceFile(p.as_posix(), p.absolute()).stamp()) for p in sorted(files)]
    except OSError as error:
        raise unreadable(source, field, error.filename or local, error) from error
    return [_open_dataset(source, field)._fingerprint]


def _read_text(source: SourceConfig, field: str, skips: Skips) -> Iterator[Record]:
    for file in list_files(source, field, skips):
        try:
            data = file.path.read_bytes()
            text = data.decode("utf-8-sig")
        except OSError as error:
            raise unreadable(source, field, file.path, error) from error
        except UnicodeDecodeError:
            skips.add("not UTF-8 text", file.name)
            continue
        if "\0" in text:
            skips.add("a binary file (it holds NUL bytes)", file.name)
            continue
        yield Record(file.name, text=text)


def _read_dataset(source: SourceConfig, field: str, skips: Skips) -> Iterator[Record]:
    label = Path(source.path).name or source.path
    return rows_to_records(enumerate(_open_dataset(source, field)), source, field, skips,
                           f"{label}/{source.split}", f"{source.path} ({source.split})", "row")


def _open_dataset(source: SourceConfig, field: str) -> Any:
    """The split as a ``datasets.Dataset`` or, with streaming, an ``IterableDataset``.

    A path is a folder of ``save_to_disk``, a folder or file that ``load_dataset`` knows, or a name on the hub;
    ``NAME:SUBSET`` picks a configuration of it.
    """
    import datasets

    local = local_path(source)
    try:
        if any((local / name).is_file() for name in _SAVED_DATASET):
            return _open_saved(local, source, field)
        name, _, subset = source.path.partition(":") if not local.exists() else (str(local), "", "")
        return datasets.load_dataset(name, subset or None, split=source.split, streaming=source.streaming)
    except (FileNotFoundError, datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        raise ConfigError(f"{field}.path", source.path, f"datasets finds nothing there: {error}") from error
    except UserError:
        raise
    except Exception as error:  # of the many formats' readers
        if type(error) is ValueError:  # an unknown split or subset; the message lists those there are
            raise ConfigError(f"{field}.split", source.split, str(error)) from error
        inner = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise unreadable(source, field, "datasets", inner) from error


def _open_saved(folder: Path, source: SourceConfig, field: str) -> Any:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise ConfigError(f"{field}.split", source.split, f"{folder} has {', '.join(sorted(loaded))}")
        loaded = loaded[source.split]
    return loaded.to_iterable_dataset() if source.streaming else loaded

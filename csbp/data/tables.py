"""Records of jsonl and parquet files, file after file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

from csbp.config.schema import SourceConfig
from csbp.config.sources import column_names
from csbp.data.files import SourceFile, list_files, unreadable
from csbp.data.records import Record, check_columns, record_from_row
from csbp.data.skips import SkipRecord, Skips
from csbp.errors import UserError


def read_tables(source: SourceConfig, field: str, skips: Skips) -> Iterator[Record]:
    """Every row of a jsonl or parquet source.

    Raises:
        ConfigError: nothing there, a missing column, a file that breaks its own format, by file and line or row.
    """
    reader, unit = (_read_jsonl, "line") if source.kind == "jsonl" else (_read_parquet, "row")
    for file in list_files(source, field):
        yield from rows_to_records(reader(file, source, field), source, field, skips, file.name, file.path, unit)


def rows_to_records(rows: Iterator[tuple[int, Any]], source: SourceConfig, field: str, skips: Skips, name: str,
                    label: object, unit: str) -> Iterator[Record]:
    """Records named ``name:index``.

    Args:
        rows: (index from 0, row), read as they are asked for.
        label: what messages call the file or dataset; unit: what they call a row.

    Raises:
        ConfigError: by label and row, whatever the rows' reader has raised, or a row that breaks its format.
    """
    last = 0
    while True:
        try:
            index, row = next(rows)
        except StopIteration:
            return
        except UserError:
            raise
        except Exception as error:  # gzip, pyarrow and datasets have many for a file that is cut short or damaged
            raise unreadable(source, field, f"{label}, after {unit} {last}" if last else label, error) from error
        last = index + 1
        try:
            yield record_from_row(row, source, field, f"{name}:{index}", f"{label}, {unit} {last}")
        except SkipRecord as skip:
            skips.add(skip.reason, f"{name}:{index}")


def _read_jsonl(file: SourceFile, source: SourceConfig, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    opened = gzip.open(file.path, "rb") if file.path.suffix == ".gz" else file.path.open("rb")
    with opened as lines:
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            where = f"{file.path}, line {index + 1}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, a number without end
                hint = "; a file that starts with '[' is one JSON array: write one object a line" \
                    if index == 0 and line.lstrip().startswith(b"[") else ""
                raise unreadable(source, field, where, f"not a JSON line ({error}){hint}") from error
            if not isinstance(row, dict):
                raise unreadable(source, field, where, f"every line must be a JSON object, not {type(row).__name__}")
            yield index, row


def _read_parquet(file: SourceFile, source: SourceConfig, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file.path) as table:
        available = table.schema_arrow.names
        check_columns(source, field, available, str(file.path))
        wanted = [theirs for theirs in column_names(source, field).values() if theirs in available]
        index = 0
        for batch in table.iter_batches(batch_size=1024, columns=wanted):
            for row in batch.to_pylist():
                yield index, row
                index += 1

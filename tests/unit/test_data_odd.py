"""What lies in folders and files beside good data: never a traceback, never a wait, and the file that is to blame."""

from __future__ import annotations

import gzip
import io
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_kit import qwen_like, write_lines, write_rows

from csbp.config.schema import DataConfig, SourceConfig
from csbp.data.corpus import open_corpus
from csbp.data.files import LINK, SPECIAL
from csbp.data.records import NOT_UNICODE, Record
from csbp.data.skips import Skips
from csbp.data.sources import read_source, source_stamp
from csbp.errors import ConfigError, UserError

FIELD = "data.sources.0"
TOKENIZER = qwen_like(None, eos="<|endoftext|>")


def read(skips: Skips | None = None, **settings: Any) -> list[Record]:
    source = SourceConfig(**settings)
    source_stamp(source, FIELD)  # what a corpus is named by; it must be as careful
    return list(read_source(source, FIELD, skips or Skips()))


def make_odd(path: Path, what: str) -> None:
    if what == "dangling":
        path.symlink_to("nowhere")
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif what == "device":
        path.symlink_to("/dev/zero")


ODD = [("dangling", LINK), ("loop", LINK), ("pipe", SPECIAL), ("socket", SPECIAL), ("device", SPECIAL)]


@pytest.mark.parametrize(("what", "reason"), ODD)
@pytest.mark.parametrize("pattern", ["", "*"])
def test_in_a_folder_of_texts_what_is_no_file_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      what: str, reason: str, pattern: str) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    Path("a.txt").write_text("a")
    make_odd(Path("odd.txt"), what)
    skips = Skips()
    assert [r.name for r in read(skips, path=os.path.join(".", pattern))] == ["a.txt"]
    assert skips.counts == {reason: 1} and skips.first == {reason: "odd.txt"}


@pytest.mark.parametrize(("what", "reason"), ODD)
@pytest.mark.parametrize("path", ["x/odd.jsonl", "x"])
def test_a_table_that_is_no_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str,
                                                    reason: str, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    write_lines(Path("x/a.jsonl"), [{"text": "a"}])
    make_odd(Path("x/odd.jsonl"), what)
    with pytest.raises(ConfigError, match=rf"data.sources.0.path='{path}': .*odd.jsonl: is {reason}; give regular"):
        read(kind="jsonl", path=path)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "dataset"])
@pytest.mark.parametrize(("what", "reason"), [("dangling", LINK), ("pipe", SPECIAL)])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, kind: str, what: str, reason: str) -> None:
    make_odd(tmp_path / "odd", what)
    reason = "datasets finds nothing there" if kind == "dataset" else f".*odd: is {reason}"
    with pytest.raises(ConfigError, match=rf"data.sources.0.path='.*/odd': {reason}"):
        read(kind=kind, path=str(tmp_path / "odd"))


def test_names_that_are_no_utf8_are_read_and_written_out(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "x") + b"/caf\xe9.txt")).write_text("a")
    config = DataConfig(sources=[SourceConfig(path=str(tmp_path / "x"))], cache_dir=str(tmp_path / "cache"))
    corpus = open_corpus(config.sources[0], FIELD, config, TOKENIZER)
    assert corpus.name(0) == r"caf\xe9.txt"


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "dataset"])
def test_files_that_may_not_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The system's refusal is imitated: whoever runs the tests may be allowed everything."""
    path = tmp_path / "secret"
    if kind == "text":
        path.write_text("a")
    else:
        write_rows(path, kind, [{"text": "a"}])

    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("pathlib.Path.open", "pathlib.Path.read_bytes", "pyarrow.parquet.ParquetFile",
                 "datasets.load_from_disk"):
        monkeypatch.setattr(name, refuse)
    with pytest.raises(ConfigError, match=r"data.sources.0.path=.*secret.*Permission denied"):
        read(kind=kind, path=str(path))


def test_folders_that_may_not_be_listed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "secret").mkdir()
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ConfigError, match=r"data.sources.0.path=.*/secret: cannot be read: Permission denied"):
        read(path=str(tmp_path))


@pytest.mark.parametrize(("data", "texts", "reason"), [
    (b"\xef\xbb\xbfabc", ["abc"], None), (b"\xff\xfea\0b\0", [], "not UTF-8 text"),
    (b"\xed\xa0\x80", [], "not UTF-8 text"), (b"a\0b", [], "a binary file (it holds NUL bytes)")])
def test_texts_begin_after_their_mark_and_binaries_are_left_out(tmp_path: Path, data: bytes, texts: list[str],
                                                                reason: str | None) -> None:
    (tmp_path / "x.txt").write_bytes(data)
    skips = Skips()
    assert [r.text for r in read(skips, path=str(tmp_path))] == texts
    assert list(skips.counts) == ([reason] if reason else [])


@pytest.mark.parametrize(("format", "row"), [
    ("text", r'{"text": "a\ud800"}'), ("prompt_completion", r'{"prompt": "\udc00", "completion": "a"}'),
    ("messages", r'{"messages": [{"role": "user", "content": "\ud83d"}]}'),
    ("messages", r'{"messages": [{"role": "user", "content": "a", "name": "\ud83d"}]}'),
    ("messages", r'{"messages": "[{\"role\": \"user\", \"content\": \"\\ud83d\"}]"}'),
    ("messages", r'{"messages": [], "tools": [{"\ud800": 1}]}'),
    ("sharegpt", r'{"conversations": [{"from": "human", "value": "\ud83d"}]}')])
def test_halves_of_surrogate_pairs_are_left_out_and_counted(tmp_path: Path, format: str, row: str) -> None:
    path, skips = tmp_path / "x.jsonl", Skips()
    good = '{"text": "a", "messages": [], "conversations": [], "prompt": "a", "completion": "a"}'
    path.write_text(f"{good}\n{row}\n")
    assert len(read(skips, kind="jsonl", path=str(path), format=format)) == 1
    assert skips.counts == {NOT_UNICODE: 1} and skips.first == {NOT_UNICODE: "x.jsonl:1"}


@pytest.mark.parametrize("line", [
    '{"text": ' + "[" * 100_000, '{"text": ' + "1" * 5000 + "}", "[]", "null", "5", '"a"', '{"text": "a\0"}', "\0" * 20,
    '{"text": "a"', '{"text": {"a": ' + "[" * 100_000 + "}"])
def test_lines_that_no_reader_can_take_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"text": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"x.jsonl, line 2: "):
        read(kind="jsonl", path=str(path))


def gzipped(lines: int = 200) -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as file:
        numbers = np.random.default_rng(0).integers(1 << 60, size=lines)
        file.write(b"".join(b'{"text": "%d"}\n' % n for n in numbers))
    return out.getvalue()


@pytest.mark.parametrize(("data", "message"), [
    (gzipped()[:-9], r"a.jsonl.gz, after line \d+: .*cannot be read: EOFError"),
    (gzipped()[:40], r"a.jsonl.gz.*EOFError"),
    (gzipped()[:-8] + b"\1" * 8, r"a.jsonl.gz.*cannot be read: CRC check failed"),
    (gzipped()[:100] + b"\xff" * 50 + gzipped()[150:], r"a.jsonl.gz: cannot be read"),
    (b'{"text": "a"}\n', r"a.jsonl.gz: cannot be read: Not a gzipped file")])
def test_broken_gzip_files(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read(kind="jsonl", path=str(tmp_path))


def damaged_parquet(path: Path, how: str) -> None:
    if how == "bad text":
        column = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        return
    texts = [str(n) for n in np.random.default_rng(0).integers(1 << 60, size=20_000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=5000, use_dictionary=False)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle:middle + 4000] = bytes(4000)
    path.write_bytes({"middle": bytes(data), "cut": path.read_bytes()[:middle], "empty": b"", "text": b"a" * 99}[how])


@pytest.mark.parametrize(("how", "message"), [
    ("middle", r"a.parquet(, after row \d+)?: cannot be read"), ("cut", "a.parquet: cannot be read"),
    ("empty", "a.parquet: cannot be read"), ("text", "a.parquet: cannot be read"),
    ("bad text", "a.parquet: cannot be read: UnicodeDecodeError")])
def test_broken_parquet_files_are_not_a_broken_cache(tmp_path: Path, how: str, message: str) -> None:
    damaged_parquet(tmp_path / "a.parquet", how)
    source = SourceConfig(kind="parquet", path=str(tmp_path / "a.parquet"))
    config = DataConfig(sources=[source], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=rf"data.sources.0.path=.*{message}"):
        open_corpus(source, FIELD, config, TOKENIZER)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["bad line", "cut arrow", "no arrow", "bad state"])
def test_broken_datasets(tmp_path: Path, how: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "set"
    if how == "bad line":
        path.mkdir()
        (path / "train.jsonl").write_text('{"text": "a"}\n{bad\n')
    else:
        write_rows(path, "dataset", [{"text": "a" * 50}] * 500)
        (arrow,) = path.glob("*.arrow")
        if how == "cut arrow":
            arrow.write_bytes(arrow.read_bytes()[:300])
        elif how == "no arrow":
            arrow.unlink()
        else:
            (path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"data.sources.0.path='.*set': "):
        read(kind="dataset", path=str(path), streaming=streaming)


def test_a_cache_that_fills_up_is_not_blamed_on_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a"}])
    config = DataConfig(sources=[SourceConfig(kind="jsonl", path=str(path))], cache_dir=str(tmp_path / "cache"))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("csbp.data.arrays.ArrayFolder._flush", full)
    with pytest.raises(UserError, match=r"data.cache_dir=.*the corpus cannot be written: .*No space left"):
        open_corpus(config.sources[0], FIELD, config, TOKENIZER)

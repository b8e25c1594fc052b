"""Reading sources: every kind and format, the same order everywhere, and messages that say what to write."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from data_kit import write_lines, write_rows

from csbp.config.schema import DataConfig, SourceConfig
from csbp.config.sources import check_sources
from csbp.data.files import list_files
from csbp.data.records import Record
from csbp.data.skips import Skips
from csbp.data.sources import read_source, source_stamp
from csbp.errors import ConfigError

FIELD = "data.sources.0"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]


def read(**settings: Any) -> list[Record]:
    return list(read_source(SourceConfig(**settings), FIELD, Skips()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.py", "a.py", "pkg/c.py", "pkg/test/d.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    return tmp_path


def test_a_folder_is_read_in_the_order_of_names_and_undecodable_files_are_counted(folder: Path) -> None:
    skips = Skips()
    records = list(read_source(SourceConfig(path=str(folder)), FIELD, skips))
    assert [r.name for r in records] == ["a.py", "b.py", "notes.txt", "pkg/c.py", "pkg/test/d.py"]
    assert records[3].text == "# pkg/c.py\n"
    assert skips.counts == {"not UTF-8 text": 1} and skips.first == {"not UTF-8 text": "binary.py"}


@pytest.mark.parametrize(("include", "exclude", "names"), [
    (["**/*.py"], ["**/test*/**", "binary.py"], ["a.py", "b.py", "pkg/c.py"]),
    (["*.py"], ["b*"], ["a.py"]),
    (["pkg/**"], [], ["pkg/c.py", "pkg/test/d.py"]),
    (["notes.txt", "?.py"], [], ["a.py", "b.py", "notes.txt"])])
def test_include_and_exclude_match_the_relative_path(folder: Path, include: list[str], exclude: list[str],
                                                     names: list[str]) -> None:
    files = list_files(SourceConfig(path=str(folder), include=include, exclude=exclude), FIELD)
    assert [f.name for f in files] == names


def test_globs_and_single_files(folder: Path) -> None:
    assert [r.name for r in read(path=str(folder / "**/[cd].py"))] == ["pkg/c.py", "pkg/test/d.py"]
    assert [r.name for r in read(path=str(folder / "a.py"))] == ["a.py"]


def test_what_is_installed_beside_the_standard_library_is_not_even_looked_at(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("os.py", "json/decoder.py", "json/__pycache__/decoder.pyc", "site-packages/huge/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr("csbp.data.files.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    looked, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: looked.append(Path(folder).name) or scan(folder))
    files = list_files(SourceConfig(path="@stdlib"), FIELD)
    assert [file.name for file in files] == ["json/decoder.py", "os.py"] and looked == [tmp_path.name, "json"]


def test_the_standard_library_leaves_out_what_is_not_its_own() -> None:
    files = list_files(SourceConfig(path="@stdlib", include=["**/*.py"], exclude=["**/test*/**"]), FIELD)
    names = [f.name for f in files]
    assert "abc.py" in names and "json/decoder.py" in names and names == sorted(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert "unittest" in folders and not {"site-packages", "dist-packages", "__pycache__", "test"} & folders


@pytest.mark.parametrize(("settings", "message"), [
    ({"path": "/no/such/place"}, r"data.sources.0.path.*there is no /no/such/place"),
    ({"path": "FOLDER", "include": ["*.rs"]}, r"6 files are there, but include=\['\*.rs'\].*leave none"),
    ({"path": "FOLDER", "include": ["**.py"]}, r"data.sources.0.include.*not a glob"),
    ({"path": "FOLDER", "kind": "jsonl"}, r"data.sources.0.path.*empty folder")])
def test_nothing_there_is_an_error_that_names_the_field(folder: Path, settings: dict[str, Any], message: str) -> None:
    settings["path"] = settings["path"].replace("FOLDER", str(folder))
    with pytest.raises(ConfigError, match=message):
        read(**settings)


@pytest.mark.parametrize(("settings", "message"), [
    ({"path": ""}, r"data.sources.0.path.*name a file"),
    ({"path": "x", "format": "messages"}, r"data.sources.0.format.*kind=text reads whole files"),
    ({"path": "x", "streaming": True}, r"data.sources.0.streaming.*only kind=dataset streams"),
    ({"path": "x", "columns": {"txt": "text"}}, r"data.sources.0.columns.*has no column 'txt'"),
    ({"path": "@stdlib", "kind": "jsonl"}, r"data.sources.0.kind.*use kind=text")])
@pytest.mark.parametrize("group", ["sources", "validation"])
def test_sources_that_cannot_be(group: str, settings: dict[str, Any], message: str) -> None:
    sources = {"sources": [SourceConfig(path="x")], group: [SourceConfig(**settings)]}
    with pytest.raises(ConfigError, match=message.replace("sources", group)):
        check_sources(DataConfig(**sources))


FORMATS = [("text", {"text": "abc"}, Record("NAME", text="abc")),
           ("messages", {"messages": CHAT}, Record("NAME", messages=tuple(CHAT))),
           ("sharegpt", {"conversations": TURNS}, Record("NAME", messages=tuple(CHAT))),
           ("prompt_completion", {"prompt": "1+1=", "completion": "2"}, Record("NAME", pair=("1+1=", "2")))]


@pytest.mark.parametrize(("format", "row", "record"), FORMATS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_every_format_of_every_kind(tmp_path: Path, kind: str, format: str, row: dict[str, Any],
                                    record: Record) -> None:
    path = write_rows(tmp_path / f"x.{kind}", kind, [row, row])
    name = "x.dataset/train:1" if kind == "dataset" else f"x.{kind}:1"
    found = read(kind=kind, path=str(path), format=format)
    assert len(found) == 2
    assert found[1] == Record(name, record.text, record.messages, record.tools, record.pair)


def test_columns_map_our_names_to_the_files(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"q": "1+1=", "a": "2"}, {"q": "2+2=", "a": None}])
    found = read(kind="jsonl", path=str(path), format="prompt_completion", columns={"prompt": "q", "completion": "a"})
    assert [r.pair for r in found] == [("1+1=", "2"), ("2+2=", "")]


def test_a_folder_of_files_and_compressed_ones(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as out:
        out.write('{"text": "a0"}\n\n{"text": "a2"}\n')
    (tmp_path / "readme.md").write_text("not data")
    assert [(r.name, r.text) for r in read(kind="jsonl", path=str(tmp_path))] == [
        ("a.jsonl.gz:0", "a0"), ("a.jsonl.gz:2", "a2"), ("b.jsonl:0", "b")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path / f"x.{kind}", kind, [{"content": "x", "id": 1}])
    with pytest.raises(ConfigError, match=r"data.sources.0.columns.*'text'.*it has content, id; write columns="):
        read(kind=kind, path=str(path))


@pytest.mark.parametrize(("line", "message"), [
    ('{"text": ', r"x.jsonl, line 3: not a JSON line"), ('"just text"', "line 3: every line must be a JSON object"),
    ('{"text": 5}', "line 3: column 'text' holds int"), ("\xff", "line 3: not a JSON line")])
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=message):
        read(kind="jsonl", path=str(path))


def test_a_json_array_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[\n{"text": "a"}]')
    with pytest.raises(ConfigError, match="one JSON array"):
        read(kind="jsonl", path=str(path))


@pytest.mark.parametrize(("format", "row", "message"), [
    ("messages", {"messages": "Hi"}, "column 'messages' must hold a list, not 'Hi'"),
    ("messages", {"messages": [CHAT]}, "'role' and 'content'"),
    ("messages", {"messages": [{"role": ["user"], "content": "x"}]}, "'role' and 'content'"),
    ("messages", {"messages": [{"role": "user", "content": {"text": "x"}}]}, "content must be text"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be text"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "holds int, not text"),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls must hold a list, not 5"),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": {"name": "f"}}]}, "tool_calls must hold a list"),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": ["add"]}]}, "tool_calls must hold a list of obj"),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "tool call's function must"),
    ("messages", {"messages": CHAT, "tools": 5}, "column 'tools' must hold a list, not 5"),
    ("messages", {"messages": CHAT, "tools": [[]]}, "column 'tools' must hold a list of objects"),
    ("messages", {"messages": CHAT, "tools": "add"}, "column 'tools' must hold a list, not 'add'"),
    ("messages", {"messages": "[" * 5000}, "column 'messages' must hold a list"),
    ("sharegpt", {"conversations": [{"from": ["gpt"], "value": "x"}]}, "'from' one of system, human"),
    ("sharegpt", {"conversations": [5]}, "'from' one of system, human"),
    ("prompt_completion", {"prompt": ["x"], "completion": "x"}, "column 'prompt' holds list, not text"),
    ("messages", {"messages": [{"content": "x"}]}, "'role' and 'content'"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content must be text"),
    ("sharegpt", {"conversations": [{"from": "robot", "value": "x"}]}, "'from' one of system, human")])
def test_broken_conversations(tmp_path: Path, format: str, row: dict[str, Any], message: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [row])
    with pytest.raises(ConfigError, match=message) as caught:
        read(kind="jsonl", path=str(path), format=format)
    assert "x.jsonl, line 1: " in str(caught.value) and str(caught.value).endswith("; mend or remove it")


def test_messages_lose_nulls_join_text_parts_and_parse_arguments(tmp_path: Path) -> None:
    """Arrow gives every message every key; APIs write tool arguments as a string."""
    call = {"id": None, "function": {"name": "add", "arguments": '{"a": 2}'}}
    path = write_lines(tmp_path / "x.jsonl", [{"tools": [{"name": "add"}], "messages": [
        {"role": "user", "content": [{"type": "text", "text": "su"}, {"type": "text", "text": "m"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]}]}])
    (record,) = read(kind="jsonl", path=str(path), format="messages")
    assert record.messages == ({"role": "user", "content": "sum"}, {
        "role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]})
    assert record.tools == ({"name": "add"},)


def test_lists_and_schemas_may_be_json_texts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"messages": json.dumps(CHAT), "tools": json.dumps([{"name": "add"}])},
                                              {"messages": CHAT, "tools": ['{"name": "add"}']},
                                              {"messages": CHAT, "tools": ""}, {"messages": CHAT, "tools": "null"}])
    found = read(kind="jsonl", path=str(path), format="messages")
    assert all(record.messages == tuple(CHAT) for record in found)
    assert [record.tools for record in found] == [({"name": "add"},)] * 2 + [None] * 2


def test_a_mapping_of_an_unknown_name_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match="has no column 'txt'; map any of text"):
        read(kind="jsonl", path=str(path), columns={"txt": "text"})


def test_datasets_by_split_and_as_streams(tmp_path: Path) -> None:
    rows = {"train": [{"text": "train"}] * 2, "dev": [{"text": "dev"}]}
    datasets.DatasetDict({s: datasets.Dataset.from_list(r) for s, r in rows.items()}).save_to_disk(tmp_path / "saved")
    saved = str(tmp_path / "saved")
    assert [r.text for r in read(kind="dataset", path=saved, split="dev")] == ["dev"]
    assert [r.text for r in read(kind="dataset", path=saved, streaming=True)] == ["train", "train"]
    with pytest.raises(ConfigError, match=r"data.sources.0.split.*has dev, train"):
        read(kind="dataset", path=saved, split="test")
    (tmp_path / "plain").mkdir()
    write_lines(tmp_path / "plain" / "train.jsonl", [{"text": "a"}, {"text": "b"}])
    streamed = read(kind="dataset", path=str(tmp_path / "plain"), streaming=True)
    assert [(r.name, r.text) for r in streamed] == [("plain/train:0", "a"), ("plain/train:1", "b")]


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.sources.0.path"):
        read(kind="dataset", path=str(tmp_path / "none"))


def test_the_stamp_changes_with_the_files(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a"}])
    source = SourceConfig(kind="jsonl", path=str(path))
    before = source_stamp(source, FIELD)
    assert before == source_stamp(source, FIELD)
    write_lines(path, [{"text": "ab"}])
    assert source_stamp(source, FIELD) != before
    saved = SourceConfig(kind="dataset", path=str(tmp_path / "saved"))
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(saved.path)
    assert source_stamp(saved, FIELD)

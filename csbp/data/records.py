"""One document as read, before any tokenizer: text, a conversation, or a prompt with its completion."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from csbp.config.schema import SourceConfig
from csbp.config.sources import REQUIRED, column_names
from csbp.data.files import unreadable
from csbp.data.skips import SkipRecord
from csbp.errors import ConfigError

_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                   "model": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool"}
NOT_UNICODE = "text that is no Unicode: half of a surrogate pair"


@dataclass(frozen=True)
class Record:
    """One document of a source; exactly one of ``text``, ``messages`` and ``pair`` is set.

    Attributes:
        name: stable on every machine (relative path, or file:index); its hash decides train or held-out.
        text: a plain document.
        messages: chat turns, each with at least ``role`` and ``content`` (a string).
        tools: tool schemas handed to the chat template with ``messages``.
        pair: (prompt, completion).
    """

    name: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[Any, ...] | None = None
    pair: tuple[str, str] | None = None


def check_columns(source: SourceConfig, field: str, available: Collection[str], where: str) -> None:
    """Refuses a file without a column that the format needs, with the columns it has."""
    for ours, theirs in column_names(source, field).items():
        if ours in REQUIRED[source.format] and theirs not in available:
            raise ConfigError(f"{field}.columns", dict(source.columns),
                              f"{where} has no column {theirs!r} for {ours!r}; it has "
                              f"{', '.join(sorted(available)) or 'none'}; write columns={{{ours}: NAME}} or another "
                              f"format than {source.format}")


def record_from_row(row: Mapping[str, Any], source: SourceConfig, field: str, name: str, where: str) -> Record:
    """One row of a jsonl file, a parquet file or a dataset.

    Args:
        row: column name -> value.
        field: dotted name of the source, e.g. ``data.sources.0``.
        name: the record's stable name.
        where: file and line, for messages.

    Raises:
        ConfigError: the row lacks a column, or one holds something else than the format says.
        SkipRecord: its text cannot be written as UTF-8.
    """
    columns = column_names(source, field)
    for ours in REQUIRED[source.format]:
        if columns[ours] not in row:
            check_columns(source, field, row.keys(), where)
    try:
        record = _record({ours: row.get(theirs) for ours, theirs in columns.items()}, source.format, columns, name)
        json.dumps((record.text, record.messages, record.tools, record.pair), ensure_ascii=False, default=str).encode()
        return record
    except UnicodeEncodeError as error:
        raise SkipRecord(NOT_UNICODE) from error
    except _BadRow as error:
        raise unreadable(source, field, where, f"{error}; mend or remove it") from error
    except RecursionError as error:
        raise unreadable(source, field, where, "is nested too deeply; mend or remove it") from error


class _BadRow(Exception):
    """What is wrong with a row's values."""


def _record(values: dict[str, Any], format: str, columns: dict[str, str], name: str) -> Record:
    if format == "text":
        return Record(name, text=_string(values["text"], columns["text"]))
    if format == "prompt_completion":
        prompt, completion = (_string(values[k], columns[k]) for k in ("prompt", "completion"))
        return Record(name, pair=(prompt, completion))
    ours, convert = ("messages", _message) if format == "messages" else ("conversations", _sharegpt_message)
    messages = tuple(convert(turn) for turn in _list(values[ours], f"column {columns[ours]!r}"))
    given = None if values["tools"] in ("", "null") else values["tools"]
    tools = _objects(given, f"column {columns['tools']!r}") if given is not None else []
    return Record(name, messages=messages, tools=tuple(tools) or None)


def _string(value: Any, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _BadRow(f"column {column!r} holds {type(value).__name__}, not text")
    return value


def _parse(text: str) -> Any:
    """The value of a JSON text, or None where it is none that can be read (nested too deeply, an endless number)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _list(value: Any, what: str) -> list[Any]:
    found = _parse(value) if isinstance(value, str) else value  # some exports keep the list as a JSON string
    if not isinstance(found, list | tuple):
        raise _BadRow(f"{what} must hold a list, not {value!r:.80}")
    return list(found)


def _objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    found = [_parse(item) if isinstance(item, str) else item for item in _list(value, what)]
    for item in found:
        if not isinstance(item, Mapping):
            raise _BadRow(f"{what} must hold a list of objects, not {value!r:.80}")
    return found


def _message(message: Any) -> dict[str, Any]:
    """A chat message with its None entries gone (Arrow fills every row with every key of the column)."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _BadRow(f"a message must be an object with 'role' and 'content', not {message!r:.80}")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _content(kept.get("content", ""))
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_tool_call(call) for call in _objects(kept["tool_calls"], "tool_calls")]
    return kept


def _content(content: Any) -> str:
    """The text of a message; a list of ``{type: text, text: …}`` parts is joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if None in texts:
        raise _BadRow(f"a message's content must be text, not {content!r:.80}")
    return "".join(_string(text, "content") for text in texts)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object: templates expect one, APIs write it as a JSON string. Other text is
    printed by the template as it is."""
    call = {key: value for key, value in call.items() if value is not None}
    if "function" in call:
        if not isinstance(call["function"], Mapping):
            raise _BadRow(f"a tool call's function must be an object with 'name' and 'arguments', not "
                          f"{call['function']!r:.80}")
        return {**call, "function": _tool_call(call["function"])}
    if isinstance(call.get("arguments"), str):
        parsed = _parse(call["arguments"])
        call["arguments"] = call["arguments"] if parsed is None else parsed
    return call


def _sharegpt_message(turn: Any) -> dict[str, Any]:
    speaker = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES or not isinstance(turn.get("value"), str):
        raise _BadRow(f"a ShareGPT turn must be {{from, value}} with 'from' one of {', '.join(_SHAREGPT_ROLES)}, not "
                      f"{turn!r:.80}")
    return {"role": _SHAREGPT_ROLES[speaker], "content": turn["value"]}

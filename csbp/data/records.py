"""One document as read, before any tokenizer: text, a conversation, or a prompt with its completion."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from csbp.config.schema import SourceConfig
from csbp.config.sources import REQUIRED, column_names
from csbp.errors import ConfigError, UserError

_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                   "model": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool"}


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
        ConfigError: the row lacks a column.
        UserError: a column holds something else than the format says.
    """
    columns = column_names(source, field)
    for ours in REQUIRED[source.format]:
        if columns[ours] not in row:
            check_columns(source, field, row.keys(), where)
    values = {ours: row.get(theirs) for ours, theirs in columns.items()}
    if source.format == "text":
        return Record(name, text=_string(values["text"], where, columns["text"]))
    if source.format == "prompt_completion":
        prompt, completion = (_string(values[k], where, columns[k]) for k in ("prompt", "completion"))
        return Record(name, pair=(prompt, completion))
    if source.format == "messages":
        messages = tuple(_message(m, where) for m in _list(values["messages"], where, columns["messages"]))
    else:
        turns = _list(values["conversations"], where, columns["conversations"])
        messages = tuple(_sharegpt_message(turn, where) for turn in turns)
    return Record(name, messages=messages, tools=_tools(values["tools"], where))


def _string(value: Any, where: str, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    return value


def _list(value: Any, where: str, column: str) -> list[Any]:
    if isinstance(value, str):  # some exports keep the list as a JSON string
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = None
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: column {column!r} must hold a list of messages")
    return list(value)


def _tools(value: Any, where: str) -> tuple[Any, ...] | None:
    return tuple(_list(value, where, "tools")) if value else None


def _message(message: Any, where: str) -> dict[str, Any]:
    """A chat message with its None entries gone (Arrow fills every row with every key of the column)."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: a message must be an object with 'role' and 'content', not {message!r:.80}")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _content(kept.get("content", ""), where)
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_tool_call(call) for call in kept["tool_calls"]]
    return kept


def _content(content: Any, where: str) -> str:
    """The text of a message; a list of ``{type: text, text: …}`` parts is joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(part["text"] for part in content)
    raise UserError(f"{where}: a message's content must be text, not {content!r:.80}")


def _tool_call(call: Any) -> Any:
    """A tool call whose arguments are an object: templates expect one, APIs write it as a JSON string."""
    if not isinstance(call, Mapping):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _tool_call(call["function"])}
    if isinstance(call.get("arguments"), str):
        try:
            call["arguments"] = json.loads(call["arguments"])
        except json.JSONDecodeError:
            pass  # free text: the template prints it as it is
    return call


def _sharegpt_message(turn: Any, where: str) -> dict[str, Any]:
    speaker = turn.get("from") if isinstance(turn, Mapping) else None
    if speaker not in _SHAREGPT_ROLES or not isinstance(turn.get("value"), str):
        raise UserError(f"{where}: a ShareGPT turn must be {{from, value}} with 'from' one of "
                        f"{', '.join(_SHAREGPT_ROLES)}, not {turn!r:.80}")
    return {"role": _SHAREGPT_ROLES[speaker], "content": turn["value"]}

"""What can be said of a run's sources without reading them: names, columns, combinations."""

from __future__ import annotations

import math

from csbp.config.schema import DataConfig, SourceConfig
from csbp.errors import ConfigError

STDLIB = "@stdlib"  # as a path: this Python's standard library
# Our column names, by format; the first are required, the rest are read where they exist.
REQUIRED = {"text": ("text",), "messages": ("messages",), "sharegpt": ("conversations",),
            "prompt_completion": ("prompt", "completion")}
OPTIONAL = {"text": (), "messages": ("tools",), "sharegpt": ("tools",), "prompt_completion": ()}


def column_names(source: SourceConfig, field: str) -> dict[str, str]:
    """Our names -> the file's column names, for the source's format.

    Raises:
        ConfigError: for a mapping of a name that the format does not have.
    """
    known = REQUIRED[source.format] + OPTIONAL[source.format]
    for name in source.columns:
        if name not in known:
            raise ConfigError(f"{field}.columns", source.columns,
                              f"format={source.format} has no column {name!r}; map any of {', '.join(known)}")
    return {name: source.columns.get(name, name) for name in known}


def named_sources(config: DataConfig, group: str) -> list[tuple[str, SourceConfig]]:
    """The sources of "train" or "validation" with the dotted names that messages call them by."""
    name, sources = ("data.sources", config.sources) if group == "train" else ("data.validation", config.validation)
    return [(f"{name}.{i}", source) for i, source in enumerate(sources)]


def check_weights(sources: list[tuple[str, SourceConfig]]) -> None:
    """Refuses weights that give no mixture.

    Raises:
        ConfigError: naming the source.
    """
    given = [(field, source.weight) for field, source in sources if source.weight is not None]
    for field, source in sources:
        if given and source.weight is None:
            raise ConfigError(f"{field}.weight", None, "give every source a weight, or none of them")
    for field, weight in given:
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{field}.weight", weight, "must be a finite number, at least 0")
    total = sum(weight for _, weight in given)
    if given and not (math.isfinite(total) and total > 0):
        raise ConfigError(f"{given[0][0]}.weight", given[0][1], "at least one weight must be above 0, and their sum "
                                                                "finite, e.g. weight=1")


def _check_source(source: SourceConfig, field: str) -> None:
    if not source.path:
        raise ConfigError(f"{field}.path", "", "name a file, a folder, a glob or a dataset")
    if source.kind == "text" and source.format != "text":
        raise ConfigError(f"{field}.format", source.format, "kind=text reads whole files; use format=text, or "
                                                            "kind=jsonl, parquet or dataset")
    if source.path == STDLIB and source.kind != "text":
        raise ConfigError(f"{field}.kind", source.kind, f"{STDLIB} is a folder of text files; use kind=text")
    column_names(source, field)
    if source.streaming and source.kind != "dataset":
        raise ConfigError(f"{field}.streaming", True, f"only kind=dataset streams, not kind={source.kind}")


def check_lengths(config: DataConfig) -> None:
    """Refuses documents longer than a pack.

    Raises:
        ConfigError: naming the field.
    """
    if config.document_tokens is not None and config.document_tokens > config.seq_len:
        raise ConfigError("data.document_tokens", config.document_tokens,
                          f"a document must fit a pack: at most data.seq_len={config.seq_len}")


def check_sources(config: DataConfig) -> None:
    """Refuses settings that cannot go together, without reading anything.

    Raises:
        ConfigError: naming the field.
    """
    if not config.sources:
        raise ConfigError("data.sources", [], "name at least one, e.g. data.sources=[{path: FOLDER}]")
    check_lengths(config)
    for group in ("train", "validation"):
        check_weights(named_sources(config, group))
    for field, source in named_sources(config, "train") + named_sources(config, "validation"):
        _check_source(source, field)
        if source.streaming and not config.validation and config.validation_fraction > 0:
            raise ConfigError("data.validation_fraction", config.validation_fraction,
                              f"{field} is streamed, so nothing can be split off it; give data.validation, or 0")

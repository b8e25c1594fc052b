"""What the first record of every source tells, before anything large is imported. No torch, no transformers."""

from __future__ import annotations

import json
from pathlib import Path

from csbp.config.schema import RunConfig
from csbp.config.sources import named_sources
from csbp.data.encode import no_chat_template
from csbp.data.skips import Skips
from csbp.data.sources import read_source
from csbp.data.tokenizer import resolve_folder


def check_first_records(config: RunConfig) -> None:
    """Read one record of each source that is files, and look for the chat template that conversations need. The rest
    of the data, data sets and tokenizers elsewhere are looked at when they are read.

    Raises:
        ConfigError, UserError: as when the whole source is read.
    """
    for field, source in named_sources(config.data, "train") + named_sources(config.data, "validation"):
        if source.kind == "dataset":
            continue
        record = next(iter(read_source(source, field, Skips())), None)
        if record is not None and record.messages is not None and _lacks_template(config):
            raise no_chat_template(field)


def _lacks_template(config: RunConfig) -> bool:
    """Whether the tokenizer lies in a folder here, as transformers saves them, and has no chat template."""
    folder = Path(resolve_folder(config.data.tokenizer or config.model.path, config.model.family))
    about = folder / "tokenizer_config.json"
    if not about.is_file() or any((folder / name).exists() for name in (
            "chat_template.jinja", "chat_template.json", "additional_chat_templates")):
        return False
    try:
        return not json.loads(about.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError):
        return False  # its reader says what is wrong with it

"""Where an export may be written. No torch: ``csbp export`` asks before it loads anything."""

from __future__ import annotations

import re
from pathlib import Path

FAMILY_KEY = "csbp_family"  # in an export's config.json; written by csbp alone
_OWN = {"config.json", "generation_config.json", "README.md", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"}
NOT_OURS = "it exists and is not an exported model; choose another folder"


def may_export_to(folder: Path) -> bool:
    """Whether nothing but an earlier export would be replaced: another tool's model, and files put beside an export,
    are kept."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return True
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else {""}
    foreign = {n for n in names - _OWN if not re.fullmatch(r"model.*\.safetensors(\.index\.json)?", n)}
    return not foreign and "config.json" in names and FAMILY_KEY in (folder / "config.json").read_text("utf-8")

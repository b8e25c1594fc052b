"""What every rank of a run must have been given alike, whichever host it is on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

# A host's own affair, or taken from rank 0 alone. Of devices, those that ranks get are compared (start_runtime); of
# documents, tokenizers and weights, what is in them (open_session, make_ready), wherever they lie.
_OWN = re.compile(r"run_dir|data\.(cache_dir|tokenizer)|model\.path|cad\.profile|parallel\.(threads|device)|observe\..*"
                  r"|plan\..*|data\.(sources|validation)\.\d+\.path")


def shared_settings(config: Any) -> dict[str, Any]:
    """Dotted key -> value, entries of lists and mappings one by one, in the order in which they are declared."""
    return {key: value for key, value in _flat(asdict(config), "") if not _OWN.fullmatch(key)}


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (dict, list)):
        yield key, value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flat(part, f"{key}.{name}" if key else str(name))

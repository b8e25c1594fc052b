"""Counting what is left out, so that nothing is left out silently."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from csbp.errors import ConfigError

log = logging.getLogger("csbp.data")


class SkipRecord(Exception):
    """A document that cannot be used. ``reason`` is the same for all of its kind; ``detail`` is of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass
class Skips:
    """How many documents were left out, by reason, and the first of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, name: str, count: int = 1) -> None:
        """One more (or ``count`` more) document left out."""
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.first.setdefault(reason, name)

    def lines(self) -> list[str]:
        """One sentence a reason."""
        return [f"left out {n:,}: {reason} (first: {self.first[reason]})" for reason, n in self.counts.items()]

    def nothing_left(self, field: str, path: str) -> ConfigError:
        """What to raise for a source that gave no sample at all."""
        why = "; ".join(self.lines()) or "it is empty"
        return ConfigError(f"{field}.path", path, f"no document that can be learnt; {why}; give other data")

    def warn(self, where: str) -> None:
        """Say so once, after a whole source has been read."""
        for line in self.lines():
            log.warning("%s: %s", where, line)

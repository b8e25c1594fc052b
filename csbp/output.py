"""Standard output and error that may go away (``| head -1``, a closed terminal, a full disk) while a run goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast


class Lasting:
    """A text stream for which writing never fails: once it does, what comes after is dropped, at its descriptor too,
    so that neither a library below nor the interpreter's last flush meets the error again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop. Returns the number of characters taken."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self._stream.fileno())


def outlast_output() -> None:
    """Call it first in a process whose work matters more than what it prints. May be called again.

    A standard stream that was closed from the start (``>&-``) becomes the null device; otherwise the next file that
    is opened would take its number, and get what a library prints. Characters that the terminal cannot show are
    escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            taken = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one
            os.set_inheritable(taken, True)
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if isinstance(stream, Lasting):
            continue
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, cast(TextIO, Lasting(stream)))

"""Standard output and error that may go away (``| head -1``, a closed terminal, a full disk) while a run goes on; and
how the command is called in what they show."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TextIO, cast

from csbp.errors import UserError

P = ParamSpec("P")


def called_as() -> str:
    """What a user types for csbp: the path that this process was called by, unless the shell finds that by name."""
    path = sys.argv[0]
    if os.path.basename(path) != "csbp" or not os.path.isfile(path):
        return "csbp"
    found = shutil.which("csbp")
    return "csbp" if found and os.path.abspath(found) == os.path.abspath(path) else path


def script() -> str:
    """The csbp script as torchrun wants it, by its path."""
    name = called_as()
    return "$(which csbp)" if name == "csbp" else name


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
        _to_nothing(self._stream)


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


def until_closed(command: Callable[P, int]) -> Callable[P, int]:
    """For a command that is there for what it prints: it ends, quietly, once nobody reads on. The opposite of
    ``outlast_output``.

    Its exit code is then 1, as it is where rich meets the closed end first.

    Raises:
        UserError: standard output cannot be written for another reason.
    """
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except BrokenPipeError:
            _to_nothing(sys.stdout)
            return 1
        except OSError as error:
            if error.filename is not None or error.errno != errno.ENOSPC:
                raise
            _to_nothing(sys.stdout)
            raise UserError(f"standard output: cannot be written: {error.strerror}") from error

    return run


def _to_nothing(stream: TextIO) -> None:
    """What is still to be written to a stream, by whomever, goes nowhere."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())

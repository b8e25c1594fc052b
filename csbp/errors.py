"""The two kinds of failure that a user can do something about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something outside csbp is wrong (a file, a folder, a checkpoint). Shown without a traceback; exit code 1."""

    exit_code = 1
    shared = False  # every rank has met it: one of each host says it


class ConfigError(UserError, ValueError):
    """A configuration that cannot run. Exit code 2, raised before any long work starts.

    Args:
        field: full dotted name, e.g. ``"parallel.csbp"``.
        value: what the user gave; ``...`` (Ellipsis) where there is none.
        fix: what to write instead, as a sentence or an override.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.field, self.value, self.fix = field, value, fix
        super().__init__(f"{field}: {fix}" if value is ... else f"{field}={written(value)}: {fix}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        """As its three arguments: an error of one rank is shown to all."""
        return type(self), (self.field, self.value, self.fix)


def written(value: object) -> str:
    """A value of a setting as messages show it: what a user would write, texts in quotes."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


@contextmanager
def met_by_all() -> Iterator[None]:
    """Around what every rank of a run does alike, so that its errors need not be told by each of them."""
    try:
        yield
    except UserError as error:
        error.shared = True
        raise


def refused_by_system(error: BaseException) -> bool:
    """Whether the operating system refused something: a full disk, a missing right. Libraries written in Rust
    (safetensors, tokenizers) tell of it in their own exceptions."""
    return isinstance(error, OSError) or "(os error " in str(error)


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Around what writes a file or a folder: names it where the operating system refuses.

    Raises:
        UserError: it cannot be written.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not refused_by_system(error):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path}: cannot be written: {reason}") from error

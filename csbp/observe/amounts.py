"""Numbers for people."""

from __future__ import annotations

_GIB = 2**30


def counted(number: int, what: str) -> str:
    """A number of things: ``1 document``, ``1,024 documents``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def parameters_text(count: int) -> str:
    """Parameters: ``8.49B``."""
    size, unit = next((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if count >= size)
    return f"{count / size:.{2 if unit == 'B' else 1 if unit else 0}f}{unit}"


def seconds_text(count: float) -> str:
    """Seconds, short ones with two digits."""
    return f"{count:.2f}" if count >= 0.1 else f"{count:.2g}"


def bytes_text(count: float) -> str:
    """Bytes; a difference may be below 0."""
    if not count:
        return "0"
    if abs(count) < 2**20 / 20:  # 0.0 MiB
        return f"{count / 2**10:.1f} KiB"
    return f"{count / _GIB:.2f} GiB" if abs(count) >= _GIB / 4 else f"{count / 2**20:.1f} MiB"

"""The end of a run: summary.json for programs, a report for people."""

from __future__ import annotations

import json
import math
import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from csbp.errors import writing
from csbp.observe.amounts import bytes_text
from csbp.observe.metrics import finite

FILE = "summary.json"
BLOCK = (("context", "text before the block"), ("original", "original"), ("noised", "noised (▒ is masked)"))

# What it means that training has not beaten it.
_MEANS = {"before training": ": training has not helped; train longer, or change optim.lr",
          "unigram model": ": not yet better than counting tokens; train longer"}


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write ``run_dir/summary.json``, whole or not at all. Numbers that are not finite become null.

    Raises:
        UserError: it cannot be written.
    """
    path = run_dir / FILE
    temporary = path.with_name(f".{FILE}.tmp")
    text = json.dumps(finite(summary), indent=1, ensure_ascii=False, allow_nan=False)
    with writing(path):
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    return path


def comparisons(summary: Mapping[str, Any]) -> list[tuple[str, float | None, str]]:
    """(what, held-out loss, how it compares with the trained model's), the trained model first.

    A loss that was not measured or recorded is None, and nothing is said about it.
    """
    after = summary.get("eval_loss_after")
    steps = summary.get("random_start_steps")
    rows = [("before training", summary.get("eval_loss_before")), ("unigram model", summary.get("eval_loss_unigram"))]
    if summary.get("eval_loss_random_start") is not None:
        rows.append((f"random start, {steps} steps (recorded)", summary["eval_loss_random_start"]))
    found: list[tuple[str, float | None, str]] = [("after training", after, "")]
    for name, value in rows:
        verdict = ""
        if value is not None and after is not None:
            verdict = f"after is {abs(value - after):.4f} {'lower' if after < value else 'higher'}" \
                if value != after else "the same"
            verdict += "" if after < value else _MEANS.get(name, "")
        found.append((name, value, verdict))
    return found


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The report in a line or two, for a run that shows nothing else."""
    (_, after, _), *others = comparisons(summary)
    compared = ", ".join(f"{name} {number(value)}" for name, value, _ in others)
    exported = summary.get("export_dir")
    return [f"held-out loss {number(after)} nats per supervised token ({compared})",
            *_cad_lines(summary), *([f"exported model: {exported}"] if exported is not None else [])]


def print_report(summary: Mapping[str, Any], before: Mapping[str, str] | None = None,
                 after: Mapping[str, str] | None = None, *, console: Console | None = None) -> None:
    """Print how the held-out numbers compare, and one held-out block as the model fills it.

    Args:
        summary: the values of summary.json; "objective" says what the numbers are of.
        before, after: a block as shown by the untrained and the trained model: "context", "original", "noised",
            "filled". None where the objective fills no blocks.
    """
    console = console or Console()
    diffusion = summary.get("objective", "block_diffusion") == "block_diffusion"
    console.print("\nHeld-out loss, nats per supervised token, lower is better", soft_wrap=True)
    table = Table()
    table.add_column("model")
    table.add_column("loss", justify="right")
    table.add_column("")
    for name, value, verdict in comparisons(summary):
        table.add_row(name, number(value), verdict)
    console.print(table)
    console.print("\nThe same text and noise", soft_wrap=True)
    more = Table()
    for heading in ("", "before", "after"):
        more.add_column(heading, justify="right" if heading else "left")
    names = ("bits per byte (upper bound)", "masked-token accuracy") if diffusion else ("bits per byte",
                                                                                        "next-token accuracy")
    for name, key, show in zip(names, ("bits_per_byte", "masked_accuracy"), (number, percent), strict=True):
        more.add_row(name, show(summary.get(f"{key}_before")), show(summary.get(f"{key}_after")))
    console.print(more)
    if after is not None:
        _print_block(console, before, after)
    for line in _cad_lines(summary):
        console.print(f"{line[0].upper()}{line[1:]}", highlight=False, soft_wrap=True)
    for key, text in (("export_dir", "Exported model"), ("seconds", "Seconds of training")):
        if summary.get(key) is not None:
            value = summary[key]
            console.print(f"{text}: {value:.0f}" if isinstance(value, float) else f"{text}: {value}", markup=False,
                          highlight=False, soft_wrap=True)


def _cad_lines(summary: Mapping[str, Any]) -> list[str]:
    """What disaggregation has moved; nothing for a run without it."""
    added = summary.get("cad_bytes")
    return [] if added is None else [
        f"core attention disaggregation has added {bytes_text(added)} to what ranks sent, over all steps"]


def _print_block(console: Console, before: Mapping[str, str] | None, after: Mapping[str, str]) -> None:
    console.print("\nOne held-out block", markup=False)
    parts = [(title, after.get(key)) for key, title in BLOCK]
    parts += [("filled before training", before.get("filled") if before else None),
              ("filled after training", after.get("filled"))]
    for title, text in parts:
        if text is not None:
            # Text, not a string: model output may hold what rich would take for markup.
            console.print(Panel(Text(_visible(text)), title=title, title_align="left", expand=False))


def _visible(text: str) -> str:
    """Without control characters, each in place as U+FFFD: a model may write what moves a cursor."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def number(value: float | None, digits: int = 4) -> str:
    """A number as shown to people; - for one that there is not."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 2) -> str:
    """A share as shown to people; - for one that there is not."""
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"

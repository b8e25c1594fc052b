"""What ``csbp plan`` says of core attention disaggregation: a table of layer kinds, words, fields of its JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from csbp.observe.amounts import bytes_text, counted, seconds_text
from csbp.observe.plan_result import PlanResult
from csbp.plan.forecast import Forecast
from csbp.plan.levelled import ALL, Levelled

_SAME = 0.001  # part of a step that is no difference


def cad_json(result: PlanResult, levelled: Levelled) -> dict[str, Any]:
    """Fields of ``csbp plan --json``. Bytes and attention are those of what is planned together."""
    def balance(name: str) -> dict[str, float]:
        before, after = levelled.before[name], levelled.after[name]
        return {"max_over_mean_time_without": before.over_mean, "max_over_mean_time_with": after.over_mean,
                "max_over_lower_bound_time_without": before.over_bound,
                "max_over_lower_bound_time_with": after.over_bound}

    return {
        "profile": levelled.cad.cost.name, **balance(ALL), "max_over_mean_work_without": _work(levelled.without),
        "max_over_mean_work_with": _work(levelled.with_moves), "bytes_moved_by_cad": levelled.bytes_moved,
        "predicted_step_seconds_without": result.step_seconds(levelled.without),
        "predicted_step_seconds_with": result.step_seconds(levelled.with_moves),
        "cad_layers": {name: {
            **balance(name), "attention_seconds_mean": float(levelled.after[name].seconds.mean()),
            "query_bytes_mean": float(added.queries.mean()), "query_bytes_max": float(added.queries.max()),
            "key_bytes_mean": float(added.keys.mean()), "key_bytes_max": float(added.keys.max())}
            for name, added in levelled.added.items() if name != ALL}}


def cad_columns(levelled: Levelled) -> dict[str, np.ndarray]:
    """Columns of the ranks in the JSON object, [N]; rows of one layer of each kind together."""
    kinds, added = levelled.with_moves.counts.kinds.values(), levelled.added[ALL]
    return {"attention_seconds_without": levelled.before[ALL].seconds,
            "query_rows_for_others": np.sum([kind.guests for kind in kinds], 0),
            "query_rows_elsewhere": np.sum([kind.lent for kind in kinds], 0),
            "query_bytes_added": added.queries, "key_bytes_added": added.keys}


def cad_title(result: PlanResult, levelled: Levelled) -> str:
    """What is planned together, and by which costs."""
    together = levelled.with_moves.together
    packs = (f"{counted(result.packs, 'pack')} of {counted(together, 'replica')} planned together; without it each "
             "replica has its own" if together > 1 else "within a sequence axis")
    return f"  core attention disaggregation, {packs}; attention by the profile {levelled.cad.cost.name}:"


def cad_table(result: PlanResult, levelled: Levelled) -> Table:
    """Each kind of layer, and all, without and with."""
    table = Table("  layers", box=None, pad_edge=False, padding=(0, 2))
    for name in ("attention s, mean", "max/mean without", "with", "max/bound without", "with", "queries in, mean",
                 "most", "keys in, mean", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    counts = {part.kind.name: part.count for part in result.shape.attention}
    for name in [*counts, ALL] if len(counts) > 1 else counts:
        before, after, added = levelled.before[name], levelled.after[name], levelled.added[name]
        ratios = (before.over_mean, after.over_mean, before.over_bound, after.over_bound)
        sizes = [size for part in (added.queries, added.keys) for size in (part.mean(), part.max())]
        table.add_row(f"  {name}" + (f" x {counts[name]}" if name in counts else ""),
                      seconds_text(after.seconds.mean()), *(f"{ratio:.3f}" for ratio in ratios),
                      *map(bytes_text, sizes))
    return table


def cad_words(result: PlanResult, levelled: Levelled) -> list[str]:
    """Whether it pays, and why what stays does."""
    lines = [f"Nothing moves in {name} layers: {_why(levelled, name)}." for name in levelled.missed]
    still = len(lines) == len(result.shape.attention)
    if still and len(result.case.geometry.document_starts) - 1 == result.packs:
        lines.append("Each pack planned is one document, and few of those leave much to level: data.document_lengths="
                     "FILE, a document's tokens a line, plans documents like your own.")
    if still and levelled.with_moves.together == 1:
        replicas = levelled.with_moves.replicas
        more = f" There are {replicas} replicas: cad.pool=dp shares attention among them too." if replicas > 1 else ""
        return [*lines, f"Disaggregation changes nothing here.{more}"]
    without, with_moves = result.step_seconds(levelled.without), result.step_seconds(levelled.with_moves)
    gain, before, after = 1 - with_moves / without, levelled.before[ALL].over_mean, levelled.after[ALL].over_mean
    balance = (f"max/mean of attention {before:.3f} without, {after:.3f} with; "
               f"of all work {_work(levelled.without):.3f}, {_work(levelled.with_moves):.3f}")
    step = f"a step takes {seconds_text(with_moves)} s, {seconds_text(without)} s without it"
    # Planned together, documents also go to the replica that has room: that alone may be all.
    how = "Sharing documents among replicas" if still else "Disaggregation"
    if gain > _SAME:
        lines.append(f"{how} pays: {step}, {gain:.1%} less ({balance}).")
    elif gain < -_SAME:
        lines.append(f"{how} does not pay: {step}, {-gain:.1%} more ({balance}).")
    else:
        lines.append(f"{how} makes no difference to a step: {step} ({balance}).")
    if levelled.without.fits and not levelled.with_moves.fits:
        lines.append("Only without disaggregation does the device hold it; a lower cad.max_buffer_mib takes less.")
    return lines


def _work(found: Forecast) -> float:
    """The busiest rank's computing over the mean: attention, and what a rank's rows take beside it."""
    return float(found.seconds.busy.max() / found.seconds.busy.mean())


def _why(levelled: Levelled, name: str) -> str:
    """Why nothing of a kind of layer moves."""
    settings, home, missed = levelled.cad.settings, levelled.home[name], levelled.missed[name]
    if levelled.with_moves.plan.world == 1:
        return "there is one rank"
    if home.over_mean <= 1 + settings.tolerance:
        return (f"the fullest rank has {home.over_mean - 1:.2%} more than the mean, within "
                f"cad.tolerance={settings.tolerance}")
    if missed > 0:
        return (f"that would save {missed:.2%} of the slowest rank's time, below cad.min_gain={settings.min_gain} "
                f"(max/mean is {home.over_mean:.3f})")
    limits = (("send", settings.max_send_bytes), ("receive", settings.max_receive_bytes),
              ("buffer", settings.max_buffer_bytes))
    given = "".join(f"cad.max_{what}_mib={limit >> 20}, " for what, limit in limits if limit is not None)
    return (f"no move makes the slowest rank faster within what may travel: {given}{'and ' if given else ''}what links "
            f"carry while a layer attends (max/mean is {home.over_mean:.3f}, max/lower bound {home.over_bound:.3f})")

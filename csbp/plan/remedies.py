"""What would make a run fit its device: each change tried by itself, with what the fullest rank would need then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from csbp.config.schema import CHECKPOINTING
from csbp.plan.estimate import Device, Memory, Settings, predict_memory
from csbp.plan.forecast import Case, Forecast, forecast
from csbp.plan.limits import MAX_AXIS

_MOST_TIMES = 64  # as many ranks as the run has


@dataclass(frozen=True)
class Remedy:
    """A change.

    Attributes:
        words: the settings, as on the command line.
        memory: bytes of the fullest rank with them.
        fits: the device has so many.
    """

    words: str
    memory: float
    fits: bool


def fullest(memory: Memory, received: str = "received keys") -> dict[str, float]:
    """What lies on the fullest rank -> bytes. The loss is never there together with received keys and scores.

    Args:
        received: what ``Memory.keys`` are called.
    """
    rank = int(memory.total.argmax())
    scores = float(memory.workspace[rank])
    return {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer,
            "gathered layers": memory.gathered, "activations": float(memory.activations[rank]),
            received: float(memory.keys[rank]), **({"attention scores": scores} if scores else {}),
            "loss": float(memory.logits[rank])}


def remedies(case: Case, found: Forecast, settings: Settings, device: Device, exchange: str) -> list[Remedy]:
    """Changes by which the fullest rank needs less, what helps most first. What is set already is not among them.

    Args:
        found: what does not fit.
        settings, exchange: of the run.
    """
    def needed(words: str, changed: Settings, planned: Forecast = found) -> Remedy:
        memory = predict_memory(case.shape, planned.counts, planned.loss_rows, changed)
        return Remedy(words, float(memory.total.max()), bool(memory.total.max() <= device.memory))

    now = float(found.memory.total.max())
    helping = {words: change for words, change in _changes(settings, lambda changed: needed("", changed).fits)
               if needed(words, replace(settings, **change)).memory < now}
    tried = [needed(words, replace(settings, **change)) for words, change in helping.items()]
    if len(helping) > 1 and not any(remedy.fits for remedy in tried):
        together = {name: value for change in helping.values() for name, value in change.items()}
        tried.append(needed(" ".join(helping), replace(settings, **together)))
    more = _more_ranks(case, found, settings, device, exchange)
    if more is not None and more.memory < now:
        tried.append(more)
    return sorted(tried, key=lambda remedy: remedy.memory)


def _changes(settings: Settings, fit: Callable[[Settings], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that leave the ranks' rows as they are: as on the command line, and as fields of ``Settings``."""
    less = CHECKPOINTING[CHECKPOINTING.index(settings.checkpointing) + 1:]
    if less:  # what computes least again of those that fit, or what keeps least
        policy = next((policy for policy in less if fit(replace(settings, checkpointing=policy))), less[-1])
        yield f"parallel.checkpointing={policy}", {"checkpointing": policy}
    if not settings.offload:
        yield "parallel.offload=true", {"offload": True}
    if settings.logit_rows is not None:
        yield "train.logit_rows=null", {"logit_rows": None}
    if settings.copies > 1:
        yield "parallel.dp_replicate=1", {"copies": 1}


def _more_ranks(case: Case, found: Forecast, settings: Settings, device: Device, exchange: str) -> Remedy | None:
    """Twice as many ranks, and twice again until they fit; a longer sequence axis where the kind has one.

    What ranks share halves each time, so that all further doublings take off about as much as the last one did. Where
    that would not do, the rest is not shared (received keys of one long document), and no more ranks are tried.
    """
    ranks, remedy, times = found.ranks, None, 2
    before = float(found.memory.total.max())
    while times <= _MOST_TIMES:
        axis = 1 if found.kind == "data" else ranks * times
        if axis > min(len(case.geometry.cell_starts) - 1, MAX_AXIS):
            break
        planned = forecast(case, found.kind, axis, replace(settings, world=settings.world * times), device, exchange)
        words = f"parallel.nproc={settings.world * times}" + (f" parallel.csbp={axis}" if axis > 1 else "")
        remedy = Remedy(words, float(planned.memory.total.max()), planned.fits)
        if remedy.fits or 2 * remedy.memory - before > device.memory:
            break
        before, times = remedy.memory, 2 * times
    return remedy

"""What attention costs on a kind of device: measured rows, fitted, kept in a small JSON file and read again.

``conf/profile/NAME.json`` ship with csbp; ``csbp bench profile out=FILE.json`` makes one. A row is a launch: what it
had to do (``tiles``, ``segments``, ``pairs`` of one query head) and the milliseconds of all heads that it took, forward
and backward apart where both are known (``forward_ms``, ``backward_ms``), else together (``ms``).
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csbp.config.fields import nearest_name
from csbp.config.places import conf_dir
from csbp.errors import ConfigError
from csbp.plan.cost import CostModel, PassCost

FORMAT = 1
PARTS = ("tile", "segment", "pair")
PASSES = ("forward", "backward")
MEASURED = {"forward_ms": (1, 0), "backward_ms": (0, 1), "ms": (1, 1)}  # of which passes each is the time
# What devices of a kind are called: name in estimate.DEVICES -> of one that it is, or of one that it is not.
_KINDS = {"h200": (re.compile(r"\bH200\b"), True), "cpu": (re.compile("NVIDIA|Tesla|GeForce|Instinct"), False)}
_FEMTO = 1e12  # femtoseconds of a millisecond
_MOST = 10**13  # femtoseconds: hundredths of a second for one pair

Row = Mapping[str, Any]


def fit(rows: Sequence[Row], *, name: str, heads: int, kv_heads: int, head_dim: int, launch: bool = True) -> CostModel:
    """The costs, none below 0, whose predictions have the least squares of relative errors.

    Args:
        rows: as in the module's docstring.
        heads, kv_heads, head_dim: that they were measured with.
        launch: rows are short enough to tell what a launch takes; else it is said to take nothing.
    """
    terms, values = [], []
    for row in rows:
        once = np.array([heads * row["tiles"], heads * row["segments"], heads * row["pairs"], launch], float) / _FEMTO
        for key, (forward, backward) in MEASURED.items():
            if row.get(key) is not None and (key != "ms" or row.get("forward_ms") is None):
                terms.append(np.concatenate([forward * once, backward * once]))
                values.append(row[key])
    found = _nonnegative(np.array(terms) / np.array(values)[:, None], np.ones(len(values)))
    costs = [PassCost(*(round(x) for x in found[first:first + 3])) for first in (0, 4)]
    return CostModel(name, head_dim, heads // kv_heads, costs[0], costs[1], round(found[3] + found[7]))


def _nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative numbers: the best of all choices of which are 0. [rows, C], [rows] -> [C]; C is
    small. Columns are brought to one size first, for the sake of the digits."""
    size = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    best, least = np.zeros(matrix.shape[1]), float(target @ target)
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            part = matrix[:, chosen] / size[list(chosen)]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.square(part @ found - target).sum())
            if found.min() >= 0 and error < least * (1 - 1e-9):
                best, least = np.zeros(matrix.shape[1]), error
                best[list(chosen)] = found / size[list(chosen)]
    return best


def predicted(model: CostModel, row: Row, heads: int) -> dict[str, float]:
    """Milliseconds of a row by the model: "forward_ms" and "backward_ms", each with half a launch, and "ms"."""
    counts = (row["tiles"], row["segments"], row["pairs"])
    forward, backward = ((heads * cost.of(*counts) + model.launch / 2) / _FEMTO
                         for cost in (model.forward, model.backward))
    return {"forward_ms": float(forward), "backward_ms": float(backward), "ms": float(forward + backward)}


def errors(model: CostModel, rows: Sequence[Row], heads: int) -> dict[str, dict[str, float]]:
    """Relative errors, predicted against measured: {"ms": {"median", "worst"}, ...} of all that was measured."""
    found = {}
    for key in MEASURED:
        off = [abs(predicted(model, row, heads)[key] / row[key] - 1) for row in rows if row.get(key) is not None]
        if off:
            found[key] = {"median": statistics.median(off), "worst": max(off)}
    return found


def as_json(model: CostModel) -> dict[str, Any]:
    """The fit, as a profile has it."""
    return {**{name: {part: getattr(getattr(model, name), part) for part in PARTS} for name in PASSES},
            "launch": model.launch}


def load_profile(name_or_path: str, field: str = "profile") -> CostModel:
    """The costs of a device.

    Args:
        name_or_path: of a file of ``conf/profile``, or a path that ends in .json.
        field: of the setting that names it, for messages.

    Raises:
        ConfigError: there is no such file, it is no profile, or it is one of another format.
    """
    file = Path(name_or_path).expanduser()
    if file.suffix != ".json":
        shipped = sorted(path.stem for path in (conf_dir() / "profile").glob("*.json"))
        if name_or_path not in shipped:
            raise ConfigError(field, name_or_path, nearest_name(name_or_path, shipped, "profiles")
                              + "; or a FILE.json made by: csbp bench profile out=FILE.json")
        file = conf_dir() / "profile" / f"{name_or_path}.json"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(field, name_or_path, f"cannot be read: {reason}; {_AGAIN}") from error
    try:
        return parse_profile(read)
    except ValueError as error:
        raise ConfigError(field, name_or_path, f"{error}; {_AGAIN}") from error


_AGAIN = "make one by: csbp bench profile out=FILE.json"


def parse_profile(read: object) -> CostModel:
    """The costs in a profile's JSON.

    Raises:
        ValueError: what is wrong with it, in words.
    """
    if not isinstance(read, dict) or "fit" not in read:
        raise ValueError("is no profile of csbp bench profile: it has no fit")
    if read.get("format") != FORMAT:
        raise ValueError(f"is a profile of format {read.get('format')!r}; this csbp reads format {FORMAT}")
    heads, kv_heads, head_dim = (_number(read, key, 1) for key in ("heads", "kv_heads", "head_dim"))
    forward, backward = (PassCost(*(_number(read, f"fit.{name}.{part}", 0) for part in PARTS)) for name in PASSES)
    if not all(cost.tile + cost.pair for cost in (forward, backward)):
        raise ValueError("costs nothing: fit.forward and fit.backward need a tile or a pair above 0")
    return CostModel(str(read.get("name", "")), head_dim, max(heads // kv_heads, 1), forward, backward,
                     _number(read, "fit.launch", 0), str(read.get("device", "")))


def foreign(profile: str, cost: CostModel, device: str) -> list[str]:
    """A sentence, where a run's costs were measured on a device of another kind than it is planned for.

    Args:
        profile: ``cad.profile``.
        cost: what it stands for.
        device: name in ``estimate.DEVICES``.
    """
    called, wanted = _KINDS[device]
    if not cost.device or bool(called.search(cost.device)) == wanted:
        return []
    return [f"cad.profile={profile} was measured on {cost.device!r}, and plan.device is {device}: attention is priced "
            "by the one, all else by the other; use cad.profile=auto, a profile of the device, or another plan.device"]


def _number(read: dict[str, Any], key: str, low: int) -> int:
    value: Any = read
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MOST:
        raise ValueError(f"{key} is {value!r}, not a whole number from {low} to {_MOST:,}")
    return value

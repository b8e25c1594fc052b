"""``csbp plan``: what a run will do on its ranks, from shapes and document lengths alone. No torch, no data.

One pack is planned: as many documents of ``data.document_lengths`` as fill ``data.seq_len``, or one document of that
length. Every block is a target. docs/planning.md says how the numbers come about.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from csbp.config.compose import compose_run
from csbp.config.mesh import axis_sizes
from csbp.config.places import package_dir
from csbp.config.schema import DataConfig, RunConfig
from csbp.config.validate import check_bounds, validate_plan
from csbp.errors import ConfigError
from csbp.observe.plan_report import as_json, counted, show
from csbp.observe.plan_result import PlanResult
from csbp.plan.asked import expect_fields, expect_window, shaped
from csbp.plan.estimate import DEVICES, Settings
from csbp.plan.forecast import Case, forecast, whole_pack
from csbp.plan.limits import MAX_AXIS, MAX_BLOCKS, check_ranks, check_size, check_split, check_windows
from csbp.plan.shapes import model_shape

_BUILTIN = "builtin:"
_LENGTH = re.compile("(?=0*[1-9])[0-9]{1,18}")
_ITEMSIZE = {"float32": 4, "bfloat16": 2}


def run_plan(words: Sequence[str], *, json_only: bool = False, picture: str = "") -> int:
    """Plan a run and say what it will take.

    Args:
        words: settings, as for ``csbp train``. Without ``parallel.nproc`` the run has ``parallel.csbp`` x
            ``parallel.tp`` ranks, where these are given.
        json_only: print one JSON object and nothing else.
        picture: file to draw the plan into, .svg or .png.

    Raises:
        ConfigError: settings that cannot be planned.
    """
    config = compose_run(words)
    check_bounds(config)
    given = {word.partition("=")[0].strip() for word in words}
    if given & {"parallel.csbp", "parallel.tp"} and "parallel.nproc" not in given and config.parallel.csbp:
        ranks = config.parallel.csbp * config.parallel.tp
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, nproc=ranks))
    validate_plan(config)
    if picture and Path(picture).suffix not in (".svg", ".png"):
        raise ConfigError("--picture", picture, "must end in .svg or .png")
    result = plan_result(config)
    if picture:
        _draw(config, result, picture)
    print(json.dumps(as_json(result)), flush=True) if json_only else show(result)
    if picture:
        print(f"picture: {picture}", file=sys.stderr if json_only else sys.stdout, flush=True)
    return 0


def _draw(config: RunConfig, result: PlanResult, picture: str) -> None:
    from csbp.observe.picture import draw_plan

    try:
        draw_plan(result.chosen.plan, Path(picture).expanduser(), title=_title(config, result))
    except OSError as error:
        reason = f"{error.strerror}: {error.filename!r}"
        raise ConfigError("--picture", picture, f"cannot be written: {reason}; name another file") from error


def plan_result(config: RunConfig) -> PlanResult:
    """Everything that ``csbp plan`` says, as numbers.

    Raises:
        ConfigError: sizes are missing, the lengths cannot be read, or the ranks do not fit the pack.
    """
    parallel, objective, noise = config.parallel, config.objective, config.noise
    shape = model_shape(_config_fields(config), objective.clean_stream)
    expect_window(config.model.shape, shape.kinds)
    check_split(parallel.tp, shape)
    check_windows(shape.kinds, objective)
    lengths, diffusion = document_lengths(config.data), objective.kind == "block_diffusion"
    check_size(lengths, objective.block_size, shape)
    geometry = whole_pack(lengths, objective.block_size, noised=diffusion)
    case = Case(shape, geometry, hidden=(noise.t_min + noise.t_max) / 2 if diffusion else 0.0,
                next_token=not diffusion or objective.ar_weight > 0)
    ranks, world = axis_sizes(parallel)[1], parallel.nproc // parallel.tp
    blocks = len(geometry.cell_starts) - 1
    check_ranks(parallel, blocks, "the planned pack")
    name = config.plan.device
    if name == "auto":
        name = "cpu" if parallel.device == "cpu" else "h200"
    settings = Settings(parallel.nproc, parallel.checkpointing, _ITEMSIZE[config.train.dtype],
                        config.train.logit_rows, parallel.offload, 4 if parallel.gradient_wire == "float32" else None,
                        parallel.tp, parallel.dp_replicate)
    kinds = ("csbp", "context", "block", "data") if world > 1 else (parallel.kind,)
    # Beside "data" the others are shown with all ranks on the sequence axis, as far as there are blocks.
    axis = ranks if parallel.kind != "data" else min(world, blocks, MAX_AXIS)
    found = {kind: forecast(case, kind, axis, settings, DEVICES[name], parallel.exchange) for kind in kinds
             if kind in (parallel.kind, "data") or world % axis == 0}
    return PlanResult(config.experiment, name, DEVICES[name], case, settings, parallel.kind, found,
                      config.train.packs_per_step)


def document_lengths(data: DataConfig) -> list[int]:
    """Tokens of each document of the planned pack, cut as training would cut them.

    Raises:
        ConfigError: the file cannot be read, a line of it is no length, or there are too many documents to plan.
    """
    lengths = read_lengths(data.document_lengths) if data.document_lengths else [data.seq_len]
    limit = min(data.document_tokens or data.seq_len, data.seq_len)
    pack: list[int] = []
    room = data.seq_len
    for length in lengths:
        if data.document_lengths and data.long_documents == "error" and length > limit:
            raise ConfigError("data.document_lengths", data.document_lengths, f"holds a document of {length:,} tokens, "
                              f"and data.long_documents=error; at most {limit:,}, or choose split or truncate")
        length = min(length, room) if data.long_documents == "split" else min(length, limit, room)
        if len(pack) + length // limit > MAX_BLOCKS:
            raise ConfigError("data.seq_len", data.seq_len, f"too much to plan: more than {MAX_BLOCKS:,} documents; "
                                                            "use longer ones (data.document_tokens), or fewer tokens")
        pack += [limit] * (length // limit) + ([length % limit] if length % limit else [])
        room -= length
        if room == 0:
            break
    return pack


def read_lengths(path: str) -> list[int]:
    """The numbers of a file, one a line; empty lines are skipped."""
    field = "data.document_lengths"
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(field, path, f"cannot be read: {reason}") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not _LENGTH.fullmatch(text):
            raise ConfigError(field, path, f"line {number} is {text[:40]!r}; write one document's tokens a line, as a "
                                           "whole number above 0 of at most 18 digits")
        found += [int(text)] if text else []
    if not found:
        raise ConfigError(field, path, "holds no length; write one document's tokens a line")
    return found


def _config_fields(config: RunConfig) -> dict[str, Any]:
    """``model.shape`` over the config.json at ``model.path``."""
    model = config.model
    found = _config_file(model.path, model.family) if model.path else None
    if found is None and not model.shape:
        raise ConfigError("model.path", model.path, "no config.json here to plan from; give a folder that has one, or "
                                                    "the sizes as model.shape={hidden_size: ..., ...}")
    try:
        base = json.loads(found.read_text(encoding="utf-8")) if found else {}
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", model.path, f"{found} cannot be read as JSON") from error
    if not isinstance(base, dict):
        raise ConfigError("model.path", model.path, f"{found} is not a JSON object")
    expect_fields(base, model.shape)
    return shaped(base, model.shape)


def _config_file(path: str, family: str) -> Path | None:
    if path.startswith(_BUILTIN):
        shipped = (package_dir("csbp.models") / family).rglob("config.json")
        return next((file for file in shipped if file.parent.name == path.removeprefix(_BUILTIN)), None)
    folder = Path(path).expanduser()
    return next((file for file in (folder / "config.json", folder / "export" / "config.json") if file.is_file()), None)


def _title(config: RunConfig, result: PlanResult) -> str:
    geometry = result.case.geometry
    return (f"{config.experiment}: {counted(geometry.num_clean, 'token')} in "
            f"{counted(len(geometry.document_starts) - 1, 'document')}, {counted(result.chosen.plan.world, 'rank')}, "
            f"parallel.kind={result.kind}")

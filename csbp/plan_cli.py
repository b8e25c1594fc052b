"""``csbp plan``: what a run will do on its ranks, from shapes and document lengths alone. No torch, no data.

One pack is planned: as many documents of ``data.document_lengths`` as fill ``data.seq_len``, or one document of that
length; with ``cad.pool=dp`` one for each replica. Every block is a target. docs/planning.md says how the numbers come
about.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from csbp.config.cad import pooled, unheeded, unpredicted
from csbp.config.compose import compose_run
from csbp.config.mesh import axis_sizes
from csbp.config.places import package_dir
from csbp.config.schema import ParallelConfig, RunConfig
from csbp.config.validate import check_bounds, validate_plan
from csbp.errors import ConfigError
from csbp.observe.amounts import counted
from csbp.observe.plan_report import as_json, show
from csbp.observe.plan_result import PlanResult
from csbp.plan.asked import expect_fields, expect_window, shaped
from csbp.plan.cad import cad_of
from csbp.plan.estimate import DEVICES, Settings
from csbp.plan.forecast import Case, forecast, whole_pack
from csbp.plan.lengths import planned, stand_in
from csbp.plan.levelled import ALL, level, price_beside
from csbp.plan.limits import MAX_AXIS, check_pool, check_ranks, check_size, check_split, check_windows
from csbp.plan.profiles import foreign
from csbp.plan.shapes import model_shape

_KINDS = ("csbp", "context", "block", "data")
_BUILTIN = "builtin:"


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
    own, note = config.parallel.nproc, ""
    if given & {"parallel.csbp", "parallel.tp"} and "parallel.nproc" not in given and config.parallel.csbp:
        ranks = config.parallel.csbp * config.parallel.tp
        if own not in (ranks, ParallelConfig().nproc):
            note = (f"csbp: note: planned on {counted(ranks, 'rank')}, parallel.csbp x parallel.tp, not on the "
                    f"parallel.nproc={own} of {config.experiment}; to plan on other ranks write parallel.nproc=N")
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, nproc=ranks))
    validate_plan(config)
    if picture and Path(picture).suffix not in (".svg", ".png"):
        raise ConfigError("--picture", picture, "must end in .svg or .png")
    warn([*unheeded(config), *unpredicted(config)])
    result = plan_result(config)
    if note:
        print(note, file=sys.stderr, flush=True)
    if result.levelled:
        warn(foreign(config.cad.profile, result.levelled.cad.cost, result.device_name))
    if picture:
        _draw(config, result, picture)
    print(json.dumps(as_json(result)), flush=True) if json_only else show(result)
    if picture:
        print(f"picture: {picture}", file=sys.stderr if json_only else sys.stdout, flush=True)
    return 0


def warn(notes: Sequence[str]) -> None:
    """A line each on stderr."""
    for note in notes:
        print(f"csbp: warning: {note}", file=sys.stderr, flush=True)


def _draw(config: RunConfig, result: PlanResult, picture: str) -> None:
    from csbp.observe.picture import draw_plan

    try:
        chosen, found = result.chosen, result.levelled
        draw_plan(chosen.plan, Path(picture).expanduser(), title=_title(config, result),
                  ranks=chosen.ranks if chosen.together > 1 else None,
                  attention=(found.before[ALL].seconds, found.after[ALL].seconds) if found else None)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename!r}"
        raise ConfigError("--picture", picture, f"cannot be written: {reason}; name another file") from error


def plan_result(config: RunConfig) -> PlanResult:
    """Everything that ``csbp plan`` says, as numbers.

    Raises:
        ConfigError: sizes are missing, the lengths cannot be read, or the ranks do not fit the pack.
    """
    parallel, objective = config.parallel, config.objective
    shape = model_shape(_config_fields(config), objective.clean_stream)
    expect_window(config.model.shape, shape.kinds)
    check_split(parallel.tp, shape)
    check_windows(shape.kinds, objective)
    documents, diffusion = planned(config), objective.kind == "block_diffusion"
    packs = documents.packs
    lengths = [length for pack in packs for length in pack]
    check_size(lengths, objective.block_size, shape)
    case = Case.of(config, shape, whole_pack(lengths, objective.block_size, noised=diffusion),
                   tuple(map(len, packs)) if pooled(config) else ())
    ranks, world = axis_sizes(parallel)[1], parallel.nproc // parallel.tp
    blocks = min(sum(-(-length // objective.block_size) for length in pack) for pack in packs if pack)
    check_ranks(parallel, blocks, "the planned pack")
    check_pool(ranks, case.together)
    name = config.plan.device
    if name == "auto":
        name = "cpu" if parallel.device == "cpu" else "h200"
    device, exchange, settings = DEVICES[name], parallel.exchange, Settings.of(config, name)
    # Beside "data" the others are shown with all ranks on the sequence axis, as far as there are blocks.
    axis = ranks if parallel.kind != "data" else min(world, blocks, MAX_AXIS)
    kinds = [kind for kind in (_KINDS if world > 1 else (parallel.kind,))
             if kind in (parallel.kind, "data") or world % axis == 0]
    cad = cad_of(config, shape, name)
    if cad is None:
        found = {kind: forecast(case, kind, axis, settings, device, exchange) for kind in kinds}
        return PlanResult(config.experiment, name, device, case, settings, parallel.kind, found,
                          config.train.packs_per_step, documents)
    levelled = level(case, parallel.kind, ranks, settings, device, exchange, cad)
    found = {parallel.kind: levelled.with_moves}
    for kind in kinds:
        if kind != parallel.kind:
            pack = stand_in(packs, alone=kind != "data" and axis == world)
            one = dataclasses.replace(case, geometry=whole_pack(pack, objective.block_size, noised=diffusion), packs=())
            found[kind] = price_beside(one, kind, axis, settings, device, exchange, levelled)
    found = {kind: found[kind] for kind in kinds}
    return PlanResult(config.experiment, name, device, case, settings, parallel.kind, found,
                      config.train.packs_per_step, documents, levelled)


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
    geometry, packs = result.case.geometry, f" of {result.packs} packs" if result.packs > 1 else ""
    return (f"{config.experiment}: {counted(geometry.num_clean, 'token')}{packs} in "
            f"{counted(len(geometry.document_starts) - 1, 'document')}, {counted(result.chosen.plan.world, 'rank')}, "
            f"parallel.kind={result.kind}")

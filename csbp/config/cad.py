"""Can core attention be shared among the ranks that are asked for? No torch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from csbp.config.fields import nearest_name
from csbp.config.mesh import axis_sizes
from csbp.config.places import conf_dir
from csbp.config.schema import SELECTIVE, CadConfig, ParallelConfig, RunConfig
from csbp.errors import ConfigError, written


def check_cad(config: RunConfig) -> None:
    """Refuse settings of ``cad`` that mean nothing on this mesh.

    Raises:
        ConfigError: naming the first.
    """
    cad, parallel = config.cad, config.parallel
    if not cad.enabled:
        return
    if parallel.kind in ("context", "block"):
        raise ConfigError("cad.enabled", True, f"ranks attend for one another only with parallel.kind=csbp or data, "
                                               f"not {parallel.kind}; use one of them, or cad.enabled=false")
    replicas, ranks, _ = axis_sizes(parallel)
    if cad.pool == "csbp" and ranks == 1 and replicas > 1:
        raise ConfigError("cad.pool", cad.pool, "a sequence axis of one rank has none to share with; use cad.pool=dp, "
                                                "or parallel.csbp=2 or more")
    if pooled(config) and parallel.exchange == "all_gather":
        raise ConfigError("parallel.exchange", parallel.exchange, "every rank of the pool would get every replica's "
                                                                  "keys; use exact, or cad.pool=csbp")
    shipped = sorted(path.stem for path in (conf_dir() / "profile").glob("*.json"))
    if cad.profile.endswith(".json"):
        if not Path(cad.profile).expanduser().is_file():
            raise ConfigError("cad.profile", cad.profile, "no such file; make one by: csbp bench profile out=FILE.json")
    elif cad.profile not in ("auto", *shipped):
        names = nearest_name(cad.profile, ["auto", *shipped], "a FILE.json of csbp bench profile, or one of")
        raise ConfigError("cad.profile", cad.profile, names)


def unheeded(config: RunConfig) -> list[str]:
    """A sentence each, where something of ``cad`` or an offload is set although nothing heeds it."""
    return [*_unheeded_cad(config), *_unheeded_offload(config.parallel)]


def _unheeded_offload(parallel: ParallelConfig) -> list[str]:
    if parallel.offload and parallel.device == "cpu":
        return ["parallel.offload=true: does nothing on a CPU, where everything is in its memory already"]
    if parallel.offload and parallel.checkpointing in SELECTIVE and not parallel.compile:
        return [f"parallel.offload=true: moves next to nothing of what parallel.checkpointing={parallel.checkpointing} "
                "keeps where layers are not compiled; set parallel.compile=true"]
    return []


def _unheeded_cad(config: RunConfig) -> list[str]:
    usual = CadConfig()
    # Keys and values travel without moves too.
    given = {field.name: getattr(config.cad, field.name) for field in fields(CadConfig) if field.name != "overlap"}
    names = [f"cad.{name}={written(value)}" for name, value in given.items() if value != getattr(usual, name)]
    if config.cad.enabled or not names:
        return []
    return [f"{', '.join(names)}: nothing heeds that with cad.enabled=false; set cad.enabled=true, or leave it out"]


def unpredicted(config: RunConfig) -> list[str]:
    """A sentence, where predictions do not follow what ``cad`` says."""
    if config.cad.overlap != "none":
        return []
    return ["cad.overlap=none: predictions assume cad.overlap=operator, where what travels hides behind attention; "
            "steps take longer than said"]


def pooled(config: RunConfig) -> bool:
    """Whether the packs of all replicas are planned as one."""
    return config.cad.enabled and config.cad.pool == "dp" and axis_sizes(config.parallel)[0] > 1

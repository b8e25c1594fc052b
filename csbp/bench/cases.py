"""What is to be measured: read from the command line, checked before anything is built. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from csbp.bench.packs import document_lengths, geometry_of
from csbp.bench.presets import key_of, rows, split_settings
from csbp.config.bench import BenchAttentionConfig, BenchStepConfig
from csbp.config.compose import compose_flat, compose_run
from csbp.config.schema import MAX_ROWS, RunConfig
from csbp.config.validate import check_bounds, validate_synthetic
from csbp.errors import ConfigError
from csbp.output import script
from csbp.plan.counts import attended_pairs
from csbp.plan.estimate import DEVICES
from csbp.plan.shapes import BACKWARD_PAIRS

DEFAULT = "default"
NO_GPU = "torch finds no CUDA device here; use device=cpu"
FEWEST = 3  # timed runs from which a median and a spread still say something
_ENDLESS_SECONDS = 1200.0
T = TypeVar("T")


@dataclass(frozen=True)
class StepCase:
    """One row of ``csbp bench step``: a run, and the variants of it that are compared.

    Attributes:
        bench: its own settings.
        runs: what each variant is called -> its configuration, in the order given.
    """

    bench: BenchStepConfig
    runs: dict[str, RunConfig]


def attention_cases(words: Sequence[str], world: int, gpu: bool = True) -> list[BenchAttentionConfig]:
    """What ``csbp bench attention`` measures on ``world`` ranks: one configuration, or the rows of a preset, with
    lengths and dtype that suit the device.

    Args:
        gpu: there is one.

    Raises:
        ConfigError: a setting that cannot be measured.
    """
    found = [compose_flat("bench_attention", BenchAttentionConfig, row) for row in rows(words, "attention")]
    found = [_suited(case, gpu and case.device != "cpu") for case in found]
    for case in found:
        if case.device == "cuda" and not gpu:
            raise ConfigError("device", "cuda", NO_GPU)
        _check_attention(case)
    found = _for_ranks(found, [case.ranks for case in found], world)
    for case in found:
        for name in ("device", "threads"):
            if getattr(case, name) != getattr(found[0], name):
                raise ConfigError(name, getattr(case, name), "is the same for all rows; set it beside preset=")
        blocks = min(-(-length // case.block_size) for length in case.lengths)
        if case.kind != "data" and blocks < world:
            raise ConfigError("lengths", list(case.lengths), f"a pack of {blocks} block(s) is too short for {world} "
                                                             "ranks; lengthen it, or use a smaller block_size")
    found = [case if case.name else replace(case, name=_title(case)) for case in found]
    _expect_apart([case.name for case in found])
    return found


def _for_ranks(cases: list[T], wanted: list[int | None], world: int) -> list[T]:
    """The cases that are for so many ranks."""
    kept = [case for case, ranks in zip(cases, wanted, strict=True) if ranks in (None, world)]
    if not kept:
        raise ConfigError("ranks", wanted[0], f"{world} rank(s) were started; start {wanted[0]}: torchrun "
                                              f"--nproc-per-node {wanted[0]} {script()} bench ...")
    return kept


def _expect_apart(names: Sequence[str]) -> None:
    """Refuse rows of one name: of their results only the last would be kept."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("name", name, "would be the name of several rows; leave it out, or keep one row by only=")


def _suited(case: BenchAttentionConfig, gpu: bool) -> BenchAttentionConfig:
    dtype = case.dtype if case.dtype != "auto" else "bfloat16" if gpu else "float32"
    return replace(case, dtype=dtype, lengths=case.lengths or ([32768, 65536] if gpu else [512, 1024]))


def cpu_seconds(case: BenchAttentionConfig, pairs: float) -> float:
    """What one row's fewest runs take at least on a CPU.

    Args:
        pairs: attended pairs of what one rank has to do.
    """
    flops = 4.0 * (1 + BACKWARD_PAIRS) * case.heads * case.head_dim * pairs
    return (case.warmup + FEWEST) * flops / DEVICES["cpu"].attention


def refuse_endless(case: BenchAttentionConfig, world: int) -> None:
    """Refuse sizes for a GPU on a CPU that nobody has asked for by name.

    Raises:
        ConfigError: a row would take too long.
    """
    for length in case.lengths:
        pairs = attended_pairs(*geometry_of(case, length)) / (world if case.kind != "data" else 1)
        seconds = cpu_seconds(case, pairs)
        if case.device != "cpu" and seconds > _ENDLESS_SECONDS:
            raise ConfigError("lengths", list(case.lengths), f"there is no GPU here, and on a CPU {length:,} tokens "
                              f"take at least {seconds / 3600:.1f} hours; use lengths=[1024], or device=cpu if that is "
                              "what you want")


def _check_attention(case: BenchAttentionConfig) -> None:
    check_bounds(case)
    if not all(type(length) is int and 0 < length <= MAX_ROWS for length in case.lengths):
        raise ConfigError("lengths", list(case.lengths), f"must be whole numbers from 1 to {MAX_ROWS:,}, as in "
                                                         "[32768, 65536]")
    if len(set(case.lengths)) < len(case.lengths):
        raise ConfigError("lengths", list(case.lengths), "one is there twice; name each once")
    if case.heads % case.kv_heads:
        raise ConfigError("kv_heads", case.kv_heads, f"must divide heads={case.heads}")
    if case.window is not None and case.window < case.block_size:
        raise ConfigError("window", case.window, f"smaller than a block; at least block_size={case.block_size}")
    if case.documents == "packed" and case.longest > min(case.lengths):
        raise ConfigError("longest", case.longest, f"longer than a pack of lengths={list(case.lengths)}; set "
                                                   f"longest={min(case.lengths)} or less, or longer lengths")
    if not case.backends:
        raise ConfigError("backends", [], "name at least one, or auto")
    document_lengths(case, 1)  # reads the file, if there is one


def _title(case: BenchAttentionConfig) -> str:
    """What tells a row from others: the pack, the heads, and settings that are not the usual ones."""
    usual, packed = BenchAttentionConfig(), case.documents == "packed"
    documents = {"one": "one document", "packed": f"packed, median {case.median}, longest {case.longest}"}
    parts = [documents.get(case.documents, case.documents), f"B={case.block_size}",
             f"{case.heads}/{case.kv_heads} heads", f"d={case.head_dim}"]
    parts += [f"spread {case.spread}"] if packed and case.spread != usual.spread else []
    parts += [f"seed {case.seed}"] if packed and case.seed != usual.seed else []
    parts += [f"window {case.window}"] if case.window is not None else []
    parts += ["token-causal"] if case.clean_stream == "token_causal" else []
    parts += [case.dtype] if case.dtype != "bfloat16" else []
    parts += [case.exchange] if case.exchange != "exact" else []
    return ", ".join(parts)


def step_cases(words: Sequence[str], world: int) -> list[StepCase]:
    """What ``csbp bench step`` measures on ``world`` ranks.

    Raises:
        ConfigError: a setting that cannot be measured.
    """
    found = [_step_case(row, world) for row in rows(words, "step")]
    found = _for_ranks(found, [case.bench.ranks for case in found], world)
    _expect_apart([case.bench.name for case in found])
    runs = [config for case in found for config in case.runs.values()]
    for nproc in (config.parallel.nproc for config in runs):
        if nproc != world:
            raise ConfigError("parallel.nproc", nproc, f"{world} rank(s) were started; leave it out, or start {nproc}: "
                                                       f"torchrun --nproc-per-node {nproc} {script()} bench ...")
    for section, name in (("parallel", "device"), ("parallel", "threads"), ("train", "deterministic")):
        values = [getattr(getattr(config, section), name) for config in runs]
        if len(set(values)) > 1:
            raise ConfigError(f"{section}.{name}", values[1], "is the same for all that is compared; set it beside the "
                                                              "variants")
    return found


def _step_case(words: Sequence[str], world: int) -> StepCase:
    own = {field.name for field in fields(BenchStepConfig)}
    bench = compose_flat("bench_step", BenchStepConfig, [word for word in words if key_of(word) in own])
    check_bounds(bench)
    if not bench.variants:
        raise ConfigError("variants", [], "name at least one, or leave it out")
    shared = [f"parallel.nproc={bench.ranks or world}", *(word for word in words if key_of(word) not in own)]
    runs: dict[str, RunConfig] = {}
    for variant in bench.variants:
        label, changes = _labelled(variant)
        if label in runs:
            raise ConfigError("variants", list(bench.variants), f"{label!r} is there twice")
        runs[label] = _synthetic(compose_run([*shared, *changes]))
        validate_synthetic(runs[label])
    first = next(iter(runs.values()))
    return StepCase(bench if bench.name else replace(bench, name=first.experiment), runs)


def _labelled(variant: str) -> tuple[str, list[str]]:
    """What a variant is called, and its settings: LABEL: KEY=VALUE KEY=VALUE."""
    before, colon, rest = variant.partition(":")
    label, text = (before.strip(), rest) if colon and "=" not in before else (variant, variant)
    changes = [] if text.strip() == DEFAULT else split_settings("variants", text)
    for change in changes:
        if "=" not in change:
            raise ConfigError("variants", variant, f"{change} is no setting of csbp train; write KEY=VALUE, or "
                                                   f"{DEFAULT} alone")
    return label, changes


def _synthetic(config: RunConfig) -> RunConfig:
    """The same run from random weights, on which its speed does not depend. Where there is a shape, no file is read."""
    model = replace(config.model, init="random", path="" if config.model.shape else config.model.path)
    return replace(config, model=model)

"""``csbp check``: everything about a run that can be known before it costs anything.

Reads and tokenizes the data (which the run then finds in the cache) and builds the model without its weights.
The configuration itself has been validated by the time it gets here.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from csbp.config.cad import pooled
from csbp.config.schema import RunConfig
from csbp.data.batch import PackedBatch
from csbp.data.packs import PackStream
from csbp.data.samples import IndexedSamples
from csbp.data.tokenizer import next_free_id
from csbp.errors import ConfigError, writing
from csbp.memory import FirstStep, count_parameters, free_memory, plan_first_step, refuse_without_room
from csbp.memory import size_text as _size
from csbp.observe.amounts import counted
from csbp.output import called_as
from csbp.parallel.runtime import choose_device, mesh_sizes
from csbp.plan.cad import Cad, saving_text
from csbp.plan.estimate import DEVICES
from csbp.plan.remedies import fullest
from csbp.rundir import check_run_dir
from csbp.train.ready import ReadyModel, check_kernels, check_model, open_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SHOWN_BLOCKS = 12
_PIPED_WIDTH = 120


def run_check(config: RunConfig, words: Sequence[str] = (), console: Console | None = None,
              lengths: str = "") -> int:
    """Say what the run would read, learn and need, section after section.

    Args:
        config: a valid configuration.
        words: the settings as the user gave them, for the command that is shown at the end.
        console: where to; by default stdout, plain and 120 columns wide where that is no terminal.
        lengths: file to write the training documents' tokens to, or "".

    Returns:
        0: the run can start, here or on a machine that has its devices. Warnings do not change that.

    Raises:
        ConfigError, UserError: the first thing that would stop the run.
    """
    out = console or _console()
    _check_lengths(config, lengths)
    check_run_dir(config)
    device, missing = _check_devices(config, out)
    ready = check_model(config)
    if device is not None:
        check_kernels(config, ready.shape, device)
    _show_tokenizer(config, ready, out)
    for note in ready.notes:
        _warn(out, note)
    streams = open_data(config, ready.tokenizer)
    _show_data(config, streams, out)
    if lengths:
        _write_lengths(streams["train"], lengths, out)
    _show_sample(config, streams["train"], ready.tokenizer, out)
    _check_memory(config, ready, streams["train"], device, out)
    command = shlex.join([called_as(), "train", *words])
    if missing is not None:
        _warn(out, f"{missing.field}={missing.value!r}: {missing.fix}")
        out.print(f"\nNothing but the devices, which are not here, stands in the way: {command}")
    else:
        out.print(f"\nNothing stands in the way: {command}")
    return 0


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=_PIPED_WIDTH)


def _check_devices(config: RunConfig, out: Console) -> tuple[torch.device | None, ConfigError | None]:
    """The device of the ranks, or what is missing here: the machine that checks need not be the one that trains."""
    parallel = config.parallel
    dp, csbp, tp = mesh_sizes(parallel, parallel.nproc)
    mesh = f"dp={dp} x csbp={csbp}" + (f" x tp={tp}" if tp > 1 else "")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", parallel.nproc))
    device = missing = None
    try:
        device = choose_device(parallel.device, here - 1)
    except ConfigError as error:
        missing = error
    out.print(_heading("Devices"))
    if device is None:
        out.print(f"  {here} GPUs a machine, {mesh}; this machine has {torch.cuda.device_count()}")
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(0)
        out.print(f"  {here} of {torch.cuda.device_count()} GPUs ({name}), {mesh}")
    else:
        cores = os.cpu_count() or 1
        out.print(f"  {parallel.nproc} CPU ranks x {parallel.threads} threads on {cores} cores, {mesh}")
        if parallel.nproc * parallel.threads > cores:
            _warn(out, f"more threads than cores; parallel.nproc={max(cores // parallel.threads, 1)} would be faster")
        if config.train.dtype == "bfloat16":
            _warn(out, "bfloat16 is many times slower than float32 on most CPUs")
    if config.train.packs_per_step % dp:
        short = "some have only attention of others" if pooled(config) else "some wait"
        _warn(out, f"train.packs_per_step={config.train.packs_per_step} is no multiple of {dp} replicas; {short}")
    return device, missing


def _show_tokenizer(config: RunConfig, ready: ReadyModel, out: Console) -> None:
    tokenizer, last = ready.tokenizer, next_free_id(ready.tokenizer) - 1
    out.print(_heading("Tokenizer"))
    out.print(f"  ids 0..{last} of {ready.rows} embedding rows; EOS {tokenizer.eos_token!r}; chat template: "
              f"{'yes' if tokenizer.chat_template else 'no'}", markup=False)
    if config.objective.kind != "autoregressive":
        mask = ready.mask
        what = repr(tokenizer.decode([mask])) if mask <= last else "past the last id, so no text contains it"
        out.print(f"  mask id {mask}: {what}", markup=False)


def _show_data(config: RunConfig, streams: dict[str, PackStream], out: Console) -> None:
    out.print(_heading("Data"))
    table = Table("  split", box=None, pad_edge=False, padding=(0, 2))
    for name in ("documents", "samples", "tokens", "supervised", "bytes/token", "packs filled"):
        table.add_column(name, justify="right")
    for name, stream in streams.items():
        totals = stream.totals
        numbers = [f"{n:,}" for n in (totals.documents, totals.samples, totals.tokens, totals.supervised)]
        table.add_row("  " + (name if totals.exact else f"{name} (first window)"), *numbers,
                      f"{stream.bytes_per_token:.2f}", f"{stream.efficiency():.1%}")
    out.print(table)
    for line in dict.fromkeys(line for stream in streams.values() for line in stream.totals.skipped):
        _warn(out, line)
    train = streams["train"]
    if train.totals.exact:
        read = config.train.steps * config.train.packs_per_step * config.data.seq_len * train.efficiency()
        out.print(f"  train.steps={config.train.steps} reads {read:,.0f} tokens, "
                  f"{read / train.totals.tokens:.2f} epochs")


def _check_lengths(config: RunConfig, lengths: str) -> None:
    """Refuse a file of lengths that could not be written."""
    if lengths and any(source.streaming for source in config.data.sources):
        raise ConfigError("--lengths", lengths, "a streaming source is never read to its end; set "
                          "data.sources.N.streaming=false, or leave it out")
    path = Path(lengths).expanduser()
    if lengths and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError("--lengths", lengths, "must be a file in a folder that is there")


def _write_lengths(stream: PackStream, lengths: str, out: Console) -> None:
    assert isinstance(stream.samples, IndexedSamples)
    found, path = stream.samples.document_lengths().tolist(), Path(lengths).expanduser()
    with writing(path):
        path.write_text("".join(f"{length}\n" for length in found))
    documents = counted(len(found), "document")
    out.print(f"  tokens of {documents}, in the order of the first epoch: {lengths}", markup=False)


def _show_sample(config: RunConfig, stream: PackStream, tokenizer: PreTrainedTokenizerFast, out: Console) -> None:
    """The first sample of the run: a line a block, # for a supervised token and . for one that is only read."""
    (pack,), _ = stream.take(stream.first(), 1)
    size = config.objective.block_size
    length = int(pack.document_starts[1])
    supervised = int(pack.target_mask[:length].sum())
    cells = "lines" if config.objective.kind == "autoregressive" else "blocks"
    out.print(_heading(f"First sample: {length} tokens, {supervised} supervised, {cells} of {size}"))
    first = max(int(pack.target_mask[:length].argmax()) // size - 2, 0)
    table = Table("  block", "positions", "loss", "text", box=None, pad_edge=False, padding=(0, 2))
    table.columns[3].overflow = "fold"
    last = min(first + _SHOWN_BLOCKS, -(-length // size))
    for block in range(first, last):
        begin, end = block * size, min((block + 1) * size, length)
        marks = "".join("#" if t else "." for t in pack.target_mask[begin:end])
        table.add_row(f"  {block}", f"{begin}-{end - 1}", marks, _block_text(pack, begin, end, tokenizer))
    out.print(table)
    if last * size < length:
        out.print(f"  … {-(-length // size) - last} more {cells}")


def _block_text(pack: PackedBatch, begin: int, end: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """Decoded on one line, the supervised runs in colour."""
    text, start = Text(), begin
    for place in range(begin + 1, end + 1):
        if place == end or pack.target_mask[place] != pack.target_mask[start]:
            piece = json.dumps(tokenizer.decode(pack.tokens[start:place]), ensure_ascii=False)[1:-1]
            text.append(piece.replace('\\"', '"'), style="bold green" if pack.target_mask[start] else "dim")
            start = place
    return text


def _check_memory(config: RunConfig, ready: ReadyModel, stream: PackStream, device: torch.device | None,
                  out: Console) -> None:
    parallel, adapter, model = config.parallel, ready.adapter, ready.model
    has = count_parameters(model, adapter.units(model), parallel.tp, adapter.tp_plan(model))
    first = plan_first_step(config, ready.shape, has, stream, "cpu" if device is not None and device.type == "cpu" else
                            "h200")
    need, moves = first.memory, any(plan.served for plan in first.plans)
    if first.cad is not None:
        _show_moves(config, first, first.cad, out)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", parallel.nproc))
    there, host = None, free_memory(torch.device("cpu"))
    if device is not None:
        there = free_memory(device) if device.type == "cuda" else host // here
    out.print(_heading("Memory of the fullest rank (weights, gradients and optimizer are exact, the rest is rough)"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    total = float(need.total.max())
    received = "received keys and moved queries" if moves else "received keys"
    for name, size in {**fullest(need, received), "at once": total}.items():
        table.add_row(f"  {name}", _size(size))
    table.add_row("  free", "not known here" if there is None else _size(there))
    out.print(table)
    if there is None:
        if total > DEVICES["h200"].memory:
            _warn(out, f"an H200 has room for {_size(DEVICES['h200'].memory)}; csbp plan says what would help")
        return
    refuse_without_room(parallel.nproc, need.certain, there)
    if total > there:
        less = "" if parallel.checkpointing == "full" else ", or set parallel.checkpointing=full"
        _warn(out, f"this may not fit; lower data.seq_len, raise parallel.csbp{less}")
    loading = 4 * sum(p.numel() for p in model.parameters())  # in float32
    if loading * here > host:
        _warn(out, f"every rank first builds the whole model: {_size(loading * here)} of host memory for {here} "
                   f"ranks, {_size(host)} are free")


def _show_moves(config: RunConfig, first: FirstStep, cad: Cad, out: Console) -> None:
    """Whether attention moves in the first packs, and what that is predicted to save."""
    asked, moving = config.train.packs_per_step, sum(bool(plan.served) for plan in first.plans)
    where = f"the first {first.packs} of the first step's {asked} packs" if first.packs < asked else "the first step"
    kind = "micro-batches" if pooled(config) else "packs"
    parts = f", in {moving} of {len(first.plans)} {kind}" if moving and len(first.plans) > 1 else ""
    out.print(_heading("Core attention disaggregation"))
    out.print(f"  {saving_text(*cad.saved(first.plans), where)}{parts}")


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _warn(out: Console, message: str) -> None:
    out.print(Text(f"  warning: {message}", style="yellow"))

"""``csbp train``: start the ranks, or be one of those that torchrun or accelerate has started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from csbp.config.compose import compose_run
from csbp.config.schema import RunConfig
from csbp.config.typed import save_config
from csbp.config.validate import validate_run
from csbp.errors import ConfigError, UserError, met_by_all
from csbp.output import called_as, script
from csbp.rundir import CONFIG, claim_run_dir, has_checkpoint, record_start
from csbp.supervise import Outcome, RankCommand, supervise

# -P keeps the current folder out of the import path: a file there could hide a library.
_PYTHON = (sys.executable, "-P", "-m")
_STARTING = ", as torchrun sets it; to let csbp start its own ranks, unset RANK and WORLD_SIZE"


def train(words: Sequence[str]) -> int:
    """Compose, check, run.

    Args:
        words: ``key=value`` each.

    Returns:
        The exit code: 0 done, 1 failed or stopped early, 2 if a rank refused the configuration.

    Raises:
        ConfigError: the configuration cannot run, or does not fit the ranks that were started.
    """
    with before_ranks(), met_by_all():
        config = compose_run(words)
        validate_run(config)
    world = started_ranks()
    if world is None:
        refuse_lone_process(config)
        return _start_ranks(config, words)
    if world != config.parallel.nproc:
        with before_ranks(), met_by_all():
            raise ConfigError("parallel.nproc", config.parallel.nproc,
                              f"{world} rank(s) were started (WORLD_SIZE={world}); set parallel.nproc={world}, or "
                              "unset RANK and WORLD_SIZE to let csbp start its own")
    from csbp.worker import run_started_rank

    return run_started_rank(config)


@contextmanager
def before_ranks() -> Iterator[None]:
    """Around what a rank does before it meets the others: those of other hosts, which may have been given other words,
    are told why it does not come."""
    try:
        yield
    except UserError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE") != "1":
            from csbp.parallel.rendezvous import tell_others

            tell_others(error)
        raise


def started_ranks() -> int | None:
    """How many ranks torchrun or another launcher has started, this one among them; None if there is none.

    A world of one rank under ``accelerate launch`` counts as none: see ``refuse_lone_process``.

    Raises:
        ConfigError: the environment variables that say so do not go together.
    """
    if "RANK" not in os.environ:
        return None
    world = _number("WORLD_SIZE", 1)
    _number("RANK", 0, world)
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", 0, _number("LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in os.environ else world)
    if world == 1 and _under_accelerate():
        return None
    if world > 1 or "MASTER_ADDR" in os.environ:
        if not os.environ.get("MASTER_ADDR"):
            raise ConfigError("MASTER_ADDR", os.environ.get("MASTER_ADDR"), f"must name the host of rank 0{_STARTING}")
        _number("MASTER_PORT", 1, 1 << 16)
    return world


def _number(name: str, low: int, end: int | None = None) -> int:
    """An environment variable as torchrun sets it."""
    value = os.environ.get(name)
    if value is None or not (value.isascii() and value.isdigit()) or int(value) < low or (end and int(value) >= end):
        bounds = f"at least {low}" if end is None else f"from {low} to {end - 1}"
        raise ConfigError(name, value, f"must be a whole number, {bounds}{_STARTING}")
    return int(value)


def refuse_lone_process(config: RunConfig) -> None:
    """Refuse ``accelerate launch`` that runs one process where several were asked for.

    Without GPUs ``accelerate launch --num_processes 2`` starts one plain process, unless MPI is set up. It leaves
    two traces: its own ACCELERATE_* settings, and MASTER_ADDR, which it sets only when asked for several.

    Raises:
        ConfigError: with the ways to start them.
    """
    if not _under_accelerate():
        return
    nproc = config.parallel.nproc
    if nproc > 1 or "MASTER_ADDR" in os.environ:
        raise ConfigError("parallel.nproc", nproc,
                          "accelerate launch has started one process only (on the CPU it does so whatever "
                          "--num_processes says); run csbp train by itself, which starts its own ranks, or use "
                          f"torchrun --nproc-per-node {max(nproc, 2)} {script()} train ...")


def _under_accelerate() -> bool:
    # Set by every launcher of accelerate; ACCELERATE_USE_CPU alone may be a user's own.
    return "ACCELERATE_MIXED_PRECISION" in os.environ and "ACCELERATE_DYNAMO_BACKEND" in os.environ


def _start_ranks(config: RunConfig, words: Sequence[str]) -> int:
    with claim_run_dir(config) as lock, tempfile.TemporaryDirectory(prefix="csbp-") as private:
        refused = _prepare(config, Path(private))
        if refused:
            return refused
        record_start(config, lock.folder)
        print(f"run folder: {lock.folder}", flush=True)
        outcome = supervise(rank_commands(config, lock.folder, Path(private) / "rendezvous", (lock.descriptor,)))
    _report(outcome, lock.folder, words)
    return outcome.exit_code


def _prepare(config: RunConfig, private: Path) -> int:
    """Run ``csbp.prepare`` to its end; its exit code, or 1."""
    save_config(config, private / CONFIG)
    # A signal to stop ends both: there is nothing to save yet.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen([*_PYTHON, "csbp.prepare", str(private / CONFIG)], stdin=subprocess.PIPE,
                               start_new_session=True)
    try:
        code = process.wait()
    finally:
        process.kill()
        process.communicate()
        signal.signal(signal.SIGTERM, previous)
    if code < 0:
        print(f"csbp: what comes before the ranks (tokenizing, checks) was ended by signal {-code}", file=sys.stderr)
    return max(code, 0) or int(code < 0)


def rank_commands(config: RunConfig, run_dir: Path, rendezvous: Path, keep: Sequence[int] = ()) -> list[RankCommand]:
    """One ``csbp.worker`` for each rank.

    Args:
        config: ``parallel`` says how many, and with how many threads.
        run_dir: its config.yaml is what the ranks run.
        rendezvous: where they meet; a file of this job alone cannot be taken by another job, as a port can.
        keep: descriptors that every rank inherits.
    """
    nproc = config.parallel.nproc
    argv = [*_PYTHON, "csbp.worker", str(run_dir)]
    commands = []
    for rank in range(nproc):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc),
               "LOCAL_WORLD_SIZE": str(nproc), "OMP_NUM_THREADS": str(config.parallel.threads),
               "CSBP_RENDEZVOUS_FILE": str(rendezvous), "PYTHONFAULTHANDLER": "1"}
        log = run_dir / "logs" / f"rank-{rank}.log" if rank else None
        commands.append(RankCommand(argv, env, log, tuple(keep)))
    return commands


def _report(outcome: Outcome, run_dir: Path, words: Sequence[str]) -> None:
    """Say how the job ended, unless it ended well, and how to go on."""
    if outcome.exit_code == 0:
        return
    print(f"csbp: {'stopped as asked' if outcome.as_asked else outcome.message}", file=sys.stderr)
    if outcome.exit_code == 1 and has_checkpoint(run_dir):
        kept = [word for word in words if word.partition("=")[0] not in ("run_dir", "resume")]
        print(f"csbp: go on with: {shlex.join([called_as(), 'train', *kept, f'run_dir={run_dir}', 'resume=auto'])}",
              file=sys.stderr)

"""``csbp train``: start the ranks, or be one of those that torchrun or accelerate has started."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from csbp.config.compose import compose_run
from csbp.config.schema import RunConfig
from csbp.config.validate import validate_run
from csbp.errors import ConfigError
from csbp.rundir import has_checkpoint, prepare_run_dir
from csbp.supervise import Outcome, RankCommand, supervise


def train(words: Sequence[str]) -> int:
    """Compose, check, run.

    Args:
        words: ``key=value`` each.

    Returns:
        The exit code: 0 done, 1 failed or stopped early, 2 if a rank refused the configuration.

    Raises:
        ConfigError: the configuration cannot run, or does not fit the ranks that were started.
    """
    config = compose_run(words)
    validate_run(config)
    world = started_ranks()
    if world is None:
        refuse_lone_process(config)
        return _start_ranks(config, words)
    if world != config.parallel.nproc:
        raise ConfigError("parallel.nproc", config.parallel.nproc,
                          f"{world} rank(s) were started (WORLD_SIZE={world}); set parallel.nproc={world}, or unset "
                          "RANK and WORLD_SIZE to let csbp start its own")
    from csbp.worker import run_rank

    return run_rank(config, lambda: prepare_run_dir(config))


def started_ranks() -> int | None:
    """How many ranks torchrun or another launcher has started, this one among them; None if there is none.

    A world of one rank under ``accelerate launch`` counts as none: see ``refuse_lone_process``.
    """
    if "RANK" not in os.environ or not os.environ.get("WORLD_SIZE", "").isdigit():
        return None
    world = int(os.environ["WORLD_SIZE"])
    return None if world == 1 and _under_accelerate() else world


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
                          f"torchrun --nproc-per-node {max(nproc, 2)} $(which csbp) train ...")


def _under_accelerate() -> bool:
    # Set by every launcher of accelerate; ACCELERATE_USE_CPU alone may be a user's own.
    return "ACCELERATE_MIXED_PRECISION" in os.environ and "ACCELERATE_DYNAMO_BACKEND" in os.environ


def _start_ranks(config: RunConfig, words: Sequence[str]) -> int:
    run_dir = prepare_run_dir(config)
    print(f"run folder: {run_dir}", flush=True)
    with tempfile.TemporaryDirectory(prefix="csbp-") as private:
        outcome = supervise(rank_commands(config, run_dir, f"file://{private}/rendezvous"))
    _report(outcome, run_dir, words)
    return outcome.exit_code


def rank_commands(config: RunConfig, run_dir: Path, init_method: str) -> list[RankCommand]:
    """One ``csbp.worker`` for each rank.

    Args:
        config: ``parallel`` says how many, and with how many threads.
        run_dir: its config.yaml is what the ranks run.
        init_method: where they meet; a file of this job alone cannot be taken by another job, as a port can.
    """
    nproc = config.parallel.nproc
    # -P keeps the current folder out of the ranks' import path: a file there could hide a library.
    argv = [sys.executable, "-P", "-m", "csbp.worker", str(run_dir)]
    commands = []
    for rank in range(nproc):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc),
               "LOCAL_WORLD_SIZE": str(nproc), "OMP_NUM_THREADS": str(config.parallel.threads),
               "CSBP_INIT_METHOD": init_method, "PYTHONFAULTHANDLER": "1"}
        commands.append(RankCommand(argv, env, run_dir / "logs" / f"rank-{rank}.log" if rank else None))
    return commands


def _report(outcome: Outcome, run_dir: Path, words: Sequence[str]) -> None:
    """Say how the job ended, unless it ended well, and how to go on."""
    if outcome.exit_code == 0:
        return
    print(f"csbp: {'stopped as asked' if outcome.as_asked else outcome.message}", file=sys.stderr)
    if outcome.exit_code == 1 and has_checkpoint(run_dir):
        kept = [word for word in words if word.partition("=")[0] not in ("run_dir", "resume")]
        print(f"csbp: go on with: {shlex.join(['csbp', 'train', *kept, f'run_dir={run_dir}', 'resume=auto'])}",
              file=sys.stderr)

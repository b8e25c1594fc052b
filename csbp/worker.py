"""One rank of a run: ``python -m csbp.worker DIR`` reads DIR/config.yaml and runs its recipe."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from csbp.cli import guarded
from csbp.config.cad import pooled
from csbp.config.schema import RunConfig
from csbp.config.shared import shared_settings
from csbp.config.typed import load_config
from csbp.errors import UserError
from csbp.lifeline import die_with_parent, leave_with_launcher
from csbp.output import outlast_output
from csbp.prepare import prepare_run
from csbp.rundir import CONFIG, claim_run_dir, record_start
from csbp.supervise import STOPPED


def run_rank(config: RunConfig, run_dir: Callable[[], Path], prepare_host: Callable[[], None] | None = None) -> int:
    """Join the other ranks and run the recipe. Collective.

    Args:
        config: checked; its recipe is a module of csbp.recipes.
        run_dir: gives the run folder; called on rank 0 only, while the others wait.
        prepare_host: called on the first rank of every other host.

    Returns:
        The recipe's exit code.
    """
    from csbp.parallel.rendezvous import lost_peer
    from csbp.parallel.repeatable import heed_determinism
    from csbp.parallel.runtime import start_runtime

    heed_determinism(config)
    recipe = importlib.import_module(f"csbp.recipes.{config.recipe}")
    runtime = start_runtime(config.parallel, run_dir, prepare_host, pooled(config), shared_settings(config))
    try:
        code: int = recipe.main(config, runtime)
    except Exception as error:
        if lost_peer(error):  # a traceback would hide what the other rank says
            raise UserError(f"rank {runtime.rank}: another rank has ended; it says why") from error
        raise
    runtime.close()
    return code


def run_started_rank(config: RunConfig) -> int:
    """Be one of the ranks that torchrun, accelerate or a script has started: what ``csbp train`` otherwise does
    before it starts ranks is rank 0's part.

    Returns:
        The recipe's exit code.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # another starter may rightly end before its ranks
        die_with_parent()
    with contextlib.ExitStack() as held:

        def first() -> Path:
            lock = held.enter_context(claim_run_dir(config))
            prepare_run(config)
            record_start(config, lock.folder)
            print(f"run folder: {lock.folder}", flush=True)
            return lock.folder

        return run_rank(config, first, lambda: prepare_run(config))


def main() -> None:
    """Entry point. A rank that has failed leaves at once: leaving the process group could wait for its peers."""
    outlast_output()
    leave_with_launcher()
    folder = Path(sys.argv[1])

    def run() -> int:
        # What fails raises; a recipe that returns anything but 0 was asked to stop early.
        return STOPPED if run_rank(load_config(folder / CONFIG), lambda: folder) else 0

    code = guarded(run)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    main()

"""One rank of a run: ``python -m csbp.worker DIR`` reads DIR/config.yaml and runs its recipe."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from csbp.cli import guarded
from csbp.config.schema import RunConfig
from csbp.config.typed import load_config
from csbp.lifeline import leave_with_launcher
from csbp.output import outlast_output
from csbp.rundir import CONFIG
from csbp.supervise import STOPPED


def run_rank(config: RunConfig, run_dir: Callable[[], Path]) -> int:
    """Join the other ranks and run the recipe. Collective.

    Args:
        config: checked; its recipe is a module of csbp.recipes.
        run_dir: gives the run folder; called on rank 0 only.

    Returns:
        The recipe's exit code.
    """
    from csbp.parallel.runtime import start_runtime

    recipe = importlib.import_module(f"csbp.recipes.{config.recipe}")
    runtime = start_runtime(config.parallel, run_dir)
    code: int = recipe.main(config, runtime)
    runtime.close()
    return code


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

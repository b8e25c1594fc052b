"""What comes before the ranks: ``python -m csbp.prepare FILE`` goes through the configuration in FILE.

A process of its own, so that the launcher, which lives as long as the run, stays small. What would stop the run is
said here, once, and tokenizing may take as long as it takes: no rank is waiting yet.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from csbp.cli import guarded
from csbp.config.schema import RunConfig
from csbp.config.typed import load_config
from csbp.data.first import check_first_records
from csbp.lifeline import leave_with_launcher
from csbp.output import outlast_output


def prepare_run(config: RunConfig) -> None:
    """Check tokenizer, model, kernels and memory, and tokenize what is not in the cache of this machine yet.

    Raises:
        ConfigError, UserError: the first thing that would stop the run.
    """
    from csbp.memory import expect_room
    from csbp.parallel.runtime import choose_device
    from csbp.train.ready import check_kernels, check_model, open_data

    ready = check_model(config)
    check_kernels(config, ready.shape, choose_device(config.parallel.device, 0))
    for note in ready.notes:
        print(f"csbp: warning: {note}", file=sys.stderr, flush=True)
    expect_room(ready.model, config.parallel, ready.adapter.tp_plan(ready.model))
    open_data(config, ready.tokenizer)


def check_devices(config: RunConfig) -> None:
    """Whether this machine has the devices of all ranks.

    Raises:
        ConfigError: it has not.
    """
    from csbp.parallel.runtime import choose_device

    choose_device(config.parallel.device, config.parallel.nproc - 1)


def main() -> None:
    """Entry point. Exits with 0: the ranks can start; 2: the configuration was refused; else 1."""
    outlast_output()
    leave_with_launcher()
    config = load_config(Path(sys.argv[1]))

    def run() -> int:
        check_first_records(config)  # in the order of what has to be imported
        check_devices(config)
        prepare_run(config)
        return 0

    code = guarded(run)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and unloading the libraries takes a while


if __name__ == "__main__":
    main()

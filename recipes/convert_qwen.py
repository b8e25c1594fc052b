"""Convert an autoregressive Qwen checkpoint to block diffusion, or go on training a converted one."""

from __future__ import annotations

from csbp.config.schema import RunConfig
from csbp.parallel.runtime import Runtime
from csbp.train.drive import run_training


def main(config: RunConfig, runtime: Runtime) -> int:
    """Train, evaluate before and after, export. Returns the exit code."""
    return run_training(config, runtime)

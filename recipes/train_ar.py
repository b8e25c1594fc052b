"""Train an autoregressive model from random weights or on from a checkpoint: the start of a conversion."""

from __future__ import annotations

from csbp.config.schema import RunConfig
from csbp.errors import ConfigError
from csbp.parallel.runtime import Runtime
from csbp.train.drive import run_training


def main(config: RunConfig, runtime: Runtime) -> int:
    """Train, evaluate before and after, export. Returns the exit code."""
    if config.objective.kind != "autoregressive":
        raise ConfigError("objective.kind", config.objective.kind, "this recipe needs objective=autoregressive")
    return run_training(config, runtime)

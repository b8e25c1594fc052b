"""Runs that repeat to the last bit, and ranks that compute alike."""

from __future__ import annotations

import os

import torch

from csbp.config.schema import RunConfig


def heed_determinism(config: RunConfig) -> None:
    """Allow only algorithms that repeat bit for bit, where the run asks for it. Comes before ranks meet: only as it
    starts is NCCL told to add up in a fixed order (``torch.distributed.ProcessGroupNCCL``).

    Compiled code is not chosen by timing it then, nor in layers that ranks of a tp axis share: they keep equal copies
    of some weights, and go on to do so only by computing the same numbers.
    """
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.train.deterministic or (config.parallel.compile and config.parallel.tp > 1):
        from torch._inductor import config as inductor  # takes seconds

        inductor.deterministic = True

"""The process groups in which rows travel."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from csbp.comm.transport import LocalTransport, ProcessGroupTransport, Transport

# Thread blocks of NCCL's kernel for what travels home, at most. Each takes a multiprocessor from attention, also while
# it waits for a peer that is not yet done; there is time for it to be slow.
HOME_BLOCKS = 8


def make_transport(ranks: np.ndarray, device: torch.device, timeout: timedelta) -> Transport:
    """What moves rows among the ranks of this rank's line of [lines, ranks, lines]. Collective.

    Its groups are its own, whatever other axes they span: rows do not queue behind FSDP's traffic. On GPUs their
    streams come first, or an exchange would have to wait for the attention that is to hide it to leave it a
    multiprocessor.
    """
    mine: Transport = LocalTransport()
    if ranks.shape[1] == 1:
        return mine
    for line in ranks.swapaxes(1, 2).reshape(-1, ranks.shape[1]).tolist():
        groups = [_group(line, device, timeout, *of) for of in (("rows", None), ("home", HOME_BLOCKS))]
        if dist.get_rank() in line:
            mine = ProcessGroupTransport(*groups)
    return mine


def _group(ranks: list[int], device: torch.device, timeout: timedelta, name: str,
           blocks: int | None) -> dist.ProcessGroup:
    options = None
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        if blocks:
            options.config.max_ctas = blocks
    return dist.new_group(ranks, timeout, pg_options=options, group_desc=name)

"""Global gradient norm, finite check and clipping of sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from csbp.comm.upload import upload

# Numbers summed at once: a CPU makes a copy of them in float64.
_PIECE = 1 << 20


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients over all ranks, float64; NaN or infinite if any rank's gradient is. A scalar on the
    device: the host does not wait for it. Collective.

    One sum over all ranks, the same on every one of them. Left to DTensor, a mesh of two axes or three has it summed
    axis by axis, in float32, with a warning that the ranks may not agree.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0, dtype=torch.float64)
    pieces = [(g.to_local() if isinstance(g, DTensor) else g).reshape(-1).split(_PIECE) for g in gradients]
    # In float32 a large gradient's sum would depend on how many ranks share it, by up to a percent on a CPU.
    norms = torch.stack(torch._foreach_norm([x for parts in pieces for x in parts], 2, torch.float64))
    # What several ranks have a copy of counts once: each gives its share.
    copies = np.repeat([float(_copies(g)) for g in gradients], [len(parts) for parts in pieces])
    total = (norms.square() / upload(copies, norms.device)).sum()
    if any(isinstance(g, DTensor) for g in gradients):
        dist.all_reduce(total)
    return total.sqrt()


def _copies(gradient: Tensor) -> int:
    """On how many ranks each part of a gradient is, by its mesh, which has all ranks of the run."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh
    return math.prod(mesh.size(axis) for axis, placed in enumerate(gradient.placements) if placed.is_replicate())


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients of the finite norm ``norm`` down to at most ``limit``; 0 means no limit."""
    if limit and norm > limit:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], limit / norm)

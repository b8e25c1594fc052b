"""Global gradient norm, finite check and clipping of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients over all ranks; NaN or infinite if any rank's gradient is. A scalar on the device: the
    host does not wait for it. Collective."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients of the finite norm ``norm`` down to at most ``limit``; 0 means no limit."""
    if limit and norm > limit:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], limit / norm)

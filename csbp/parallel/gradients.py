"""Global gradient norm, finite check and clipping of sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def global_norm(parameters: Iterable[nn.Parameter]) -> float:
    """2-norm of all gradients over all ranks; NaN or infinite if any rank's gradient is. Collective."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients of norm ``norm`` down to at most ``limit``; 0 means no limit."""
    if limit and math.isfinite(norm) and norm > limit:
        clip_grads_with_norm_(parameters, limit, torch.tensor(norm))

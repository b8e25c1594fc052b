"""What is kept between forward and backward: activation checkpointing, whole or selective."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import csbp.attention.operator  # noqa: F401  (registers the op that the policy names)

# Attention is the dearest thing to run twice, and the smallest to keep: one row of output and a number.
_ATTENTION = {torch.ops.csbp.attend.default}
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
_KEPT = {"attention": _ATTENTION, "matmuls": _ATTENTION | _PRODUCTS}


def _keep(kept: set[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_checkpointing(units: Sequence[nn.Module], policy: str) -> None:
    """Wrap the units' forwards, in place; names and hooks of the modules stay as they are.

    Args:
        units: usually the decoder layers; call this before they are compiled or sharded.
        policy: "none", "full" (keep a unit's input, compute the rest again), "attention" (keep attention's
            output and log-sum-exp too) or "matmuls" (and what matrix products give). Gradients are the same bit
            for bit.
    """
    if policy != "none":
        for unit in units:
            unit.forward = partial(_forward, unit.forward, policy)


def _forward(inner: Any, policy: str, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    named: dict[str, Any] = {} if policy == "full" else {
        "context_fn": partial(create_selective_checkpoint_contexts, partial(_keep, _KEPT[policy]))}
    return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **named, **kwargs)

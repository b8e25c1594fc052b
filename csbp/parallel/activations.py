"""What is kept between forward and backward: activation checkpointing, whole or selective, and CPU offload."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import csbp.attention.operator  # noqa: F401  (registers the op that the policy names)


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention is the dearest thing to run twice, and the smallest to keep: one row of output and a number."""
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.csbp.attend.default else CheckpointPolicy.PREFER_RECOMPUTE


def apply_checkpointing(units: Sequence[nn.Module], policy: str, offload: bool) -> None:
    """Wrap the units' forwards, in place; names and hooks of the modules stay as they are.

    Args:
        units: usually the decoder layers; call this before they are compiled or sharded.
        policy: "none", "full" (keep a unit's input, compute the rest again) or "attention" (keep attention's
            output and log-sum-exp too). Gradients are the same bit for bit.
        offload: move what is kept to CPU memory until its backward.
    """
    if policy == "none" and not offload:
        return
    for unit in units:
        unit.forward = partial(_forward, unit.forward, policy, offload)


def _forward(inner: Any, policy: str, offload: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    saving: AbstractContextManager[Any] = nullcontext()
    if offload:
        saving = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    with saving:
        if policy == "none":
            return inner(*args, **kwargs)
        named: dict[str, Any] = {} if policy == "full" else {
            "context_fn": partial(create_selective_checkpoint_contexts, _keep_attention)}
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **named, **kwargs)

"""AdamW with its two parameter groups, and learning rates as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from csbp.config.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters; weight decay on those with two or more dims only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # Fused: one pass over weights, gradients and moments, on the CPU as on a GPU, and no number that the host reads.
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, eps=config.eps,
                             betas=(config.beta1, config.beta2), fused=True)


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) out of ``steps``.

    Linear warmup, then "constant", "cosine" down to min_lr_ratio, or "wsd": constant, then linear down over
    the last decay_fraction of the steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    low = config.lr * config.min_lr_ratio
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
        return low + (config.lr - low) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
    if config.schedule == "wsd":
        decay = max(round(steps * config.decay_fraction), 1)
        left = min(max((steps - step) / decay, 0.0), 1.0)
        return low + (config.lr - low) * left
    return config.lr

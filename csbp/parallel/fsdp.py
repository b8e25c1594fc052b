"""FSDP2 over every rank of the run, with gradients that are exact sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, compute: torch.dtype) -> nn.Module:
    """Shard a model's parameters, in place, over a mesh.

    Gradients come out *summed* over the ranks: each rank's loss is already divided by the global counts,
    and a rank holds a part of a pack, not a replica of it.

    Args:
        model: full-size float32 parameters, equal on every rank.
        units: modules that are gathered and freed as one, in forward order.
        mesh: all ranks, also a single one; two axes (replicate, shard) keep copies of the shards.
        compute: dtype of the forward and backward; gradients are reduced in float32 or the masters' dtype.
    """
    master = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy() if compute == master else MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def reshard(model: nn.Module) -> None:
    """Free what a forward without backward has left gathered (FSDP keeps the root's weights for a backward)."""
    if isinstance(model, FSDPModule):
        model.reshard()

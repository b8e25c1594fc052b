"""Everything that parallel training does to a model, in the order in which it must happen."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from csbp.config.schema import ParallelConfig
from csbp.parallel.activations import apply_checkpointing
from csbp.parallel.fsdp import shard_model
from csbp.parallel.offload import Mover, apply_offload
from csbp.parallel.runtime import Runtime
from csbp.parallel.tensor import split_model


def parallelize(model: nn.Module, units: Sequence[nn.Module], config: ParallelConfig, runtime: Runtime,
                compute: torch.dtype, plan: Mapping[str, str] | None = None) -> nn.Module:
    """Split, checkpoint, compile, offload and shard a model, in place.

    Args:
        model: full-size float32 parameters on the rank's device, equal on every rank.
        units: what is checkpointed, compiled and gathered as one, in forward order.
        compute: dtype of forward and backward.
        plan: how the family splits over the tp axis (``ModelAdapter.tp_plan``).

    Raises:
        ConfigError: the model cannot be split.
    """
    # Splitting first: it exchanges parameters and hooks modules, which all that follows must see.
    if runtime.tp_mesh is not None:
        split_model(model, plan or {}, runtime.tp_mesh)
    # Checkpointing before compilation: the compiler must see it to decide what to keep.
    apply_checkpointing(units, config.checkpointing)
    if config.compile:
        # A model's numbers never change. As inputs they would be tensors on the CPU, in each call of a unit.
        torch._dynamo.config.specialize_float = True
        # Of selective checkpointing it warns that nothing may be done in place; no layer does.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        for unit in units:
            # Lengths differ from pack to pack; one graph serves all.
            unit.compile(dynamic=True)
    # Around the compiled code, whose kept tensors are known only when it runs. On a CPU everything is there already.
    if config.offload and runtime.device.type == "cuda":
        apply_offload(units, Mover(torch.cuda.Stream(runtime.device)))
    # Sharding last: its hooks gather a unit's weights before the compiled code runs.
    return shard_model(model, units, runtime.shard_mesh, compute)

"""The host reads the device once a step, at its end: nothing before that needs a number which the device has yet to
compute. On a GPU each such read would stop the host until all kernels so far are done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exact import csbp_model, exact_norms, noising
from packs import make_pack
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from csbp.config.schema import OptimConfig, ParallelConfig
from csbp.models.registry import get_adapter
from csbp.parallel.apply import parallelize
from csbp.parallel.runtime import start_runtime
from csbp.train.optimizer import build_optimizer
from csbp.train.step import StepRunner

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.nonzero_numpy, aten.masked_select, aten.equal, aten._unique2,
           aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave.Tensor, aten.bincount, aten.is_nonzero}
READING = {Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__,
           Tensor.__index__, Tensor.__array__}


class Reads(TorchDispatchMode):
    """Collects operators whose result, or its size, the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else ()
        masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)
        if func in WAITING or func.overloadpacket in WAITING or masks:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Collects what Python asks of tensors that operators do not show: on a CPU most reads are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_cpu = func is Tensor.to and any(isinstance(x, str) for x in (*args[1:], *kwargs.values()))
        listed = func is Tensor.__getitem__ and isinstance(args[1], (list, np.ndarray))  # goes to the device, waited for
        if func in READING or to_cpu or listed:
            self.found.append(func.__name__)
        return func(*args, **kwargs)


def watched_step(tp: int, checkpointing: str, train: bool, careless: bool) -> tuple[list[str], list[str], list[str]]:
    """What was read in ``run``, and in ``update``."""
    config = ParallelConfig(nproc=dist.get_world_size(), tp=tp, checkpointing=checkpointing, device="cpu")
    runtime = start_runtime(config, lambda: Path("unused"))
    adapter, model = get_adapter("qwen3"), csbp_model()
    parallelize(model, adapter.units(model), config, runtime, torch.float64, adapter.tp_plan(model))
    optimizer = build_optimizer(model, OptimConfig(clip_norm=1e-3))
    runner = StepRunner(model, adapter, runtime, "reference", logit_rows=4)
    if careless:
        careful = runner._micro_batch
        runner._micro_batch = lambda *args: careful(*args) * float(careful(*args).sum() > 0)
    how = noising(4, clean_stream="token_causal", ar_weight=0.3)
    packs = [make_pack([1, 3, 5, 13]), make_pack([9, 4], targets=[[8], []], first_id=9)]
    with exact_norms():
        works = runner.prepare(packs, how, step=0)
        with Calls() as calls, Reads() as reads:
            result = runner.run(works, train=train)
        with Calls() as later, Reads() as last:
            if train:
                assert runner.update(result, optimizer, 1e-3).updated
    return calls.found, reads.found, later.found + last.found


@pytest.mark.parametrize(("tp", "checkpointing", "train"), [
    (1, "none", True), (2, "attention", True), pytest.param(1, "full", True, marks=pytest.mark.slow),
    (1, "none", False)])
def test_one_read_a_step(ranks, tp, checkpointing, train):
    for calls, reads, later in ranks(2, watched_step, tp, checkpointing, train, False):
        assert calls == ["tolist"] and reads == [] and later == []


def test_a_careless_step_is_found(ranks):
    calls, reads, _ = ranks(2, watched_step, 1, "none", False, True)[0]
    assert calls == ["__float__", "__float__", "tolist"] and len(reads) == 2

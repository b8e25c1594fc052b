"""A model and its optimizer as one flat set of named tensors, and back.

Names are ``model.<parameter or buffer>`` and ``optimizer.<parameter>.<state>``. Tensors are the live ones
(DTensors where FSDP has sharded them), so loading writes into them in place. Hyperparameters are not among
them: on resume they come from the run's configuration, as everything else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from csbp.errors import UserError

MODEL, OPTIMIZER = "model.", "optimizer."
# What wrapping a module adds to the names of its parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without the parts that compiling or wrapping its module adds."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once: a tied weight under its first name only."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[MODEL + plain_name(name)] = value.detach()
    return found


def _named_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters in its own order."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        assert id(parameter) in names, "the optimizer holds a parameter that is not the model's"
        yield names[id(parameter)], parameter


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state: exp_avg, exp_avg_sq and the 0-dim step for AdamW."""
    found: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"optimizer state {key!r} of {name} is no tensor"
            found[f"{OPTIMIZER}{name}.{key}"] = value
    return found


def empty_optimizer_tensors(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Zero tensors for the optimizer state in ``saved``, sharded as this model's parameters are.

    Raises:
        UserError: ``saved`` has state for a parameter that the optimizer does not train.
    """
    parameters = dict(_named_parameters(model, optimizer))
    found: dict[str, Tensor] = {}
    for name, stored in saved.items():
        if not name.startswith(OPTIMIZER):
            continue
        parameter = parameters.get(name.removeprefix(OPTIMIZER).rpartition(".")[0])
        if parameter is None:
            raise UserError(f"the checkpoint has optimizer state {name!r}, but this run does not train that weight")
        dtype = stored.properties.dtype
        # Moments have the parameter's shape and sharding; AdamW's step is a number on the CPU.
        alike = stored.size == parameter.shape
        found[name] = torch.zeros_like(parameter, dtype=dtype) if alike else torch.zeros(stored.size, dtype=dtype)
    return found


def install_optimizer_tensors(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Make ``tensors`` (named as ``optimizer_tensors`` names them) the optimizer's whole state."""
    numbers = {name: number for number, (name, _) in enumerate(_named_parameters(model, optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        state.setdefault(numbers[parameter], {})[key] = value
    # The optimizer's own loader knows which values belong on the parameter's device (step does if fused).
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def check_model(wanted: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UserError: names or shapes differ; the first difference is named.
    """
    have = {name for name in saved if name.startswith(MODEL)}
    for name in sorted(have ^ set(wanted)):
        side = "the checkpoint lacks" if name in wanted else "the model lacks"
        raise UserError(f"the checkpoint is of another model: {side} {name.removeprefix(MODEL)!r}")
    for name, value in wanted.items():
        if value.shape != saved[name].size:
            raise UserError(f"the checkpoint is of another model: {name.removeprefix(MODEL)!r} is "
                            f"{list(saved[name].size)} there and {list(value.shape)} here")


def file_numbers(tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, int]:
    """Which file (1, 2, ...) of a rank each tensor's shard goes to, the same on every rank.

    Bounds the memory that writing takes: a file is copied to the CPU and serialised as one. Optimizer state
    starts a new file, so that loading the model alone opens none of it.

    Args:
        file_bytes: most bytes of one number, over all ranks together (one larger tensor still fits).
    """
    numbers: dict[str, int] = {}
    number, used, kind = 0, 0, ""
    for name, value in tensors.items():
        size = value.numel() * value.element_size()
        if name.partition(".")[0] != kind or used + size > file_bytes:
            number, used, kind = number + 1, 0, name.partition(".")[0]
        numbers[name], used = number, used + size
    return numbers

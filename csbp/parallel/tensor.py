"""Tensor parallelism: heads and MLP columns split over the tp axis, by the plan that a family's adapter gives.

The ranks of a tp axis hold the same rows, and between modules of the plan they have the same numbers. Parameters are
DTensors on the tp mesh, copied ones too, so that FSDP, norms, the optimizer and checkpoints see whole weights on one
mesh. Activations are plain tensors: a module of the plan computes with its local part of the weight and calls one
of three collectives, which compile for any number of rows.

H hidden channels, V vocabulary.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from csbp.diffusion.loss import Head
from csbp.errors import ConfigError
from csbp.parallel.sums import Enter, Join, Leave, stacked


class _Part:
    """Mixed into the class of a module whose weights are DTensors; it computes with its local parts."""

    tp_group: str
    tp_rank: int

    def local(self, name: str) -> Tensor:
        """This rank's part of a parameter."""
        parameter: Any = self._parameters[name]  # type: ignore[attr-defined]
        return parameter.to_local()  # type: ignore[no-any-return]


class _Copy(_Part):
    """Any module, with whole weights and the same rows on every rank. Its own code meets plain tensors; all others,
    FSDP among them, meet the parameters."""

    inside = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.inside = True
        try:
            return super().forward(*inputs, **named)  # type: ignore[misc]
        finally:
            self.inside = False


class _CopyForHeads(_Copy):
    """Applied to this rank's heads alone: gradients of the weights add up over the ranks."""

    def local(self, name: str) -> Tensor:
        return Enter.apply(super().local(name), self.tp_group)


class _Columns(_Part):
    """A linear layer's outputs split; the module that holds it has let its rows in."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias  # type: ignore[attr-defined]
        return functional.linear(x, self.local("weight"), None if bias is None else self.local("bias"))


class _OwnColumns(_Columns):
    """The only split layer of its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Enter.apply(x, self.tp_group))


class _JoinedColumns(_OwnColumns):
    """Outputs split for the product only."""

    def forward(self, x: Tensor) -> Tensor:
        return Join.apply(super().forward(x), self.tp_group, self.tp_rank)


class _Rows(_Part):
    """A linear layer's inputs split; the bias is whole and counts once."""

    def forward(self, x: Tensor) -> Tensor:
        out = Leave.apply(functional.linear(x, self.local("weight")), self.tp_group)
        return out if self.bias is None else out + self.local("bias")  # type: ignore[attr-defined]


class _Vocabulary(_Part):
    """An embedding of which each rank has V / tp rows."""

    def forward(self, ids: Tensor) -> Tensor:
        weight_VH = self.local("weight")
        ids = ids - self.tp_rank * len(weight_VH)
        here = (ids >= 0) & (ids < len(weight_VH))
        rows = functional.embedding(torch.where(here, ids, 0), weight_VH)
        return Leave.apply(torch.where(here[..., None], rows, 0.0), self.tp_group)


class _Holder:
    """Mixed into the class of a module that holds several layers split by columns: its rows are let in once, so that
    their gradients are added before they travel. By convention they are its first argument, or ``hidden_states``."""

    tp_group: str

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if inputs:
            inputs = (Enter.apply(inputs[0], self.tp_group), *inputs[1:])
        else:
            named = {**named, "hidden_states": Enter.apply(named["hidden_states"], self.tp_group)}
        return super().forward(*inputs, **named)  # type: ignore[misc]


def _everywhere(name: str) -> Placement:
    return Replicate()


# Style, named as in the plans of transformers' models -> what is mixed in, and how a parameter is cut.
_STYLES: dict[str, tuple[type[_Part], Callable[[str], Placement]]] = {
    "colwise": (_OwnColumns, lambda name: Shard(0)),
    "colwise_gather_output": (_JoinedColumns, lambda name: Shard(0)),
    "rowwise": (_Rows, lambda name: Shard(1) if name == "weight" else Replicate()),
    "embedding_rowwise": (_Vocabulary, lambda name: Shard(0)),
    "replicated_with_grad_allreduce": (_CopyForHeads, _everywhere),
}


def split_model(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split a model's parameters over a tp axis, in place.

    Args:
        model: full-size parameters, equal on every rank; what the plan splits divides by the axis.
        plan: module name, in which ``*`` stands for anything, -> name of a style; modules that it does not name are
            copied.
        mesh: the tp axis.

    Raises:
        ConfigError: the family has no plan, or one with a style that csbp does not know.
    """
    if not plan:
        raise ConfigError("parallel.tp", mesh.size(), "this model's family has no plan for it; use parallel.tp=1")
    for pattern, style in plan.items():
        if style not in _STYLES:
            raise ConfigError("parallel.tp", mesh.size(), f"the model's plan wants {style!r} for {pattern}, which csbp "
                                                          "does not know; use parallel.tp=1")
    cut: dict[int, nn.Parameter] = {}  # a tied weight stays one
    holders = []
    for name, module in list(model.named_modules()):
        style = style_of(name, plan)
        part, placed = _STYLES.get(style, (_Copy, _everywhere))
        if style == "colwise" and _columns_of(model, name, plan) > 1:
            part, holder = _Columns, model.get_submodule(name.rpartition(".")[0])
            holders += [] if holder in holders else [holder]
        names = [own for own, _ in module.named_parameters(recurse=False)]
        for own in names:
            whole: nn.Parameter = getattr(module, own)
            if id(whole) not in cut:
                # Every rank has the whole weight already: cut it here, ask nobody.
                piece = distribute_tensor(whole.detach(), mesh, [placed(own)], src_data_rank=None)
                cut[id(whole)] = nn.Parameter(piece, requires_grad=whole.requires_grad)
            module.register_parameter(own, cut[id(whole)])
        if names:
            _mix(module, part, tuple(names) if issubclass(part, _Copy) else (), mesh)
    for holder in holders:
        _mix(holder, _Holder, (), mesh)


def enter_head(rows: Tensor, head: nn.Linear) -> tuple[Tensor, Head]:
    """Rows [..., H] as they go into a model's head, as [E, H], and the part of its matrix that this rank has.

    Call it where the head would be called, in the model's own forward: there FSDP has gathered its weight.
    """
    assert head.bias is None, "a head with a bias"
    part: Any = head
    if isinstance(head, _JoinedColumns):
        rows, weight_VH = Enter.apply(rows, part.tp_group), part.local("weight")
        return rows.flatten(0, -2), Head(weight_VH, part.tp_rank * len(weight_VH),
                                         lambda x: stacked(x, part.tp_group))
    return rows.flatten(0, -2), Head(part.local("weight") if isinstance(head, _Part) else head.weight)


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """The style that a plan gives to the module of that name; empty where it is copied."""
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), "")


def part_of(name: str, plan: Mapping[str, str], tp: int) -> tuple[int, int]:
    """Into how many parts a plan cuts the inputs and the outputs of the matrix of that module."""
    _, placed = _STYLES.get(style_of(name, plan), (_Copy, _everywhere))
    where = placed("weight")
    return tp if where == Shard(1) else 1, tp if where == Shard(0) else 1


def _columns_of(model: nn.Module, name: str, plan: Mapping[str, str]) -> int:
    """How many layers split by columns the module has that holds this one."""
    parent = name.rpartition(".")[0]
    return sum(style_of(f"{parent}.{child}", plan) == "colwise"
               for child, _ in model.get_submodule(parent).named_children())


def _mix(module: nn.Module, part: type, names: tuple[str, ...], mesh: DeviceMesh) -> None:
    module.__class__ = _mixed(part, type(module), names)  # type: ignore[arg-type]
    for name, value in {"tp_group": str(mesh.get_group().group_name), "tp_rank": mesh.get_local_rank()}.items():
        setattr(module, name, value)


@cache  # one class for all layers: a compiler sees one kind of module
def _mixed(part: type, kind: type, names: tuple[str, ...]) -> type:
    def parameter(name: str) -> property:
        return property(lambda self: self.local(name) if self.inside else self._parameters[name])

    return type(kind.__name__, (part, kind), {name: parameter(name) for name in names})

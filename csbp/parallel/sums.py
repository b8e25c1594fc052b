"""What the ranks of a tp axis tell each other in a forward and its backward: three functions of autograd,
and a gathering for code that brings its own.

They call functional collectives, which compile for any number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

# torch 2.11 knows the older name alone; later ones warn of it.
_GATHER = funcol.all_gather_single if hasattr(funcol, "all_gather_single") else funcol.all_gather_tensor


def _sum(x: Tensor, group: Any) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))


def _gather(x: Tensor, group: Any) -> Tensor:
    return funcol.wait_tensor(_GATHER(x.contiguous()[None], 0, group))


def stacked(x: Tensor, group: Any) -> Tensor:
    """Every rank's tensor, [ranks, ...]. Outside of autograd."""
    return _gather(x, group)


class Enter(torch.autograd.Function):
    """The same on every rank, from where each rank computes a part: gradients add up over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """x, any shape, as it is; ``group``: name of the tp axis's process group."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The sum of the ranks' gradients, like x."""
        return _sum(dx, ctx.group), None


class Leave(torch.autograd.Function):
    """The sum of the ranks' parts, the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """The sum over the group of x, any shape."""
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """dx as it is: every rank has the same, and its part counts once."""
        return dx, None


class Join(torch.autograd.Function):
    """The ranks' columns side by side, the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, rank: int) -> Tensor:
        """[..., C * ranks] of x [..., C]; ``rank``: this one's place in the group."""
        ctx.rank, ctx.width = rank, x.shape[-1]
        return torch.cat(_gather(x, group).unbind(0), -1)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """This rank's columns of dx."""
        return dx.narrow(-1, ctx.rank * ctx.width, ctx.width), None, None

"""Core attention on interval masks: backend choice, shape checks, autograd."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from csbp.attention import flash, flex, reference, wide
from csbp.attention.mask import IntervalMask

ORDER = ("flash", "wide", "flex", "reference")  # in which "auto" asks them


class Backend(Protocol):
    """What a kernel must offer. Shapes as in ``reference``."""

    def forward(self, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask,
                scale: float) -> tuple[Tensor, Tensor]:
        """Output [S, N, D] and log-sum-exp [S, N], stored head after head."""
        ...

    def backward(self, dout_SND: Tensor, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SND: Tensor,
                 lse_SN: Tensor, mask: IntervalMask, scale: float,
                 dlse_SN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, of which the output and log-sum-exp are the whole softmax's."""
        ...


class _Auto:
    """Picks by what is asked: the fastest backend that can compute it. Says so once for each kind of question."""

    def forward(self, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: IntervalMask,
                scale: float) -> tuple[Tensor, Tensor]:
        return _fastest(q_SND, v_TKD).forward(q_SND, k_TKD, v_TKD, mask, scale)

    def backward(self, dout_SND: Tensor, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SND: Tensor,
                 lse_SN: Tensor, mask: IntervalMask, scale: float,
                 dlse_SN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return _fastest(q_SND, v_TKD).backward(dout_SND, q_SND, k_TKD, v_TKD, out_SND, lse_SN, mask, scale, dlse_SN)


BACKENDS: dict[str, Backend] = {"auto": _Auto(), "flash": flash, "wide": wide, "flex": flex, "reference": reference}


def get_backend(name: str) -> Backend:
    """The backend of that name; "auto" is the fastest that can compute what it is given.

    Raises:
        ValueError: unknown name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r}: use one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def resolved(backend: Backend, query: Tensor, value: Tensor) -> Backend:
    """The backend that computes these, where "auto" was asked for."""
    return _fastest(query, value) if isinstance(backend, _Auto) else backend


def _fastest(query: Tensor, value: Tensor) -> Backend:
    return BACKENDS[choose(query.device, query.dtype, query.shape[2], value.shape[2],
                           torch.are_deterministic_algorithms_enabled())]


@functools.cache
def choose(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, deterministic: bool) -> str:
    """Name of the backend that "auto" stands for."""
    passed = passed_over(device, dtype, key_dim, value_dim, deterministic)
    return next(name for name in ORDER if name not in passed)


def passed_over(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int,
                deterministic: bool) -> dict[str, str]:
    """The backends that "auto" cannot take, in the order in which it would, and why."""
    reasons = {"flash": flash.unusable(device, dtype, key_dim, value_dim, deterministic),
               "wide": wide.unusable(device, dtype, key_dim, value_dim),
               "flex": flex.unusable(device, dtype, key_dim, value_dim)}
    return {name: why for name, why in reasons.items() if why}


def default_scale(query: Tensor, scale: float | None) -> float:
    """``scale``, or 1 / sqrt(head dim)."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def check_shapes(query: Tensor, key: Tensor, value: Tensor, rows: int) -> None:
    """Refuse shapes that cannot be attended.

    Raises:
        ValueError: naming the tensor and what it must be.
    """
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
        raise ValueError(f"query, key and value must be [rows, heads, dim], got {tuple(query.shape)}, "
                         f"{tuple(key.shape)}, {tuple(value.shape)}")
    if key.shape[:2] != value.shape[:2]:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in rows or heads")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"head dim of query is {query.shape[2]}, of key {key.shape[2]}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads are not a multiple of {key.shape[1]} key heads")
    if rows != query.shape[0]:
        raise ValueError(f"the mask has {rows} rows, the query {query.shape[0]}")
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        raise ValueError(f"query, key and value must share one float dtype, got {query.dtype}, {key.dtype}, "
                         f"{value.dtype}")


class _IntervalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask, scale: float,
                backend: Backend) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward(query, key, value, mask, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask, ctx.scale, ctx.backend = mask, scale, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        grads = ctx.backend.backward(dout, query, key, value, out, lse, ctx.mask, ctx.scale, dlse)
        return (*(g.to(query.dtype) for g in grads), None, None, None)


def interval_attention(query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask, *,
                       scale: float | None = None, backend: str = "reference") -> tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T) V over the keys that ``mask`` lets each row see. Differentiable.

    Args:
        query: [S, N, D].
        key, value: [T, K, D]; N is a multiple of K (grouped-query attention). Value's D may differ.
        mask: int32 [S] ranges into the T keys.
        scale: score factor; default 1 / sqrt(D).
        backend: "auto", "flash", "wide", "flex" or "reference".

    Returns:
        out like query, and lse [S, N], the log-sum-exp of the scores, float32 (float64 for float64 input).
        A row that sees nothing gives out 0, lse -inf and zero gradients.

    Raises:
        ValueError: shapes, dtypes or the backend's name do not fit.
    """
    check_shapes(query, key, value, len(mask))
    return _IntervalAttention.apply(query, key, value, mask, default_scale(query, scale),
                                    get_backend(backend))

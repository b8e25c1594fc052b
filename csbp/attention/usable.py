"""Whether a backend that is asked for by name can compute what a model asks of it."""

from __future__ import annotations

import inspect

import torch

from csbp.attention.core import BACKENDS, ORDER, choose, passed_over
from csbp.errors import ConfigError
from csbp.plan.shapes import ModelShape


def unusable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> str:
    """Why a backend of ``BACKENDS`` cannot compute that, in words; "" where it can."""
    ask = getattr(BACKENDS[name], "unusable", None)
    if ask is None:  # one that takes everything
        return ""
    known = {"device": device, "dtype": dtype, "key_dim": head_dim, "value_dim": head_dim,
             "deterministic": deterministic}
    return str(ask(**{asked: known[asked] for asked in inspect.signature(ask).parameters}))


def taken(name: str, shape: ModelShape, device: torch.device, dtype: torch.dtype,
          deterministic: bool) -> dict[str, str]:
    """The backends that compute a model's attention, each with a sentence on what it does and why.

    Args:
        name: as ``attention.backend``.
        dtype: of the computation.
    """
    found: dict[str, str] = {}
    for head_dim in sorted({part.head_dim for part in shape.attention}):
        asked = (device, dtype, head_dim, head_dim, deterministic)
        backend = choose(*asked) if name == "auto" else name
        passed = passed_over(*asked) if name == "auto" and device.type == "cuda" else {}
        why = "".join(f"; not {other}: {passed[other]}" for other in ORDER[:ORDER.index(backend)] if other in passed)
        said = f"attention.backend={name}: {backend} for heads of {head_dim}{why}"
        found[backend] = f"{found[backend]}. {said}" if backend in found else said
    return found


def check_backend(name: str, shape: ModelShape, device: torch.device, dtype: torch.dtype, deterministic: bool) -> None:
    """Refuse a backend that some layer cannot run on.

    Args:
        dtype: of the computation.

    Raises:
        ConfigError: with its reason.
    """
    for head_dim in sorted({part.head_dim for part in shape.attention}):
        if reason := unusable(name, device, dtype, head_dim, deterministic):
            raise ConfigError("attention.backend", name, f"cannot run this model here: {reason}; use auto, which takes "
                                                         "the fastest that can")

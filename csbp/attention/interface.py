"""csbp as an attention implementation of transformers, so that stock models run unmodified on a rank's rows.

Call a model whose config has ``_attn_implementation = "csbp"`` with explicit ``position_ids`` and with
``csbp_plan=`` a plan (anything with ``attend``, see ``BoundPlan.attend``). Where a model has more than one kind of
layer, each attention module carries its kind's name as ``csbp_kind``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "csbp"


def csbp_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                   scaling: float | None = None, dropout: float = 0.0, **kwargs: Any) -> tuple[Tensor, None]:
    """One layer's attention.

    Args:
        module: the layer's attention module; its ``layer_idx`` is used.
        query: [1, N, S, D]; key, value: [1, K, S, D].
        attention_mask: always None; what rows see is the plan's.
        scaling, dropout: as transformers passes them.
        kwargs: must hold ``csbp_plan``.

    Returns:
        ([1, S, N, D], None).

    Raises:
        ValueError: no plan given, a batch, dropout, or a feature that interval masks cannot express.
    """
    plan = kwargs.get("csbp_plan")
    if plan is None:
        raise ValueError("attention implementation 'csbp' needs csbp_plan= in the model's forward call")
    if query.shape[0] != 1:
        raise ValueError(f"csbp packs documents into one row of tokens; got a batch of {query.shape[0]}")
    if dropout:
        raise ValueError(f"attention_dropout={dropout}: set it to 0 in the model's config; csbp's gradients "
                         "are those of one device, which unkeyed dropout would break")
    for name in ("s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} (attention sinks or score capping) is not supported by csbp")
    # A compiled layer is compiled anew for each value of what it reads: the number only where it is needed.
    layer = int(module.layer_idx) if plan.numbers_layers else 0  # type: ignore[arg-type]
    kind = getattr(module, "csbp_kind", "full")
    if kind == "full" and getattr(module, "sliding_window", None) is not None:
        raise ValueError(f"layer {module.layer_idx} has a sliding window, but its csbp_kind is not set")
    out = plan.attend(kind, *(x[0].transpose(0, 1) for x in (query, key, value)),
                      layer=layer, scale=scaling)
    return out[None], None


def register() -> None:
    """Make the name "csbp" known to transformers. Safe to call again."""
    AttentionInterface.register(NAME, csbp_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)

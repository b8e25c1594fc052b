"""Qwen3: the stock transformers model, run on a rank's rows with csbp's attention.

Legend: S local rows, E rows with a loss, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from csbp.attention.operator import BoundPlan
from csbp.models.protocol import LocalBatch, Reader, read_instead
from csbp.models.qwen3.settings import read_settings
from csbp.plan.geometry import LayerKind

KIND_OF_TYPE = {"full_attention": "full", "sliding_attention": "sliding"}


def _model(model: nn.Module) -> Qwen3ForCausalLM:
    return cast(Qwen3ForCausalLM, model)


def _kinds(config: Qwen3Config) -> tuple[str, ...]:
    """The layer kind of every layer."""
    return tuple(KIND_OF_TYPE[t] for t in config.layer_types or ())


def _named(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Tell each attention module its layer kind."""
    for layer, kind in zip(model.model.layers, _kinds(model.config), strict=True):
        layer.self_attn.csbp_kind = kind
    return model


class Qwen3Adapter:
    """``ModelAdapter`` of Qwen3ForCausalLM (transformers models/qwen3)."""

    family = "qwen3"

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        """Pretrained weights from a Hugging Face folder."""
        config = read_settings(path, {})
        return _named(Qwen3ForCausalLM.from_pretrained(path, config=config, dtype=dtype, local_files_only=True,
                                                       use_safetensors=True))

    def build(self, path: Path | None, shape: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
        """Random weights by the family's own initialisation (draws from torch's global generator)."""
        return cast(nn.Module, _named(Qwen3ForCausalLM(read_settings(path, shape)))).to(dtype)

    def layer_kinds(self, model: nn.Module, clean: str) -> tuple[LayerKind, ...]:
        """One kind, or two where some layers have a sliding window."""
        config = _model(model).config
        kinds = {"full": LayerKind("full", clean),
                 "sliding": LayerKind("sliding", clean, window=config.sliding_window)}
        return tuple(kinds[name] for name in dict.fromkeys(_kinds(config)))

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The decoder layers."""
        return list(_model(model).model.layers)

    def tp_plan(self, model: nn.Module) -> Mapping[str, str]:
        """transformers' own, and the vocabulary's rows over the ranks: embedding and head may be one weight."""
        base = _model(model).config.base_model_tp_plan
        return {**{f"model.{name}": style for name, style in base.items()},
                "model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}

    def forward(self, model: nn.Module, batch: LocalBatch, plan: BoundPlan, read: Reader | None = None) -> Tensor:
        """Logits [E, V] of the rows with a loss, or what ``read`` makes of these rows."""
        if not hasattr(_model(model).model.layers[0].self_attn, "csbp_kind"):
            _named(_model(model))
        # With its masks given, none, the library need not look at the positions, for which it would wait.
        with read_instead(_model(model).lm_head, read):
            out = model(input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False,
                        attention_mask=dict.fromkeys(KIND_OF_TYPE), logits_to_keep=batch.loss_rows, csbp_plan=plan)
        return cast(Tensor, out.logits if read else out.logits[0])

    def export_config(self, model: nn.Module, diffusion: Mapping[str, Any]) -> dict[str, Any]:
        """Qwen3's config.json with the diffusion properties beside its own fields."""
        config = _model(model).config.to_dict()
        config.update(architectures=["Qwen3ForCausalLM"], use_cache=True, **diffusion)
        return {k: v for k, v in config.items() if not k.startswith("_")}


ADAPTER = Qwen3Adapter()

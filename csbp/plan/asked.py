"""What ``model.shape`` asks for over the fields of a config.json."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from csbp.errors import ConfigError
from csbp.plan.geometry import LayerKind

# What planning reads of a configuration (csbp/plan/shapes.py). Families have other fields too, which only they know.
_READ = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_global_key_value_heads", "global_head_dim", "attention_k_eq_v", "vocab_size", "tie_word_embeddings",
    "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "num_experts", "n_routed_experts",
    "num_experts_per_tok", "top_k_experts", "moe_intermediate_size", "canvas_length", "text_config")
_ALIKE = 0.85  # of two names, where one is the other misspelt


def expect_fields(base: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse a misspelt field: planning would go by what it had, and say nothing.

    Args:
        base: the config.json, whose fields are all known.
        changes: ``model.shape``.

    Raises:
        ConfigError: naming the field, and the one that was meant.
    """
    for name, value in changes.items():
        meant = difflib.get_close_matches(name, _READ, n=1, cutoff=_ALIKE)
        if name not in _READ and name not in base and meant:
            raise ConfigError(f"model.shape.{name}", value, f"no such field; did you mean {meant[0]}?")


def shaped(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with other fields. A list of layer types that the changes would contradict goes: it is then
    derived anew."""
    derived = ("num_hidden_layers", "use_sliding_window", "max_window_layers")
    left_out = ("layer_types",) if any(name in changes for name in derived) else ()
    return {**{name: value for name, value in base.items() if name not in left_out}, **changes}


def expect_window(changes: Mapping[str, Any], kinds: Iterable[LayerKind]) -> None:
    """Refuse a window that was asked for where no layer has one.

    Args:
        changes: ``model.shape``.
        kinds: of the model with them.

    Raises:
        ConfigError: naming the field that asks for it.
    """
    asked = next((name for name in ("sliding_window", "use_sliding_window") if changes.get(name)), None)
    if asked and not any(kind.window for kind in kinds):
        raise ConfigError(f"model.shape.{asked}", changes[asked], "no layer would have a window: that takes "
                          "use_sliding_window=true with max_window_layers, the first layers without one, or "
                          "layer_types")

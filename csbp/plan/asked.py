"""What ``model.shape`` asks for over the fields of a config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from csbp.errors import ConfigError
from csbp.plan.geometry import LayerKind


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

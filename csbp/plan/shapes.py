"""What planning knows of a model: the sizes in its config.json, no weights.

Counted are matrices alone: norms, biases and routers' scales are below a thousandth of a model.
H query heads, K key/value heads, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from csbp.errors import ConfigError
from csbp.plan.geometry import LayerKind

_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
_LARGEST = 2**31 - 1  # of any size
_DEEPEST = 1024  # layers: each is modules, which take a millisecond and more to make
# What interval attention cannot express, by the fields of transformers' configurations that ask for it.
_REFUSED = {"kv_lora_rank": "multi-head latent attention (MLA)", "alibi": "ALiBi",
            "attn_logit_softcapping": "capping of attention scores",
            "add_swa_attention_sink_bias": "an attention sink", "add_full_attention_sink_bias": "an attention sink"}
BACKWARD_PAIRS = 2.5  # the backward of attention is five matrix products against the forward's two


@dataclass(frozen=True)
class AttentionLayers:
    """The attention layers of one kind.

    Attributes:
        kind: what their rows see.
        count: how many layers.
        heads, kv_heads: H and K.
        head_dim: d of queries, keys and values.
        value_matrix: False where values are the keys' projection, normed otherwise.
    """

    kind: LayerKind
    count: int
    heads: int
    kv_heads: int
    head_dim: int
    value_matrix: bool = True

    @property
    def row_elements(self) -> int:
        """Numbers in the key and the value of one row of one layer; they travel apart."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs of one attended pair in one layer: QK and PV over all query heads."""
        return 4 * self.heads * self.head_dim

    def linears(self, hidden: int) -> list[tuple[int, int]]:
        """(inputs, outputs) of the projections of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [(hidden, queries), *[(hidden, keys)] * (1 + self.value_matrix), (queries, hidden)]


@dataclass(frozen=True)
class ModelShape:
    """A decoder.

    Attributes:
        attention: its layers by kind.
        hidden: width of the residual stream.
        ffn: width of the dense gated MLP; 0 if there is none.
        experts, experts_per_token, expert_ffn: of the mixture of experts, beside or in place of the dense MLP.
        vocabulary: V. tied: the embedding is also the head.
        own_clean_pass: the family's own code runs the clean rows first and the noised rows in a second pass over
            kept keys. Published byte counts of such a model hold two passes; csbp runs both streams in one.
    """

    attention: tuple[AttentionLayers, ...]
    hidden: int
    ffn: int
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    own_clean_pass: bool = False

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return sum(part.count for part in self.attention)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of attention layer."""
        return tuple(part.kind for part in self.attention)

    def weights(self, kinds: Iterable[LayerKind]) -> tuple[int, ...]:
        """What attending one pair costs in all layers of each of these kinds, beside the others: 25 layers of 16 x 256
        and 5 of 16 x 512 weigh 5 and 2.

        Raises:
            KeyError: the model has no layers of a kind of that name.
        """
        costs = {part.kind.name: part.count * part.pair_flops for part in self.attention}
        chosen = [costs[kind.name] for kind in kinds]
        return tuple(cost // math.gcd(*chosen) for cost in chosen)

    def layer_linears(self, part: AttentionLayers, *, active: bool) -> list[tuple[int, int]]:
        """(inputs, outputs) of every matrix of one layer; ``active``: of those that one token passes through."""
        hidden, chosen = self.hidden, self.experts_per_token if active else self.experts
        found = part.linears(hidden)
        for width, number in ((self.ffn, 1), (self.expert_ffn, chosen)):
            if width:
                found += ([(hidden, width)] * 2 + [(width, hidden)]) * number
        return found + ([(hidden, self.experts)] if self.experts else [])

    def _layer_parameters(self, *, active: bool) -> int:
        return sum(part.count * _area(self.layer_linears(part, active=active)) for part in self.attention)

    @property
    def parameters(self) -> int:
        """All of the model's."""
        return self._layer_parameters(active=False) + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Those that one token passes through, embedding and head included."""
        return self._layer_parameters(active=True) + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest decoder layer, the unit that is gathered as one."""
        return max(_area(self.layer_linears(part, active=False)) for part in self.attention)

    @property
    def row_flops(self) -> int:
        """Forward FLOPs of the linear layers for one row, the head apart."""
        return 2 * self._layer_parameters(active=True)

    @property
    def row_pairs(self) -> int:
        """What a row takes beside attention, as so many attended pairs in each layer, forward and backward together:
        about 25,000 for dense models of 8B parameters."""
        linear, pairs = 3 * self.row_flops, sum(part.count * part.pair_flops for part in self.attention)
        return round(linear / (pairs * (1 + BACKWARD_PAIRS)))

    @property
    def logit_flops(self) -> int:
        """Forward FLOPs of the head for one row with a loss."""
        return 2 * self.vocabulary * self.hidden

    def row_width(self, part: AttentionLayers) -> int:
        """Numbers that go into and come out of one layer's matrices for one row."""
        return sum(inputs + outputs for inputs, outputs in self.layer_linears(part, active=True))


def _area(linears: list[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in linears)


def model_shape(fields: Mapping[str, Any], clean: str) -> ModelShape:
    """Read a Hugging Face configuration.

    Args:
        fields: config.json, or ``model.shape``; a nested ``text_config`` is taken.
        clean: what a clean row sees, "block_causal" or "token_causal".

    Raises:
        ConfigError: a size is missing, is no positive whole number, or does not fit the others.
    """
    nested = fields.get("text_config", {})
    if not isinstance(nested, Mapping):
        raise ConfigError("model.shape.text_config", nested, "must be a mapping, as in {name: value}")
    fields = {**fields, **nested}

    def size(*names: str, default: int | None = None, high: int = _LARGEST) -> int:
        given = next((fields[name] for name in names if fields.get(name) is not None), default)
        low = 1 if default is None else 0
        if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
            raise ConfigError(f"model.shape.{names[0]}", given, f"must be a whole number from {low} to {high:,}")
        return given

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    layers = size("num_hidden_layers", high=_DEEPEST)
    head_dim, kv_heads = size("head_dim"), size("num_key_value_heads", default=heads)
    if not kv_heads or heads % kv_heads:
        raise ConfigError("model.shape.num_key_value_heads", kv_heads, f"must divide num_attention_heads={heads}")
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise ConfigError(f"model.shape.{name}", fields[name], f"{what} cannot be written as two ranges of keys; "
                                                                   "choose a model without it")
    far_heads = size("num_global_key_value_heads", default=kv_heads)
    if not far_heads or heads % far_heads:
        raise ConfigError("model.shape.num_global_key_value_heads", far_heads,
                          f"must divide num_attention_heads={heads}")
    types = _layer_types(fields, layers)
    groups = []
    for name in dict.fromkeys(types):
        window = size("sliding_window") if name == "sliding_attention" else None
        apart = name == "full_attention" and fields.get("global_head_dim") is not None
        groups.append(AttentionLayers(
            LayerKind(_KINDS[name], clean, window=window), types.count(name), heads,
            far_heads if apart else kv_heads,
            size("global_head_dim") if apart else head_dim,
            value_matrix=not (apart and fields.get("attention_k_eq_v", True))))
    experts = size("num_experts", "n_routed_experts", default=0)
    # The configurations that name top_k_experts have a dense MLP beside the experts, others have it in their place.
    beside = not experts or "top_k_experts" in fields
    return ModelShape(
        tuple(groups), hidden, size("intermediate_size") if beside else 0, size("vocab_size"),
        bool(fields.get("tie_word_embeddings", True)), experts,
        size("num_experts_per_tok", "top_k_experts", high=experts) if experts else 0,
        size("moe_intermediate_size") if experts else 0, own_clean_pass="canvas_length" in fields)


def _layer_types(fields: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of every layer, by the rules of transformers' configurations."""
    types = fields.get("layer_types")
    if types is None:
        first = fields.get("max_window_layers", 0) if fields.get("use_sliding_window") else layers
        if not isinstance(first, int) or first < 0:
            raise ConfigError("model.shape.max_window_layers", first, "must be a whole number, at least 0")
        return ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(layers - first, 0)
    if not isinstance(types, (list, tuple)):
        raise ConfigError("model.shape.layer_types", types, "must be a list, one entry a layer")
    if len(types) != layers:
        raise ConfigError("model.shape.layer_types", f"{len(types)} entries", f"must name {layers} layers, "
                                                                              "one entry a layer")
    for name in types:
        if name not in _KINDS:
            raise ConfigError("model.shape.layer_types", name, f"must be one of {', '.join(_KINDS)}; csbp has no "
                                                               "exchange for another kind of layer yet")
    return list(types)

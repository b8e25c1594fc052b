"""What a tp axis leaves of a model on one rank, and what its ranks tell each other.

N ranks of a sequence axis.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from csbp.plan.shapes import ModelShape


def split_shape(shape: ModelShape, tp: int) -> ModelShape:
    """The heads, MLP columns and vocabulary rows of one of ``tp`` ranks, at the model's full width."""
    parts = tuple(replace(part, heads=part.heads // tp, kv_heads=part.kv_heads // tp) for part in shape.attention)
    return replace(shape, attention=parts, ffn=shape.ffn // tp, expert_ffn=shape.expert_ffn // tp,
                   vocabulary=shape.vocabulary // tp)


def split_bytes(shape: ModelShape, rows: np.ndarray, loss_rows: np.ndarray, *, tp: int, checkpointing: str,
                itemsize: int) -> np.ndarray:
    """Bytes that a tp axis brings into a rank for one pack, float64 [N].

    A layer adds up its rows after attention and after its MLP, and in the backward the gradients of what went into
    both; what is computed again (all but the last sum) travels again. So do the embedding's rows and the gradients
    of the head's, once each. Left out: a few numbers a row with a loss, of which each rank knows a part. A sum of n
    bytes brings 2 (tp - 1) / tp n, as a ring does it.

    Args:
        shape: the whole model.
        rows, loss_rows: [N], rows that a rank computes, and those whose logits it needs.
        checkpointing: "none", "matmuls", "attention" or "full".
    """
    sums = shape.layers * (4 + (checkpointing != "none")) + 1
    numbers = 2.0 * shape.hidden * (sums * rows + loss_rows)
    return (tp - 1) / tp * itemsize * np.asarray(numbers, float)

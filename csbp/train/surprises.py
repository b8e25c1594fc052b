"""What a user should know before a run that can start: settings that work, but perhaps not as meant."""

from __future__ import annotations

from typing import Any

from csbp.checkpoint.huggingface import DIFFUSION_KEYS
from csbp.config.cad import unheeded
from csbp.config.schema import RunConfig
from csbp.errors import written

# What the rows of such a model have learnt to mean, so that with another value training starts over in part.
_MEANING = {"label_shift": "which row predicts a token", "clean_stream": "what clean rows see",
            "mask_token_id": "which token hides another"}


def surprises(config: RunConfig, model_config: Any, mask: int) -> list[str]:
    """A sentence for each surprise.

    Args:
        config: a run that can start.
        model_config: of the model it starts from, as transformers reads its config.json.
        mask: id of [MASK] in this run.
    """
    found = unheeded(config)
    if config.data.document_lengths:
        found.append(f"data.document_lengths={written(config.data.document_lengths)}: training reads the documents "
                     "themselves, and only csbp plan and csbp bench step heed that; leave it out")
    limit, longest = getattr(model_config, "max_position_embeddings", None), config.data.seq_len
    if config.data.document_tokens is not None:
        longest = config.data.document_tokens
    if limit is not None and longest > limit:
        found.append(f"documents of up to {longest} tokens go beyond the model's max_position_embeddings={limit}: "
                     "positions that it has not seen; lower data.document_tokens, or change its rope_parameters")
    if config.model.init == "pretrained" and all(hasattr(model_config, key) for key in DIFFUSION_KEYS):
        found += _changed(config, model_config, mask)
    return found


def _changed(config: RunConfig, model_config: Any, mask: int) -> list[str]:
    """The properties of a block-diffusion checkpoint that this run would change."""
    objective = config.objective
    if objective.kind == "autoregressive":
        return ["the model was trained by block diffusion, and objective.kind=autoregressive trains it for something "
                "else"]
    now = {"label_shift": objective.label_shift, "clean_stream": objective.clean_stream, "mask_token_id": mask,
           "block_size": objective.block_size}
    lines = []
    for key in DIFFUSION_KEYS:
        before = getattr(model_config, key)
        setting = "model.mask_token_id" if key == "mask_token_id" else f"objective.{key}"
        if before != now[key] and key in _MEANING:
            lines.append(f"THE MODEL WAS TRAINED WITH {key}={before}, this run has {now[key]}: that changes "
                         f"{_MEANING[key]}; set {setting}={str(before).lower()} to go on with what it has learnt")
        elif before != now[key]:
            lines.append(f"the model was trained with {key}={before}, this run has {now[key]}")
    return lines

"""What the trainer asks of a model family. Nothing else of a family is known outside its own folder.

Shapes: S local rows of a rank, E of them with a loss, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from csbp.attention.cache import CachedPlan
from csbp.plan.geometry import LayerKind

if TYPE_CHECKING:
    from csbp.attention.operator import BoundPlan


Reader = Callable[[Tensor, nn.Linear], Tensor]


@dataclass(frozen=True)
class LocalTerm:
    """This rank's part of one loss term: entry i asks row ``loss_rows[index[i]]`` for ``labels[i]``. A term asks a row
    at most once."""

    name: str
    index: Tensor
    labels: Tensor
    weights: Tensor
    masked: Tensor
    scale: float


@dataclass(frozen=True)
class LocalBatch:
    """The rows of one pack that this rank computes: its clean rows in global order, then its noised blocks.

    Attributes:
        tokens, positions: int64 [S].
        num_clean: how many of the S rows are clean rows.
        clean_rows: int64 [num_clean], their numbers in the pack (to fetch features kept elsewhere).
        loss_rows: int64 [E], the local rows whose logits are needed, each once, ascending.
        terms: this rank's loss terms; empty tensors where it has none.
    """

    tokens: Tensor
    positions: Tensor
    num_clean: int
    clean_rows: Tensor
    loss_rows: Tensor
    terms: tuple[LocalTerm, ...]


@contextmanager
def read_instead(head: nn.Linear, read: Reader | None) -> Iterator[None]:
    """While this lasts, a call of the head is one of ``read``, for models whose own forward ends with their head."""
    if read is None:
        yield
        return
    # On the instance, so that the module keeps its class, parameters and hooks.
    head.forward = lambda rows: read(rows, head)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward


class ModelAdapter(Protocol):
    """One family. Stateless: the model travels as an argument."""

    family: str

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        """The pretrained model at a Hugging Face folder, on the CPU, attention set to csbp's."""
        ...

    def build(self, path: Path | None, shape: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
        """A randomly initialised model: the config at ``path``, if any, overridden by ``shape``."""
        ...

    def layer_kinds(self, model: nn.Module, clean: str) -> tuple[LayerKind, ...]:
        """The distinct kinds of attention layer, for a clean stream that is "block_causal" or "token_causal"."""
        ...

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules that FSDP shards and gathers as one, in forward order (usually the decoder layers)."""
        ...

    def tp_plan(self, model: nn.Module) -> Mapping[str, str]:
        """How tensor parallelism splits the model: module name, in which ``*`` stands for anything -> style, named as
        in the plans of transformers' models (``parallel.tensor``). Empty: this family cannot be split."""
        ...

    def forward(self, model: nn.Module, batch: LocalBatch, plan: BoundPlan | CachedPlan,
                read: Reader | None = None) -> Tensor:
        """Logits [E, V] of ``batch.loss_rows``, in the model's compute dtype; or, without these logits, what ``read``
        makes of the rows that would go into the head. Must run its collectives and touch the model's parameters on
        every rank, also with E = 0.

        Args:
            read: called once in the head's place, within the model's own forward (where FSDP has gathered the
                head), with the rows [..., E, H] of ``batch.loss_rows`` and the head.
        """
        ...

    def export_config(self, model: nn.Module, diffusion: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of an export: the family's own, with the diffusion properties (block size, mask id,
        label shift, clean stream) that a sampler needs."""
        ...

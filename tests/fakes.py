"""Two model families that are not decoders over [clean | noised] rows, to hold the adapter protocol to its word.

``DraftAdapter`` has the shape of a draft model: no clean query rows; the clean rows are features of another
model, from which the keys and values of *all* layers are projected ahead; blocks hang on anchors and overlap.
``RethinkingAdapter`` runs the clean rows once and keeps their keys and values, asks the noised rows over them
without gradient, and asks again, with gradient, with its first guess mixed into the input.

Attention is a function given to the adapter: csbp's distributed one, or ``DensePack.attend`` with every row in one
place. Legend: T clean and M noised rows of a pack, S local rows, C hidden channels, N query heads, K key/value
heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import dense_attention, dense_mask
from torch import Tensor, nn

from csbp.attention.operator import attend_distributed
from csbp.diffusion.layout import StreamLayout
from csbp.models.protocol import LocalBatch, Reader
from csbp.plan.geometry import LayerKind

VOCAB, CHANNELS, FEATURES, HEADS, KV_HEADS, DIM, LAYERS, PLACES = 24, 16, 10, 4, 2, 4, 3, 64
Attend = Callable[..., Tensor]


def logits(rows: Tensor, head: nn.Linear) -> Tensor:
    """A reader for whoever gives none."""
    return head(rows)


class Layer(nn.Module):
    """A pre-norm decoder layer. Called with ``context`` alone it only projects keys and values, so that FSDP gathers
    its weights for that too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.query = nn.Linear(CHANNELS, HEADS * DIM, bias=False)
        self.key = nn.Linear(CHANNELS, KV_HEADS * DIM, bias=False)
        self.value = nn.Linear(CHANNELS, KV_HEADS * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, CHANNELS, bias=False)
        self.mlp = nn.Sequential(nn.Linear(CHANNELS, 24), nn.GELU(), nn.Linear(24, CHANNELS))

    def _project(self, x_SC: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(x_SC).unflatten(-1, (KV_HEADS, DIM)), self.value(x_SC).unflatten(-1, (KV_HEADS, DIM))

    def forward(self, hidden_SC: Tensor | None = None, attend: Attend | None = None, *,
                context: Tensor | None = None) -> tuple[Tensor, ...]:
        """Keys and values of ``context``; or the layer's output, and the keys and values of its rows."""
        if context is not None:
            return self._project(context)
        assert hidden_SC is not None and attend is not None
        x_SC = self.norm(hidden_SC)
        key, value = self._project(x_SC)
        query = self.query(x_SC).unflatten(-1, (HEADS, DIM))
        hidden_SC = hidden_SC + self.out(attend(query, key, value).flatten(1))
        return hidden_SC + self.mlp(self.mlp_norm(hidden_SC)), key, value


class FakeModel(nn.Module):
    """Parameters of both families; ``forward`` runs whatever the adapter gives it, inside FSDP's root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, CHANNELS), nn.Embedding(PLACES, CHANNELS)
        self.fuse, self.signal = nn.Linear(FEATURES, CHANNELS), nn.Linear(VOCAB, CHANNELS, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(CHANNELS, VOCAB, bias=False)
        features = torch.randn(PLACES, FEATURES, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        self.register_buffer("features", features)  # of the pack's clean rows, by their number

    def forward(self, run: Callable[[FakeModel], Tensor]) -> Tensor:
        return run(self)


def fake_model() -> FakeModel:
    """The same float64 weights everywhere."""
    model, random = FakeModel().to(torch.float64), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    return model


@dataclass(frozen=True)
class _Fake:
    """What the two adapters share of ``ModelAdapter``."""

    attend: Attend = attend_distributed

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        return fake_model().to(dtype)

    def build(self, path: Path | None, shape: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
        return fake_model().to(dtype)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.layers)  # type: ignore[arg-type]

    def export_config(self, model: nn.Module, diffusion: Mapping[str, Any]) -> dict[str, Any]:
        return dict(diffusion)


@dataclass(frozen=True)
class DraftAdapter(_Fake):
    """Noised queries only, over context that does not depend on depth; the last layer has no window."""

    family: str = "draft"

    def layer_kinds(self, model: nn.Module, clean: str) -> tuple[LayerKind, ...]:
        return (LayerKind("near", clean="absent", window=5, window_anchor="row"), LayerKind("full", clean="absent"))

    def forward(self, model: nn.Module, batch: LocalBatch, plan: Any, read: Reader = logits) -> Tensor:
        """What ``read`` makes of ``batch.loss_rows``, all of them noised."""
        clean, kinds = batch.num_clean, ["near"] * (LAYERS - 1) + ["full"]

        def run(m: FakeModel) -> Tensor:
            context_SC = m.fuse(m.features[batch.clean_rows]) + m.place(batch.positions[:clean])
            ahead = [layer(context=context_SC) for layer in m.layers]
            hidden_SC = m.embed(batch.tokens[clean:]) + m.place(batch.positions[clean:])
            for layer, kept, kind in zip(m.layers, ahead, kinds, strict=True):
                hidden_SC, _, _ = layer(hidden_SC, lambda q, k, v, kept=kept, kind=kind: self.attend(
                    q, *kept, k, v, plan, kind))
            return read(hidden_SC[batch.loss_rows - clean], m.head)

        return model(run)


@dataclass(frozen=True)
class RethinkingAdapter(_Fake):
    """One clean pass, then two noised passes over its kept keys and values; the clean rows may have losses too."""

    family: str = "rethinking"

    def layer_kinds(self, model: nn.Module, clean: str) -> tuple[LayerKind, ...]:
        return (LayerKind("read", clean=clean, noised=False), LayerKind("guess", clean="absent"))

    def forward(self, model: nn.Module, batch: LocalBatch, plan: Any, read: Reader = logits) -> Tensor:
        """What ``read`` makes of ``batch.loss_rows``: clean rows from the only pass they have, noised rows from the
        second."""
        clean = batch.num_clean

        def guess(m: FakeModel, kept: list[tuple[Tensor, Tensor]], signal_MV: Tensor) -> Tensor:
            hidden_SC = m.embed(batch.tokens[clean:]) + m.place(batch.positions[clean:]) + m.signal(signal_MV)
            for layer, (key, value) in zip(m.layers, kept, strict=True):
                hidden_SC, _, _ = layer(hidden_SC, lambda q, k, v, key=key, value=value: self.attend(
                    q, key, value, k, v, plan, "guess"))
            return hidden_SC

        def run(m: FakeModel) -> Tensor:
            hidden_SC, kept = m.embed(batch.tokens[:clean]) + m.place(batch.positions[:clean]), []
            for layer in m.layers:
                hidden_SC, key, value = layer(hidden_SC, lambda q, k, v: self.attend(
                    q, k, v, k[:0], v[:0], plan, "read"))
                kept.append((key, value))
            with torch.no_grad():
                first_MV = m.head(guess(m, kept, torch.zeros(len(batch.tokens) - clean, VOCAB, dtype=hidden_SC.dtype)))
            second_MC = guess(m, kept, torch.softmax(2 * first_MV, -1))
            return read(torch.cat((hidden_SC, second_MC))[batch.loss_rows], m.head)

        return model(run)


class DensePack:
    """The whole pack in one place: stands where a plan stands, and attends with the table's dense mask."""

    def __init__(self, layout: StreamLayout, kinds: Sequence[LayerKind]) -> None:
        self.clean = layout.geometry.num_clean
        self.sees = {kind.name: torch.from_numpy(dense_mask(layout.geometry, kind)) for kind in kinds}
        self.kinds = {kind.name: kind for kind in kinds}

    @staticmethod
    def attend(query: Tensor, key_clean: Tensor, value_clean: Tensor, key_noised: Tensor, value_noised: Tensor,
               pack: DensePack, kind: str) -> Tensor:
        """Same arguments as csbp's operator, whose plan is this pack."""
        rows = slice(pack.clean if pack.kinds[kind].clean == "absent" else 0,
                     None if pack.kinds[kind].noised else pack.clean)
        key, value = torch.cat((key_clean, key_noised)), torch.cat((value_clean, value_noised))
        return dense_attention(query, key, value, pack.sees[kind][rows, :len(key)])


def whole_batch(layout: StreamLayout) -> LocalBatch:
    """Every row of a pack, in the order of the pack, with logits asked of the rows of its terms in turn."""
    clean, rows = layout.geometry.num_clean, np.concatenate([term.rows for term in layout.terms])
    return LocalBatch(torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions), clean, torch.arange(clean),
                      torch.from_numpy(rows), ())

"""Families of other shapes train through the same step: exact against dense attention with every row in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exact import EXACT, assert_same_grads
from fakes import VOCAB, DensePack, DraftAdapter, RethinkingAdapter, fake_model, whole_batch
from oracle import gradients
from packs import anchor_geometry, make_layout, make_pack
from torch import Tensor, nn

from csbp.attention.operator import BoundPlan
from csbp.config.schema import ParallelConfig
from csbp.diffusion.layout import LossTerm, StreamLayout
from csbp.parallel.fsdp import shard_model
from csbp.parallel.runtime import start_runtime
from csbp.plan.plan import plan_rank
from csbp.train.scatter import scatter
from csbp.train.step import StepRunner, Work

EOS, BLANK = 0, VOCAB - 1


def draft_layout(lengths: Sequence[int], anchors: Sequence[tuple[int, int]], block: int) -> StreamLayout:
    """Blocks that hang on anchors: slot 0 stands on the anchor, whose token is known, and slot k predicts the token
    k places on, or EOS past the document's end. Later slots weigh less."""
    pack, geometry = make_pack(lengths), anchor_geometry(lengths, anchors, block)
    pack.tokens[:] %= BLANK
    tokens, positions, rows, labels, weights = [], [], [], [], []
    for document, anchor in anchors:
        text = pack.tokens[pack.document_starts[document]:pack.document_starts[document + 1]]
        for slot in range(block):
            truth = text[anchor + slot] if anchor + slot < len(text) else EOS
            if slot:
                rows.append(geometry.num_clean + len(tokens))
                labels.append(truth)
                weights.append(0.8 ** slot)
            tokens.append(BLANK if slot else truth)
            positions.append(anchor + slot)
    term = LossTerm("draft", np.array(rows), np.array(labels), np.array(weights), float(sum(weights)), 1.0,
                    np.ones(len(rows), bool))
    return StreamLayout(geometry, np.concatenate([pack.tokens, tokens]).astype(np.int64),
                        np.concatenate([pack.positions, positions]).astype(np.int64), (term,), len(rows))


def rethinking_layout(lengths: Sequence[int]) -> StreamLayout:
    """Diffusion and next-token losses over a token-causal clean stream."""
    pack = make_pack(lengths)
    pack.tokens[:] %= BLANK
    layout = make_layout(pack, 4, clean_stream="token_causal", ar_weight=0.7)
    layout.tokens[layout.tokens > BLANK] = BLANK
    return layout


@dataclass(frozen=True)
class Share:
    """One rank's logged loss, gradients (rank 0), rows with a loss, and what its transport sent."""

    loss: float
    grads: dict[str, Tensor]
    asked: int
    clean: int
    sent_rows: dict[str, int]


def step(adapter: DraftAdapter | RethinkingAdapter, streams: Sequence[StreamLayout]) -> Share:
    """One training step of csbp with an adapter that it has never heard of."""
    runtime = start_runtime(ParallelConfig(nproc=dist.get_world_size(), device="cpu"), lambda: Path("unused"))
    model = adapter.build(None, {}, torch.float64)
    shard_model(model, adapter.units(model), runtime.shard_mesh, torch.float64)
    works = []
    for layout in streams:
        kinds = adapter.layer_kinds(model, "token_causal")
        plan = plan_rank(layout.geometry, kinds, runtime.csbp, runtime.csbp_rank)
        works.append(Work(layout, scatter(layout, plan.rows), BoundPlan(plan, runtime.transport)))
    result = StepRunner(model, adapter, runtime, "reference").run(works, train=True)
    grads = {name: p.grad.full_tensor() if p.grad is not None else torch.zeros(p.shape, dtype=p.dtype)
             for name, p in model.named_parameters()}
    return Share(result.loss, grads if runtime.main else {}, sum(len(w.batch.loss_rows) for w in works),
                 sum(w.batch.num_clean for w in works), runtime.transport.sent_rows)


def dense_step(adapter: DraftAdapter | RethinkingAdapter,
               streams: Sequence[StreamLayout]) -> tuple[float, dict[str, Tensor]]:
    """The same loss with plain attention over whole packs."""
    model, total = fake_model(), torch.zeros((), dtype=torch.float64)
    counts = [sum(layout.terms[i].count for layout in streams) for i in range(len(streams[0].terms))]
    for layout in streams:
        pack = DensePack(layout, adapter.layer_kinds(model, "token_causal"))
        logits = adapter.forward(model, whole_batch(layout), pack)
        parts = logits.split([len(term.rows) for term in layout.terms])
        for part, term, count in zip(parts, layout.terms, counts, strict=True):
            nats = nn.functional.cross_entropy(part, torch.from_numpy(term.labels), reduction="none")
            total = total + term.scale * (nats * torch.from_numpy(term.weights)).sum() / count
    return total.item(), gradients(total, model)


DRAFTS = {
    "overlapping anchors": [draft_layout([9, 3, 14], [(0, 2), (0, 3), (0, 8), (1, 1), (2, 1), (2, 12), (2, 14)], 4)],
    "fewer anchors than ranks": [draft_layout([12], [(0, 9)], 4)],
    "two packs": [draft_layout([9], [(0, 1), (0, 6)], 4), draft_layout([5, 7], [(1, 4)], 4)],
}
RETHINKING = {
    "three documents": [rethinking_layout([6, 22, 3])],
    "fewer blocks than ranks": [rethinking_layout([4])],
    "two packs": [rethinking_layout([9, 2]), rethinking_layout([13])],
}


def check(ranks, family, streams, world):
    loss, grads = dense_step(family(DensePack.attend), streams)
    shares = ranks(world, step, family(), streams)
    assert all(abs(share.loss - loss) <= EXACT["atol"] for share in shares)
    assert_same_grads(shares[0].grads, grads)
    return shares, grads


def cases(names):
    """Every case on 1, 2 and 3 ranks; by default the first on 3, the second on 2."""
    by_default = set(zip(names, (3, 2), strict=False))
    return pytest.mark.parametrize("case,world", [
        pytest.param(case, world, marks=() if (case, world) in by_default else pytest.mark.slow)
        for case in names for world in (1, 2, 3)])


@cases(DRAFTS)
def test_draft_with_keys_projected_ahead(ranks, case, world):
    shares, grads = check(ranks, DraftAdapter, DRAFTS[case], world)
    for name in ("fuse.weight", "layers.0.key.weight", "layers.2.value.weight", "embed.weight"):
        assert grads[name].abs().max() > 1e-4
    if case == "fewer anchors than ranks" and world > 1:
        assert sorted(share.asked > 0 for share in shares) == [False] * (world - 1) + [True]


@cases(RETHINKING)
def test_second_thoughts_over_kept_keys(ranks, case, world):
    shares, grads = check(ranks, RethinkingAdapter, RETHINKING[case], world)
    assert grads["signal.weight"].abs().max() > 1e-4
    if case == "three documents" and world > 1:
        # The guess without gradient fetches keys but returns no gradients for them.
        keys, returned = (sum(share.sent_rows[label] for share in shares) for label in ("keys", "gradients"))
        assert keys > 2 * returned > 0


def test_the_first_guess_changes_the_second_and_no_clean_row():
    """The dense version that the ranks are held against does what its name says."""
    streams, adapter, model = RETHINKING["three documents"], RethinkingAdapter(DensePack.attend), fake_model()
    with torch.no_grad():
        model.signal.weight.zero_()
    pack = DensePack(streams[0], adapter.layer_kinds(model, "token_causal"))
    without = adapter.forward(model, whole_batch(streams[0]), pack)
    with_guess = adapter.forward(fake_model(), whole_batch(streams[0]), pack)
    noised = len(streams[0].terms[0].rows)
    assert (without[:noised] - with_guess[:noised]).abs().amax(1).min() > 1e-3
    assert torch.equal(without[noised:], with_guess[noised:])

"""Models whose layers differ in their windows, and steps with next to nothing to learn, on 1 to 4 ranks.

The windowed model is held against the stock one in one dense pass over all rows, with a mask for each kind of layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exact import assert_same_grads, expected, layouts, noising, step_on_ranks
from oracle import dense_mask, exact_norms, gradients, tiny_model
from packs import make_pack
from simulated import step_on_threads, summed_grads
from torch import Tensor, nn

from csbp.attention import interface
from csbp.config.schema import ParallelConfig
from csbp.data.batch import PackedBatch
from csbp.models.registry import get_adapter
from csbp.parallel.fsdp import shard_model
from csbp.parallel.runtime import start_runtime
from csbp.train.step import Noising, StepRunner

WINDOW, LAYER_TYPES = 6, ["sliding_attention", "full_attention", "sliding_attention"]
KIND_OF_TYPE = {"full_attention": "full", "sliding_attention": "sliding"}
CASES = {
    "block causal": ([make_pack([41, 3, 14])], noising(4)),
    "token causal, next token too": ([make_pack([9, 26], targets=[range(9), range(7, 26)]), make_pack([7], first_id=8)],
                                     noising(3, clean_stream="token_causal", ar_weight=0.5)),
}


def windowed_model(attention: str = interface.NAME) -> nn.Module:
    """Three layers, the first and the last with a window."""
    interface.register()
    return tiny_model(layers=len(LAYER_TYPES), attention=attention, layer_types=list(LAYER_TYPES),
                      use_sliding_window=True, sliding_window=WINDOW)


@functools.cache
def dense_step(case: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the stock model over all rows of each pack at once."""
    packs, how = CASES[case]
    adapter, model, streams = get_adapter("qwen3"), windowed_model("sdpa"), layouts(*CASES[case])
    kinds = {kind.name: kind for kind in adapter.layer_kinds(model, how.objective.clean_stream)}
    assert kinds["sliding"].window == WINDOW and kinds["full"].window is None
    counts = [sum(layout.terms[i].count for layout in streams) for i in range(len(streams[0].terms))]
    total = torch.zeros((), dtype=torch.float64)
    with exact_norms():
        for layout in streams:
            sees = {layer: torch.from_numpy(dense_mask(layout.geometry, kinds[kind]))[None, None]
                    for layer, kind in KIND_OF_TYPE.items()}
            logits = model(input_ids=torch.from_numpy(layout.tokens)[None], attention_mask=sees,
                           position_ids=torch.from_numpy(layout.positions)[None]).logits[0]
            for term, count in zip(layout.terms, counts, strict=True):
                nats = nn.functional.cross_entropy(logits[term.rows], torch.from_numpy(term.labels), reduction="none")
                total = total + term.scale * (nats * torch.from_numpy(term.weights)).sum() / count
        return total.item(), gradients(total, model)


@dataclass(frozen=True)
class Share:
    """One rank's logged loss, the gradients (rank 0), rows sent, and by layer kind the rows that the plans receive."""

    loss: float
    grads: dict[str, Tensor]
    sent_rows: dict[str, int]
    received: dict[str, int]


def windowed_step(packs: Sequence[PackedBatch], how: Noising, scheme: str, exchange: str) -> Share:
    """One training step on the ranks of the process group."""
    config = ParallelConfig(nproc=dist.get_world_size(), device="cpu", kind=scheme, exchange=exchange)
    runtime = start_runtime(config, lambda: Path("unused"))
    adapter, model = get_adapter("qwen3"), windowed_model()
    shard_model(model, adapter.units(model), runtime.shard_mesh, torch.float64)
    runner = StepRunner(model, adapter, runtime, "reference")
    works = runner.prepare(packs, how, step=0)
    with exact_norms():
        result = runner.run(works, train=True)
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    received = {kind: sum(sum(work.plan.rank_plan.kinds[kind].exchange.receive_counts) for work in works)
                for kind in KIND_OF_TYPE.values()}
    return Share(result.loss, grads if runtime.main else {}, dict(runtime.transport.sent_rows), received)


@pytest.mark.parametrize(("case", "world", "scheme", "exchange"), [
    pytest.param(case, world, scheme, exchange, marks=() if (scheme, exchange) == ("csbp", "exact") or
                 (case, world) == ("block causal", 2) else pytest.mark.slow)
    for case in CASES for world in (1, 2, 4)
    for scheme, exchange in (("csbp", "exact"), ("csbp", "all_gather"), ("context", "exact"), ("block", "exact"))])
def test_layers_with_and_without_a_window(ranks, case, world, scheme, exchange):
    loss, grads = dense_step(case)
    shares = ranks(world, windowed_step, *CASES[case], scheme, exchange)
    assert all(abs(share.loss - loss) <= 1e-10 for share in shares)
    assert_same_grads(shares[0].grads, grads)
    if world > 1 and scheme != "block":
        received = {kind: sum(share.received[kind] for share in shares) for kind in KIND_OF_TYPE.values()}
        rows = sum(received[KIND_OF_TYPE[layer]] for layer in LAYER_TYPES)  # each layer moves its own kind's rows
        assert sum(share.sent_rows["keys"] for share in shares) == 2 * rows
        assert sum(share.sent_rows["gradients"] for share in shares) == rows
        if exchange == "exact":
            assert 0 < received["sliding"] < received["full"], "a window's exchange is its halo"


@pytest.mark.parametrize("scheme", ["csbp", "context", "block"])
def test_layers_with_and_without_a_window_on_many_simulated_ranks(scheme):
    loss, grads = dense_step("block causal")
    shares = step_on_threads(8, *CASES["block causal"], scheme, model=windowed_model)
    assert all(abs(share.loss - loss) <= 1e-10 for share in shares)
    assert_same_grads(summed_grads(shares), grads)


def test_the_window_matters():
    """The dense version that the ranks are held against does what its name says."""
    case = CASES["block causal"]
    full = step_on_threads(1, *case, model=lambda: tiny_model(layers=len(LAYER_TYPES), attention=interface.NAME))
    assert abs(full[0].loss - dense_step("block causal")[0]) > 1e-3


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"clean_stream": "token_causal", "label_shift": True}])
def test_one_supervised_token_in_all(ranks, world, options):
    """Its gradient is the same on any number of ranks; those without it, and without any row, finish in time."""
    packs = [make_pack([9, 14, 5], targets=[[], [11], []]), make_pack([6], targets=[[]], first_id=7)]
    how = noising(4, t_min=1.0, **options)
    answer = expected(packs, how)
    shares = ranks(world, step_on_ranks, packs, how)
    assert sorted(share.asked for share in shares) == [0] * (world - 1) + [1]
    assert all(share.supervised == 1 and abs(share.loss - answer.loss) <= 1e-10 for share in shares)
    assert answer.loss > 0.1 and answer.grads["lm_head.weight"].abs().max() > 1e-3
    assert_same_grads(shares[0].grads, answer.grads)

"""Heads and MLP columns split over a tp axis: loss, logits and every gradient are the oracle's, to 1e-10.

Ranks are numbered tp fastest: every second one has the same rows as the one before it.
"""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from exact import EXACT, assert_exact, assert_same_grads, csbp_model, expected, noising, step_on_ranks
from packs import make_pack
from torch.distributed.tensor import _redistribute

from csbp.checkpoint.huggingface import full_weights
from csbp.checkpoint.shards import load_model
from csbp.checkpoint.store import CheckpointStore
from csbp.config.schema import CHECKPOINTING, ParallelConfig
from csbp.memory import count_parameters
from csbp.models.registry import get_adapter
from csbp.parallel.apply import parallelize
from csbp.parallel.runtime import start_runtime
from csbp.plan.shapes import model_shape
from csbp.plan.split import split_bytes

slow = pytest.mark.slow
PACKS = [make_pack([1, 3, 5, 13, 17]), make_pack([9, 4, 8], targets=[[8], [], []], seed=1, first_id=9)]
# name -> (world, csbp, further settings)
MESHES = {"tp": (2, 1, {}), "csbp x tp": (4, 2, {}), "dp x tp": (4, 1, {}),
          "copies x tp": (4, 1, {"dp_replicate": 2}), "context x tp": (4, 2, {"kind": "context"}),
          "block x tp": (4, 2, {"kind": "block"}), "attention kept": (2, 1, {"checkpointing": "attention"}),
          "nothing kept": (4, 2, {"checkpointing": "full"})}
BY_DEFAULT = {"csbp x tp", "attention kept"}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[] if m in BY_DEFAULT else slow) for m in MESHES])
def test_loss_and_gradients_of_two_packs(ranks, mesh):
    """One of them leaves ranks without a row that has a loss."""
    world, csbp, settings = MESHES[mesh]
    how = noising(4, clean_stream="token_causal", ar_weight=0.3)
    answer = expected(PACKS, how)
    shares = ranks(world, step_on_ranks, PACKS, how, csbp, None, {"tp": 2, **settings})
    assert all(abs(share.loss - answer.loss) <= 1e-10 and share.supervised == 40 for share in shares)
    assert_same_grads(shares[0].grads, answer.grads)
    norm = float(sum(g.square().sum() for g in answer.grads.values()).sqrt())
    assert all(abs(share.grad_norm - norm) <= 1e-10 and share.grad_norm == shares[0].grad_norm for share in shares)
    for share, twin in zip(shares[::2], shares[1::2], strict=True):
        assert [list(rows) for rows in share.rows] == [list(rows) for rows in twin.rows]


# Tied: one weight, two modules. The others: FSDP cuts what tp has cut into pieces of unequal size.
SHAPES = {"tied": {"tie_word_embeddings": True}, "odd": {"intermediate_size": 42, "vocab_size": 42},
          "one head a rank, biases": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6,
                                      "attention_bias": True}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("csbp", [2, pytest.param(1, marks=slow)])
def test_models_of_other_shapes(ranks, shape, csbp):
    answer = expected(PACKS[:1], noising(4), **SHAPES[shape])
    shares = ranks(4, step_on_ranks, PACKS[:1], noising(4), csbp, None, {"tp": 2}, SHAPES[shape])
    assert abs(shares[0].loss - answer.loss) <= 1e-10
    assert_same_grads(shares[0].grads, answer.grads)


@pytest.mark.slow
def test_logits_of_all_rows_and_no_loss_at_all(ranks):
    how = noising(4)
    shares = ranks(4, step_on_ranks, PACKS[:1], how, 2, None, {"tp": 2})
    assert_exact(shares[::2], expected(PACKS[:1], how), [[0]] * 2)
    nothing = [make_pack([5, 3], targets=[[], []])]
    assert_same_grads(ranks(4, step_on_ranks, nothing, how, 2, None, {"tp": 2})[0].grads,
                      expected(nothing, how).grads, **EXACT)


def step_and_export() -> list[str]:
    """What torch says of a step and of the gathering of whole weights, by its warnings and by its loggers."""
    lines = io.StringIO()
    getattr(_redistribute, "_warned_flatten_issues", set()).clear()  # it says everything once
    handler, loggers = logging.StreamHandler(lines), [logging.getLogger(name) for name in (
        "torch", "torch.distributed", _redistribute.__name__)]  # torch stops some on their way up
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step_on_ranks(PACKS[:1], noising(4), 2, None, {"tp": 2}, EVEN)
            model, adapter = csbp_model(**EVEN), get_adapter("qwen3")
            whole = {name: value.clone() for name, value in model.state_dict().items()}
            config = ParallelConfig(nproc=4, csbp=2, tp=2, device="cpu")
            runtime = start_runtime(config, lambda: Path("unused"))
            parallelize(model, adapter.units(model), config, runtime, torch.float64, adapter.tp_plan(model))
            found = full_weights(model)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert all(torch.equal(value, whole[name]) for name, value in found.items()) and (found or not runtime.main)
    return [str(w.message) for w in caught] + lines.getvalue().splitlines()


EVEN = {"intermediate_size": 48, "vocab_size": 48, "hidden_size": 32}


@pytest.mark.slow
def test_torch_has_nothing_to_warn_of(ranks):
    assert ranks(4, step_and_export) == [[]] * 4


def test_each_rank_sends_its_own_heads(ranks):
    whole = ranks(2, step_on_ranks, PACKS[:1], noising(4))
    halves = ranks(4, step_on_ranks, PACKS[:1], noising(4), 2, None, {"tp": 2})
    for rank, share in enumerate(halves):
        assert share.sent_rows == whole[rank // 2].sent_rows
        assert share.sent_bytes == {label: n // 2 for label, n in whole[rank // 2].sent_bytes.items()}


def bytes_of_the_axis(packs, how, csbp, parallel):
    """What the tp axis brings into this rank in a step, as rings of sums and gathers do it."""
    from csbp.parallel import sums

    found, total, gather = [], sums._sum, sums._gather

    def counted(collective):
        def call(x, group):
            found.append(x.nbytes if x.dim() == 3 else 0)  # rows; weights of norms and parts of numbers are left out
            return collective(x, group)
        return call

    sums._sum, sums._gather = counted(total), counted(gather)
    try:
        share = step_on_ranks(packs, how, csbp, None, parallel)
    finally:
        sums._sum, sums._gather = total, gather
    return sum(found), share.asked, [len(rows) for rows in share.rows]


@pytest.mark.parametrize("checkpointing", ["none", *(pytest.param(policy, marks=slow) for policy in CHECKPOINTING[1:])])
def test_planned_bytes_of_the_axis(ranks, checkpointing):
    """An evaluation of all logits follows the step: one more forward, without the rows of a loss."""
    told = ranks(2, bytes_of_the_axis, PACKS[:1], noising(4), 1, {"tp": 2, "checkpointing": checkpointing})
    shape = model_shape(csbp_model().config.to_dict(), "block_causal")
    for found, asked, (rows,) in told:
        planned = split_bytes(shape, np.array([rows]), np.array([asked]), tp=2, checkpointing=checkpointing,
                              itemsize=8)
        after = 8 * (rows * shape.hidden * (2 * shape.layers + 1) + rows * shape.vocabulary / 2)
        assert found == planned.item() + after


def weights_held(csbp):
    """Numbers of all parameters that this rank keeps."""
    return sum(p.to_local().numel() for p in split_model_here(csbp, {})[0].parameters())


@pytest.mark.parametrize("csbp", [1, pytest.param(2, marks=slow)])
def test_estimated_weights_are_those_of_a_rank(ranks, csbp):
    adapter, model = get_adapter("qwen3"), csbp_model()
    has = count_parameters(model, adapter.units(model), 2, adapter.tp_plan(model))
    assert set(ranks(2 * csbp, weights_held, csbp)) == {-(-has.total // csbp)}


def split_model_here(csbp, shape):
    config = ParallelConfig(nproc=2 * csbp, csbp=csbp, tp=2, device="cpu")
    runtime, adapter, model = start_runtime(config, lambda: Path("unused")), get_adapter("qwen3"), csbp_model(**shape)
    parallelize(model, adapter.units(model), config, runtime, torch.float64, adapter.tp_plan(model))
    return model, torch.optim.AdamW(model.parameters())


def save_split(folder, csbp, shape):
    model, optimizer = split_model_here(csbp, shape)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() * (number + 1)
    optimizer.step()
    CheckpointStore(Path(folder)).save(1, model, optimizer, {})
    return whole(model, optimizer)


def load_split(folder, csbp, shape):
    model, optimizer = split_model_here(csbp, shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    store = CheckpointStore(Path(folder))
    store.load(store.newest_valid(), model, optimizer)
    return whole(model, optimizer)


def whole(model, optimizer):
    """Every weight and its moments, gathered."""
    found = {name: p.full_tensor() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{key}": v.full_tensor() for key, v in optimizer.state[p].items() if key != "step"}
    return found


@pytest.mark.parametrize("shape", ["odd", pytest.param("tied", marks=slow)])
def test_checkpoints_of_pieces_of_pieces(ranks, tmp_path, shape):
    shaped = {**SHAPES[shape], "layers": 1}
    written = ranks(4, save_split, str(tmp_path), 2, shaped)[0]
    read = ranks(2, load_split, str(tmp_path), 1, shaped)[0]
    model = csbp_model(**shaped)
    start = {name: value.clone() for name, value in model.named_parameters()}
    load_model(tmp_path / "checkpoints" / "step-00000001", model)
    assert read.keys() == written.keys() and len(read) == 3 * len(start)
    assert all(torch.equal(read[name], value) for name, value in written.items())
    for name, value in model.named_parameters():
        assert torch.equal(value, written[name]) and not torch.equal(value, start[name])

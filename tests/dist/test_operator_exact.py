"""The distributed attention operator on 1 to 4 ranks against dense attention, for every kind of layer.

Legend: R = T + M rows of a pack [clean | noised], N query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moved import with_moves
from oracle import dense_attention, dense_mask
from packs import anchor_geometry, make_layout, make_pack
from torch import Tensor

from csbp.attention.operator import BoundPlan, attend_distributed
from csbp.comm.transport import LocalTransport, Outgoing, Pending, ProcessGroupTransport
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.stages import Stages

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 4, 6
EXACT = {"rtol": 0.0, "atol": 1e-12}

KINDS = (
    LayerKind("block", clean="block_causal"),
    LayerKind("token", clean="token_causal"),
    LayerKind("window", clean="token_causal", window=3),
    LayerKind("causal block", clean="token_causal", in_block="causal"),
    LayerKind("clean alone", clean="block_causal", noised=False),
    LayerKind("draft", clean="absent"),
    LayerKind("draft window", clean="absent", window=4, window_anchor="row"),
)
PACKS = {
    "two documents": make_layout(make_pack([6, 10]), 4).geometry,
    "odd lengths": make_layout(make_pack([1, 3, 5, 13, 17]), 4).geometry,
    "one block": make_layout(make_pack([4]), 4).geometry,
    "no block": make_layout(make_pack([5, 6], targets=[[], []]), 4).geometry,
    "some blocks": make_layout(make_pack([9, 14], targets=[[8], [0, 13]]), 3).geometry,
    "anchors": anchor_geometry([7, 2, 12], [(0, 3), (0, 4), (1, 2), (2, 1), (2, 11), (2, 12)], 4),
    "one anchor": anchor_geometry([9], [(0, 6)], 5),
    "more anchors than text": anchor_geometry([2], [(0, 2), (0, 1), (0, 2), (0, 0), (0, 2)], 3),
}


class Spy(ProcessGroupTransport):
    """Keeps a copy of everything that leaves the rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.seen: list[tuple[str, Tensor]] = []

    def start(self, outgoing: Outgoing) -> Pending:
        self.seen.append((outgoing.label, outgoing.rows.clone()))
        return super().start(outgoing)


def inputs(geometry: Geometry) -> dict[str, Tensor]:
    """Query, key, value and the gradient of the output for all R rows.

    Channel 0 tells the streams apart: negative in clean keys and values, positive in noised ones.
    """
    random = torch.Generator().manual_seed(geometry.num_clean)
    rows = geometry.num_clean + geometry.num_noised

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(rows, heads, dim, generator=random, dtype=torch.float64)

    tensors = {"query": draw(HEADS, DIM), "key": draw(KV_HEADS, DIM), "value": draw(KV_HEADS, VALUE_DIM),
               "dout": draw(HEADS, VALUE_DIM)}
    for name in ("key", "value"):
        tensors[name][..., 0].abs_()[:geometry.num_clean].neg_()
    return tensors


@dataclass
class Share:
    """One rank's part: its rows (numbers in [clean | noised], -1 for a dummy) and what came out for them."""

    keys: np.ndarray
    queries: np.ndarray
    out: Tensor
    grads: dict[str, Tensor]
    sent_rows: dict[str, int]
    sent_bytes: dict[str, int]
    planned_rows: dict[str, int]
    sent_noise: bool


def run_kinds(geometry: Geometry, kinds: tuple[LayerKind, ...], exchange: str = "exact", moves: int | None = None,
              overlap: bool = True, stages: int = 1) -> list[Share]:
    """Every kind once, forward and backward, with one plan for all of them; ``moves``: seed of random ones."""
    world = dist.get_world_size()
    pack = PackPlan(geometry, kinds, world, exchange=exchange)
    plan = (pack if moves is None else with_moves(pack, moves)).rank_plan(dist.get_rank())
    shares = []
    for kind in kinds:
        transport = Spy(dist.group.WORLD) if world > 1 else LocalTransport()
        bound, tensors = BoundPlan(plan, transport, overlap=overlap, stages=Stages(stages)), inputs(geometry)
        noised = np.where(plan.rows.noised < 0, -1, geometry.num_clean + plan.rows.noised)
        keys = np.concatenate([plan.rows.clean, noised]) if kind.noised else plan.rows.clean
        queries = noised if kind.clean == "absent" else keys
        padded = {name: torch.cat([x, torch.full_like(x[:1], 9.0)]) for name, x in tensors.items()}
        query = padded["query"][queries].requires_grad_()
        key, value = (padded[name][keys].requires_grad_() for name in ("key", "value"))
        clean = len(plan.rows.clean)
        out = attend_distributed(query, key[:clean], value[:clean], key[clean:], value[clean:], bound, kind.name)
        grads = torch.autograd.grad(out, (query, key, value), padded["dout"][queries])
        keys_moved, guests = plan.kinds[kind.name].exchange, plan.kinds[kind.name].guests
        planned = {"keys": 2 * sum(keys_moved.send_counts), "gradients": sum(keys_moved.receive_counts)}
        if guests is not None:
            served = sum(guests.receive_counts)
            planned |= {"queries": 2 * sum(guests.send_counts), "outputs": served, "query_gradients": served}
        sent = [rows for label, rows in getattr(transport, "seen", []) if label == "keys"]
        shares.append(Share(
            keys, queries, out.detach(), dict(zip(("query", "key", "value"), grads, strict=True)),
            transport.sent_rows, transport.sent_bytes,
            planned, any(bool((rows[..., channel] > 0).any()) for rows in sent for channel in (0, DIM))))
    return shares


def gathered(shares: list[Share], name: str, like: Tensor) -> Tensor:
    """The ranks' rows put together; NaN where no rank has the row."""
    whole = torch.full_like(like, float("nan"))
    for share in shares:
        rows = share.queries if name in ("out", "query") else share.keys
        local = share.out if name == "out" else share.grads[name]
        whole[rows[rows >= 0]] = local[rows >= 0]
        assert (local[rows < 0] == 0).all(), f"{name} of a dummy row"
    return whole


SAMPLE = {("two documents", 1), ("two documents", 2), ("odd lengths", 4), ("one block", 3), ("no block", 2),
          ("some blocks", 3), ("anchors", 2), ("one anchor", 2)}
MOVED_SAMPLE = {("odd lengths", 4, 0), ("odd lengths", 2, 1), ("some blocks", 4, 2), ("some blocks", 2, 3),
                ("anchors", 2, 4), ("anchors", 4, 5)}


@pytest.mark.parametrize("pack,world", [
    pytest.param(pack, world, marks=() if (pack, world) in SAMPLE else pytest.mark.slow)
    for pack in PACKS for world in (1, 2, 3, 4)])
def test_output_and_gradients_are_those_of_dense_attention(ranks, pack, world):
    geometry = PACKS[pack]
    drafts = tuple(kind for kind in KINDS if kind.clean == "absent")
    kinds = drafts if "anchor" in pack else KINDS
    check(ranks(world, run_kinds, geometry, kinds, "exact", None, True, 1 + (world + len(pack)) % 4), geometry, kinds)


@pytest.mark.parametrize("exchange", ["exact", "all_gather"])
def test_a_rank_without_clean_rows_in_a_pass_over_clean_rows_alone(ranks, exchange):
    """It has blocks of its own, and no query and no key at all in that pass, forward or backward."""
    geometry, kinds = PACKS["more anchors than text"], tuple(k for k in KINDS if k.clean == "absent" or not k.noised)
    by_rank = ranks(4, run_kinds, geometry, kinds, exchange)
    alone = [kind.noised for kind in kinds].index(False)
    empty = [rank for rank in by_rank if not len(rank[alone].queries)]
    assert 2 <= len(empty) < 4 and all((rank[-1].keys >= 0).any() and not len(rank[alone].keys) for rank in empty)
    check(by_rank, geometry, kinds)


@pytest.mark.parametrize("pack,world,seed,overlap", [
    pytest.param(pack, world, seed, seed % 3 > 0, marks=() if (pack, world, seed) in MOVED_SAMPLE else pytest.mark.slow)
    for pack in PACKS for world in (2, 4) for seed in range(6)])
def test_moved_rows_equal_dense_attention(ranks, pack, world, seed, overlap):
    geometry = PACKS[pack]
    drafts = tuple(kind for kind in KINDS if kind.clean == "absent")
    kinds = drafts if "anchor" in pack else KINDS
    by_rank = ranks(world, run_kinds, geometry, kinds, "exact", seed, overlap)
    check(by_rank, geometry, kinds)
    for share in (share for rank in by_rank for share in rank):
        assert share.sent_rows == share.planned_rows and not share.sent_noise
    moved = sum(share.sent_rows.get("queries", 0) for rank in by_rank for share in rank)
    assert moved > 0 or pack.startswith("one ")


def check(by_rank: list[list[Share]], geometry: Geometry, kinds: tuple[LayerKind, ...]) -> None:
    """Every kind's output and gradients against dense attention over the whole pack."""
    for i, kind in enumerate(kinds):
        shares = [rank[i] for rank in by_rank]
        sees = torch.from_numpy(dense_mask(geometry, kind))
        tensors = {name: x.requires_grad_(name != "dout") for name, x in inputs(geometry).items()}
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        out = dense_attention(query, key, value, sees)
        asked = slice(geometry.num_clean if kind.clean == "absent" else 0, None if kind.noised else geometry.num_clean)
        held = slice(None if kind.noised else geometry.num_clean)
        grads = torch.autograd.grad(out[asked], (query, key, value), tensors["dout"][asked])
        found = gathered(shares, "out", out.detach())
        torch.testing.assert_close(found[asked], out.detach()[asked], **EXACT)
        for name, grad in zip(("query", "key", "value"), grads, strict=True):
            rows = asked if name == "query" else held
            torch.testing.assert_close(gathered(shares, name, grad)[rows], grad[rows], **EXACT)


@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 3])
def test_only_clean_rows_travel_and_as_many_as_planned(ranks, world):
    row_bytes = {"keys": KV_HEADS * (DIM + VALUE_DIM) * 8, "gradients": KV_HEADS * (DIM + VALUE_DIM) * 8}
    total = 0
    for share in (share for rank in ranks(world, run_kinds, PACKS["odd lengths"], KINDS) for share in rank):
        assert not share.sent_noise, "a noised key or value left its rank"
        assert share.sent_rows == share.planned_rows
        assert share.sent_bytes == {label: rows * row_bytes[label] for label, rows in share.planned_rows.items()}
        total += share.planned_rows["keys"]
    assert total > 0

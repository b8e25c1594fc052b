"""Random moves over the pieces of a plan: whole pieces, ranges of keys cut off at either end, all of it or none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from csbp.plan.pieces import find_pieces
from csbp.plan.plan import PackPlan
from csbp.plan.tasks import Moves, Pieces


def draw_moves(random: np.random.Generator, pieces: Pieces, world: int) -> Moves:
    """Some of the pieces, to ranks that are any, or one alone, or all but a few; on some ranks nothing is left."""
    share = random.choice([0.1, 0.5, 1.0])
    servers = random.permutation(world)[:random.integers(1, world + 1)]
    emptied = set(random.permutation(world)[:random.integers(0, 1 + world // 2)].tolist())
    low, high, tasks = pieces.low.copy(), pieces.high.copy(), []
    for piece, owner in enumerate(pieces.owner.tolist()):
        others = random.permutation(servers[servers != owner]).tolist()
        if not others or (random.random() > share and owner not in emptied):
            continue
        dense = int(pieces.dense_low[piece]), int(pieces.dense_high[piece])
        whole = owner in emptied or dense[1] <= dense[0] or random.random() < 0.4
        cuts = [] if whole else random.integers(dense[0], dense[1] + 1, random.integers(1, 4)).tolist()
        edges = sorted({int(low[piece]), *cuts, int(high[piece])})
        parts = list(zip(edges[:-1], edges[1:], strict=True))
        # One part stays, or none does; those that leave do so from both ends inwards, one to a server.
        stays = int(random.integers(len(parts) + 1)) if cuts else len(parts)
        leave = (parts[:stays] + parts[:stays:-1])[:len(others)]
        tasks += [(server, piece, *part) for server, part in zip(others, leave, strict=False)]
        left = [part for part in parts if part not in leave]
        low[piece], high[piece] = (left[0][0], left[-1][1]) if left else (low[piece], low[piece])
    table = np.array(sorted(tasks), np.int64).reshape(-1, 4)
    return Moves(table[:, 1], table[:, 0], table[:, 2], table[:, 3], low, high)


def with_moves(plan: PackPlan, seed: int) -> PackPlan:
    """The plan with random moves in every layer kind."""
    random = np.random.default_rng(seed)
    return replace(plan, moves={kind.name: draw_moves(random, find_pieces(plan, kind), plan.world)
                                for kind in plan.kinds})

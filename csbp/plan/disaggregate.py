"""Core attention disaggregation: which CA-tasks move, so that every rank has the same attention time (docs/cad.md).

N ranks, P pieces. Times are femtoseconds and sizes bytes of one layer in one training step; where 64 bits do not hold
all ranks' femtoseconds together, times are counted in larger units, and bytes a second with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from csbp.plan.cost import FEMTO, PassCost
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.remains import Remains
from csbp.plan.resident import Resident
from csbp.plan.tasks import Moves, Pieces
from csbp.plan.waterfill import Levels, Limits
from csbp.plan.work import MovedBytes, StepBytes, home_times, time_unit

_NO_LIMIT = 1 << 60
_STAGES = (1, 4, 16)  # of each try, see Levels.fill
_NEAR = 8  # bounds that are apart by less than this part are not brought nearer


@dataclass(frozen=True)
class CadSettings:
    """What may move.

    Attributes:
        tolerance: a rank may keep this part of the mean above it.
        min_gain: part of the fullest rank's time that moving must save.
        ship_queries: whether noised query rows may move; clean ones always may.
        max_send_bytes, max_receive_bytes: most that moves may add to a rank, in one layer of a step.
        max_buffer_bytes: most of that which one pass may send and receive.
    """

    tolerance: float = 0.02
    min_gain: float = 0.01
    ship_queries: bool = True
    max_send_bytes: int | None = None
    max_receive_bytes: int | None = None
    max_buffer_bytes: int | None = None


def no_moves(pieces: Pieces) -> Moves:
    """Everything stays at home."""
    none = np.zeros(0, np.int64)
    return Moves(none, none, none, none, pieces.low, pieces.high)


def disaggregate(plan: PackPlan, kind: LayerKind, pieces: Pieces, rates: PassCost, sizes: StepBytes,
                 settings: CadSettings, *, beside: np.ndarray | None = None,
                 bytes_per_second: float | None = None, worse: Callable[[Moves], bool] | None = None) -> Moves:
    """The moves of one layer kind; none where they would not save ``min_gain``.

    Args:
        plan: without moves; its ranks are the pool.
        pieces: of ``kind``.
        rates, sizes: of one layer of the kind.
        beside: [N], femtoseconds of other work of each rank that is to be balanced together with attention.
        bytes_per_second: that a rank sends, and at the same time receives, while it attends. What does not travel in
            the time of the fullest rank takes longer, and so do its moves. None: any number of bytes.
        worse: whether moves are worse than none, however many follow; then no more are looked for.
    """
    other = np.zeros(plan.world) if beside is None else beside
    unit = time_unit(plan, kind, pieces, rates, float(other.sum()))
    rates, link = rates.times(1 / unit), None if bytes_per_second is None else bytes_per_second * unit
    start = home_times(plan, kind, pieces, rates) + np.rint(other / unit).astype(np.int64)
    mean = int(start.sum()) // plan.world
    best, least = no_moves(pieces), _slowest(plan, kind, sizes, start, None, link)
    ceiling = mean + int(mean * settings.tolerance)
    if plan.world == 1 or int(start.max()) <= ceiling:
        return best
    before, enough = least, least - int(least * settings.min_gain)
    # Moves lower neither the mean nor what travels anyway.
    if max(mean, _slowest(plan, kind, sizes, np.zeros_like(start), None, link)) > enough:
        return best
    movable = np.ones(len(pieces), bool) if settings.ship_queries else ~pieces.noised
    shortest, longest = mean, least  # how long a layer takes, between which the best lies
    for number in range(len(_STAGES)):
        # The first try moves least; where limits forbid to be level, the others share out what they leave.
        target = (shortest + longest) // 2 if number else mean
        stages = _STAGES[number if link is None else min(number, 1)]
        remains = Remains(pieces, movable, rates, sizes, Resident(plan, kind.name), plan.world)
        levels = Levels(start, remains, MovedBytes(plan.world, sizes),
                        _limits(plan, kind, sizes, settings, target, link))
        if not levels.fill(settings.tolerance, stages, least, worse):
            return best if len(best) else remains.moves()
        slowest = _slowest(plan, kind, sizes, levels.load, levels.moved, link)
        if slowest < least and slowest <= enough:
            best, least = remains.moves(), slowest
        shared = number > 0 and link is None and 10 * least < 9 * before
        if shared or not levels.limited or int(levels.load.max()) <= ceiling:
            break
        if slowest > target + int(target * settings.tolerance):
            shortest, longest = target, min(longest, slowest)
        else:
            longest = slowest
        if number and (longest - shortest) * _NEAR < longest:
            break
    return best


def base_bytes(plan: PackPlan, kind: LayerKind, sizes: StepBytes) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N] each, what every rank sends and receives without moves."""
    matrix = plan.traffic[kind.name]
    gives, gets = matrix.sum(1), matrix.sum(0)
    return (gives * sizes.fetched + gets * sizes.key_gradient, gets * sizes.fetched + gives * sizes.key_gradient)


def _limits(plan: PackPlan, kind: LayerKind, sizes: StepBytes, settings: CadSettings, target: int,
            bytes_per_second: float | None) -> Limits:
    """What may be added to each rank, where a layer takes ``target`` femtoseconds."""
    most = [np.full(plan.world, _NO_LIMIT if limit is None else min(limit, _NO_LIMIT))
            for limit in (settings.max_send_bytes, settings.max_receive_bytes, settings.max_buffer_bytes)]
    if bytes_per_second is not None:
        hidden = int(min(target * FEMTO * bytes_per_second, _NO_LIMIT))
        for limit, base in zip(most[:2], base_bytes(plan, kind, sizes), strict=True):
            np.minimum(limit, np.maximum(hidden - base, 0), out=limit)
    return Limits(np.array(most))


def _slowest(plan: PackPlan, kind: LayerKind, sizes: StepBytes, load: np.ndarray, moved: MovedBytes | None,
             bytes_per_second: float | None) -> int:
    """Femtoseconds of a layer: the fullest rank's work or the longest transfer, which travels meanwhile."""
    if bytes_per_second is None:
        return int(load.max())
    sent, received = base_bytes(plan, kind, sizes)
    most = max(int((sent if moved is None else sent + moved.sent).max()),
               int((received if moved is None else received + moved.received).max()))
    return max(int(load.max()), int(most / bytes_per_second / FEMTO))


def count_moved(plan: PackPlan, kind: LayerKind, pieces: Pieces, moves: Moves, sizes: StepBytes) -> MovedBytes:
    """Bytes that moves add to every rank, as they are sent if no rank's own needs shrink by them."""
    moved, resident = MovedBytes(plan.world, sizes), Resident(plan, kind.name)
    rows, owner = pieces.rows[moves.piece], pieces.owner[moves.piece]
    for server in np.unique(moves.server):
        mine = moves.server == server
        key_owner, start, end = resident.missing(int(server), moves.low[mine], moves.high[mine])
        moved.add(int(server), int(server), 0, key_owner, end - start)
        for giver in np.unique(owner[mine]):
            moved.add(int(giver), int(server), int(rows[mine & (owner == giver)].sum()), key_owner[:0], start[:0])
    return moved

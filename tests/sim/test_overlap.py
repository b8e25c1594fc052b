"""Between the start of what travels and the wait for it, a rank attends something."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moved import with_moves
from packs import make_layout, make_pack

from csbp.attention import core, reference
from csbp.attention.operator import BoundPlan
from csbp.attention.phases import Phases, backward_phases, forward_phases
from csbp.comm.loopback import LoopbackWorld
from csbp.plan.geometry import LayerKind
from csbp.plan.plan import PackPlan
from csbp.plan.stages import Stages


def _watched(phases: Phases, events: list[str]) -> Phases:
    reply = None
    while True:
        try:
            request = phases.send(reply)
        except StopIteration as stop:
            return stop.value
        events.append("wait" if request is None else "start")
        reply = yield request


def _noting(events: list[str]) -> SimpleNamespace:
    def noted(call: Any) -> Any:
        def run(*args: Any, **rest: Any) -> Any:
            events.append("attend")
            return call(*args, **rest)
        return run
    return SimpleNamespace(forward=noted(reference.forward), backward=noted(reference.backward))


@pytest.mark.parametrize(("moved", "stages"), [(False, 1), (False, 3), (True, 1)])
def test_what_travels_has_something_to_hide_behind(moved: bool, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = 3
    pack = PackPlan(make_layout(make_pack([150, 90]), 8).geometry, (LayerKind(),), world)
    pack = with_moves(pack, 1) if moved else pack
    events: list[list[str]] = [[] for _ in range(world)]
    transports, bound, passes = LoopbackWorld(world), [], []
    for rank in range(world):
        monkeypatch.setitem(core.BACKENDS, f"rank {rank}", _noting(events[rank]))
        bound.append(BoundPlan(pack.rank_plan(rank), transports.transport(rank),
                               backend=f"rank {rank}", stages=Stages(stages)).kinds["full"])
        assert len(bound[-1].stages) == stages
        assert bound[-1].guests is not None if moved else all(sum(one.receive_counts) for one in bound[-1].stages)
    inputs = [[torch.randn(len(kind.here), heads, 8) for heads in (4, 2, 2, 4)] for kind in bound]
    done = transports.lock_step([_watched(forward_phases(q, k, v, kind, 0.3), seen)
                                 for (q, k, v, _), kind, seen in zip(inputs, bound, events, strict=True)])
    passes += [[*seen] for seen in events]
    for seen in events:
        seen.clear()
    transports.lock_step([_watched(backward_phases(dout, q, k, v, out, lse, kind, 0.3), seen) for (q, k, v, dout),
                          kind, seen, (out, lse) in zip(inputs, bound, events, done, strict=True)])
    for seen, kind in zip([*passes, *events], bound * 2, strict=True):
        travelling: deque[int] = deque()
        hidden = []
        for place, event in enumerate(seen):
            if event == "start":
                travelling.append(place)
            elif event == "wait":
                hidden.append("attend" in seen[travelling.popleft():place])
        assert hidden and not travelling
        # Who needs nothing from elsewhere has nothing left to do while what it has lent comes back.
        assert all(hidden if kind.stages[-1].sees_far else hidden[:2])

"""A transport that moves nothing: what would arrive lies here already. What it saves is communication."""

from __future__ import annotations

import torch
from torch import Tensor

from csbp.comm.transport import Counting, Outgoing, Pending


class _Here:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> Tensor:
        """At once."""
        return self.rows


class ResidentTransport(Counting):
    """Answers every exchange with random rows of the right shape, made once."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._rows: dict[object, Tensor] = {}

    def start(self, outgoing: Outgoing) -> Pending:
        """Nothing is sent."""
        self.count(outgoing)
        sent = outgoing.rows
        shape = (sum(outgoing.receive_counts), *sent.shape[1:])
        key = (outgoing.label, shape, sent.dtype)
        if key not in self._rows:
            make = torch.randn if sent.dtype.is_floating_point else torch.zeros  # parcels of bytes hold numbers
            self._rows[key] = make(shape, dtype=sent.dtype, device=sent.device)
        return _Here(self._rows[key])

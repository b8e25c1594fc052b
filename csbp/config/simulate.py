"""The settings of ``csbp simulate``."""

from __future__ import annotations

from dataclasses import dataclass

from csbp.config.schema import option


@dataclass(frozen=True)
class SimulateConfig:
    """``csbp simulate``: steps of a cluster, predicted without one (docs/cad.md). Beside these it takes every setting
    of ``csbp train``."""

    documents: str = option("pretrain", "how long documents are: pretrain or prolong, with an @ before it or not, as "
                            "such corpora have them; else a file with the tokens of one document a line, drawn from at "
                            "random")
    steps: int = option(3, "steps, with documents of their own each", low=1, high=1000)
    near_link: float | None = option(None, "GB/s into a rank from its own node; null: as measured on plan.device",
                                     low=0.001, high=1e6)
    far_link: float | None = option(None, "GB/s into a rank from other nodes; null: as plan.device has it", low=0.001,
                                    high=1e6)
    node: int | None = option(None, "ranks of a node; null: as plan.device has it", low=1, high=2**20)

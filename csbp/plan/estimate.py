"""Devices, and the memory that a plan will take, before one is rented.

N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csbp.config.schema import SELECTIVE, RunConfig
from csbp.plan.counts import PlanCounts
from csbp.plan.shapes import AttentionLayers, ModelShape
from csbp.plan.split import split_shape
from csbp.plan.wire import buffer_bytes, row_bytes

# Beside the inputs and outputs of its matrices, a layer keeps norms, rotated queries and keys and the activation
# function for its backward, about half as much again; a compiled layer computes most of that again.
_BESIDE_LINEAR = {False: 1.5, True: 1.0}
_LOGIT_BYTES = 256 << 20  # of the logits that exist at once, where no number of rows is asked for
_LOGIT_ROWS = 64  # and then rows come in multiples of this
_MASTER = 4  # bytes of a float32 number: weights, gradients, and twice for AdamW
_TILE = 128  # query rows, and keys, of a tile of scores
WIDE_DIMS = range(264, 513, 8)  # head dims of the wide backend
WIDE_TILES = 16384  # tiles of scores, over all heads, that it has in memory at once


def logit_rows(vocabulary: int, itemsize: int, asked: int | None = None) -> int:
    """Rows whose logits exist at once: as many as asked for, else about 256 MiB of them.

    Args:
        vocabulary: tokens whose logits one rank computes.
        itemsize: bytes of a logit.
        asked: ``train.logit_rows``.
    """
    return asked or max(_LOGIT_BYTES // (vocabulary * itemsize) // _LOGIT_ROWS, 1) * _LOGIT_ROWS


def loss_bytes(rows: np.ndarray, vocabulary: int, hidden: int, itemsize: int, asked: int | None = None) -> np.ndarray:
    """Bytes, like ``rows``, that the loss takes: logits of some rows and their gradient, the gradient of all its rows,
    and that of the head, summed in float32 and then in the compute dtype."""
    at_once = np.minimum(rows, logit_rows(vocabulary, itemsize, asked))
    head = vocabulary * hidden * (_MASTER + (itemsize if itemsize != _MASTER else 0))
    return itemsize * (2 * at_once * float(vocabulary) + rows * float(hidden)) + head


@dataclass(frozen=True)
class Device:
    """What one rank computes on, as measured.

    Attributes:
        peak: FLOP/s that utilisation is measured against; NaN where machines of the kind differ too much.
        attention, linear: FLOP/s reached by attention (forward and backward) and by matrix products.
        memory: usable bytes.
        near_link, far_link: bytes/s that a rank receives inside a node and between nodes.
        node: ranks of one node.
        rows: bytes/s of query rows gone over once more, forward and backward, where keys come in another stage.
    """

    peak: float
    attention: float
    linear: float
    memory: float
    near_link: float
    far_link: float
    node: int
    rows: float


DEVICES = {
    # 141 GB, of which the driver, the kernels and fragments of the allocator take some.
    "h200": Device(989e12, 575e12, 650e12, 0.94 * 141e9, 350e9, 42e9, 8, 110e9),
    "cpu": Device(float("nan"), 50e9, 50e9, float("inf"), 5e9, 1e9, 1 << 30, 1e9),
}


@dataclass(frozen=True)
class Settings:
    """How a run computes.

    Attributes:
        world: all ranks of the run; weights are sharded over those of one copy.
        checkpointing: "none", "matmuls", "attention" or "full", as ``parallel.checkpointing``.
        itemsize: bytes of a number in the compute dtype, which is also what travels.
        logit_rows: rows whose logits exist at once; None: see the function of that name.
        offload: what is kept for the backward lies in CPU memory, on another device than that.
        gradient_itemsize: bytes of a number of dK and dV on the wire; None: as ``itemsize``.
        tp: ranks that share the heads of the same rows.
        copies: ``parallel.dp_replicate``, whole sets of the sharded weights.
        wide: heads of ``WIDE_DIMS`` go through the wide backend.
        stages: as ``parallel.exchange_stages``.
        compiled: as ``parallel.compile``.
    """

    world: int
    checkpointing: str
    itemsize: int
    logit_rows: int | None = None
    offload: bool = False
    gradient_itemsize: int | None = None
    tp: int = 1
    copies: int = 1
    wide: bool = False
    stages: int | None = None
    compiled: bool = False

    @classmethod
    def of(cls, config: RunConfig, device: str) -> Settings:
        """A run's, on the device of that name in ``DEVICES``."""
        parallel, half = config.parallel, config.train.dtype == "bfloat16"
        return cls(parallel.nproc, parallel.checkpointing, 2 if half else 4, config.train.logit_rows,
                   parallel.offload and device != "cpu",
                   4 if parallel.gradient_wire == "float32" else None, parallel.tp, parallel.dp_replicate,
                   wide=half and device == "h200" and config.attention.backend in ("auto", "wide"),
                   stages=parallel.exchange_stages, compiled=parallel.compile)


@dataclass(frozen=True)
class Parameters:
    """How many one rank of a tp axis has, before they are sharded.

    Attributes:
        total: all.
        ends: of no decoder layer: embedding and head.
        layer: of the largest decoder layer.
    """

    total: int
    ends: int
    layer: int


@dataclass(frozen=True)
class Memory:
    """Bytes of each rank; the first three are the same everywhere.

    Attributes:
        weights, gradients, optimizer: float32 shards.
        gathered: the layer being computed and the next one, embedding and head, whole.
        activations: float64 [N], kept for the backward (offloaded: of two layers), and one layer computed again.
        keys: float64 [N], received keys and values of one layer and their gradients, and query rows that move.
        workspace: float64 [N], scores of one layer that the wide backend has in memory.
        logits: float64 [N], and what else the loss takes (``loss_bytes``); where query rows move also the memory for
            what travels, which stays.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: np.ndarray
    keys: np.ndarray
    workspace: np.ndarray
    logits: np.ndarray

    @property
    def certain(self) -> float:
        """What no pack changes."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> np.ndarray:
        """float64 [N]. Logits are never there together with a layer's keys and scores."""
        return self.certain + self.gathered + self.activations + np.maximum(self.keys + self.workspace, self.logits)


def predict_memory(shape: ModelShape, counts: PlanCounts, loss_rows: np.ndarray, settings: Settings,
                   parameters: Parameters | None = None) -> Memory:
    """Peak bytes of each rank, with AdamW and every parameter sharded over the ranks of its copy (FSDP2, a tp axis).

    Args:
        shape: of the whole model.
        loss_rows: [N], rows whose logits each rank needs.
        parameters: of the model as it is; None: its matrices, by its shape.
    """
    item, shards = settings.itemsize, settings.world // settings.tp // settings.copies
    shape = split_shape(shape, settings.tp)
    has = parameters or Parameters(shape.parameters, (1 if shape.tied else 2) * shape.vocabulary * shape.hidden,
                                   shape.largest_layer)
    shard = -(-has.total // shards)
    gathered = item * (has.ends + 2 * has.layer) if shards > 1 or item != _MASTER else 0
    layers = [_kept(shape, part, settings) for part in shape.attention]
    moved = [_moved(shape, layer, settings) for layer in layers]
    kept = 2 * max(moved) + sum(part.count * (layer - gone)
                                for part, layer, gone in zip(shape.attention, layers, moved, strict=True))
    again = max(_whole(shape, part, settings) - layer for part, layer in zip(shape.attention, layers, strict=True))
    far = np.stack([_travelling(counts, part, settings) for part in shape.attention]).max(0)
    scores = np.stack([_scores(counts, part, settings) for part in shape.attention]).max(0)
    buffers = np.stack([buffer_bytes(counts.kinds[part.kind.name], counts.clean, part, item, settings.gradient_itemsize)
                      for part in shape.attention]).max(0)
    return Memory(
        weights=_MASTER * shard, gradients=_MASTER * shard, optimizer=2 * _MASTER * shard, gathered=gathered,
        activations=counts.rows * (kept + again), keys=far, workspace=scores,
        logits=loss_bytes(loss_rows, shape.vocabulary, shape.hidden, item, settings.logit_rows) + buffers)


def _travelling(counts: PlanCounts, part: AttentionLayers, settings: Settings) -> np.ndarray:
    """Bytes, float64 [N], that what travels takes in the backward of one layer."""
    item, kind = settings.itemsize, counts.kinds[part.kind.name]
    row = row_bytes(part.heads, part.kv_heads, part.head_dim, part.head_dim, item, settings.gradient_itemsize).backward
    # Received rows as they came and in order, their gradients in float32 and as they leave.
    keys = kind.received * float(part.row_elements) * (3 * item + _MASTER)
    # Guests may see own clean rows too, which then lie behind the received ones.
    keys += (kind.guests > 0) * counts.clean * float(part.row_elements) * (item + _MASTER)
    # Guest rows as they came and in order, an output of zeros, their gradients as computed and as they leave.
    numbers = float(part.heads * part.head_dim)
    guests = kind.guests * (2 * row["queries"] + 2 * item * numbers + row["query_gradients"])
    # Lent rows as they leave, with the gradient and the output that they are made of, and the gradients that come back.
    lent = kind.lent * (row["queries"] + 2 * _MASTER * numbers + row["query_gradients"])
    return np.asarray(keys + guests + lent, np.float64)


def _scores(counts: PlanCounts, part: AttentionLayers, settings: Settings) -> np.ndarray:
    """Bytes, float64 [N], of the scores that the wide backend has in memory in the backward of one layer, and their
    gradients: of all tiles, where they are few."""
    rows, keys = counts.rows, counts.rows + counts.kinds[part.kind.name].received
    tiles = np.minimum(part.heads * -(-rows // _TILE) * -(-keys // _TILE), WIDE_TILES)
    used = settings.wide and part.head_dim in WIDE_DIMS
    return np.asarray(2.0 * settings.itemsize * _TILE**2 * tiles * used, np.float64)


def _kept(shape: ModelShape, part: AttentionLayers, settings: Settings) -> float:
    """Bytes that one layer keeps for one row."""
    item = settings.itemsize
    if settings.checkpointing == "none":
        return _whole(shape, part, settings)
    if settings.checkpointing == "full":
        return shape.hidden * item
    attention = (shape.hidden + part.heads * part.head_dim) * item + part.heads * _MASTER
    if settings.checkpointing == "attention":
        return attention
    products = sum(outputs for _, outputs in shape.layer_linears(part, active=True))
    # The last one's result no backward needs, and a compiler sees that.
    return attention + item * (products - settings.compiled * shape.hidden)


def _moved(shape: ModelShape, layer: float, settings: Settings) -> float:
    """Bytes of what one layer keeps for one row that go into CPU memory. Selective checkpointing holds what it keeps
    itself, out of reach, unless the layer is compiled."""
    if not settings.offload:
        return 0.0
    held = settings.checkpointing in SELECTIVE and not settings.compiled
    return shape.hidden * settings.itemsize if held else layer


def _whole(shape: ModelShape, part: AttentionLayers, settings: Settings) -> float:
    """Bytes of all that one layer makes of one row."""
    return _BESIDE_LINEAR[settings.compiled] * shape.row_width(part) * settings.itemsize

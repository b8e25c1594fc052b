"""Every setting of a run, as frozen dataclasses: one class per group of ``conf/``.

``option`` carries what the checker and the reference page need: help text, allowed values, bounds.
Declarations only: meshes, tokenizers and process groups are passed to functions as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Policies by what a layer keeps for its backward, from all to least; selective ones keep what some operators give.
SELECTIVE = ("matmuls", "attention")
CHECKPOINTING = ("none", *SELECTIVE, "full")
# Rows are counted in 32 bits on their way to the kernels, a clean and a noised one for each token.
MAX_ROWS = 2**30


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), low: float | None = None,
           high: float | None = None) -> Any:
    """A dataclass field with its documentation and its bounds (``low`` and ``high`` are inclusive)."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SourceConfig:
    """One place that documents come from."""

    kind: str = option("text", "how to read it", choices=("text", "jsonl", "parquet", "dataset"))
    path: str = option("", "file, folder, glob or dataset name; '@stdlib' is this Python's standard library")
    format: str = option("text", "what one record holds",
                         choices=("text", "messages", "sharegpt", "prompt_completion"))
    columns: dict[str, str] = option({}, "our name -> the file's column name, e.g. {text: content}")
    include: list[str] = option(["**/*"], "text folders: glob patterns of files to take")
    exclude: list[str] = option([], "text folders: glob patterns, matched on the relative path, to leave out")
    split: str = option("train", "kind=dataset: the split to read")
    streaming: bool = option(False, "kind=dataset: read as a stream, without building an index")
    weight: float | None = option(None, "share of the samples of an epoch; null: every sample once", low=0.0)


@dataclass(frozen=True)
class ModelConfig:
    """Which family, which weights."""

    family: str = option("qwen3", "folder under models/")
    path: str = option("", "Hugging Face folder, run folder, name on the hub, or 'builtin:NAME', shipped with csbp")
    init: str = option("pretrained", "start from the weights at path, or from random ones of that shape",
                       choices=("pretrained", "random"))
    shape: dict[str, Any] = option({}, "fields of the family's config, over those at path (init=random); with "
                                   "pretrained weights from the hub: what csbp plan goes by before they are here")
    mask_token_id: int | None = option(None, "id of [MASK]; null: the first id past the tokenizer's last",
                                       low=0, high=2**31 - 1)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learnt, and how it is averaged (formulas: docs/objectives.md)."""

    kind: str = option("block_diffusion", "denoise target blocks, or predict the next token",
                       choices=("block_diffusion", "autoregressive"))
    block_size: int = option(8, "rows of a target block", low=1, high=MAX_ROWS)
    clean_stream: str = option("block_causal", "what a clean row sees of its own document",
                               choices=("block_causal", "token_causal"))
    label_shift: bool = option(False, "row p predicts token p+1; slot 0 is read from clean row s-1")
    weight: str = option("none", "weight of a masked token's loss", choices=("none", "inverse_t"))
    denominator: str = option("masked", "what the sum is divided by, once per optimizer step",
                              choices=("masked", "supervised"))
    ar_weight: float = option(0.0, "weight of an added next-token loss on the clean stream", low=0.0)


@dataclass(frozen=True)
class NoiseConfig:
    """How target blocks are corrupted."""

    kind: str = option("absorbing", "replace by [MASK]", choices=("absorbing",))
    scope: str = option("block", "one noise level t per", choices=("block", "document"))
    t_min: float = option(0.001, "smallest noise level", low=0.0, high=1.0)
    t_max: float = option(1.0, "largest noise level", low=0.0, high=1.0)


@dataclass(frozen=True)
class DataConfig:
    """Documents, and how they become packs."""

    sources: list[SourceConfig] = option([], "training documents; mixed by their weights")
    validation: list[SourceConfig] = option([], "held-out documents; empty: split off the sources")
    validation_fraction: float = option(0.05, "share of documents held out, by a hash of their name",
                                        low=0.0, high=0.9)
    tokenizer: str = option("", "Hugging Face folder, name on the hub, or 'builtin:NAME'; empty: the model's")
    seq_len: int = option(2048, "token budget of one pack", low=1, high=MAX_ROWS)
    document_tokens: int | None = option(None, "longest document before long_documents applies; null: seq_len",
                                         low=1, high=MAX_ROWS)
    long_documents: str = option("split", "what to do with a longer one", choices=("split", "truncate", "error"))
    append_eos: bool = option(True, "end every text document with the tokenizer's EOS")
    shuffle: bool = option(True, "order the samples anew each epoch")
    pack_window: int = option(512, "samples looked at together when filling packs", low=1, high=MAX_ROWS)
    cache_dir: str = option("~/.cache/csbp", "where tokenized corpora are kept")
    document_lengths: str = option("", "csbp plan and bench: file with the tokens of one document a line; pretrain or "
                                  "prolong, with an @ before it or not: drawn as such corpora have them; empty: one "
                                  "document")


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks and mesh axes: nproc = dp x csbp x tp. The sequence axis is called csbp whatever its kind."""

    nproc: int = option(1, "all ranks of the run, the product of the mesh axes", low=1, high=2**20)
    kind: str = option("csbp", "csbp: blocks whole on a rank, clean rows sharded; context: both streams sharded; "
                       "block: blocks whole on a rank, clean rows computed wherever they are seen; data: no sequence "
                       "axis", choices=("csbp", "context", "block", "data"))
    exchange: str = option("exact", "keys that a rank receives: just those its rows see, or all of them",
                           choices=("exact", "all_gather"))
    exchange_stages: int | None = option(None, "shares in which those keys come: the first are attended while others "
                                         "travel, each more goes over the query rows again; null: 1 where the axis "
                                         "fits a node, else up to 8 of 4096 rows or more; always 1 for layers whose "
                                         "query rows move", low=1, high=64)
    gradient_wire: str = option("compute", "dtype in which gradients of keys travel home; they are summed in float32 "
                                "either way", choices=("compute", "float32"))
    csbp: int | None = option(None, "size of the sequence axis; null: all remaining ranks", low=1)
    tp: int = option(1, "ranks that share the heads and MLP columns of the same rows (tensor parallelism); "
                     "neighbours, so that they lie in one node", low=1)
    dp_replicate: int = option(1, "copies of the weights among the dp = nproc / csbp / tp replicas; each copy is "
                               "sharded over the ranks that share it (FSDP2; more than 1: hybrid sharding)", low=1)
    checkpointing: str = option("none", "what a layer's backward computes again: nothing, all but attention and matrix "
                                "products, all but attention, or all of it", choices=CHECKPOINTING)
    offload: bool = option(False, "keep what is kept for the backward in CPU memory; of checkpointing=matmuls or "
                           "attention only with compile")
    compile: bool = option(False, "compile each layer with torch.compile")
    device: str = option("auto", "what ranks compute on; auto: a GPU each where there are any",
                         choices=("auto", "cpu", "cuda"))
    threads: int = option(1, "CPU threads of one rank", low=1, high=1024)
    timeout_seconds: int = option(600, "longest wait in one collective", low=5, high=10**7)


@dataclass(frozen=True)
class AttentionConfig:
    """Kernel choice."""

    backend: str = option("auto", "kernel of core attention; auto: the fastest that can compute what is asked",
                          choices=("auto", "flash", "wide", "flex", "reference"))


@dataclass(frozen=True)
class CadConfig:
    """Core attention disaggregation: the same attention work on every rank (docs/cad.md)."""

    enabled: bool = option(False, "ranks attend for one another, so that all have the same attention work")
    pool: str = option("csbp", "ranks that do so: those of a sequence axis, or with dp those of all data-parallel "
                       "replicas together, whose packs are then planned as one", choices=("csbp", "dp"))
    tolerance: float = option(0.02, "a rank may keep this part of the mean attention time above it", low=0.0, high=1.0)
    min_gain: float = option(0.01, "nothing moves that does not save this part of the predicted step",
                             low=0.0, high=1.0)
    ship_queries: bool = option(True, "noised queries may move too; false: only clean ones, so that nothing of the "
                                "noised stream ever travels")
    overlap: str = option("operator", "what travels does so while attention runs, or (to measure that) is waited for "
                          "at once; keys and values also with cad.enabled=false", choices=("operator", "none"))
    profile: str = option("auto", "what attention costs: auto (by device), a name in conf/profile, or a FILE.json of "
                          "csbp bench profile")
    max_send_mib: int | None = option(None, "most that moves may make a rank send in one layer of a step", low=0)
    max_receive_mib: int | None = option(None, "the same, received", low=0)
    max_buffer_mib: int | None = option(8192, "most of that which one pass over a layer may hold", low=0)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = option(1e-5, "peak learning rate", low=0.0, high=1000.0)
    beta1: float = option(0.9, "decay of the mean of gradients; below 1", low=0.0, high=1.0)
    beta2: float = option(0.95, "decay of the mean of squared gradients; below 1", low=0.0, high=1.0)
    eps: float = option(1e-8, "added to the root of that mean", low=0.0, high=1.0)
    weight_decay: float = option(0.1, "on matrices only; norms and biases have none", low=0.0, high=1000.0)
    schedule: str = option("cosine", "from the peak down by a cosine; wsd: level, then down; constant: level",
                          choices=("cosine", "wsd", "constant"))
    warmup_steps: int = option(10, "linear from 0", low=0)
    decay_fraction: float = option(0.2, "wsd: share of the steps that decays", low=0.0, high=1.0)
    min_lr_ratio: float = option(0.1, "last learning rate over the peak", low=0.0, high=1.0)
    clip_norm: float = option(1.0, "largest global gradient norm; 0 turns clipping off", low=0.0)


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = option(1000, "optimizer steps", low=1)
    packs_per_step: int = option(1, "packs in one optimizer step, over all ranks and micro-batches", low=1,
                                 high=2**20)
    dtype: str = option("float32", "compute dtype; master weights are always float32",
                        choices=("float32", "bfloat16"))
    logit_rows: int | None = option(None, "rows of a rank whose logits exist at once; null: about 256 MiB of them",
                                    low=1)
    deterministic: bool = option(False, "only algorithms that repeat bit for bit, or an error where torch has none")
    eval_every: int = option(0, "held-out loss every so many steps; 0: only before and after", low=0)
    eval_packs: int = option(8, "packs of held-out text in one evaluation", low=1, high=2**20)
    eval_seed: int = option(1234, "seed of the fixed evaluation noise", low=0)
    eval_t_min: float = option(0.02, "smallest noise level in an evaluation", low=0.0001, high=1.0)
    sample_every: int = option(0, "log one filled-in held-out block every so many steps; 0: never", low=0)
    nonfinite_limit: int = option(3, "consecutive skipped updates before the run stops", low=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and exporting."""

    every: int = option(0, "steps between checkpoints; 0: only at the end and on SIGTERM", low=0)
    keep: int = option(2, "newest checkpoints kept (the best one is kept beside them)", low=1)
    export: bool = option(True, "write a Hugging Face folder at the end")
    export_dtype: str = option("float32", "dtype of the exported weights", choices=("float32", "bfloat16"))


@dataclass(frozen=True)
class ObserveConfig:
    """What is shown and where."""

    trackers: list[str] = option([], "any of wandb, tensorboard, trackio, beside metrics.jsonl")
    project: str = option("csbp", "project name given to the trackers")
    progress: str = option("auto", "progress bar; auto: a bar on a terminal, lines elsewhere; off: "
                           "only warnings and the result",
                           choices=("auto", "bar", "lines", "off"))
    plot: bool = option(True, "write loss.png at the end")
    random_start_loss: float | None = option(None, "recorded held-out loss of this run from random weights, shown "
                                             "beside the run's own; not measured anew", low=0.0)
    random_start_steps: int | None = option(None, "how many steps that recorded run had", low=1)
    random_start_for: str = option("", "digest of the settings that it holds for; with others it is not shown")


@dataclass(frozen=True)
class PlanConfig:
    """What ``csbp plan`` assumes (docs/planning.md); training does not read it."""

    device: str = option("auto", "what a rank computes on; auto: cpu where parallel.device=cpu, else h200",
                         choices=("auto", "h200", "cpu"))


@dataclass(frozen=True)
class RunConfig:
    """One run. ``experiment=NAME`` picks a file of ``conf/experiment`` that sets all of it."""

    recipe: str = option("convert_qwen", "module of recipes/ that drives the run, one of those below")
    experiment: str = option("", "name of the experiment file; filled in by the composer")
    run_dir: str | None = option(None, "run folder; null: runs/<experiment>-<date>")
    resume: str = option("none", "none: a fresh run; auto: go on from the newest valid checkpoint, if any",
                         choices=("none", "auto"))
    seed: int = option(0, "seed of order, noise and random weights", low=0)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    cad: CadConfig = field(default_factory=CadConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


@dataclass(frozen=True)
class GenerateConfig:
    """``csbp generate``: block-wise denoising."""

    model: str = option("", "run folder, exported model, name on the hub, or 'builtin:NAME'")
    prompt: str = option("", "text to go on from, taken as it stands: no chat template is applied")
    max_new_tokens: int = option(64, "longest continuation; it ends earlier at the tokenizer's EOS", low=1,
                                 high=MAX_ROWS)
    threshold: float = option(0.9, "a masked token is kept once its probability reaches this", low=0.0, high=1.0)
    temperature: float = option(0.0, "0: most likely token", low=0.0)
    seed: int = option(0, "used when temperature > 0", low=0)
    device: str = option("auto", "auto: the first GPU, where there is one", choices=("auto", "cpu", "cuda"))

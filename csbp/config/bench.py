"""The settings of ``csbp bench attention``, ``csbp bench step`` and ``csbp bench profile``."""

from __future__ import annotations

from dataclasses import dataclass

from csbp.config.schema import MAX_ROWS, option


@dataclass(frozen=True)
class BenchAttentionConfig:
    """``csbp bench attention``: the forward and backward of one attention layer, timed (docs/benchmarks.md)."""

    preset: str = option("", "named rows: NAME for conf/bench/attention_NAME.yaml, or a FILE.yaml of your own")
    only: str = option("", "in a preset: measure only rows whose name contains this")
    name: str = option("", "what the rows are called; empty: made from the settings")
    ranks: int | None = option(None, "in a preset: measure only on so many ranks; null: on any number", low=1)
    lengths: list[int] = option([], "clean tokens of a pack; each noised once: twice as many rows. Empty: "
                                "[32768, 65536] on a GPU, [512, 1024] on a CPU")
    documents: str = option("one", "one: a pack is one document; packed: one of longest tokens, the rest lognormal; "
                            "else a file with the tokens of one document a line, taken in turn until the pack is full")
    median: int = option(2048, "documents=packed: median of the lognormal lengths", low=1, high=MAX_ROWS)
    spread: float = option(1.2, "documents=packed: standard deviation of the logarithm of the lengths", low=0.0,
                           high=5.0)
    longest: int = option(45056, "documents=packed: the longest document, which is there once", low=1, high=MAX_ROWS)
    block_size: int = option(32, "rows of a target block", low=1, high=MAX_ROWS)
    window: int | None = option(None, "sliding window in tokens; null: none", low=1, high=MAX_ROWS)
    clean_stream: str = option("block_causal", "what a clean row sees of its own document",
                               choices=("block_causal", "token_causal"))
    heads: int = option(32, "query heads", low=1, high=4096)
    kv_heads: int = option(8, "key/value heads; must divide heads", low=1, high=4096)
    head_dim: int = option(128, "numbers of a head", low=1, high=4096)
    dtype: str = option("auto", "of queries, keys and values; auto: bfloat16 on a GPU, float32 on a CPU",
                        choices=("auto", "bfloat16", "float32"))
    kind: str = option("csbp", "how several ranks share a pack; data: a pack each",
                       choices=("csbp", "context", "block", "data"))
    exchange: str = option("exact", "keys that a rank receives: just those its rows see, or all of them",
                           choices=("exact", "all_gather"))
    backends: list[str] = option(["auto"], "kernels to measure; auto: all that this device can use, plain torch only "
                                 "where there is no other")
    causal: bool = option(True, "measure FlashAttention-4's causal kernel beside them, where it can run")
    repeats: int = option(20, "timed runs of each row, at most", low=1, high=10**6)
    seconds: float = option(3.0, "time for one row's runs; at least three are made", low=0.0, high=86400.0)
    warmup: int = option(3, "runs before them", low=1, high=1000)
    sample: int = option(64, "query rows whose result is held against a float64 reference before anything is timed",
                         low=1, high=4096)
    seed: int = option(0, "seed of lengths and data", low=0)
    device: str = option("auto", "auto: a GPU for each rank, where there is one", choices=("auto", "cpu", "cuda"))
    threads: int = option(1, "CPU threads of one rank", low=1, high=1024)


@dataclass(frozen=True)
class BenchStepConfig:
    """``csbp bench step``: whole optimizer steps, timed (docs/benchmarks.md). Beside these it takes every setting of
    ``csbp train``."""

    preset: str = option("", "named rows: NAME for conf/bench/step_NAME.yaml, or a FILE.yaml of your own")
    only: str = option("", "in a preset: measure only rows whose name contains this")
    name: str = option("", "what the rows are called; empty: the experiment's name")
    ranks: int | None = option(None, "in a preset: measure only on so many ranks; null: on any number", low=1)
    variants: list[str] = option(["default"], "settings of csbp train by which the compared runs differ, one text a "
                                 "run, e.g. 'flex, eager: attention.backend=flex parallel.compile=false', with or "
                                 "without a label; default: no change")
    warmup: int = option(3, "steps before the timed ones", low=1, high=1000)
    repeats: int = option(10, "timed steps", low=1, high=10**6)


@dataclass(frozen=True)
class BenchProfileConfig:
    """``csbp bench profile``: what attention costs on this device, for csbp to plan by (docs/cad.md)."""

    out: str = option("", "FILE.json to write the profile to; empty: it is only shown")
    name: str = option("", "what the device is called; empty: its own name")
    rows: int | None = option(None, "query rows of the largest launch; null: 65,536 on a GPU, 4,096 on a CPU", low=2048,
                              high=MAX_ROWS)
    block_size: int = option(32, "rows of a target block", low=1, high=1024)
    heads: int | None = option(None, "query heads; null: 32 on a GPU, 4 on a CPU", low=1, high=4096)
    kv_heads: int | None = option(None, "key/value heads; must divide heads; null: 8 on a GPU, 2 on a CPU", low=1,
                                  high=4096)
    head_dim: int | None = option(None, "numbers of a head; null: 128 on a GPU, 64 on a CPU", low=1, high=4096)
    dtype: str = option("auto", "of queries, keys and values; auto: bfloat16 on a GPU, float32 on a CPU",
                        choices=("auto", "bfloat16", "float32"))
    backend: str = option("auto", "kernel to measure; auto: the fastest that this device can use",
                          choices=("auto", "flash", "wide", "flex", "reference"))
    repeats: int = option(20, "timed runs of each launch, at most", low=1, high=10**6)
    seconds: float = option(1.0, "time for one launch's runs; at least three are made", low=0.0, high=86400.0)
    warmup: int = option(2, "runs before them", low=1, high=1000)
    seed: int = option(0, "seed of lengths and data", low=0)
    device: str = option("auto", "auto: a GPU, where there is one", choices=("auto", "cpu", "cuda"))
    threads: int = option(1, "CPU threads", low=1, high=1024)

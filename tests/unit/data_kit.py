"""A tiny byte-level BPE tokenizer with Qwen's special tokens, made in memory, and its stock chat templates; files of
every kind to read."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent.parent / "golden" / "chat_templates"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_TEXT = ["def add(a, b):\n    return a + b\n\n\n", "user\nassistant\nsystem\ntool\n", "You are a helpful assistant.",
         "What is the sum of two and three? It is five.", "import os\n\n\nclass Point:\n    pass\n"]
# How Qwen's tokenizers split text before merging (tokenizer.json, pre_tokenizer): newlines may join.
_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")


@lru_cache(maxsize=4)
def qwen_like(template: str | None = "qwen2_5", eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Byte-level BPE, 256 bytes and some merges, special tokens after them; the template by file name."""
    from tokenizers import Regex

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(_TEXT * 3, trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _SPECIAL])
    core.add_tokens([AddedToken(t, normalized=False, special=False) for t in _ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token="<|endoftext|>",
                                        clean_up_tokenization_spaces=False)
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def with_template(tokenizer: Any, template: str) -> Any:
    """A copy of a tokenizer with another chat template."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(path: Path, kind: str, rows: list[Any]) -> Path:
    """A jsonl file, a parquet file or the folder of a dataset."""
    if kind == "jsonl":
        return write_lines(path, rows)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path

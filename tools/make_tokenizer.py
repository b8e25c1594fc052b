"""Make the byte-level BPE tokenizer that the shipped tiny checkpoint uses: ``make_tokenizer.py [--source DIR]``.

It learns its merges from the training documents of ``experiment=tiny_ar`` alone, so held-out loss and bits per
byte stay honest. Every byte has an id of its own: no text is unknown. The same files give the same tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from csbp.config.compose import compose_run
from csbp.config.schema import DataConfig
from csbp.data.corpus import name_hash
from csbp.data.pieces import held_out
from csbp.data.skips import Skips
from csbp.data.sources import read_source

EOS = "<|endoftext|>"
OUT = Path(__file__).parent.parent / "models" / "qwen3" / "tiny_ar"


def training_texts(data: DataConfig, source: str) -> list[str]:
    """The texts of ``data``'s first source, read from ``source``, that are not held out."""
    skips = Skips()
    records = list(read_source(dataclasses.replace(data.sources[0], path=source), "data.sources.0", skips))
    skips.warn(source)
    held = held_out(np.array([name_hash(record.name) for record in records], np.uint64), data.validation_fraction)
    return [record.text for record, out in zip(records, held, strict=True) if record.text and not out]


def train(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``size`` ids: EOS is 0, then the 256 bytes, then the merges in the order they were learnt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet,
                                  show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, model_max_length=4096,
                                   clean_up_tokenization_spaces=False)


def main() -> None:
    """Read the arguments, train, save, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="@stdlib", help="folder of .py files; '@stdlib': this Python's own")
    parser.add_argument("--size", type=int, default=2040, help="ids of the tokenizer; the model's vocabulary has "
                        "a few rows more, the first of them for [MASK]")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    arguments = parser.parse_args()
    texts = training_texts(compose_run(["experiment=tiny_ar"]).data, arguments.source)
    tokenizer = train(texts, arguments.size)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(arguments.out)
    ids = tokenizer(texts, verbose=False)["input_ids"]
    tokens, size = sum(map(len, ids)), sum(len(text.encode()) for text in texts)
    print(f"{len(texts)} files, {len(tokenizer)} ids, {tokens:,} tokens, {size / tokens:.3f} bytes a token")


if __name__ == "__main__":
    main()

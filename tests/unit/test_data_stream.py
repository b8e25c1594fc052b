"""The stream of packs: every sample once an epoch, and any cursor goes on exactly as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_kit import qwen_like, write_lines, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.config.schema import DataConfig, SourceConfig
from csbp.data.batch import PackedBatch
from csbp.data.samples import Totals, Window
from csbp.data.stream import Cursor, PackStream, open_stream, prepare_corpora
from csbp.errors import ConfigError, UserError

TOKENIZER = qwen_like(None, eos="<|endoftext|>")


class Numbered:
    """Sample i of an epoch has ``lengths[i]`` tokens, all equal to i."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, np.int64)
        self.samples_per_epoch = len(lengths)

    def window(self, epoch: int, window: int, size: int) -> Window | None:
        places = np.arange(len(self.lengths))[window * size:(window + 1) * size]
        if not len(places):
            return None
        return Window(self.lengths[places], epoch * len(self.lengths) + places,
                      lambda i: (np.full(self.lengths[places[i]], places[i]), None))

    def totals(self) -> Totals:
        return Totals(len(self.lengths), len(self.lengths), int(self.lengths.sum()), int(self.lengths.sum()), 1.0)

    def token_counts(self, vocabulary: int) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def digest(self) -> str:
        return repr(self.lengths.tolist())


def key(pack: PackedBatch) -> tuple[Any, ...]:
    return tuple(tuple(getattr(pack, f.name).tolist()) for f in dataclasses.fields(pack))


@st.composite
def streams(draw: st.DrawFn) -> PackStream:
    budget = draw(st.integers(2, 20))
    lengths = draw(st.lists(st.integers(1, budget), min_size=1, max_size=30))
    return PackStream(Numbered(lengths), seq_len=budget, pack_window=draw(st.integers(1, 12)), vocabulary=30,
                      shuffle_key=draw(st.sampled_from([None, ("train", 0), ("train", 1)])))


@settings(max_examples=60)
@given(streams())
def test_every_sample_once_an_epoch_within_the_budget(stream: PackStream) -> None:
    samples = stream.samples.samples_per_epoch
    assert samples is not None
    cursor, seen = stream.first(), list[int]()
    while cursor.epoch < 3:
        (pack,), cursor = stream.take(cursor, 1)
        assert 1 <= len(pack.tokens) <= stream.seq_len == stream.seq_len
        assert pack.document_starts[-1] == len(pack.tokens) == len(pack.target_mask)
        assert pack.tokens.dtype == pack.document_starts.dtype == pack.sample_ids.dtype == np.int64
        assert (pack.tokens == np.repeat(pack.sample_ids, np.diff(pack.document_starts)) % samples).all()
        seen += pack.sample_ids.tolist()
    whole = [i for i in seen if i < 3 * samples]
    assert sorted(whole) == list(range(3 * samples)) and len(set(seen)) == len(seen)


@settings(max_examples=60)
@given(streams(), st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 4))
def test_any_cursor_resumes_the_uninterrupted_sequence(stream: PackStream, parts: list[int], ranks: int) -> None:
    """However the packs are taken, and however many ranks share them, the sequence is one and the same."""
    whole, end = stream.take(stream.first(), sum(parts))
    cursor, found = stream.first(), list[PackedBatch]()
    for part in parts:
        fresh = PackStream(stream.samples, seq_len=stream.seq_len, pack_window=stream.pack_window, vocabulary=30,
                           shuffle_key=stream.shuffle_key)  # a new process: nothing but the cursor is left
        packs, cursor = fresh.take(Cursor.from_json(json.loads(json.dumps(cursor.to_json()))), part)
        by_rank = [packs[rank::ranks] for rank in range(ranks)]
        found += [by_rank[i % ranks][i // ranks] for i in range(part)]
    assert list(map(key, found)) == list(map(key, whole))
    assert cursor == end


def test_packs_of_a_window_are_shuffled_anew_each_epoch() -> None:
    samples = Numbered([10] * 40)
    stream = PackStream(samples, seq_len=10, pack_window=40, vocabulary=40, shuffle_key=("train", 0))
    orders = [[int(p.tokens[0]) for p in stream.take(Cursor(e), 40)[0]] for e in range(2)]
    assert orders[0] != sorted(orders[0]) and orders[0] != orders[1]
    still = PackStream(samples, seq_len=10, pack_window=40, vocabulary=40, shuffle_key=None)
    assert [int(p.tokens[0]) for p in still.take(Cursor(), 40)[0]] == list(range(40))


def test_progress_head_and_efficiency() -> None:
    stream = PackStream(Numbered([4, 3, 3, 4, 2]), seq_len=7, pack_window=3, vocabulary=5, shuffle_key=None)
    assert [stream.epoch_progress(Cursor(*c)) for c in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 0), (2, 1, 0)]] == [
        0.0, 0.3, 0.6, 1.0, 2.6]
    assert len(stream.head(100)) == 3 and [p.sample_ids.tolist() for p in stream.head(2)] == [[0, 1], [2]]
    assert stream.efficiency() == 16 / 21


def test_a_source_without_samples_stops_the_stream() -> None:
    stream = PackStream(Numbered([]), seq_len=7, pack_window=3, vocabulary=5, shuffle_key=None)
    with pytest.raises(UserError, match="no document"):
        stream.take(stream.first(), 1)


# --- opened from a configuration ---

@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    for name, count in (("one", 60), ("two", 20)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{name}{i}.py").write_text(f"{name} é {i}\n" * (1 + i % 7))
    return DataConfig(sources=[SourceConfig(path=str(tmp_path / n)) for n in ("one", "two")], seq_len=60,
                      validation_fraction=0.3, pack_window=16, cache_dir=str(tmp_path / "cache"))


def opened(config: DataConfig, split: str = "train", seed: int = 0, tokenizer: Any = TOKENIZER) -> PackStream:
    return open_stream(config, seed=seed, tokenizer=tokenizer, split=split)


def epoch_texts(stream: PackStream, epoch: int = 0) -> list[str]:
    """The documents (pieces) of one epoch, decoded."""
    found, cursor = [], Cursor(epoch)
    total = stream.samples.samples_per_epoch
    assert total is not None
    while len(found) < total:
        (pack,), cursor = stream.take(cursor, 1)
        starts = pack.document_starts
        found += [TOKENIZER.decode(pack.tokens[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    return found


def all_texts(config: DataConfig) -> list[str]:
    files = [f for s in config.sources for f in sorted(Path(s.path).rglob("*.py"))]
    return [f.read_text() + "<|endoftext|>" for f in files]


def test_train_and_held_out_documents_are_apart_and_all_there(config: DataConfig) -> None:
    train, held = opened(config), opened(config, "validation")
    joined = "".join(sorted(epoch_texts(train) + epoch_texts(held)))
    assert len(joined) == sum(map(len, all_texts(config)))
    assert train.totals.documents + held.totals.documents == 80
    assert 10 <= held.totals.documents <= 38
    pieces = Counter(epoch_texts(train))
    assert pieces == Counter(epoch_texts(train, 1))
    assert set(pieces & Counter(epoch_texts(held))) <= {"<|endoftext|>"}  # a last piece may be just that


def test_sample_ids_are_places_in_the_order_of_the_run(config: DataConfig) -> None:
    stream = opened(config)
    total = stream.samples.samples_per_epoch
    assert total is not None
    for epoch in range(2):
        packs, cursor, ids = [], Cursor(epoch), list[int]()
        while len(ids) < total:
            packs, cursor = stream.take(cursor, 1)
            ids += packs[0].sample_ids.tolist()
        assert sorted(ids) == list(range(epoch * total, (epoch + 1) * total))


@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_counts_and_bytes_match_the_texts(config: DataConfig, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("csbp.data.samples._CHUNK", chunk)  # tokens are counted in parts
    for split in ("train", "validation"):
        stream = opened(config, split)
        texts = epoch_texts(stream)
        ids = [i for text in texts for i in TOKENIZER(text)["input_ids"]]
        assert stream.token_counts().tolist() == np.bincount(ids, minlength=len(TOKENIZER)).tolist()
        size = sum(len(text.replace("<|endoftext|>", "").encode()) for text in texts)
        assert stream.totals.supervised == stream.totals.tokens == len(ids)
        assert stream.bytes_per_token == pytest.approx(size / len(ids), rel=1e-12)


def test_the_seed_orders_training_but_not_evaluation(config: DataConfig) -> None:
    assert epoch_texts(opened(config)) != epoch_texts(opened(config, seed=1))
    assert epoch_texts(opened(config, "validation")) == epoch_texts(opened(config, "validation", seed=1))
    still = dataclasses.replace(config, shuffle=False, pack_window=1)
    assert epoch_texts(opened(still)) == epoch_texts(opened(still, seed=1)) == epoch_texts(opened(still), 1)


def test_the_first_held_out_packs_come_from_everywhere(config: DataConfig) -> None:
    text = "".join(epoch_texts(opened(config, "validation"))[:12])
    assert "one" in text and "two" in text


def test_validation_sources_leave_the_training_documents_whole(config: DataConfig) -> None:
    given_apart = dataclasses.replace(config, sources=config.sources[:1], validation=config.sources[1:])
    assert opened(given_apart).totals.documents == 60
    assert opened(given_apart, "validation").totals.documents == 20


def test_weights_mix_the_sources(config: DataConfig) -> None:
    sources = [dataclasses.replace(s, weight=w) for s, w in zip(config.sources, (1.0, 3.0), strict=True)]
    mixed = dataclasses.replace(config, sources=sources, validation_fraction=0.0, long_documents="truncate")
    texts = epoch_texts(opened(mixed))
    assert sum(t.startswith("two") for t in texts) == 60 and len(texts) == 80


@pytest.mark.parametrize("weights", [(1.0, 1.0), (None, None)])
def test_a_source_of_which_nothing_is_trained_on_is_refused(config: DataConfig, tmp_path: Path,
                                                            weights: tuple[float | None, ...]) -> None:
    """Drawing from it would never end, and leaving it out would go unnoticed."""
    path = write_lines(tmp_path / "one.jsonl", [{"text": "abc"}])  # its only document is one of the 90% held out
    sources = [dataclasses.replace(config.sources[0], weight=weights[0]),
               SourceConfig(kind="jsonl", path=str(path), weight=weights[1])]
    mixed = dataclasses.replace(config, sources=sources, validation_fraction=0.9)
    with pytest.raises(ConfigError, match=r"data.sources.1='.*one.jsonl': nothing of it is left to train on "
                                          r"\(data.validation_fraction=0.9\): 0.9 of 1 documents.*take the source out"):
        opened(mixed)
    assert opened(mixed, "validation").totals.documents > 1
    unused = [dataclasses.replace(source, weight=weight) for source, weight in zip(sources, (1.0, 0.0), strict=True)]
    stream = opened(dataclasses.replace(mixed, sources=unused))
    assert len(stream.take(stream.first(), 3)[0]) == 3


def chats(path: Path, question: str, count: int = 9) -> SourceConfig:
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "Hello"}]
    return SourceConfig(kind="jsonl", path=str(write_lines(path, [{"messages": chat}] * count)), format="messages")


@pytest.mark.parametrize(("setting", "split", "message"), [
    ("seq_len", "train", r"data.long_documents='truncate': the train split is empty: cut to 12 tokens, all of its \d+ "
                         r"documents end before anything that is learnt; choose split, or raise data.seq_len"),
    ("document_tokens", "validation", r"data.long_documents='truncate': the validation split is empty.*raise "
                                      r"data.document_tokens"),
    ("mixed", "train", r"data.sources.1=.*nothing of it is left to train on \(data.long_documents=truncate\)")])
def test_targets_lost_by_truncation_are_not_blamed_on_the_split(config: DataConfig, tmp_path: Path, setting: str,
                                                                split: str, message: str) -> None:
    late = chats(tmp_path / "late.jsonl", "What is this? " * 20)
    short = {"document_tokens" if setting == "document_tokens" else "seq_len": 12}
    sources = [config.sources[0], late] if setting == "mixed" else [late]
    with pytest.raises(ConfigError, match=message):
        opened(dataclasses.replace(config, sources=sources, long_documents="truncate", **short), split,
               tokenizer=qwen_like("qwen2_5"))


@pytest.mark.parametrize(("policy", "limit"), [("split", 10), ("truncate", 10), ("split", None)])
def test_long_documents(config: DataConfig, policy: str, limit: int | None) -> None:
    stream = opened(dataclasses.replace(config, long_documents=policy, document_tokens=limit, validation_fraction=0.0))
    packs, _ = stream.take(stream.first(), 30)
    assert max(int(np.diff(p.document_starts).max()) for p in packs) == (limit or 60)
    sizes = [len(TOKENIZER(text)["input_ids"]) for text in all_texts(config)]
    kept = sizes if policy == "split" else [min(size, limit or 60) for size in sizes]
    assert stream.totals.tokens == sum(kept) and stream.totals.documents == 80


def test_long_documents_error(config: DataConfig) -> None:
    with pytest.raises(ConfigError, match=r"data.long_documents.*one\d+.py with \d+ tokens"):
        opened(dataclasses.replace(config, long_documents="error", document_tokens=10))


def test_chat_packs_carry_their_targets(config: DataConfig) -> None:
    source = chats(Path(config.cache_dir).parent / "chat.jsonl", "Hi")
    stream = opened(dataclasses.replace(config, sources=[source], validation_fraction=0.0),
                    tokenizer=qwen_like("qwen3"))
    (pack,), _ = stream.take(stream.first(), 1)
    answers = TOKENIZER.decode(pack.tokens[pack.target_mask])
    assert answers == "<think>\n\n</think>\n\nHello<|im_end|>" * len(pack.sample_ids) and len(pack.sample_ids) > 1
    assert stream.token_counts().sum() == stream.totals.supervised == 9 * pack.target_mask.sum() / len(pack.sample_ids)


def test_the_digest_changes_with_what_is_read_and_only_then(config: DataConfig, tmp_path: Path) -> None:
    before = opened(config).digest
    assert before == opened(dataclasses.replace(config, cache_dir=str(tmp_path / "elsewhere"))).digest
    moved = [dataclasses.replace(s, path=str(shutil.copytree(s.path, tmp_path / "moved" / Path(s.path).name)))
             for s in config.sources]
    assert opened(dataclasses.replace(config, sources=moved)).digest == before
    changes: list[dict[str, Any]] = [
        {"seq_len": 61}, {"pack_window": 17}, {"document_tokens": 20}, {"validation_fraction": 0.2},
        {"append_eos": False}, {"shuffle": False}, {"sources": config.sources[::-1]},
        {"sources": [dataclasses.replace(s, weight=w) for s, w in zip(config.sources, (1.0, 2.0), strict=True)]}]
    (Path(moved[1].path) / "two0.py").write_text("one word more\n")  # in moved alone
    found = [opened(dataclasses.replace(config, **change)).digest for change in [*changes, {"sources": moved}]]
    found += [opened(config, seed=1).digest, opened(config, "validation").digest]
    assert len({before, *found}) == 1 + len(found)


def test_a_streams_digest_is_of_its_settings(config: DataConfig, tmp_path: Path) -> None:
    source = streaming(tmp_path, "s", 5)
    live = dataclasses.replace(config, sources=[source], validation_fraction=0.0)
    assert opened(live).digest == opened(live).digest
    other = dataclasses.replace(live, sources=[dataclasses.replace(source, split="dev")])
    assert opened(live).digest != opened(other).digest


def test_prepared_corpora_are_only_read(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_corpora(config, TOKENIZER)
    monkeypatch.setattr("csbp.data.corpus._build", None)
    assert opened(config).totals.documents + opened(config, "validation").totals.documents == 80


@pytest.mark.slow
def test_another_process_draws_the_same_packs(config: DataConfig, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    code = f"""
import hashlib
from csbp.config.schema import DataConfig, SourceConfig
from csbp.data.stream import open_stream
from csbp.data.tokenizer import load_tokenizer
config = {config!r}
stream = open_stream(config, seed=5, tokenizer=load_tokenizer({str(tmp_path / "tokenizer")!r}, ""), split="train")
print(hashlib.sha256(b"".join(p.tokens.tobytes() for p in stream.take(stream.first(), 30)[0])).hexdigest())"""
    found = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(found) == 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"sources": []}, "data.sources="),
    ({"document_tokens": 61}, r"data.document_tokens=61: .*at most data.seq_len=60"),
    ({"validation_fraction": 1e-9}, r"data.validation_fraction.*validation split is empty: 1e-09 of 80 documents"),
    ({"validation_fraction": 0.0}, r"data.validation_fraction.*nothing is held out")])
def test_settings_that_cannot_work(config: DataConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(dataclasses.replace(config, **changes), "validation")


# --- streaming datasets ---

def streaming(tmp_path: Path, name: str, count: int, weight: float | None = None) -> SourceConfig:
    path = tmp_path / name
    write_rows(path, "dataset", [{"text": f"{name} {i}\n" * (1 + i % 4)} for i in range(count)])
    return SourceConfig(kind="dataset", path=str(path), streaming=True, weight=weight)


def test_a_stream_gives_every_document_and_resumes_anywhere(config: DataConfig, tmp_path: Path) -> None:
    live = dataclasses.replace(config, sources=[streaming(tmp_path, "s", 50)], validation=config.sources[:1],
                               document_tokens=20)
    stream = opened(live)
    whole, end = stream.take(stream.first(), 30)
    assert end.epoch >= 1 and stream.epoch_progress(end) is None
    ids = [i for p in whole for i in p.sample_ids.tolist()]
    assert len(set(ids)) == len(ids)
    text = "".join(TOKENIZER.decode(p.tokens) for p in whole)
    assert all(f"s {i}\n" in text for i in range(50))
    cursor = stream.first()
    for _ in range(10):
        packs, cursor = opened(live).take(cursor, 3)
        assert list(map(key, packs)) == list(map(key, whole[:3]))
        whole = whole[3:]
    assert opened(live).bytes_per_token > 0.5 and opened(live).token_counts().sum() > 0
    assert not stream.totals.exact


def test_weighted_streams_are_interleaved_until_all_have_ended(config: DataConfig, tmp_path: Path) -> None:
    sources = [streaming(tmp_path, "a", 30, 1.0), streaming(tmp_path, "b", 10, 2.0)]
    stream = opened(dataclasses.replace(config, sources=sources, validation_fraction=0.0, pack_window=30))
    cursor, names = stream.first(), Counter[str]()
    while cursor.epoch == 0:
        (pack,), cursor = stream.take(cursor, 1)
        if cursor.epoch == 0:
            names.update(TOKENIZER.decode([t])[:1] for t in pack.tokens[pack.document_starts[:-1]])
    assert names["a"] == 30 and 58 <= names["b"] <= 62


def test_streams_cannot_be_split(config: DataConfig, tmp_path: Path) -> None:
    live = dataclasses.replace(config, sources=[streaming(tmp_path, "s", 5)])
    with pytest.raises(ConfigError, match=r"data.validation_fraction.*give data.validation, or 0"):
        opened(live)
    with pytest.raises(ConfigError, match=r"data.sources.0.streaming"):
        opened(dataclasses.replace(config, sources=[dataclasses.replace(config.sources[0], streaming=True)]))

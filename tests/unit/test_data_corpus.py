"""The cached corpus: what it holds, when it is made anew, and that nothing half-written is ever read."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_kit import qwen_like, write_lines
from hypothesis import given
from hypothesis import strategies as st

from csbp.config.schema import DataConfig, SourceConfig
from csbp.data import corpus as corpus_module
from csbp.data.corpus import Corpus, name_hash, open_corpus
from csbp.data.pieces import cut_pieces, held_out
from csbp.data.skips import Skips
from csbp.errors import ConfigError, UserError

FIELD = "data.sources.0"
TOKENIZER = qwen_like(None, eos="<|endoftext|>")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "text").mkdir()
    for name, text in (("a.py", "import os\n"), ("b.py", ""), ("c.py", "é😀" * 3), ("d.py", "x")):
        (tmp_path / "text" / name).write_text(text)
    return DataConfig(sources=[SourceConfig(path=str(tmp_path / "text"))], cache_dir=str(tmp_path / "cache"))


def opened(config: DataConfig, **options: Any) -> Corpus:
    return open_corpus(config.sources[0], FIELD, config, options.pop("tokenizer", TOKENIZER), **options)


def lines_source(config: DataConfig, rows: list[Any], format: str = "text") -> SourceConfig:
    path = write_lines(Path(config.cache_dir).parent / "x.jsonl", rows)
    return SourceConfig(kind="jsonl", format=format, path=str(path))


def folder_of(config: DataConfig) -> Path:
    (folder,) = Path(config.cache_dir).iterdir()
    return folder


def texts(corpus: Corpus) -> list[str]:
    return [TOKENIZER.decode(corpus.tokens[a:b]) for a, b in zip(corpus.starts, corpus.starts[1:], strict=False)]


def test_what_a_corpus_holds(config: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    corpus = opened(config)
    assert texts(corpus) == ["import os\n<|endoftext|>", "é😀é😀é😀<|endoftext|>", "x<|endoftext|>"]
    assert [corpus.name(d) for d in corpus.document] == ["a.py", "c.py", "d.py"]
    assert corpus.target_bytes.tolist() == [10, 18, 1] and corpus.targets is None
    assert corpus.target_counts.tolist() == np.diff(corpus.starts).tolist()
    assert corpus.name_hash.tolist() == [name_hash(n) for n in ("a.py", "c.py", "d.py")]
    assert corpus.tokens.dtype == np.uint16 and isinstance(corpus.tokens, np.memmap)
    assert corpus.skips.counts == {"an empty document": 1}
    assert "data.sources.0: left out 1: an empty document (first: b.py)" in caplog.text


def test_tokenizing_that_takes_long_says_how_far_it_is(config: DataConfig, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    opened(dataclasses.replace(config, append_eos=False))
    assert "tokenizing" not in capsys.readouterr().err
    monkeypatch.setattr(corpus_module, "_REPORT_SECONDS", -1.0)
    opened(config)
    assert re.search(r"^csbp: tokenizing data.sources.0: 1 documents, \d+ tokens$", capsys.readouterr().err, re.M)
    opened(config)
    assert capsys.readouterr().err == ""  # it is in the cache


def test_it_is_made_once(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(config)
    monkeypatch.setattr(corpus_module, "_build", None)  # a second build would fail
    again = opened(config, checksums=True)
    assert texts(again) == texts(first) and again.skips == first.skips


def changed(config: DataConfig, how: str) -> Corpus:
    if how == "file":
        (Path(config.sources[0].path) / "d.py").write_text("xy")
    if how == "new file":
        (Path(config.sources[0].path) / "e.py").write_text("x")
    if how == "exclude":
        config = dataclasses.replace(config, sources=[dataclasses.replace(config.sources[0], exclude=["a*"])])
    if how == "eos":
        config = dataclasses.replace(config, append_eos=False)
    return opened(config, tokenizer=qwen_like(None, eos="<|im_end|>") if how == "tokenizer" else TOKENIZER)


@pytest.mark.parametrize("how", ["file", "new file", "exclude", "eos", "tokenizer"])
def test_it_is_made_anew_when_anything_that_decides_it_changes(config: DataConfig, how: str) -> None:
    before = opened(config)
    after = changed(config, how)
    assert after.tokens.tolist() != before.tokens.tolist()
    assert len(list(Path(config.cache_dir).iterdir())) == 2


def test_settings_that_do_not_decide_it_share_it(config: DataConfig) -> None:
    opened(config)
    source = dataclasses.replace(config.sources[0], weight=2.0)
    opened(dataclasses.replace(config, sources=[source], validation_fraction=0.5, seq_len=2, long_documents="error"))
    folder_of(config)  # one folder


def damage(folder: Path, how: str) -> None:
    tokens = folder / "tokens.npy"
    if how == "missing array":
        tokens.unlink()
    elif how == "cut short":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif how == "flipped bit":
        data = bytearray(tokens.read_bytes())
        data[-1] ^= 1
        tokens.write_bytes(bytes(data))
    elif how == "no meta":
        (folder / "meta.json").unlink()
    elif how == "half a meta":
        (folder / "meta.json").write_text((folder / "meta.json").read_text()[:40])
    elif how == "emptied":
        for file in folder.iterdir():
            file.unlink()
    elif how in ODD_META:
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(ODD_META[how](meta) or json.dumps(meta))
    else:
        shutil.rmtree(folder)
        if how == "a file":
            folder.write_text("")
        elif how == "a link to nothing":
            folder.symlink_to("nowhere")
        else:
            folder.symlink_to("..")


ODD_META: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "not ours": lambda meta: "[]", "null": lambda meta: "null", "deep": lambda meta: "[" * 100_000,
    "no skips": lambda meta: meta.pop("skips") and None, "odd skips": lambda meta: meta.update(skips={"counts": 5}),
    "more skips": lambda meta: meta["skips"].update(more=1), "a skip": lambda meta: meta["skips"]["counts"].update(x=1),
    "no files": lambda meta: meta["files"].clear(), "one less": lambda meta: meta["files"].pop("starts.npy") and None,
    "odd size": lambda meta: meta["files"].update({"starts.npy": 5})}
DAMAGES = ["missing array", "cut short", "flipped bit", "no meta", "half a meta", "emptied", *ODD_META, "a file",
           "a link to nothing", "a link elsewhere"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_copy_is_made_anew(config: DataConfig, how: str) -> None:
    before = texts(opened(config))
    damage(folder_of(config), how)
    if how != "flipped bit":  # that is seen when a run prepares its data
        assert texts(opened(config)) == before
    assert texts(opened(config, checksums=True)) == before
    folder_of(config)  # nothing else is left behind
    assert corpus_module.read_meta(folder_of(config), checksums=True) is not None


def test_two_builders_at_once(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tokenize to the end before either publishes; both then read the same folder."""
    barrier, publish, found, published = threading.Barrier(2, timeout=30), corpus_module._publish, [], set()

    def together(building: Path, folder: Path) -> None:
        barrier.wait()
        publish(building, folder)
        published.add((folder / "meta.json").stat().st_ino)

    monkeypatch.setattr(corpus_module, "_publish", together)
    threads = [threading.Thread(target=lambda: found.append(texts(opened(config)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and found[0] == found[1] and len(published) == 1
    folder_of(config)


def test_a_failed_build_leaves_nothing(config: DataConfig) -> None:
    source = lines_source(config, [{"text": "a"}])
    with Path(source.path).open("a") as out:
        out.write("{bad\n")
    with pytest.raises(UserError, match="line 2"):
        open_corpus(source, FIELD, config, TOKENIZER)
    assert list(Path(config.cache_dir).iterdir()) == []


def test_a_source_without_anything_to_learn_is_an_error(config: DataConfig) -> None:
    shutil.rmtree(config.sources[0].path)
    Path(config.sources[0].path).mkdir()
    (Path(config.sources[0].path) / "b.py").write_text("")
    with pytest.raises(UserError, match=r"data.sources.0.*no document that can be learnt; left out 1: an empty"):
        opened(config)


def test_a_cache_that_cannot_be_written(config: DataConfig) -> None:
    blocked = Path(config.cache_dir).parent / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"data.cache_dir.*cannot be written"):
        opened(dataclasses.replace(config, cache_dir=str(blocked)))


def test_chats_keep_their_target_masks(config: DataConfig) -> None:
    rows: list[Any] = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"},
                       {"role": "assistant", "content": "Hello é"}]]
    source = lines_source(config, [{"messages": m} for m in rows], "messages")
    corpus = open_corpus(source, FIELD, config, qwen_like("qwen2_5"))
    assert corpus.targets is not None and corpus.name(0) == "x.jsonl:1"
    assert TOKENIZER.decode(corpus.tokens[corpus.targets]) == "Hello é<|im_end|>"
    assert corpus.target_counts.tolist() == [corpus.targets.sum()] and corpus.target_bytes.tolist() == [8]
    assert list(corpus.skips.counts.values()) == [1]


def test_prompt_and_completion_without_a_template(config: DataConfig) -> None:
    rows = [("def ", "add"), ("ad", "d"), ("a\n", "\nb"), ("", "x"), ("q", "")]
    source = lines_source(config, [{"prompt": p, "completion": c} for p, c in rows], "prompt_completion")
    corpus = open_corpus(source, FIELD, config, TOKENIZER)
    assert corpus.targets is not None
    for (prompt, completion), a, b in zip(rows, corpus.starts, corpus.starts[1:], strict=False):
        ids, mask = corpus.tokens[a:b], corpus.targets[a:b]
        assert TOKENIZER.decode(ids[mask]) == completion + "<|endoftext|>"
        assert ids[~mask].tolist() == TOKENIZER(prompt)["input_ids"]


def test_with_a_template_prompt_and_completion_are_a_chat(config: DataConfig) -> None:
    source = lines_source(config, [{"prompt": "Hi", "completion": "Hello"}], "prompt_completion")
    corpus = open_corpus(source, FIELD, config, qwen_like("qwen3"))
    assert TOKENIZER.decode(corpus.tokens) == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
                                               "<think>\n\n</think>\n\nHello<|im_end|>")


def test_a_tokenizer_that_begins_with_bos(config: DataConfig) -> None:
    import copy

    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(TOKENIZER)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    corpus = opened(config, tokenizer=tokenizer)
    assert corpus.targets is not None
    first = corpus.starts[:-1]
    assert (corpus.tokens[first] == start).all() and not corpus.targets[first].any()
    assert corpus.targets.sum() == len(corpus.targets) - len(first)


# --- pieces ---

def names(n: int) -> str:
    return f"doc{n}"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 12),
       st.sampled_from(["split", "truncate"]), st.data())
def test_pieces_cover_the_documents(lengths: list[int], limit: int, policy: str, data: st.DataObject) -> None:
    starts = np.cumsum([0, *lengths])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=int(starts[-1]), max_size=int(starts[-1]))))
    keep = np.array(data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True).map(sorted)), np.int64)
    counts = np.array([mask[a:b].sum() for a, b in zip(starts, starts[1:], strict=False)])
    skips = Skips()
    pieces = cut_pieces(starts, mask, counts, keep, limit, policy, names, skips)
    expected = []
    for n in keep.tolist():
        end = starts[n + 1] if policy == "split" else min(starts[n] + limit, starts[n + 1])
        expected += [(int(a), int(min(a + limit, end)), n) for a in range(starts[n], end, limit)]
    whole = [(a, b, n) for a, b, n in expected if mask[a:b].any()]
    assert list(zip(pieces.start, pieces.start + pieces.length, pieces.parent, strict=True)) == whole
    assert pieces.targets.tolist() == [mask[a:b].sum() for a, b, _ in whole]
    assert sum(skips.counts.values()) == len(expected) - len(whole)


def test_long_documents_error_names_the_longest() -> None:
    starts = np.array([0, 3, 10, 18])
    with pytest.raises(ConfigError, match=r"data.long_documents='error': 2 documents.*doc2 with 8 tokens"):
        cut_pieces(starts, None, np.diff(starts), np.arange(3), 5, "error", names, Skips())
    assert cut_pieces(starts, None, np.diff(starts), np.arange(1), 5, "error", names, Skips()).length.tolist() == [3]


def test_held_out_names_do_not_depend_on_the_others() -> None:
    hashes = np.array([name_hash(f"pkg/m{i}.py") for i in range(4000)], np.uint64)
    small, large = held_out(hashes, 0.05), held_out(hashes, 0.2)
    assert 150 < small.sum() < 250 and 700 < large.sum() < 900
    assert (large | ~small).all()  # a larger share only adds
    assert not held_out(hashes, 0.0).any()
    assert name_hash("json/decoder.py") == 0xd61b8829a2a2b1d  # the same on every machine, for ever

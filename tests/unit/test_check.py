"""``csbp check`` shows what would be learnt, and stops at what would stop the run."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cad import dear_profile
from data_kit import qwen_like
from rich.console import Console

from csbp import check, memory
from csbp.check import run_check
from csbp.config.schema import (
    CadConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
)
from csbp.data.stream import open_stream
from csbp.data.tokenizer import load_tokenizer
from csbp.errors import ConfigError, UserError
from csbp.locks import RunLock
from csbp.models.registry import families, get_adapter
from csbp.plan.estimate import DEVICES
from csbp.plan.lengths import read_lengths
from csbp.prepare import prepare_run
from csbp.train.ready import build_on_meta

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 400, "tie_word_embeddings": False}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    qwen_like("qwen2_5").save_pretrained(tmp_path / "tokenizer")
    chats = [{"messages": [{"role": "user", "content": f"[red]What is {i}?"},
                           {"role": "assistant", "content": f"It is\n{i}."}]} for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(c) + "\n" for c in [*chats, {"messages": []}]))
    return RunConfig(
        model=ModelConfig(family=families()[0], init="random", shape=SHAPE), objective=ObjectiveConfig(block_size=4),
        data=DataConfig(sources=[SourceConfig(kind="jsonl", path=str(tmp_path / "chat.jsonl"), format="messages")],
                        tokenizer=str(tmp_path / "tokenizer"), seq_len=256, validation_fraction=0.3,
                        cache_dir=str(tmp_path / "cache")),
        parallel=ParallelConfig(nproc=2, device="cpu"))


def change(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def shown(config: RunConfig) -> str:
    out = io.StringIO()
    assert run_check(config, ["experiment=x"], Console(file=out, width=120, highlight=False, soft_wrap=True)) == 0
    return out.getvalue()


def test_a_run_that_can_start(config: RunConfig) -> None:
    text = shown(config)
    for title in ("Devices", "Tokenizer", "Data", "First sample", "Memory of the fullest rank",
                  "Nothing stands in the way"):
        assert title in text
    numbers = {words[0]: words[1:4] for words in map(str.split, text.splitlines())
               if words and words[0] in ("train", "validation")}
    assert sum(int(n[0]) for n in numbers.values()) == 30  # the empty chat is not there, but is said
    assert "left out 1: a conversation without an assistant turn" in text and "chat.jsonl:30" in text
    assert "\x1b" not in text  # plain where it is piped


def test_replicas_without_a_pack(config: RunConfig) -> None:
    config = change(config, "parallel", nproc=2, csbp=1)
    assert "is no multiple of 2 replicas; some wait" in shown(config)
    pooled = dataclasses.replace(config, cad=CadConfig(enabled=True, pool="dp"))
    assert "is no multiple of 2 replicas; some have only attention of others" in shown(pooled)
    unheeded = dataclasses.replace(config, cad=CadConfig(pool="dp"))
    assert "warning: cad.pool='dp': nothing heeds that with cad.enabled=false" in shown(unheeded)
    assert "heed" not in shown(dataclasses.replace(config, cad=CadConfig(overlap="none")))
    assert "warning: data.document_lengths='/none': training reads the documents themselves" in shown(
        change(config, "data", document_lengths="/none"))


def test_what_would_move_is_said(config: RunConfig, tmp_path: Path) -> None:
    """And only where something moves, received rows are not keys alone."""
    config = change(config, "objective", block_size=64)
    named = {"enabled": True, "tolerance": 0.0, "profile": str(dear_profile(tmp_path))}
    text = shown(dataclasses.replace(config, cad=CadConfig(**named)))
    said = re.search(r"by prediction, what moves saves (.*)% of the time of the layers in the first step\n", text)
    assert said and 0 < float(said[1]) < 50 and "received keys and moved queries" in text
    still = shown(change(dataclasses.replace(config, cad=CadConfig(**named, max_send_mib=0)), "train",
                         packs_per_step=9))
    assert "nothing moves in the first 8 of the first step's 9 packs; csbp plan can say why\n" in still
    assert "received keys  " in still and "moved queries" not in still
    assert "disaggregation" not in shown(config)
    pool = shown(change(change(dataclasses.replace(config, cad=CadConfig(**named, pool="dp")), "parallel", csbp=1),
                        "train", packs_per_step=7))
    assert re.search(r"what moves saves .* in the first step, in \d of 4 micro-batches\n", pool)


def test_lengths_of_whole_documents_are_written(config: RunConfig, tmp_path: Path) -> None:
    config = change(config, "data", document_tokens=24, shuffle=False, validation_fraction=0.0,
                    validation=config.data.sources)
    file, out = tmp_path / "lengths", io.StringIO()
    assert run_check(config, [], Console(file=out, width=200), lengths=str(file)) == 0
    found = read_lengths(str(file))
    assert len(found) == 30 and "tokens of 30 documents, in the order of the first epoch" in out.getvalue()
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.family)
    whole = open_stream(change(config, "data", document_tokens=None).data, seed=0, tokenizer=tokenizer, split="train")
    window = whole.samples.window(0, 0, 30)
    assert window is not None and found == window.lengths.tolist() and max(found) > 24
    with pytest.raises(ConfigError, match="--lengths='/no/such/file': must be a file in a folder that is there"):
        run_check(config, lengths="/no/such/file")


def test_a_pool_that_no_plan_can_have(config: RunConfig) -> None:
    many = dataclasses.replace(change(config, "parallel", nproc=8192, csbp=2), cad=CadConfig(enabled=True, pool="dp"))
    with pytest.raises(ConfigError, match="cad.pool='dp': 4096 replicas of 2 ranks are more than a plan can have"):
        shown(many)


def test_the_sample_shows_what_is_learnt(config: RunConfig) -> None:
    lines = [line.split(maxsplit=3) for line in shown(config).splitlines()]
    blocks = [words for words in lines if len(words) >= 3 and set(words[2]) <= {"#", "."} and words[0].isdigit()]
    marks, text = "".join(b[2] for b in blocks), "".join("".join(b[3:]).replace(" ", "") for b in blocks)
    found = re.search(r"<\|im_start\|>assistant\\nItis\\n(\d+)\.<\|im_end\|>$", text)
    assert found is not None, text
    answer = qwen_like("qwen2_5")(f"It is\n{found[1]}.<|im_end|>")["input_ids"]
    assert marks == "." * (len(marks) - len(answer)) + "#" * len(answer)
    begin, end = blocks[0][1].split("-")
    assert int(begin) == 4 * int(blocks[0][0]) and int(end) == int(begin) + 3


def test_the_beginning_of_a_chat_is_shown_without_markup(config: RunConfig) -> None:
    assert "[red]" in shown(change(config, "objective", block_size=64)).replace("\n", "")


@pytest.mark.parametrize(("section", "values", "error"), [
    ("model", {"shape": {**SHAPE, "vocab_size": 354}}, r"model.mask_token_id.*mask id would be 354"),
    ("model", {"mask_token_id": 70}, r"model.mask_token_id=70.*ordinary token"),
    ("model", {"mask_token_id": "EOS"}, r"model.mask_token_id.*tokenizer's EOS token"),
    ("data", {"tokenizer": "/none"}, r"data.tokenizer='/none'.*no tokenizer"),
    ("data", {"validation_fraction": 0.0}, r"data.validation_fraction"),
    ("parallel", {"csbp": 3}, r"parallel.csbp=3"),
    ("parallel", {"nproc": 4, "tp": 4}, r"parallel.tp=4: must divide the model's 2 query heads and 1 key/value heads: "
                                        r"one of 1$"),
    ("model", {"shape": {**SHAPE, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3}},
     r"model.shape.sliding_window=3: smaller than a block; use at most objective.block_size=3"),
    ("model", {"shape": {**SHAPE, "layer_types": ["full_attention", "linear_attention"]}}, r"linear_attention"),
    ("model", {"shape": {**SHAPE, "kv_lora_rank": 8}}, r"model.shape.kv_lora_rank"),
    ("parallel", {"nproc": 128}, r"parallel.nproc=128: more ranks than blocks: the training pack with most of them has "
                                 r"\d\d;"),
    ("parallel", {"nproc": 256, "csbp": 128}, r"parallel.csbp=128: more ranks than blocks"),
])
def test_what_would_stop_the_run(config: RunConfig, section: str, values: dict[str, Any], error: str) -> None:
    if values.get("mask_token_id") == "EOS":
        values = {"mask_token_id": qwen_like("qwen2_5").eos_token_id}
    with pytest.raises(ConfigError, match=error):
        shown(change(config, section, **values))


@pytest.mark.parametrize(("gpus", "missing"), [(0, "parallel.device='cuda': no CUDA device is visible here"),
                                               (1, "parallel.nproc=2: this machine has 1 GPU(s)")])
def test_a_machine_without_the_devices_checks_the_rest(config: RunConfig, monkeypatch: pytest.MonkeyPatch, gpus: int,
                                                       missing: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(check, "free_memory", lambda device: 1000)  # of a machine that will not train it
    there = change(config, "parallel", device="cuda")
    text = shown(there)
    assert text.count(f"warning: {missing}") == 1 and f"this machine has {gpus}\n" in text
    for title in ("Tokenizer", "First sample", "Memory of the fullest rank", "not known here"):
        assert title in text
    assert text.endswith("Nothing but the devices, which are not here, stands in the way: csbp train experiment=x\n")
    with pytest.raises(ConfigError, match=r"data.validation_fraction"):
        shown(change(there, "data", validation_fraction=0.0))


def test_a_tokenizer_larger_than_the_model(config: RunConfig) -> None:
    plain = change(config, "objective", kind="autoregressive", clean_stream="token_causal")
    assert "mask id" not in shown(plain)
    with pytest.raises(ConfigError, match=r"data.tokenizer.*last id is 353, but the model has only 300"):
        shown(change(plain, "model", shape={**SHAPE, "vocab_size": 300}))


def test_weights_must_be_there(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = build_on_meta(config, get_adapter(config.model.family))
    model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    with pytest.raises(ConfigError, match=r"model.path.*holds no \*.safetensors"):
        shown(change(config, "model", init="pretrained", path=str(folder), shape={}))
    weights: Any = get_adapter(config.model.family).build(None, SHAPE, torch.float32)
    weights.save_pretrained(folder)
    assert "400 embedding rows" in shown(change(config, "model", init="pretrained", path=str(folder), shape={}))


def test_a_model_folder_without_a_tokenizer(config: RunConfig, tmp_path: Path) -> None:
    model = build_on_meta(config, get_adapter(config.model.family))
    model.config.save_pretrained(tmp_path / "model")  # type: ignore[operator, union-attr]
    bare = change(change(config, "data", tokenizer=""), "model", path=str(tmp_path / "model"), shape={})
    with pytest.raises(ConfigError, match=r"model.path=.*/model': holds no tokenizer; set data.tokenizer to"):
        shown(bare)


def test_weights_of_another_family_or_shape(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_on_meta(config, get_adapter(config.model.family)).config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    (folder / "model.safetensors").write_bytes(b"")
    told = change(config, "model", init="pretrained", path=str(folder), shape={"hidden_size": 64})
    with pytest.raises(ConfigError, match=r"model.shape.hidden_size=64: the weights have 32"):
        shown(told)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"model.family=.* holds a llama model"):
        shown(told)


def test_a_model_that_cannot_fit(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "free_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"parallel.nproc=2: weights, gradients and optimizer need"):
        shown(config)
    monkeypatch.setattr(check, "free_memory", lambda device: 2 << 20)
    assert "raise parallel.csbp, or set parallel.checkpointing=full" in shown(config)
    assert "checkpointing=full" not in shown(change(config, "parallel", checkpointing="full"))


def test_a_model_that_no_gpu_would_hold_where_none_is_here(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = change(config, "parallel", device="cuda")
    said = shown(config)
    assert "not known here" in said and "an H200 has room for" not in said
    monkeypatch.setattr(check, "DEVICES", {"h200": dataclasses.replace(DEVICES["h200"], memory=1 << 20)})
    assert "warning: an H200 has room for 1.0 MiB; csbp plan says what would help" in shown(config)


def test_unusable_data_is_an_error(config: RunConfig) -> None:
    path = Path(config.data.sources[0].path)
    path.write_text('{"messages": []}\n')
    with pytest.raises(UserError, match="no document that can be learnt; left out 1"):
        shown(config)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert memory._container_room(tmp_path) == 1 << 62
    for name, text in (("memory.max", "1000"), ("memory.current", "700"), ("memory.stat", "anon 500\nfile 150\n")):
        (tmp_path / name).write_text(text)
    assert memory._container_room(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_room(tmp_path) == 1 << 62
    assert memory.free_memory(torch.device("cpu")) > 0


@pytest.mark.parametrize("backend", ["flash", "wide", "flex"])
def test_a_kernel_that_cannot_run_here_is_refused(config: RunConfig, backend: str) -> None:
    """By csbp check, and by what comes before the ranks of csbp train."""
    named = change(config, "attention", backend=backend)
    for way in (shown, prepare_run):
        with pytest.raises(ConfigError, match=f"attention.backend='{backend}': cannot run this model here: it .*use "
                                              "auto"):
            way(named)


def test_a_folder_that_the_run_could_not_have(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    named = dataclasses.replace(config, run_dir=str(folder))
    shown(named)
    assert not folder.exists()
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="run_dir=.*holds a run already; add resume=auto"):
        shown(named)
    shown(dataclasses.replace(named, resume="auto"))
    lock = RunLock(folder)
    with pytest.raises(ConfigError, match="a run is alive in this folder"):
        shown(dataclasses.replace(named, resume="auto"))
    lock.release()
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl"]
    with pytest.raises(ConfigError, match="run_dir=.*is a file; give a folder"):
        shown(dataclasses.replace(config, run_dir=str(folder / "metrics.jsonl")))

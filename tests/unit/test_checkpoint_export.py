"""Hugging Face folders: a tiny Qwen3 goes out, stock transformers reads it back with equal logits."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch

from csbp.checkpoint import folder as folders
from csbp.checkpoint import huggingface, reading
from csbp.checkpoint.card import render_card, run_facts
from csbp.checkpoint.export_cli import run_export
from csbp.checkpoint.huggingface import export_model, write_model_files
from csbp.checkpoint.reading import open_model, resolve_model_folder
from csbp.checkpoint.store import CheckpointStore
from csbp.errors import ConfigError, UserError
from csbp.models.registry import get_adapter

DIFFUSION = {"block_size": 8, "mask_token_id": 60, "label_shift": False, "clean_stream": "block_causal"}
SHAPE = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128)


def build(tied: bool = True, seed: int = 0):
    torch.manual_seed(seed)
    return get_adapter("qwen3").build(None, {**SHAPE, "tie_word_embeddings": tied}, torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate("<abcdefghijklmnopqrstuvwxyz ")}
    core = Tokenizer(models.BPE(letters, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<")


def logits(model) -> torch.Tensor:
    """Causal logits of fixed tokens through the stock forward."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None] % 64).logits


@pytest.mark.parametrize("tied", [True, False])
def test_stock_transformers_reads_it_with_equal_logits(tmp_path, tokenizer, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build(tied)
    export_model(model, get_adapter("qwen3"), tokenizer, tmp_path / "out", DIFFUSION)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json"]
    read, problems = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(problems.values()) and type(read).__name__ == "Qwen3ForCausalLM"
    assert torch.equal(logits(read.eval()), logits(model.eval()))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a bc")["input_ids"] == [1, 27, 2, 3]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in DIFFUSION} == DIFFUSION
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "float32"


def test_a_reserved_token_is_exported_as_the_mask_and_a_free_id_is_not(tmp_path, tokenizer):
    from transformers import AddedToken, AutoTokenizer

    reserved = copy.deepcopy(tokenizer)
    reserved.add_tokens([AddedToken("<reserved_7>", special=True)])
    mask = reserved.convert_tokens_to_ids("<reserved_7>")
    for name, used, index in (("reserved", reserved, mask), ("free", reserved, 60), ("plain", reserved, 3)):
        write_model_files(build(), get_adapter("qwen3"), used, tmp_path / name, {**DIFFUSION, "mask_token_id": index})
        read = AutoTokenizer.from_pretrained(tmp_path / name)
        assert (read.mask_token, read.mask_token_id) == (("<reserved_7>", mask) if name == "reserved" else (None, None))
        assert read("a bc")["input_ids"] == [1, 27, 2, 3] and len(read) == len(reserved)
    assert reserved.mask_token is None


def test_large_models_are_split_and_tied_weights_written_once(tmp_path, tokenizer):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = build(tied=True)
    export_model(model, get_adapter("qwen3"), tokenizer, tmp_path / "out", DIFFUSION, max_shard_size="5KB")
    names: list[str] = []
    for path in (tmp_path / "out").glob("model-*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert len(names) == len(set(names)) == len(list(model.parameters())) and "lm_head.weight" not in names
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(read), logits(model.eval()))


def test_export_in_bfloat16(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM

    model = build()
    export_model(model, get_adapter("qwen3"), tokenizer, tmp_path / "out", {}, dtype=torch.bfloat16)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert torch.equal(read.model.norm.weight, model.model.norm.weight.bfloat16())
    assert not DIFFUSION.keys() & json.loads((tmp_path / "out" / "config.json").read_text()).keys()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("owner, name", [(huggingface, "write_model_files"), (huggingface, "render_card"),
                                         (huggingface, "sync"), (folders, "publish")])
def test_killed_export_leaves_the_earlier_one(tmp_path, tokenizer, monkeypatch, owner, name):
    export_model(build(), get_adapter("qwen3"), tokenizer, tmp_path / "out", DIFFUSION, facts={"run": "first"})
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def fatal(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fatal)
        with pytest.raises(Killed):
            export_model(build(seed=1), get_adapter("qwen3"), tokenizer, tmp_path / "out", DIFFUSION)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    export_model(build(seed=1), get_adapter("qwen3"), tokenizer, tmp_path / "out", DIFFUSION)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path, tokenizer):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not an exported model"):
        export_model(build(), get_adapter("qwen3"), tokenizer, tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture
def run_folder(tmp_path, tokenizer) -> Path:
    """A run that has saved two checkpoints and not exported."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    write_model_files(model, get_adapter("qwen3"), tokenizer, tmp_path / "model", DIFFUSION)
    (tmp_path / "config.yaml").write_text("experiment: tiny\nseed: 3\nmodel: {path: 'builtin:x'}\n")
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 2, "eval_loss_before": 6.5, "eval_loss_after": 5.25}))
    for step in (1, 2):
        with torch.no_grad():
            model.model.norm.weight.fill_(step)
        CheckpointStore(tmp_path, 2).save(step, model, optimizer, {})
    return tmp_path


def test_run_folder_without_export_opens_its_newest_checkpoint(run_folder, caplog):
    newest = resolve_model_folder(str(run_folder), "qwen3")
    assert newest == run_folder / "checkpoints" / "step-00000002"
    opened = open_model(newest, torch.bfloat16)
    assert opened.step == 2 and opened.diffusion == DIFFUSION and opened.files == run_folder / "model"
    assert opened.model.dtype == torch.bfloat16 and opened.model.model.norm.weight.unique().item() == 2
    (newest / "state.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert resolve_model_folder(str(run_folder), "qwen3").name == "step-00000001"
    assert "step-00000002 is damaged" in caplog.text


def test_export_of_a_run(run_folder, capsys):
    assert run_export(run_folder, None) == 0
    export = resolve_model_folder(str(run_folder), "qwen3")
    assert export == run_folder / "export" and str(export) in capsys.readouterr().out
    opened = open_model(export)
    assert opened.step is None and opened.model.model.norm.weight.unique().item() == 2
    assert torch.equal(logits(opened.model), logits(open_model(run_folder / "checkpoints" / "step-00000002").model))
    card = (export / "README.md").read_text()
    for row in ("| experiment | tiny |", "| seed | 3 |", "| started from | builtin:x |",
                "| held-out loss after training | 5.2500 |", "| step of the checkpoint | 2 |", "| block_size | 8 |"):
        assert row in card
    assert "unigram" not in card  # not recorded, so not claimed
    assert run_export(run_folder, run_folder / "elsewhere") == 0 and (run_folder / "elsewhere" / "config.json").exists()


def test_an_export_older_than_a_checkpoint_is_passed_over(run_folder):
    run_export(run_folder)
    model = build()
    CheckpointStore(run_folder, 2).save(5, model, torch.optim.AdamW(model.parameters()), {})
    assert resolve_model_folder(str(run_folder), "qwen3") == run_folder / "checkpoints" / "step-00000005"
    run_export(run_folder)
    assert resolve_model_folder(str(run_folder), "qwen3") == run_folder / "export"
    # The run's results are those of step 2, not of these weights.
    assert "held-out" not in (run_folder / "export" / "README.md").read_text()


def test_facts_of_an_empty_folder(tmp_path):
    assert run_facts(tmp_path) == {}


def test_wrong_paths_are_configuration_errors(tmp_path):
    for path, text in (("", "no such folder"), (str(tmp_path / "absent"), "no such folder"),
                       (str(tmp_path), "undamaged checkpoint"), ("builtin:nothing", "ships")):
        with pytest.raises(ConfigError, match=text) as caught:
            resolve_model_folder(path, "qwen3", field="model")
        assert caught.value.field == "model" and caught.value.value == path
    with pytest.raises(ConfigError, match="undamaged checkpoint"):
        run_export(tmp_path)


def test_builtin_models_are_found_by_name(tmp_path, monkeypatch):
    from csbp.data import tokenizer as names

    (tmp_path / "fam" / "shelf" / "tiny").mkdir(parents=True)
    (tmp_path / "fam" / "shelf" / "tiny" / "config.json").write_text("{}")
    monkeypatch.setattr(names, "package_dir", lambda package: tmp_path)
    assert resolve_model_folder("builtin:tiny", "fam") == tmp_path / "fam" / "shelf" / "tiny"


def test_card_names_what_a_summary_holds(tmp_path):
    text = render_card("out", {"model_type": "m"}, DIFFUSION, {"eval_loss_after": 5.25, "eval_loss_unigram": None})
    assert "| held-out loss after training | 5.2500 |" in text and "unigram" not in text
    assert run_facts(tmp_path, {"eval_loss_after": 5.25, "seconds": None}) == {"held-out loss after training": 5.25}


def test_a_checkpoint_without_its_model_files_says_so(run_folder):
    (run_folder / "model").rename(run_folder / "moved")
    with pytest.raises(UserError, match="model is missing"):
        reading.open_model(run_folder / "checkpoints" / "step-00000002")


@pytest.mark.parametrize("name", ["thesis.tex", "config.json"])
def test_an_export_never_replaces_what_is_not_one(run_folder, tmp_path, name):
    out = tmp_path / "out"
    run_export(run_folder, out)
    (out / name).write_text("{}")  # a file beside an export; another tool's config
    with pytest.raises(UserError, match="not an exported model"):
        run_export(run_folder, out)
    assert (out / name).read_text() == "{}"

"""Validation: every bound, and each combination that cannot work, with the field that has to change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from config_kit import changed, composed

from csbp.config.compose import compose_run
from csbp.config.fields import Field, fields_of
from csbp.config.places import model_of_shape
from csbp.config.schema import GenerateConfig, RunConfig, SourceConfig
from csbp.config.validate import check_bounds, validate_generate, validate_run
from csbp.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for a model: validation looks at names and folders only."""
    return tmp_path_factory.mktemp("model")


def refused(folder: Path, words: tuple[str, ...], values: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate_run(changed(composed(*words), {"model.path": str(folder)} | values))
    return caught.value


SDAR, AR, CLEAN = ("objective=sdar",), ("objective=autoregressive",), "objective.clean_stream"


@pytest.mark.parametrize(("words", "values"), [
    ((), {}),
    (SDAR, {"noise.t_min": 0.001}),
    ((), {"objective.label_shift": True}),  # row s-1 of a block-causal stream sees to s, not past it
    ((), {"objective.label_shift": True, CLEAN: "token_causal"}),
    ((), {"objective.ar_weight": 0.5, CLEAN: "token_causal"}),
    (AR, {"recipe": "train_ar"}),
    ((), {"parallel.nproc": 6, "parallel.csbp": 3}),
    ((), {"parallel.nproc": 8, "parallel.csbp": 2, "parallel.tp": 2, "parallel.dp_replicate": 2}),
    ((), {"noise.t_min": 0.0, "noise.t_max": 1.0}),
    ((), {"noise.t_min": 0.5, "noise.t_max": 0.5}),
    ((), {"train.packs_per_step": 1, "parallel.nproc": 4, "parallel.csbp": 1}),  # ranks without a pack are legal
    ((), {"optim.warmup_steps": 100, "train.steps": 5}),
    ((), {"resume": "auto", "run_dir": "x"}),
    ((), {"data.document_tokens": None}),
    ((), {"data.tokenizer": "Qwen/Qwen3-0.6B"}),
    ((), {"model.path": "Qwen/Qwen3-0.6B"}),
    ((), {"model.init": "random", "model.shape": {"hidden_size": 8}}),
    ((), {"model.path": "Qwen/Qwen3-0.6B", "model.shape": {"hidden_size": 8}}),  # for csbp plan; checked on loading
])
def test_good_combinations_pass(folder: Path, words: tuple[str, ...], values: dict[str, Any]) -> None:
    validate_run(changed(composed(*words), {"model.path": str(folder)} | values))


STDLIB = SourceConfig(path="@stdlib")


@pytest.mark.parametrize(("words", "values", "field", "said"), [
    ((), {"objective.ar_weight": 0.5}, CLEAN, "leaks"),
    (AR, {CLEAN: "block_causal"}, CLEAN, "leaks"),
    (AR, {"objective.ar_weight": 1.0}, "objective.ar_weight", "already"),
    (AR, {"objective.label_shift": True}, "objective.label_shift", "no meaning"),
    ((), {"noise.t_min": 0.9, "noise.t_max": 0.2}, "noise.t_min", "noise.t_max=0.2"),
    ((), {"objective.weight": "inverse_t", "noise.t_min": 0.0}, "noise.t_min", "above 0"),
    ((), {"noise.t_min": 0.0, "noise.t_max": 0.0}, "noise.t_max", "nothing would ever be masked"),
    ((), {"parallel.nproc": 6, "parallel.csbp": 4}, "parallel.csbp", "1, 2, 3, 6"),
    ((), {"parallel.csbp": 4}, "parallel.csbp", "1, 2"),
    ((), {"parallel.nproc": 6, "parallel.tp": 4}, "parallel.tp", "parallel.nproc=6: one of 1, 2, 3, 6"),
    ((), {"parallel.nproc": 8, "parallel.tp": 2, "parallel.csbp": 8}, "parallel.csbp", "parallel.tp = 4: one of 1, 2"),
    ((), {"parallel.nproc": 8, "parallel.tp": 2, "parallel.csbp": 2, "parallel.dp_replicate": 4},
     "parallel.dp_replicate", "the 2 data-parallel replicas"),
    ((), {"data.document_tokens": 4096}, "data.document_tokens", "2048"),
    (AR, {"data.seq_len": 1, "data.document_tokens": None}, "data.seq_len", "none before it"),
    ((), {"objective.label_shift": True, "data.document_tokens": 1}, "data.document_tokens", "none before it"),
    ((), {"data.sources": []}, "data.sources", "name at least one"),
    ((), {"data.sources.0.path": ""}, "data.sources.0.path", "name a file"),
    ((), {"data.sources.0.path": "/no/such/folder"}, "data.sources.0.path", "no such file"),
    ((), {"data.validation": [SourceConfig(path="/no/such")]}, "data.validation.0.path", "no such file"),
    ((), {"data.sources.0.kind": "jsonl"}, "data.sources.0.kind", "use kind=text"),
    ((), {"data.sources.0.kind": "json"}, "data.sources.0.kind", "did you mean jsonl?"),
    ((), {"data.sources.0.format": "messages"}, "data.sources.0.format", "kind=text reads whole files"),
    ((), {"data.sources.0.streaming": True}, "data.sources.0.streaming", "kind=dataset"),
    ((), {"data.sources.0.columns": {"txt": "content"}}, "data.sources.0.columns", "no column 'txt'"),
    ((), {"data.sources": [SourceConfig(path="@stdlib", weight=1.0), STDLIB]}, "data.sources.1.weight", "every source"),
    ((), {"data.validation_fraction": 0.0}, "data.validation_fraction", "nothing is held out"),
    ((), {"model.path": ""}, "model.path", "give a Hugging Face folder"),
    ((), {"model.path": "/no/such"}, "model.path", "no such folder"),
    ((), {"model.path": "no/such/folder"}, "model.path", "no such folder"),
    ((), {"model.path": "builtin:no"}, "model.path", "shipped with qwen3"),
    ((), {"model.path": "", "model.init": "random"}, "model.shape", "need a shape"),
    ((), {"model.path": "", "model.init": "random", "model.shape": {"a": 1}}, "data.tokenizer", "builtin:NAME"),
    ((), {"model.shape": {"hidden_size": 8}}, "model.shape", "model.init=random"),
    ((), {"data.tokenizer": "/no/such/folder"}, "data.tokenizer", "no such folder"),
    ((), {"model.family": "qwen"}, "model.family", "did you mean qwen3?"),
    ((), {"recipe": "convert_qwn"}, "recipe", "did you mean convert_qwen?"),
    ((), {"recipe": "../os"}, "recipe", "recipes: "),
    ((), {"observe.trackers": ["wandbb"]}, "observe.trackers", "did you mean wandb?"),
    ((), {"run_dir": ""}, "run_dir", "give a folder"),
    ((), {"resume": "auto"}, "resume", "run_dir=DIR"),
    ((), {"resume": "yes"}, "resume", "none, auto"),
    ((), {"optim.beta1": 1.0}, "optim.beta1", "below 1"),
    ((), {"optim.lr": math.nan}, "optim.lr", "finite"),
    ((), {"optim.lr": math.inf}, "optim.lr", "finite"),
    ((), {"optim.lr": 1e300}, "optim.lr", "from 0 to 1000"),
    ((), {"data.sources.0.weight": 1e300}, "data.sources.0.weight", "at most 1e+38"),
    ((), {"train.steps": 10**30}, "train.steps", "at most 9,223,372,036,854,775,807"),
    ((), {"seed": 2**63}, "seed", "at most 9,223,372,036,854,775,807"),
    ((), {"train.eval_seed": -1}, "train.eval_seed", "at least 0"),
    ((), {"parallel.timeout_seconds": 10**18}, "parallel.timeout_seconds", "to 10,000,000"),
    ((), {"data.seq_len": 2**31}, "data.seq_len", "to 1,073,741,824"),
    ((), {"model.init": "random", "model.shape": {"rope": {"a": [1, math.inf]}}}, "model.shape.rope.a.1", "finite"),
    ((), {"model.init": "random", "model.shape": {"hidden_size": 10**30}}, "model.shape.hidden_size", "at most"),
])
def test_a_bad_combination_names_field_and_fix(folder: Path, words: tuple[str, ...], values: dict[str, Any],
                                               field: str, said: str) -> None:
    error = refused(folder, words, values)
    assert error.field == field and said in error.fix


def test_a_shape_that_a_file_brought_is_called_by_the_files_name(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "my.yaml"
    own.write_text(f"defaults: [quickstart]\nmodel: {{path: {folder}}}\n")
    for words in (("experiment=" + str(own), "model=qwen3_0_6b"),
                  ("experiment=quickstart", "model=qwen3_0_6b", f"model.path={folder}")):
        with pytest.raises(ConfigError) as caught:
            validate_run(compose_run(words))
        assert (caught.value.field, caught.value.value) == ("model", "qwen3_0_6b")
        assert f"model.path={folder} has a shape of its own; leave out model=qwen3_0_6b" in caught.value.fix
    validate_run(compose_run(("experiment=" + str(own),)))
    assert model_of_shape({}) == "" and model_of_shape({"hidden_size": 8}) == ""


def test_a_tracker_must_be_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csbp.config.validate.find_spec", lambda name: None)
    assert "pip install wandb" in refused(folder, (), {"observe.trackers": ["wandb"]}).fix


def bounded() -> list[tuple[str, Field]]:
    return [(field.key, field) for cls in (RunConfig, GenerateConfig) for field in fields_of(cls)
            if field.low is not None or field.high is not None or field.choices]


@pytest.mark.parametrize(("key", "field"), bounded())
def test_every_declared_bound_is_kept(key: str, field: Field) -> None:
    config = composed() if field in fields_of(RunConfig) else GenerateConfig()
    config = changed(config, {"data.validation": [STDLIB]}) if isinstance(config, RunConfig) else config
    check_bounds(config)
    key = key.replace(".N.", ".0.")
    beyond = [] if field.low is None else [field.low - 1]
    beyond += [] if field.high is None else [field.high + 1]
    for value in beyond or ["no such choice"]:
        with pytest.raises(ConfigError) as caught:
            check_bounds(changed(config, {key: value}))
        assert (caught.value.field, caught.value.value) == (key, value)


def test_generate_asks_for_model_and_prompt(folder: Path) -> None:
    for config, field in ((GenerateConfig(), "model"), (GenerateConfig(model="/no/such"), "model"),
                          (GenerateConfig(model=str(folder)), "prompt"),
                          (GenerateConfig(model=str(folder), prompt="a", threshold=2.0), "threshold")):
        with pytest.raises(ConfigError) as caught:
            validate_generate(config)
        assert caught.value.field == field
    validate_generate(GenerateConfig(model=str(folder), prompt="a"))

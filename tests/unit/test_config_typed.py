"""The YAML in the run folder gives back exactly the configuration that was written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from csbp.config.compose import compose_run
from csbp.config.schema import DataConfig, ModelConfig, OptimConfig, RunConfig, SourceConfig
from csbp.config.typed import dump_config, load_config, save_config
from csbp.errors import ConfigError

hard_text = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12),
    st.text(st.sampled_from(["$", "{", "}", "\\", "a", ":", "'", '"', " ", "\n", "#", "."]), max_size=10),
    st.sampled_from(["null", "~", "1e5", "1_000", "0x1f", "yes", "???", "${a.b}", "\\\\${x:y}", "2026-01-01", "1:30"]))
plain = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | hard_text,
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hard_text, inner, max_size=3))


@settings(deadline=None, max_examples=10)
@given(hard_text.filter(lambda text: text != "???"), st.dictionaries(hard_text, plain, max_size=3),
       st.floats(0, 1e300), st.none() | st.floats(0, 1e9))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, text: str, shape: dict, lr: float, weight: float) -> None:
    assume("???" not in repr(shape) and not re.search(r"'_\w+_':", repr(shape)))  # "missing" and code are refused
    config = RunConfig(run_dir=text, model=ModelConfig(shape=shape), optim=OptimConfig(lr=lr),
                       data=DataConfig(sources=[SourceConfig(path=text, weight=weight, columns={"text": text})]))
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    save_config(config, path)
    assert load_config(path) == config


@pytest.mark.parametrize("name", ["quickstart", "tiny_ar"])
def test_a_composed_run_comes_back_and_every_field_is_written(tmp_path: Path, name: str) -> None:
    config = compose_run([f"experiment={name}"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    text = dump_config(config)
    for field in dataclasses.fields(config.train):
        assert f"\n  {field.name}: " in text
    assert list(tmp_path.iterdir()) == [tmp_path / "config.yaml"]


def test_configurations_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compose_run(["experiment=quickstart"]).train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(("text", "field", "said"), [
    ("train: {steps: x}", "train.steps", "must be an integer"), ("train: {stps: 1}", "train.stps", "train.steps"),
    ("a: [", "config", "not valid YAML"),
    ("3", "config", "not one value"), ("null: 3", "config", "line 1"),
    ("seed: ${oc.env:HOME}", "seed", "only references")])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, field: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert caught.value.field == field and said in caught.value.fix


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "config.yaml")

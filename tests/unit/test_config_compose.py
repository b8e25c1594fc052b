"""Composition: what the words of the command line become, and what is said about wrong ones."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from csbp.config.compose import compose_generate, compose_run
from csbp.config.places import choices, conf_dir, experiments, planned_families
from csbp.config.schema import RunConfig
from csbp.config.validate import validate_plan, validate_run
from csbp.errors import ConfigError

Q = "experiment=quickstart"


def own(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return f"experiment={folder / 'mine.yaml'}"


@pytest.mark.parametrize("name", list(experiments()))
def test_every_experiment_is_described_and_valid(name: str) -> None:
    """It can be trained, or its family is known to be one that can so far only be planned; it can be planned anyway."""
    config = compose_run([f"experiment={name}"])
    assert isinstance(config, RunConfig) and config.experiment == name and config.data.sources
    assert experiments()[name]
    validate_plan(config)
    if config.model.family in planned_families():
        with pytest.raises(ConfigError, match="can be planned .*, but not trained yet"):
            validate_run(config)
    else:
        validate_run(config)


@pytest.mark.slow
def test_every_choice_of_every_group_composes() -> None:
    groups = [folder.name for folder in sorted(conf_dir().iterdir()) if choices(folder.name)]
    groups = [group for group in groups if group not in ("experiment", "bench")]  # presets of csbp bench
    rounds = itertools.zip_longest(*(choices(group) for group in groups), fillvalue="default")
    for picked in rounds:
        assert isinstance(compose_run([Q, *(f"{g}={c}" for g, c in zip(groups, picked, strict=True))]), RunConfig)


def test_the_groups_are_the_sections() -> None:
    folders = {p.name for p in conf_dir().iterdir() if p.is_dir() and not p.name.startswith("_")}
    sections = {k for k, v in vars(RunConfig()).items() if hasattr(v, "__dataclass_fields__")}
    assert folders - {"experiment", "bench", "profile"} == sections


def test_values_and_choices_are_set() -> None:
    config = compose_run([Q, "model=tiny_qwen3", "train.steps=7", "optim.lr=1", "observe.trackers=[wandb, trackio]",
                          "model.shape.hidden_size=32", "data.sources.0.path=a b", "data.sources.0.weight=2",
                          "model.mask_token_id=5", "parallel.csbp=null", "seed=3"])
    assert (config.train.steps, config.optim.lr, config.seed) == (7, 1.0, 3)
    assert config.observe.trackers == ["wandb", "trackio"]
    assert config.model.shape["hidden_size"] == 32 and config.model.shape["num_hidden_layers"] == 4
    assert config.data.sources[0].path == "a b" and config.data.sources[0].include == ["**/*.py"]
    assert config.data.sources[0].weight == 2.0 and config.model.mask_token_id == 5 and config.parallel.csbp is None


def test_a_list_of_sources_on_the_command_line() -> None:
    config = compose_run([Q, "data.sources=[{kind: jsonl, path: /d/a.jsonl, format: messages}, {path: /d/b}]"])
    assert [(s.kind, s.path, s.format) for s in config.data.sources] == [
        ("jsonl", "/d/a.jsonl", "messages"), ("text", "/d/b", "text")]


def test_text_is_taken_as_it_stands() -> None:
    text = """a b(c, d): 'x' "y" \\ ${oc.env:HOME} \\${z} = [1"""
    assert compose_run([Q, f"run_dir={text}"]).run_dir == text
    assert compose_run([Q, "run_dir=null"]).run_dir is None
    assert compose_generate(["model=m", f"prompt={text}", "temperature=0.5"]).prompt == text


def test_the_last_value_counts_and_an_order_of_words_does_not() -> None:
    assert compose_run(["train.steps=1", Q, "train.steps=2"]).train.steps == 2
    assert compose_run(["objective.block_size=16", "objective=sdar", Q]).objective.block_size == 16


def test_a_file_of_ones_own_starts_from_a_shipped_one(tmp_path: Path) -> None:
    words = own(tmp_path, "defaults:\n  - quickstart\n  - override /objective: sdar\n  - _self_\n"
                          "train: {steps: 4}\ndata: {tokenizer: '${model.path}'}\n")
    config = compose_run([words, "model.path=/m/${x}"])
    assert (config.experiment, config.train.steps, config.objective.block_size) == ("mine", 4, 8)
    assert config.objective.denominator == "supervised"  # from sdar; the block size is quickstart's own
    assert config.data.tokenizer == config.model.path == "/m/${x}"
    assert config.data.sources[0].path == "@stdlib"


@pytest.mark.parametrize(("word", "field", "said"), [
    ("trian.steps=3", "trian.steps", "did you mean train.steps?"),
    ("train.step=3", "train.step", "did you mean train.steps?"),
    ("steps=3", "steps", "did you mean train.steps?"),
    ("optimizer.lr=3", "optimizer.lr", "did you mean optim.lr?"),
    ("data.sources.0.pth=x", "data.sources.0.pth", "data.sources.0.path"),
    ("data.sources=[{path: a}, {pth: b}]", "data.sources.1.pth", "data.sources.1.path"),
    ("+train.stepz=3", "train.stepz", "train.steps"),
    ("--train.steps=3", "--train.steps", "train.steps"),
    ("hydra.run.dir=x", "hydra.run.dir", "no such setting"),
    ("xyz=3", "xyz", "known here"),
    ("train.steps", "train.steps", "write train.steps=VALUE"),
    ("two words", "two words", "write KEY=VALUE"),
    ("train.steps=", "train.steps", "has no value"),
    ("train.steps=abc", "train.steps", "must be an integer, at least 1"),
    ("train.steps=[1", "train.steps", "must be an integer"),
    ("parallel.nproc=1.5", "parallel.nproc", "must be an integer"),
    ("seed=true", "seed", "must be an integer"),
    ("optim.lr=fast", "optim.lr", "must be a number"),
    ("data.shuffle=perhaps", "data.shuffle", "true or false"),
    ("train.steps=1,2", "train.steps", "one run takes one value"),
    ("train.steps=null", "train.steps", "must be an integer"),
    ("observe.trackers=wandb", "observe.trackers", "must be a list"),
    ("data.sources.3.path=x", "data.sources.3.path", "the list has 1 entries"),
    ("data.sources.0.weight=x", "data.sources.0.weight", "must be a number"),
    ("train=5", "train", "train.FIELD=VALUE"),
    ("objective=sdra", "objective", "did you mean sdar?"),
    ("experiment=tiny_ar", "experiment", "chosen twice"),
    ("~train.steps", "~train.steps", "cannot be removed"),
    ("seed=${oc.env:HOME}", "seed", "only references"),
    ("model.shape._target_=os.system", "model.shape._target_", "names no code"),
    ("model.shape={a: {_partial_: 1}}", "model.shape.a._partial_", "names no code"),
    ("model@x=default", "model@x", "not a key"),
])
def test_a_wrong_word_is_named_with_its_fix(word: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run([Q, word])
    assert caught.value.field == field and said in caught.value.fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("word", "said"), [
    ("experiment=quikstart", "did you mean quickstart?"), ("experiment=", "say which"), ("seed=1", "say which"),
    ("experiment=/no/such.yaml", "cannot be read")])
def test_the_experiment_is_asked_for(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match="experiment") as caught:
        compose_run([word])
    assert said in caught.value.fix


@pytest.mark.parametrize(("text", "field", "value", "said"), [
    ("train: {stepz: 3}", "train.stepz", 3, "did you mean train.steps?"),
    ("trian: {steps: 3}", "trian", {"steps": 3}, "did you mean train?"),
    ("train: 3", "train", 3, "section"),
    ("train: {steps: abc}", "train.steps", "abc", "must be an integer"),
    ("data: {sources: {path: x}}", "data.sources", {"path": "x"}, "must be a list"),
    ("data: {sources: [{pth: 1}]}", "data.sources.0.pth", 1, "data.sources.0.path"),
    ("data: {sources: [{weight: abc}]}", "data.sources.N.weight", "abc", "must be a number"),
    ("model: {shape: 3}", "model.shape", 3, "must be a mapping"),
    ("model: {path: '${oc.env:HOME}'}", "model.path", "${oc.env:HOME}", "only references"),
    (r"model: {path: '\\${oc.env:HOME}'}", "model.path", r"\\${oc.env:HOME}", "only references"),
    ("model: {path: '${${seed}:x}'}", "model.path", "${${seed}:x}", "only references"),
    ("model: {path: '${modle.family}'}", "model.path", "${modle.family}", "not found"),
    ("model: {shape: {_target_: x}}", "model.shape._target_", "x", "names no code"),
    ("hydra: {run: {dir: x}}", "hydra", {"run": {"dir": "x"}}, "no such setting"),
    ("_target_: os.system", "_target_", "os.system", "no such setting"),
    ("a: [", "experiment", None, "not valid YAML"),
    ("- 1", "experiment", None, "must hold a mapping of settings, not a list"),
    ("hello", "experiment", None, "not one value"),
    ("seed: 1\ntrain:\n\tsteps: 3", "experiment", None, "mine.yaml\", line 3"),
    ("seed: 1\nnull: 3", "experiment", None, "line 2: the key 'null' is no name"),
    ("train:\n  3: 3", "experiment", None, "line 2: the key '3' is no name"),
    ("? [a]\n: 3", "experiment", None, "line 1: a key must be a name"),
    ("seed: 1\nmodel: &a\n  shape: {b: *a}", "experiment", None, "line 2: an anchor holds itself"),
    ("model: {shape: " + "{a: " * 90 + "1" + "}" * 90 + "}", "experiment", None, "too deep"),
    ("model: {shape: " + "{a: " * 5000 + "1" + "}" * 5000 + "}", "experiment", None, "nested too deeply"),
    ("seed: 1\n---\nseed: 2", "experiment", None, "single document"),
    ("defaults: [your_file]", "experiment", None, "this file itself"),
    ("defaults: [nope]", "experiment", None, "its defaults list: Could not load 'experiment/nope'"),
    ("train.steps: 3", "train.steps", 3, "train: {steps: ...}"),
    ("seed: 1\ndata:\n  sources:\n  - {path: x}\n  - pth: 1", "data.sources.1.pth", 1, "line 5)"),
    ("defaults: 3", "experiment", None, "must be a list"),
    ("defaults: [{override /modle: x}]", "experiment", None, "modle"),
    ("defaults: [{override /model: x}]", "experiment", None, "model/x"),
    ("seed: 1\nseed: 2", "experiment", None, "duplicate"),
])
def test_a_wrong_file_is_named_with_its_fix(tmp_path: Path, text: str, field: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run([own(tmp_path, text)])
    assert caught.value.field == field and said in caught.value.fix
    assert caught.value.value == (value if value is not None else str(tmp_path / "mine.yaml"))


def test_a_file_that_is_no_utf8_is_named_with_the_line(tmp_path: Path) -> None:
    word = own(tmp_path, "")
    compose_run([f"{word}", "model.path=x"])  # an empty one is the defaults alone
    (tmp_path / "mine.yaml").write_bytes(b"seed: 1\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"mine.yaml': line 2 is not UTF-8"):
        compose_run([word])


def test_an_open_reference_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path=.*has an open \$\{.*mine.yaml, line 1"):
        compose_run([own(tmp_path, "model: {path: '${'}")])


def test_a_mapping_given_whole_replaces_and_a_key_of_it_joins() -> None:
    shape = compose_run([Q, "model=tiny_qwen3"]).model.shape
    assert len(shape) > 3
    joined = compose_run([Q, "model=tiny_qwen3", "model.shape.hidden_size=32"]).model.shape
    assert joined == {**shape, "hidden_size": 32}
    assert compose_run([Q, "model=tiny_qwen3", "model.shape={hidden_size: 32}"]).model.shape == {"hidden_size": 32}
    assert compose_run([Q, "model=tiny_qwen3", "model.shape={}"]).model.shape == {}
    words = ["model.shape={a: 1}", "model.shape.b=2", "model.shape={c: 3}", "model.shape.d=4"]
    assert compose_run([Q, *words]).model.shape == {"c": 3, "d": 4}  # in the order of the words
    columns = compose_run([Q, "data.sources=[{path: x, columns: {text: a}}]", "data.sources.0.columns={messages: b}"])
    assert columns.data.sources[0].columns == {"messages": "b"}


@pytest.mark.parametrize(("word", "said"), [
    ("quickstart", "did you mean experiment=quickstart?"), ("quikstart", "did you mean experiment=quickstart?"),
    ("mine.yaml", "did you mean experiment=mine.yaml?"), ("mine", "did you mean experiment=mine.yaml?"),
    ("runs/a", "did you mean run_dir=runs/a?"), ("folder", "did you mean run_dir=folder?"),
    ("experiment=mine", "did you mean experiment=mine.yaml?"), ("whatever", "write whatever=VALUE")])
def test_a_bare_word_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    own(tmp_path, "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        compose_run([word])
    assert said in caught.value.fix


@pytest.mark.parametrize(("word", "said"), [
    ("/", "did you mean model=/?"), ("builtin:tiny_ar", "did you mean model=builtin:tiny_ar?"),
    ("def add(a, b):", "did you mean 'prompt=def add(a, b):'?"), ("nowhere", "write nowhere=VALUE")])
def test_a_bare_word_of_generate_is_understood(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_generate([word])
    assert said in caught.value.fix


def test_generate_has_no_groups() -> None:
    with pytest.raises(ConfigError, match="did you mean threshold"):
        compose_generate(["treshold=0.5"])

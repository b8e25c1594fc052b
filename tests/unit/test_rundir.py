"""The run folder: made once, never overwritten, resumed only by the same run."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from config_kit import changed, composed

from csbp import __version__
from csbp.checkpoint.files import Manifest, describe_files
from csbp.config.schema import RunConfig
from csbp.config.typed import load_config
from csbp.errors import ConfigError
from csbp.rundir import claim_run_dir, describe_environment, has_checkpoint, holds_run, record_start


def config(folder: Path | None, **values: Any) -> RunConfig:
    named = {key.replace("__", "."): value for key, value in values.items()}
    return changed(composed(), {"run_dir": str(folder) if folder else None} | named)


def prepare_run_dir(asked: RunConfig) -> Path:
    """A start whose process then ends."""
    with claim_run_dir(asked) as lock:
        record_start(asked, lock.folder)
    return lock.folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_fresh_folder(tmp_path: Path) -> None:
    asked = config(tmp_path / "a" / "b")
    folder = prepare_run_dir(asked)
    assert folder == tmp_path / "a" / "b"
    assert load_config(folder / "config.yaml") == dataclasses.replace(asked, run_dir=str(folder))
    found = json.loads((folder / "environment.json").read_text())
    assert found["csbp"] == __version__ and found["command"] == sys.argv and found["packages"]["numpy"]
    assert not holds_run(folder) and not has_checkpoint(folder)


def start(folder: Path, asked: Any) -> None:
    """A run that has made a step."""
    prepare_run_dir(asked)
    (folder / "metrics.jsonl").write_text("{}\n")


def test_a_start_that_was_refused_does_not_block_the_next(tmp_path: Path) -> None:
    prepare_run_dir(config(tmp_path))
    for resume in ("none", "auto"):
        prepare_run_dir(config(tmp_path, seed=5, resume=resume))
        assert load_config(tmp_path / "config.yaml").seed == 5
    assert len(list((tmp_path / "earlier").iterdir())) == 2


def test_folders_without_a_name_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("csbp.rundir.time.strftime", lambda form: "20261129-101112")
    folders = [prepare_run_dir(config(None)) for _ in range(3)]
    name = "quickstart-20261129-101112"
    assert folders == [tmp_path / "runs" / n for n in (name, f"{name}-2", f"{name}-3")]
    assert load_config(folders[2] / "config.yaml").run_dir == str(folders[2])


def test_an_existing_folder_without_a_run_is_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    prepare_run_dir(config(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoints/step-00000003/manifest.json"])
def test_a_run_is_not_overwritten(tmp_path: Path, trace: str) -> None:
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).write_text("x")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="resume=auto") as caught:
        prepare_run_dir(config(tmp_path))
    assert caught.value.field == "run_dir" and contents(tmp_path) == before


def test_a_checkpoint_to_go_on_from_has_its_name_its_manifest_and_its_files(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for name in ("step-00000008.damaged", "step-9", ".writing-step-00000010", "step-00000012"):
        (root / name).mkdir(parents=True)
        write_checkpoint(root / name)
    (root / "step-00000012" / "manifest.json").unlink()
    (root / "step-00000013").write_text("")
    assert holds_run(tmp_path) and not has_checkpoint(tmp_path)  # something to lose, nothing to go on from
    (root / "step-00000014").mkdir()
    write_checkpoint(root / "step-00000014")
    assert has_checkpoint(tmp_path)
    (root / "step-00000014" / "state.json").unlink()
    assert not has_checkpoint(tmp_path)


def write_checkpoint(folder: Path) -> None:
    (folder / "state.json").write_text("{}")
    manifest = Manifest(1, False, describe_files([folder / "state.json"]))
    (folder / "manifest.json").write_text(manifest.render())


def test_resume_in_a_folder_without_a_run_is_a_fresh_start(tmp_path: Path) -> None:
    assert prepare_run_dir(config(tmp_path / "new", resume="auto")) == tmp_path / "new"


def test_resuming_the_same_run_keeps_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_run_dir(config(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    prepare_run_dir(config(tmp_path, resume="auto"))
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n" and not (tmp_path / "earlier").exists()
    assert capsys.readouterr().err == ""


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    start(tmp_path, config(tmp_path))
    before = contents(tmp_path)
    for key, value in {"seed": 1, "objective__block_size": 4, "noise__t_min": 0.2, "data__seq_len": 1024,
                       "data__sources": [], "model__mask_token_id": 3, "train__packs_per_step": 2}.items():
        with pytest.raises(ConfigError, match="the run in .* has") as caught:
            prepare_run_dir(config(tmp_path, resume="auto", **{key: value}))
        assert caught.value.field == key.replace("__", ".")
        assert contents(tmp_path) == before


def test_what_may_change_on_resuming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, config(tmp_path))
    first = (tmp_path / "config.yaml").read_bytes()
    told = {"train__steps": 7, "optim__lr": 0.5, "train__eval_seed": 5}
    untold = {"parallel__nproc": 1, "observe__plot": False, "data__cache_dir": "/tmp/x", "checkpoint__every": 3}
    again = config(tmp_path, resume="auto", **told, **untold)
    prepare_run_dir(again)
    said = capsys.readouterr().err
    assert [key for key in (*told, *untold) if key.replace("__", ".") in said] == list(told)
    assert load_config(tmp_path / "config.yaml") == again
    assert (tmp_path / "earlier" / "config-001.yaml").read_bytes() == first
    prepare_run_dir(config(tmp_path, resume="auto"))
    assert len(list((tmp_path / "earlier").iterdir())) == 2


def test_a_run_that_has_done_more_steps_is_refused_before_its_ranks(tmp_path: Path) -> None:
    start(tmp_path, config(tmp_path, train__steps=8))
    for name in ("step-00000006", "step-00000008", "step-00000009.damaged", ".writing-step-00000010"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"train.steps=3: .* already at step 8 of 3; nothing to train.*more than 8"):
        prepare_run_dir(config(tmp_path, resume="auto", train__steps=3))
    assert contents(tmp_path) == before
    for steps in (8, 9):
        prepare_run_dir(config(tmp_path, resume="auto", train__steps=steps))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError) as caught:
            prepare_run_dir(config(path))
        assert caught.value.field == "run_dir"


def test_the_environment_names_the_commit_of_this_checkout() -> None:
    found = describe_environment()
    if (Path(__file__).parents[2] / ".git").exists():
        assert len(found["git"]["commit"]) == 40
    assert "PATH" not in json.dumps(found)

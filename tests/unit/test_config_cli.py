"""The command line: what it answers without torch, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from csbp import __version__
from csbp.cli import guarded, main
from csbp.config.compose import compose_run
from csbp.config.places import experiments, planned_families
from csbp.errors import ConfigError, UserError
from csbp.output import called_as, script


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(words)
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.parametrize(("commands", "codes", "heavy"), [
    ("--help,train --help,--version,export", [0, 0, 0, 2], []),
    ("train experiment=quickstart trian.steps=3,train experiment=quickstart parallel.csbp=7,"
     "check experiment=quickstart train.steps=x,generate prompt=x", [2] * 4, ["hydra"])])
def test_what_needs_no_torch_imports_none(commands: str, codes: list[int], heavy: list[str]) -> None:
    script = ("import sys\nfrom csbp.cli import main\nfor words in sys.argv[1].split(','):\n"
              "  try: main(words.split())\n  except SystemExit as left: print('left', left.code)\n"
              "print('heavy', [m for m in ('torch', 'transformers', 'hydra') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script, commands], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("left")] == [f"left {code}" for code in codes], done.stderr
    assert lines[-1] == f"heavy {heavy}"
    said = done.stderr.splitlines()
    assert len(said) == codes.count(2) and all(line.startswith("csbp: ") for line in said)


def test_help_shows_experiments_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "train", "--help")
    assert code == 0 and "quickstart  " in out and "Convert the shipped" in out
    assert "csbp train experiment=quickstart run_dir=" in out
    code, out, _ = answer(capsys, "generate", "--help")
    assert code == 0 and all(f"  {name} " in out for name in ("model", "prompt", "threshold", "seed", "device"))
    assert "no chat template is applied" in out
    assert answer(capsys, "--version")[1] == f"csbp {__version__}\n"


def test_help_writes_values_as_a_user_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert "default null" in answer(capsys, "simulate", "--help")[1]
    out = answer(capsys, "bench", "--help")[1]
    assert "default null" in out and "default true" in out and "default None" not in out and "default True" not in out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "check", "plan", "simulate", "bench", "generate", "export"])
def test_help_fits_a_terminal_and_puts_what_can_be_trained_first(capsys: pytest.CaptureFixture[str],
                                                                 command: str) -> None:
    lines = answer(capsys, command, "--help")[1].splitlines()
    assert max(map(len, lines)) <= 100
    if command in ("train", "check", "plan"):
        names = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in experiments()]
        assert names == list(experiments())  # each once
        planned = [name for name in names if compose_run([f"experiment={name}"]).model.family in planned_families()]
        assert planned and names[-len(planned):] == planned and "quickstart" in names


def test_an_export_over_something_else_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, thesis = tmp_path / "run", tmp_path / "mine" / "thesis.txt"
    assert "has a checkpoint" in answer(capsys, "export", f"run_dir={tmp_path}")[2]
    for path in (run / "checkpoints" / "step-00000001", run / "export", thesis.parent):
        path.mkdir(parents=True)
    thesis.write_text("mine")
    (run / "export" / "config.json").write_text('{"model_type": "of another tool"}')
    script = "import sys\nfrom csbp.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    for more in ([f"out={thesis.parent}"], []):
        done = subprocess.run([sys.executable, "-c", script, "export", f"run_dir={run}", *more], capture_output=True,
                              text=True)
        assert (done.returncode, done.stdout) == (2, "False\n")
        assert "csbp: out='" in done.stderr and "not an exported model; choose another folder" in done.stderr


@pytest.mark.parametrize(("words", "said"), [
    (["train"], "csbp: experiment: say which"),
    (["train", "experiment=quickstart", "--train.steps=5"], "csbp: --train.steps=5: write train.steps=5;"),
    (["plan", "--train.steps", "5"], "csbp: --train.steps: write train.steps=VALUE;"),
    (["check", "--jsn"], "csbp: --jsn: no such option; see csbp check --help"), (["--foo"], "see csbp --help"),
    (["train", "experiment=quickstart", "data.sources.0.pth=x"],
     "csbp: data.sources.0.pth='x': no such setting; did you mean data.sources.0.path?\n"),
    (["train", "experiment=quickstart", "data.validation.12.pth=x"], "did you mean data.validation.12.path?"),
    (["train", "experiment=quickstart", "plan.logit_rows=4"], "did you mean train.logit_rows?"),
    (["train", "experiment=quickstart", "parallel.dp_shard=2"], "no such setting; known here: parallel.nproc, "),
    (["train", "experiment=quickstart", "train.batch_size=2"], "no such setting; known here: train.steps, "),
    (["train", "experiment=quickstart", "parallel.nprocs=2"], "no such setting; did you mean parallel.nproc?"),
    (["train", "experiment=quickstart", "device=cpu"], "did you mean parallel.device or plan.device?"),
    (["bench"], "csbp: bench: say what to measure: attention, step"),
    (["bench", "stp"], "csbp: bench stp: did you mean step?"),
    (["train", "experiment=quickstart", "trian.steps=3"],
     "csbp: trian.steps='3': no such setting; did you mean train.steps?\n"),
    (["export"], "run_dir=DIR"), (["export", "rundir=x"], "did you mean run_dir?"),
    (["export", "/"], "did you mean run_dir=/?"),
    (["export", "run_dir"], "write run_dir"), (["export", "run_dir=/no/such"], "no such folder"),
    (["generate"], "model=DIR"), (["frobnicate"], "frobnicate: no such command; commands: train, check"),
    (["trian", "experiment=quickstart"], "did you mean train?"),
    (["train", "quickstart"], "csbp: quickstart: did you mean experiment=quickstart?\n"),
    (["generate", "run"], "csbp: run: write run=VALUE"), (["export", "run"], "csbp: run: write run_dir=DIR"),
    (["generate", "model=/", "prompt=\udcff"], "prompt='\\udcff': is not UTF-8 text"),
    (["train", "experiment=quickstart", "run_dir=a\udcff"], "run_dir='a\\udcff': is not UTF-8 text")])
def test_exit_code_2(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, _, err = answer(capsys, *words)
    assert code == 2 and said in err


@pytest.mark.parametrize(("env", "told"), [
    ({}, True), ({"RANK": "0", "LOCAL_RANK": "0"}, True), ({"RANK": "1", "LOCAL_RANK": "1"}, False),
    ({"RANK": "1"}, True), ({"RANK": "8", "LOCAL_RANK": "0"}, True), ({"LOCAL_RANK": "3"}, True)])
@pytest.mark.parametrize("words", [["train", "quickstart"], ["train", "experiment=quickstart", "train.steps=0"],
                                   ["bench", "attention", "heads=x"], ["trian"], ["train", "--x"]])
def test_ranks_of_one_host_tell_what_all_have_met_once(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], env: dict[str, str],
        told: bool) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "16", "MASTER_ADDR": "h", "MASTER_PORT": "1", **env}.items():
        monkeypatch.setenv(name, value)
    code, _, err = answer(capsys, *words)
    assert code == 2 and err.startswith("csbp: ") == told

    def alone() -> int:
        raise UserError("only here")

    assert guarded(alone) == 1 and "only here" in capsys.readouterr().err  # what one rank meets, it tells


def test_the_command_is_named_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "csbp").write_text("#!/bin/sh\n")
        (tmp_path / folder / "csbp").chmod(0o755)
    called = str(tmp_path / "one" / "csbp")
    monkeypatch.setattr(sys, "argv", [called, "train"])
    for path, expected in (("one", "csbp"), ("two", called), ("none", called)):
        monkeypatch.setenv("PATH", str(tmp_path / path))
        assert called_as() == expected and script() == ("$(which csbp)" if expected == "csbp" else called)
    monkeypatch.setattr(sys, "argv", ["/x/pytest"])
    assert called_as() == "csbp"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys)
    assert code == 2 and "generate" in out


@pytest.mark.parametrize(("error", "code", "traceback"), [
    (ConfigError("a.b", 1, "use 2"), 2, False), (UserError("gone"), 1, False), (KeyboardInterrupt(), 1, False),
    (ValueError("a bug"), 1, True)])
def test_exit_codes_of_errors(capsys: pytest.CaptureFixture[str], error: BaseException, code: int,
                              traceback: bool) -> None:
    def call() -> int:
        raise error

    assert guarded(call) == code
    assert ("Traceback" in capsys.readouterr().err) == traceback
    assert guarded(lambda: 0) == 0


def test_a_folder_of_the_user_does_not_hide_a_library(tmp_path: Path) -> None:
    (tmp_path / "omegaconf.py").write_text("raise SystemExit('hidden')")
    rank = subprocess.Popen([sys.executable, "-P", "-m", "csbp.worker", str(tmp_path)], cwd=tmp_path,
                            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert rank.stdin and rank.stderr
    with rank.stdin:  # held open, as the launcher does
        assert "no such file" in rank.stderr.read()
        assert rank.wait() == 2


def test_an_error_survives_being_sent_to_other_ranks() -> None:
    import copy

    from csbp.errors import ConfigError

    error = copy.copy(ConfigError("data.sources", [1], "name one"))  # through __reduce__, as pickle does
    assert (error.field, error.value, error.fix, str(error)) == ("data.sources", [1], "name one",
                                                                "data.sources=[1]: name one")

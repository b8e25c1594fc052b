"""The command line: what it answers without torch, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from csbp import __version__
from csbp.cli import guarded, main
from csbp.errors import ConfigError, UserError


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(words)
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.parametrize("words", [
    ["--help"], ["train", "--help"], ["--version"], ["train", "experiment=quickstart", "trian.steps=3"],
    ["train", "experiment=quickstart", "parallel.csbp=7"], ["check", "experiment=quickstart", "train.steps=x"],
    ["generate", "prompt=x"], ["export"]])
def test_what_needs_no_torch_imports_none(words: list[str]) -> None:
    script = ("import sys\nfrom csbp.cli import main\ntry: main(sys.argv[1:])\nfinally: print('heavy',"
              "[m for m in ('torch', 'transformers', 'hydra') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    wrong = not any(word.startswith("--") for word in words)
    assert done.returncode == (2 if wrong else 0), done.stderr
    assert ("heavy ['hydra']" if wrong and words != ["export"] else "heavy []") in done.stdout
    assert done.stderr.startswith("csbp: ") == wrong and "Traceback" not in done.stderr


def test_help_shows_experiments_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "train", "--help")
    assert code == 0 and "quickstart  " in out and "Convert the shipped" in out
    assert "csbp train experiment=quickstart run_dir=" in out
    code, out, _ = answer(capsys, "generate", "--help")
    assert code == 0 and all(f"  {name} " in out for name in ("model", "prompt", "threshold", "seed", "device"))
    assert "no chat template is applied" in out
    assert answer(capsys, "--version")[1] == f"csbp {__version__}\n"


@pytest.mark.parametrize(("words", "said"), [
    (["train"], "experiment='': say which"),
    (["train", "experiment=quickstart", "trian.steps=3"],
     "csbp: trian.steps='3': no such setting; did you mean train.steps?\n"),
    (["export"], "run_dir=DIR"), (["export", "rundir=x"], "did you mean run_dir?"),
    (["export", "/"], "did you mean run_dir=/?"),
    (["export", "run_dir"], "write run_dir"), (["export", "run_dir=/no/such"], "no such folder"),
    (["generate"], "model=DIR"), (["frobnicate"], "frobnicate: no such command; commands: train, check"),
    (["trian", "experiment=quickstart"], "did you mean train?"), (["train", "quickstart"], "experiment=quickstart?"),
    (["generate", "model=/", "prompt=\udcff"], "prompt='\\udcff': is not UTF-8 text"),
    (["train", "experiment=quickstart", "run_dir=a\udcff"], "run_dir='a\\udcff': is not UTF-8 text")])
def test_exit_code_2(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, _, err = answer(capsys, *words)
    assert code == 2 and said in err


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

"""Real training processes: killed, stopped, resumed, and started by torchrun."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import SHAPE, losses, make_corpus

BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several runs


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run that trains a tiny model from random weights; takes a second once its ranks have started."""
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    shape = ", ".join(f"{name}: {str(value).lower()}" for name, value in SHAPE.items())
    return ["experiment=quickstart", "model.path=", "model.init=random", f"model.shape={{{shape}}}",
            f"data.sources=[{{path: {corpus / 'texts'}}}]", f"data.tokenizer={corpus / 'tokenizer'}",
            f"data.cache_dir={corpus / 'cache'}", "data.validation_fraction=0.25", "data.seq_len=96",
            "data.document_tokens=64", "train.eval_every=0", "train.sample_every=0", "train.eval_packs=1",
            "checkpoint.every=0", "checkpoint.export=false", "observe.plot=false", "observe.progress=off"]


TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node", "2")


def start(words: list[str], *launcher: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*launcher, str(BIN / "csbp"), "train", *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals, env={**os.environ, **env})


def heed_signals() -> None:
    """In the child: these tests may themselves be run by nohup, or in the background of a shell."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def ranks_of(launcher: subprocess.Popen[str], run: Path) -> dict[int, int]:
    """Rank -> process, once the run has made some steps."""
    while not ((run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) > 3):
        assert launcher.poll() is None, launcher.communicate()[1]
        time.sleep(0.05)
    found = {}
    for line in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        environment = Path(f"/proc/{line}/environ").read_text().split("\0")
        found[int(dict(entry.split("=", 1) for entry in environment if "=" in entry)["RANK"])] = int(line)
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_run(words: list[str], tmp_path: Path, killed: int) -> None:
    launcher = start([*words, f"run_dir={tmp_path}", "train.steps=100000"])
    ranks = ranks_of(launcher, tmp_path)
    os.kill(ranks[killed], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1 and all(gone(pid) for pid in ranks.values())
    assert f"rank {killed} (process {ranks[killed]}) was ended by SIGKILL" in errors


def test_a_killed_launcher_takes_its_ranks_along(words: list[str], tmp_path: Path) -> None:
    launcher = start([*words, f"run_dir={tmp_path}", "train.steps=100000"])
    ranks = ranks_of(launcher, tmp_path)
    launcher.kill()
    launcher.communicate()
    while not all(gone(pid) for pid in ranks.values()):
        time.sleep(0.05)


@pytest.mark.parametrize("to", ["launcher", "rank"])
def test_a_stopped_run_says_how_to_go_on_and_does(words: list[str], tmp_path: Path, to: str) -> None:
    launcher = start([*words, f"run_dir={tmp_path}", "train.steps=100000"])
    ranks = ranks_of(launcher, tmp_path)
    if to == "launcher":
        launcher.terminate()
        launcher.send_signal(signal.SIGINT)
    else:
        os.kill(ranks[1], signal.SIGTERM)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert ("stopped as asked" if to == "launcher" else "a signal had asked a rank to stop") in errors
    stopped = len(losses(tmp_path))
    hint = shlex.split(errors.rsplit("go on with: ", 1)[1])
    assert hint[:2] == [str(BIN / "csbp"), "train"] and "resume=auto" in hint  # as it was called: not on the PATH

    again = start([*hint[2:], f"train.steps={stopped + 2}"])
    output, errors = again.communicate()
    assert again.returncode == 0, errors
    assert len(losses(tmp_path)) == stopped + 2
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == stopped + 2


def test_a_run_with_nothing_but_damage_is_not_to_go_on(words: list[str], tmp_path: Path) -> None:
    settings = [*words, f"run_dir={tmp_path}", "train.steps=2"]
    assert start(settings).wait() == 0
    for shard in (tmp_path / "checkpoints").glob("*/*.safetensors"):
        shard.write_bytes(bytes([*shard.read_bytes()[:-1], 77]))
    again = start([*settings, "resume=auto", "train.steps=4"])
    errors = again.communicate()[1]
    assert again.returncode == 2 and "its checkpoints are all damaged" in errors and "go on with" not in errors, errors


def test_a_finished_run_says_that_nothing_is_left(words: list[str], tmp_path: Path) -> None:
    for steps, code, said in ((3, 0, ""), (3, 0, "already at step 3 of 3; nothing to train"),
                              (2, 2, "csbp: train.steps=2: ")):
        run = start([*words, f"run_dir={tmp_path}", "resume=auto", f"train.steps={steps}", "observe.progress=lines"])
        output, errors = run.communicate()
        assert run.returncode == code, errors
        assert said in output + errors and ("nothing to train" in output + errors) == bool(said)
        assert ("Held-out loss" in output) == (code == 0)  # reported again
    assert len(losses(tmp_path)) == 3


@pytest.mark.parametrize("redirect", ["| head -1", "2>&1 | true", ">&- 2>&-", "> /dev/full"])
def test_a_run_goes_on_when_nobody_listens(words: list[str], tmp_path: Path, redirect: str) -> None:
    settings = [*words, f"run_dir={tmp_path / 'run'}", "train.steps=4", "observe.progress=lines", "train.eval_every=1"]
    command = f"set -o pipefail; {shlex.join([str(BIN / 'csbp'), 'train', *settings])} {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, preexec_fn=heed_signals)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 4 and (tmp_path / "run" / "summary.json").exists()


def test_torchrun_gives_the_same_run(words: list[str], tmp_path: Path) -> None:
    steps = [*words, "train.steps=4"]
    own = start([*steps, f"run_dir={tmp_path / 'own'}"])
    errors = own.communicate()[1]
    assert own.returncode == 0, errors
    theirs = start([*steps, f"run_dir={tmp_path / 'theirs'}"], str(BIN / "torchrun"), "--nproc-per-node", "2")
    output, errors = theirs.communicate()
    assert theirs.returncode == 0, errors
    assert output.count(f"run folder: {tmp_path / 'theirs'}\n") == 1
    assert losses(tmp_path / "own") == losses(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "config.yaml").exists() and not (tmp_path / "theirs" / "logs").exists()


def test_torchrun_refuses_a_folder_that_holds_a_run_on_every_rank(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    theirs = start([*words, f"run_dir={tmp_path}"], str(BIN / "torchrun"), "--nproc-per-node", "2")
    _, errors = theirs.communicate()
    assert theirs.returncode != 0 and errors.count("holds a run already") == 1  # told once, by rank 0
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n" and not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("launcher", [(), TORCHRUN])
def test_a_rank_that_refuses_the_configuration(words: list[str], tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Two real ranks meet; the recipe then refuses the run."""
    refused = start([*words, "recipe=train_ar", f"run_dir={tmp_path}"], *launcher)
    errors = refused.communicate()[1]
    assert refused.returncode == (1 if launcher else 2), errors  # torchrun has its own exit code
    assert "this recipe needs objective=autoregressive" in errors and "gloo" not in errors
    assert (tmp_path / "config.yaml").exists()
    if not launcher:
        assert "ended with exit code 2" in errors


@pytest.mark.parametrize(("word", "said", "launcher"), [
    ("data.sources=[{kind: jsonl, path: FOLDER/rows.jsonl, format: messages}]", "has no column 'messages'", ()),
    ("model.shape.vocab_size=200", "the mask id would be 257", ()),
    ("model.shape.vocab_size=1000000000", "weights, gradients and optimizer need", ()),
    ("data.tokenizer=FOLDER/bare", "holds no tokenizer", ()),
    ("parallel.nproc=1000", "parallel.nproc=1000: more ranks than blocks", ()),
    ("data.tokenizer=FOLDER/bare", "holds no tokenizer", TORCHRUN)])
def test_what_is_wrong_is_said_before_the_ranks_start(words: list[str], tmp_path: Path, word: str, said: str,
                                                      launcher: tuple[str, ...]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"txt": "x"}\n')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "qwen3"}')
    word = word.replace("FOLDER", str(tmp_path))
    refused = start([*words, word, f"run_dir={tmp_path / 'run'}"], *launcher)
    output, errors = refused.communicate()
    assert refused.returncode == (1 if launcher else 2), errors
    assert errors.count(said) == 1 and "gloo" not in errors and not (tmp_path / "run").exists()
    if not launcher:
        assert output == "" and len(errors.splitlines()) == 1


def test_one_run_at_a_time(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start([*words, f"run_dir={run}", "train.steps=100000"])
    ranks_of(first, run)
    before = (run / "config.yaml").read_bytes(), len(list(run.iterdir()))
    for launcher, resume in (((), "auto"), ((), "none"), (TORCHRUN, "auto")):
        second = start([*words, f"run_dir={run}", "train.steps=100000", f"resume={resume}"], *launcher)
        errors = second.communicate()[1]
        assert second.returncode == (1 if launcher else 2) and f"alive in this folder (process {first.pid} on" in errors
    assert ((run / "config.yaml").read_bytes(), len(list(run.iterdir()))) == before and first.poll() is None
    first.kill()
    first.communicate()
    again = start([*words, f"run_dir={run}", "resume=auto", "train.steps=3"])  # it had saved nothing
    errors = again.communicate()[1]
    assert again.returncode == 0 and len(losses(run)) == 3, errors
    assert not (run / ".lock").exists()


def test_a_killed_torchrun_takes_its_ranks_along(words: list[str], tmp_path: Path) -> None:
    launcher = start([*words, f"run_dir={tmp_path}", "train.steps=100000"], *TORCHRUN)
    ranks = ranks_of(launcher, tmp_path)
    assert len(ranks) == 2
    launcher.kill()
    while not all(gone(pid) for pid in ranks.values()):
        time.sleep(0.05)
    launcher.communicate()


def slow_tokenizing(folder: Path, seconds: float) -> str:
    """An import path with which a corpus takes so long, and says in ``folder`` which process is at it."""
    (folder / "sitecustomize.py").write_text(f"""
import os, time
from pathlib import Path
from csbp.data import corpus
build = corpus._build
def slowly(*arguments):
    Path({str(folder)!r}, f"building-{{os.getpid()}}").touch()
    time.sleep({seconds})
    build(*arguments)
corpus._build = slowly
""")
    return str(folder)


def builders(folder: Path) -> list[int]:
    """Processes that have begun to tokenize."""
    return [int(path.name.partition("-")[2]) for path in folder.glob("building-*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_while_it_tokenizes(words: list[str], tmp_path: Path, number: signal.Signals) -> None:
    run, cache = tmp_path / "run", f"data.cache_dir={tmp_path / 'cache'}"
    launcher = start([*words, f"run_dir={run}", cache], PYTHONPATH=slow_tokenizing(tmp_path, 600))
    while not builders(tmp_path):
        assert launcher.poll() is None, launcher.communicate()[1]
        time.sleep(0.05)
    launcher.send_signal(number)
    errors = launcher.communicate()[1]
    while not gone(builders(tmp_path)[0]):
        time.sleep(0.05)
    if number != signal.SIGKILL:
        assert launcher.returncode == 1 and errors == "csbp: interrupted\n" and not run.exists()
    again = start([*words, f"run_dir={run}", "train.steps=1"])
    errors = again.communicate()[1]
    assert again.returncode == 0, errors


@pytest.mark.parametrize("launcher", [(), TORCHRUN])
def test_tokenizing_may_take_longer_than_a_collective(words: list[str], tmp_path: Path,
                                                      launcher: tuple[str, ...]) -> None:
    (tmp_path / "odd?#%41 ").mkdir()
    run = start([*words, f"run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", "train.steps=2",
                 "parallel.timeout_seconds=10"], *launcher, PYTHONPATH=slow_tokenizing(tmp_path, 25),
                TMPDIR=str(tmp_path / "odd?#%41 "))
    errors = run.communicate()[1]
    assert run.returncode == 0 and len(losses(tmp_path / "run")) == 2, errors
    assert len(builders(tmp_path)) == 1  # the others waited, and then found it

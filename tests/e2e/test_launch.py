"""Starting, watching and ending ranks. The ranks here are small scripts; training runs are tested elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csbp import supervise as module
from csbp.cli import main
from csbp.config.compose import compose_run
from csbp.errors import ConfigError, UserError
from csbp.launch import rank_commands, refuse_lone_process, started_ranks
from csbp.supervise import Outcome, RankCommand, supervise

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                      "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def python(script: str, log: Path | None = None, **env: str) -> RankCommand:
    return RankCommand([sys.executable, "-c", script], {**os.environ, **env}, log)


def until(condition: Callable[[], bool]) -> None:
    """Wait; the test's own timeout ends a wait that never ends."""
    while not condition():
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(folder: Path, count: int) -> list[int]:
    until(lambda: len([p for p in folder.glob("pid-*") if p.read_text()]) == count)
    return [int((folder / f"pid-{rank}").read_text()) for rank in range(count)]


# A rank that says that it is there, in two steps so that no half-written number is read.
HERE = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(os.environ["FOLDER"]), os.environ["RANK"]
def here():
    (folder / f"tmp-{rank}").write_text(str(os.getpid()))
    os.replace(folder / f"tmp-{rank}", folder / f"pid-{rank}")
"""
STUBBORN = HERE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhere()\ntime.sleep(600)"


def test_all_ranks_end_well(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-1.log"
    outcome = supervise([python("pass"), python("import os; print('rank', os.environ['RANK'])", log, RANK="1")])
    assert (outcome.codes, outcome.first, outcome.message, outcome.exit_code) == ((0, 0), None, "", 0)
    assert log.read_text() == "rank 1\n"


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(UserError, match=f"{tmp_path}/logs/rank-1.log: cannot be written"):
        supervise([python("import time; time.sleep(600)"), python("pass", tmp_path / "logs" / "rank-1.log")])


def test_a_failing_rank_ends_the_job_and_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("an earlier sitting\n")
    fails = HERE + "import time\nwhile not (folder / 'pid-0').exists(): time.sleep(0.01)\nprint('so sad')\nsys.exit(3)"
    outcome = supervise([python(STUBBORN, FOLDER=str(tmp_path), RANK="0"),
                         python(fails, log, FOLDER=str(tmp_path), RANK="1")], grace=0.3)
    assert outcome.codes == (-signal.SIGKILL, 3) and outcome.first == 1 and outcome.exit_code == 1
    assert "rank 1 " in outcome.message and "exit code 3" in outcome.message and "| so sad" in outcome.message
    assert "earlier" not in outcome.message and log.read_text().startswith("an earlier sitting\n")


def test_a_killed_rank_is_named_with_its_signal_and_the_others_get_to_clean_up(tmp_path: Path) -> None:
    cleans = HERE + """
def leave(*_):
    (folder / "cleaned").write_text("")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
here()
time.sleep(600)"""
    dies = HERE + """
while not (folder / "pid-0").exists(): time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)"""
    outcome = supervise([python(cleans, FOLDER=str(tmp_path), RANK="0"), python(dies, FOLDER=str(tmp_path), RANK="1")])
    assert outcome.codes == (0, -signal.SIGKILL) and "rank 1 " in outcome.message and "SIGKILL" in outcome.message
    assert outcome.exit_code == 1 and (tmp_path / "cleaned").exists()


def test_what_a_stuck_rank_has_started_goes_with_it(tmp_path: Path) -> None:
    parent = HERE + f"""
import subprocess
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], env={{**os.environ, "RANK": "child"}})
signal.signal(signal.SIGTERM, signal.SIG_IGN)
here()
time.sleep(600)"""
    fails = HERE + "while not (folder / 'pid-child').exists(): time.sleep(0.01)\nsys.exit(1)"
    supervise([python(fails, FOLDER=str(tmp_path), RANK="0"), python(parent, FOLDER=str(tmp_path), RANK="1")],
              grace=0.1)
    until(lambda: not alive(int((tmp_path / "pid-child").read_text())))


def ended_at_once(monkeypatch: pytest.MonkeyPatch, folder: Path, *ends: str) -> Outcome:
    """Of ranks that are all there when the first look is taken, and all gone at the second."""
    started, go = [], folder / "go"

    def start(*args: Any, **options: Any) -> Any:
        started.append(subprocess.Popen(*args, **options))
        return started[-1]

    def between(seconds: float) -> None:
        go.touch()
        for process in started:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=between))
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    return supervise([python(wait + end) for end in ends])


def test_of_several_failures_the_killed_rank_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = ended_at_once(monkeypatch, tmp_path, "raise SystemExit(1)", "os.kill(os.getpid(), 9)")
    assert outcome.first == 1 and "SIGKILL" in outcome.message


@pytest.mark.parametrize(("codes", "first"), [((1, 2), 1), ((2, 2), 0)])  # one that lost its peer ends with 1
def test_a_refused_configuration_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                     codes: tuple[int, ...], first: int) -> None:
    refused = ended_at_once(monkeypatch, tmp_path, *(f"raise SystemExit({code})" for code in codes))
    assert (refused.codes, refused.first, refused.exit_code) == (codes, first, 2)


def test_signal_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    supervise([python("pass")])
    assert signal.getsignal(signal.SIGTERM) is before


LAUNCHER = """
import os, sys
from csbp.supervise import RankCommand, supervise
commands = [RankCommand([sys.executable, "-c", sys.argv[1]], {**os.environ, "RANK": str(rank)}) for rank in range(2)]
outcome = supervise(commands, grace=0.2, saving=5.0, patience=float(os.environ.get("PATIENCE", 600)))
print("outcome", outcome.codes, outcome.stopped, outcome.exit_code, outcome.message, flush=True)
sys.exit(outcome.exit_code)
"""


def launcher(rank: str, folder: Path, *, patience: float = 600.0, **options: Any) -> subprocess.Popen[str]:
    # These tests may themselves be run by nohup, or in the background of a shell, which ignore signals for good.
    heeding = "import signal\nfor n in (signal.SIGHUP, signal.SIGINT): signal.signal(n, signal.SIG_DFL)\n" + LAUNCHER
    return subprocess.Popen([sys.executable, "-c", heeding, rank], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "FOLDER": str(folder), "PATIENCE": str(patience)}, **options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once_and_lets_them_save(tmp_path: Path, number: signal.Signals) -> None:
    saves = HERE + """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGINT, lambda *_: asked.append(2))
here()
while not asked: time.sleep(0.01)
(folder / f"asked-{rank}").write_text("")
while not (folder / "may-leave").exists(): time.sleep(0.01)
(folder / f"saved-{rank}").write_text(str(asked))
sys.exit(1)"""
    started = launcher(saves, tmp_path, start_new_session=True)
    pids(tmp_path, 2)
    os.killpg(started.pid, number)  # as a terminal does with Ctrl-C: to the whole group
    until(lambda: len(list(tmp_path.glob("asked-*"))) == 2)
    for _ in range(3):
        started.send_signal(number)
        time.sleep(0.1)
    (tmp_path / "may-leave").write_text("")
    output, _ = started.communicate()
    assert started.returncode == 1 and "outcome (1, 1) True 1" in output
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["[1]", "[1]"]


def test_a_signal_during_the_last_moments_does_not_spoil_a_finished_run(tmp_path: Path) -> None:
    finishes = HERE + """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
here()
while not asked: time.sleep(0.01)
sys.exit(0)"""
    started = launcher(finishes, tmp_path)
    pids(tmp_path, 2)
    started.terminate()
    output, _ = started.communicate()
    assert started.returncode == 0 and "outcome (0, 0) True 0" in output


SAVES = HERE + """
def leave(*_):
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
here()
time.sleep(600)"""


def test_a_rank_that_never_leaves_is_killed_and_named(tmp_path: Path) -> None:
    started = launcher(STUBBORN, tmp_path, patience=0.5, stderr=subprocess.PIPE)
    ranks = pids(tmp_path, 2)
    os.kill(ranks[1], signal.SIGSTOP)
    started.terminate()
    output, errors = started.communicate()
    assert "outcome (-9, -9) True 1 rank 0 " in output and "had not left in time" in output
    assert "they are given 0.5 seconds" in errors and not any(alive(pid) for pid in ranks)


def test_of_those_asked_to_stop_the_one_that_could_not_is_named(tmp_path: Path) -> None:
    commands = [python(script, FOLDER=str(tmp_path), RANK=str(rank)) for rank, script in enumerate((SAVES, STUBBORN))]
    threading.Thread(target=lambda: (pids(tmp_path, 2), os.kill(os.getpid(), signal.SIGTERM))).start()
    outcome = supervise(commands, saving=0.2)
    assert outcome.codes == (143, -9) and outcome.first == 1 and not outcome.as_asked
    assert "rank 1 " in outcome.message and "had not left in time" in outcome.message


@pytest.mark.slow
def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    started = launcher(STUBBORN, tmp_path, stderr=subprocess.PIPE)
    ranks = pids(tmp_path, 2)
    started.send_signal(signal.SIGINT)
    time.sleep(module._SAME_REQUEST_SECONDS + 0.2)
    assert all(alive(pid) for pid in ranks)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate()
    assert "outcome (-9, -9) True 1 rank 0 " in output and "a second signal" in output


def test_a_signal_to_one_rank_is_said(tmp_path: Path) -> None:
    commands = [python(SAVES, FOLDER=str(tmp_path), RANK=str(rank)) for rank in range(2)]
    threading.Thread(target=lambda: os.kill(pids(tmp_path, 2)[0], signal.SIGTERM)).start()
    outcome = supervise(commands)
    assert outcome.codes == (143, 143) and outcome.exit_code == 1 and not outcome.as_asked
    assert "a signal had asked a rank to stop" in outcome.message


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    waits = HERE + "here()\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + LAUNCHER  # as nohup does
    started = subprocess.Popen([sys.executable, "-c", ignoring, waits], env={**os.environ, "FOLDER": str(tmp_path)})
    pids(tmp_path, 2)
    started.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    (tmp_path / "go").write_text("")
    assert started.wait() == 0


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    stays = "from csbp.lifeline import leave_with_launcher\nleave_with_launcher()\n" + STUBBORN
    started = launcher(stays, tmp_path)
    ranks = pids(tmp_path, 2)
    assert all(alive(pid) for pid in ranks)
    if sys.platform.startswith("linux"):
        os.kill(ranks[0], signal.SIGSTOP)  # it cannot watch anything
    started.kill()
    started.wait()
    until(lambda: not any(alive(pid) for pid in ranks))


def test_each_rank_is_told_its_place(tmp_path: Path) -> None:
    config = compose_run(["experiment=quickstart", "parallel.nproc=3", "parallel.threads=2"])
    commands = rank_commands(config, tmp_path, Path("/private/rendezvous"), [7])
    for rank, command in enumerate(commands):
        assert list(command.argv) == [sys.executable, "-P", "-m", "csbp.worker", str(tmp_path)]
        told = {name: command.env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                                     "OMP_NUM_THREADS", "CSBP_RENDEZVOUS_FILE")}
        assert told == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
                        "OMP_NUM_THREADS": "2", "CSBP_RENDEZVOUS_FILE": "/private/rendezvous"}
        assert command.log == (tmp_path / "logs" / f"rank-{rank}.log" if rank else None) and command.keep == (7,)


def test_a_rank_inherits_what_it_is_to_keep(tmp_path: Path) -> None:
    with (tmp_path / "kept").open("w") as kept:
        writes = "import os, sys; os.write(int(os.environ['KEPT']), b'here')"
        command = python(writes, KEPT=str(kept.fileno()))
        assert supervise([replace(command, keep=(kept.fileno(),))]).exit_code == 0
    assert (tmp_path / "kept").read_text() == "here"


def test_whose_ranks_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started_ranks() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert started_ranks() is None  # without RANK nobody has started this process as a rank
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert started_ranks() == 2
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert started_ranks() == 1
    monkeypatch.delenv("MASTER_ADDR")
    assert started_ranks() == 1  # nobody to meet


MEETING = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("env", "field"), [
    ({"RANK": "", "WORLD_SIZE": "2"} | MEETING, "RANK"), ({"RANK": "1", "WORLD_SIZE": "1"} | MEETING, "RANK"),
    ({"RANK": "-1", "WORLD_SIZE": "2"} | MEETING, "RANK"), ({"RANK": "²", "WORLD_SIZE": "3"} | MEETING, "RANK"),
    ({"RANK": "0"}, "WORLD_SIZE"), ({"RANK": "0", "WORLD_SIZE": "two"} | MEETING, "WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE"), ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "MASTER_ADDR"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "99999"}, "MASTER_PORT"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"} | MEETING, "LOCAL_RANK"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"} | MEETING, "LOCAL_RANK"),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"} | MEETING, "LOCAL_RANK")])
def test_ranks_that_were_started_wrongly(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], field: str) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="unset RANK and WORLD_SIZE") as caught:
        started_ranks()
    assert caught.value.field == field and caught.value.value == env.get(field)


ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "True"}


@pytest.mark.parametrize(("env", "nproc", "refused"), [
    ({}, 2, False), ({"ACCELERATE_USE_CPU": "true"}, 2, False), (ACCELERATE, 1, False), (ACCELERATE, 2, True),
    (ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, 1, True), (ACCELERATE | {"RANK": "0", "WORLD_SIZE": "1"}, 2, True)])
def test_a_lone_process_of_accelerate(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], nproc: int,
                                      refused: bool) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    config = compose_run(["experiment=quickstart", f"parallel.nproc={nproc}"])
    assert started_ranks() is None
    if not refused:
        return refuse_lone_process(config)
    with pytest.raises(ConfigError, match="one process only") as caught:
        refuse_lone_process(config)
    assert caught.value.field == "parallel.nproc"


def test_more_ranks_than_configured_are_refused_on_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(SystemExit) as left:
        main(["train", "experiment=quickstart", f"model.path={tmp_path}", f"run_dir={tmp_path / 'run'}"])
    assert left.value.code == 2 and not (tmp_path / "run").exists()
    assert "parallel.nproc=2" in capsys.readouterr().err


def run(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


SCRIPT = str(Path(sys.executable).with_name("csbp"))


@pytest.mark.slow
def test_the_real_accelerate_is_found_out(tmp_path: Path) -> None:
    found = run(str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", "--num_processes", "2", SCRIPT,
                "train", "experiment=quickstart", f"model.path={tmp_path}", f"run_dir={tmp_path / 'run'}")
    assert found.returncode != 0 and "has started one process only" in found.stderr
    assert not (tmp_path / "run").exists()

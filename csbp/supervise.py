"""Start the ranks of a run as processes of this host, watch them, and end all of them when one fails.

- The first rank that ends with an error ends the job: the others get SIGTERM and, if still there after a grace
  period, SIGKILL with everything that they have started.
- SIGTERM, SIGINT or SIGHUP to this process is passed on to the ranks once, as SIGTERM; they save and leave.
  Those that have not after a time (stuck, or stopped by SIGSTOP), or a second signal, are killed.
  Ranks live in sessions of their own, so that Ctrl-C reaches them by this way only.
- Every rank's standard input is a pipe that ends when this process does, even by SIGKILL; a rank that watches
  it (``csbp.lifeline``) does not outlive the job.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from csbp.errors import writing

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A rank that has been asked by a signal of its own to stop, and has saved, leaves with this (128 + SIGTERM).
STOPPED = 143
_SAME_REQUEST_SECONDS = 1.0  # wrappers and schedulers send one request several times over
_POLL_SECONDS = 0.05
_TAIL_BYTES = 3000


@dataclass(frozen=True)
class RankCommand:
    """One process.

    Attributes:
        argv: what to run.
        env: its whole environment.
        log: file that its output is appended to; None: it writes to this process's terminal.
        keep: descriptors that it inherits.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path | None = None
    keep: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        codes: exit code of each rank as subprocess gives it: negative is the signal that ended it.
        first: the rank whose failure ended the job, or None if all ended well.
        stopped: a signal to this process had asked for the end.
        message: what happened, for the user; "" if all ended well.
    """

    codes: tuple[int, ...]
    first: int | None
    stopped: bool
    message: str

    @property
    def exit_code(self) -> int:
        """0 if all ended well, 2 if a rank refused the configuration, else 1."""
        if self.first is None:
            return 0
        return 2 if self.codes[self.first] == 2 else 1

    @property
    def as_asked(self) -> bool:
        """A signal to this process asked for the end, and every rank left by itself."""
        # A rank that had not yet begun is ended by the signal, or leaves with 1 because its peers are gone.
        return self.stopped and all(code in (0, 1, STOPPED, -signal.SIGTERM) for code in self.codes)


def supervise(ranks: Sequence[RankCommand], *, grace: float = 5.0, saving: float = 30.0,
              patience: float = 600.0) -> Outcome:
    """Run the ranks to their end. Call it in the main thread; takes over signals meanwhile.

    Args:
        ranks: at least one; their order is the rank's number.
        grace: seconds from SIGTERM to SIGKILL for the rest, once a rank has failed; also from a second signal.
        saving: the same after a requested stop, when a rank leaves before the others (they may be writing).
        patience: seconds from a requested stop to SIGKILL for ranks of which none leaves: a step and a save fit in.
    """
    job = _Job(ranks, grace, patience)
    # A signal that is ignored on purpose (nohup) stays ignored.
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, job.ask_to_stop) for number in handled}
    try:
        job.start()
        first = job.watch()
        if first is not None:
            saved = job.stopping or job.processes[first].returncode == STOPPED
            job.end(saving if saved else grace)
            if saved and job.killed and job.processes[first].returncode == STOPPED:
                first = min(job.killed)
        codes = tuple(process.wait() for process in job.processes)
        return Outcome(codes, first, job.stopping, "" if first is None else job.describe(first, codes[first]))
    finally:
        job.end(0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Job:
    def __init__(self, ranks: Sequence[RankCommand], grace: float, patience: float) -> None:
        self.ranks, self.grace, self.patience = ranks, grace, patience
        self.processes: list[subprocess.Popen[bytes]] = []
        self.log_starts: list[int] = []
        self.asked_at: float | None = None  # when a stop was asked for
        self.deadline = math.inf  # for ranks that were asked
        self.passed_on = self.hurried = False
        self.killed: set[int] = set()

    @property
    def stopping(self) -> bool:
        """A signal has asked for a stop."""
        return self.asked_at is not None

    def ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A second request, not just the first one over again, ends the patience."""
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
        elif not self.hurried and now - self.asked_at > _SAME_REQUEST_SECONDS:
            self.hurried, self.deadline = True, now + self.grace

    def start(self) -> None:
        """Start every rank, each in a session of its own."""
        for rank in self.ranks:
            output: IO[bytes] | None = None
            if rank.log:
                with writing(rank.log):
                    rank.log.parent.mkdir(parents=True, exist_ok=True)
                    output = rank.log.open("ab")
            self.log_starts.append(output.tell() if output else 0)
            self.processes.append(subprocess.Popen(
                rank.argv, env=rank.env, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                pass_fds=rank.keep))
            if output:
                output.close()

    def watch(self) -> int | None:
        """Wait until all ranks have ended well (None), or one has failed or outlived the deadline (its number). If
        several have failed at once, one that a signal ended is named, or one that refused the configuration, before
        those that only lost their peer."""
        while True:
            if self.stopping and not self.passed_on:
                _say(f"stopping: the ranks finish their step and save; they are given {self.patience:g} seconds. A "
                     "second signal (Ctrl-C) ends them without")
                self._signal_all(signal.SIGTERM)
                self.passed_on, self.deadline = True, min(self.deadline, time.monotonic() + self.patience)
            codes = [process.poll() for process in self.processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return min(failed, key=lambda rank: ((codes[rank] or 0) > 0, codes[rank] != 2))
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() >= self.deadline:
                return codes.index(None)
            time.sleep(_POLL_SECONDS)

    def end(self, seconds: float) -> None:
        """SIGTERM to what is left, unless it has had one; SIGKILL after ``seconds``."""
        if not self.passed_on:
            self._signal_all(signal.SIGTERM)
            self.passed_on = True
        until = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() >= min(until, self.deadline):
                break
            time.sleep(_POLL_SECONDS)
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.killed.add(rank)
                try:
                    os.killpg(process.pid, signal.SIGKILL)  # the rank leads a session: its children go with it
                except ProcessLookupError:
                    pass
                process.wait()
            if process.stdin:
                process.stdin.close()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def describe(self, rank: int, code: int) -> str:
        """What the user reads: which rank, why, and the end of its log."""
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if code == STOPPED:
            how = "left because a signal had asked a rank to stop; what it had done is saved"
        elif rank in self.killed:
            how = ("was killed: a second signal came before it had left" if self.hurried else
                   "was killed: it had not left in time after it was asked to stop")
        message = f"rank {rank} (process {self.processes[rank].pid}) {how}"
        log = self.ranks[rank].log
        if log is None or self.stopping or code == STOPPED:
            return message
        with log.open("rb") as opened:
            opened.seek(max(self.log_starts[rank], log.stat().st_size - _TAIL_BYTES))
            lines = opened.read().decode("utf-8", errors="replace").splitlines()
        if not lines:
            return message
        return "\n".join([f"{message}; the end of {log}:", *(f"  | {line}" for line in lines[-25:])])


def _say(message: str) -> None:
    print(f"csbp: {message}", file=sys.stderr, flush=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

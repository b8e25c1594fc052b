"""A few gloo ranks that live as long as the test session, so that a distributed check costs milliseconds.

Workers come from a fork server that has imported torch and transformers once: a plain fork of the test
process hangs as soon as that process has run an operator, and spawning pays the imports for every rank.
The pool starts nothing before its first ``run``. After any failure all workers are ended and the next
``run`` starts fresh ones: a broken process group is never reused.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle  # our own functions and results, between our own processes
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_RANKS = 4
# After the first failure the others get this long to report theirs; the earliest one is the cause.
GRACE_SECONDS = 2.0
PRELOAD = [
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.device_mesh", "torch.distributed.checkpoint",
    "transformers", "transformers.models.qwen3.modeling_qwen3",
    "pytest", "csbp.train.drive", "csbp.parallel.fsdp", "csbp.models.registry", "csbp.models.qwen3.adapter",
]


class RankError(RuntimeError):
    """A rank died, hung, or raised something that does not pickle, so it cannot be re-raised as it was."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    log: Path


@dataclass
class _Failure:
    rank: int
    when: float  # time.monotonic, which all processes of a machine share
    text: str
    error: BaseException | None = None


class RankPool:
    """Up to ``MAX_RANKS`` persistent workers. Use as a context manager; not thread safe."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._calls = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call ``function(*args)`` on n ranks with ``torch.distributed`` (gloo) initialised at world size n.

        RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them.

        Args:
            n: world size, 1 to ``MAX_RANKS``.
            function: module-level function of a test module or of a helper module beside this file.
            args: picklable, the same for every rank; the function learns its rank from ``torch.distributed``.
            timeout: seconds for the whole call.

        Returns:
            The picklable results, by rank.

        Raises:
            The exception of the rank that failed first, with its rank and remote traceback as a note.
            RankError: a rank died or the call took longer than ``timeout`` (with every rank's stacks).
        """
        assert 1 <= n <= MAX_RANKS, f"the pool has {MAX_RANKS} ranks, {n} asked"
        payload = pickle.dumps((function, args))
        try:
            self._start(n)
            return self._call(n, payload, timeout)
        except BaseException:  # also a test timeout or Ctrl-C in the middle of a call
            self.close()
            raise

    def close(self) -> None:
        """End all workers and remove their files. The pool can be used again."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, n: int) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="csbp-ranks-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        while len(self._workers) < n:
            log = self._folder / f"rank{len(self._workers)}.log"
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, log))

    def _call(self, n: int, payload: bytes, timeout: float) -> list[Any]:
        assert self._folder is not None
        self._calls += 1
        store = self._folder / f"store{self._calls}"
        team = self._workers[:n]
        for rank, worker in enumerate(team):
            worker.pipe.send_bytes(pickle.dumps((sys.path, rank, n, str(store), timeout, payload)))
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        end = time.monotonic() + timeout
        while len(results) + len(failures) < n:
            pending = [rank for rank in range(n) if rank not in results and rank not in failures]
            handles = [h for rank in pending for h in (team[rank].pipe, team[rank].process.sentinel)]
            if not wait(handles, max(0.0, end - time.monotonic())):
                break
            for rank in pending:
                self._receive(rank, team[rank], results, failures)
            if failures:
                end = min(end, time.monotonic() + GRACE_SECONDS)
        store.unlink(missing_ok=True)
        if failures:
            raise self._first(failures)
        if len(results) < n:
            raise RankError(self._describe_hang(n, results, timeout))
        return [results[rank] for rank in range(n)]

    def _receive(self, rank: int, worker: _Worker, results: dict[int, Any],
                 failures: dict[int, _Failure]) -> None:
        """Take a finished rank's answer, or note its death; nothing if it is still at work."""
        try:
            if worker.pipe.poll():
                kind, when, body, text = pickle.loads(worker.pipe.recv_bytes())  # noqa: S301
                if kind == "result":
                    results[rank] = pickle.loads(body)  # noqa: S301
                else:
                    failures[rank] = _Failure(rank, when, text, pickle.loads(body) if body else None)  # noqa: S301
                return
            if worker.process.exitcode is None:
                return
        except (EOFError, ConnectionError):
            worker.process.join(GRACE_SECONDS)
        text = f"died with exit code {worker.process.exitcode}\n{_tail(worker.log)}"
        failures[rank] = _Failure(rank, 0.0, text)  # a death explains the others' broken connections

    @staticmethod
    def _first(failures: dict[int, _Failure]) -> BaseException:
        cause, *others = sorted(failures.values(), key=lambda f: f.when)
        note = "".join(f"\nthen rank {f.rank}: {f.text.strip().splitlines()[-1]}" for f in others)
        if cause.error is None:
            return RankError(f"rank {cause.rank}: {cause.text}{note}")
        cause.error.add_note(f"on rank {cause.rank}:\n{cause.text}{note}")
        return cause.error

    def _describe_hang(self, n: int, results: dict[int, Any], timeout: float) -> str:
        stuck = [rank for rank in range(n) if rank not in results]
        for rank in stuck:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.5)  # the handler writes at once, from C
        stacks = "".join(f"\n--- rank {rank} ---\n{_tail(self._workers[rank].log)}" for rank in stuck)
        return f"ranks {stuck} of {n} not done after {timeout:g} s; their stacks:{stacks}"


def _tail(log: Path, size: int = 6000) -> str:
    return log.read_text(errors="replace")[-size:] if log.exists() else ""


def _serve(pipe: Connection, log: str) -> None:
    """A worker's life: one call after another, until the pool hangs up or a call fails."""
    output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(output, all_threads=True)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's to handle
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            path, rank, n, store, timeout, payload = pickle.loads(pipe.recv_bytes())  # noqa: S301
        except EOFError:
            return
        os.ftruncate(output, 0)
        sys.path[:] = path  # test folders join the path as pytest collects them
        try:
            result = pickle.dumps(_one_call(rank, n, store, timeout, payload))
        except BaseException as error:
            text = traceback.format_exc()
            pipe.send_bytes(pickle.dumps(("failure", time.monotonic(), _pickled(error), text)))
            os._exit(1)  # at once, so that peers in a collective with this rank fail too
        pipe.send_bytes(pickle.dumps(("result", time.monotonic(), result, "")))


def _one_call(rank: int, n: int, store: str, timeout: float, payload: bytes) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n,
                            timeout=timedelta(seconds=timeout + 60))
    function, args = pickle.loads(payload)  # noqa: S301
    result = function(*args)
    if dist.is_initialized():
        dist.barrier()  # a rank that ran one collective more than the others shows here, not in the next test
        dist.destroy_process_group()
    return result


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, or None where it would not come back (its constructor wants more arguments)."""
    try:
        body = pickle.dumps(error)
        pickle.loads(body)  # noqa: S301
    except Exception:
        return None
    return body

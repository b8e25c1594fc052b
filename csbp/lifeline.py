"""A rank does not outlive the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Call it in a rank, before long work: Linux then kills this process when the one that started it ends, however
    that ends and even while this one is stopped (SIGSTOP). Does nothing on other systems."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before the request was made
        os._exit(1)


def leave_with_launcher() -> None:
    """Call it in a rank of ``supervise``: ends this process when its standard input does, however busy its main
    thread is; where the system can, when its parent does."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        print("csbp: the launcher is gone", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()
    die_with_parent()

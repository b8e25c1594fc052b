"""Locks that end with the processes that hold them, however those end: nothing to clean up after a kill."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import sys
import time
from pathlib import Path

from csbp.errors import ConfigError

LOCK = ".lock"
# What file systems answer that have no such locks (EBADF: NFS, for a folder).
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def lock_now(descriptor: int) -> bool | None:
    """Take the exclusive lock of an open file or folder, without waiting.

    Returns:
        True: it is held until every copy of the descriptor, also in other processes, is closed. False: somebody else
        holds it. None: this file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


class RunLock:
    """The lock of a run folder: the file ``.lock`` in it, which says who holds it. There is one holder at a time.

    Attributes:
        folder: the run folder.
        descriptor: processes that inherit it hold the lock too.
    """

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            ConfigError: a run is alive in this folder.
            OSError: the file cannot be made.
        """
        self.folder, self.path = folder, folder / LOCK
        while True:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            taken = lock_now(self.descriptor)
            if taken is False:
                holder = _holder(self.descriptor)
                os.close(self.descriptor)
                raise ConfigError("run_dir", str(folder), f"a run is alive in this folder ({holder}); wait for it or "
                                                          "stop it, or choose another folder")
            if self._in_place():
                break
            os.close(self.descriptor)  # the holder before has just removed the file
        if taken is None:
            print(f"csbp: {folder}: this file system has no locks; see to it that no second run uses the folder",
                  file=sys.stderr)
        about = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(about).encode() + b"\n", 0)

    def release(self) -> None:
        """Give it back; the file goes too. Without this call it ends with the last process that has the descriptor."""
        if self._in_place():
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _in_place(self) -> bool:
        """Whether the open file is the one that others would find."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self.path.stat())
        except FileNotFoundError:
            return False


def _holder(descriptor: int) -> str:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {about['pid']} on {about['host']}, or ranks that it has started, since {about['started']}"
    except (ValueError, KeyError, TypeError):
        return "its .lock does not say whose"

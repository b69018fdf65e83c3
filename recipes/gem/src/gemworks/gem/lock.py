"""One job per run folder: a lock that the operating system drops when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path


class RunLock:
    """Holds `<folder>/lock` until `release`.

    The lock is an advisory `flock`, so a job that was killed leaves a stale file but no lock, and the next job simply
    takes it over. The file says who holds it: process id and host.

    Args:
        folder: an existing run folder.

    Raises:
        ValueError: another job holds the lock; says which. Or the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 4096).decode("utf-8", "replace")
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(
                    f"run folder {str(folder)!r}: got one that {_describe(holder)} is using, expected a free one; "
                    "wait for that job, stop it, or choose another folder"
                ) from error
            raise ValueError(
                f"run folder {str(folder)!r}: its file system has no file locks ({error.strerror}), which keep two "
                "jobs apart; put the run folder on another one"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets the next job in. The file stays: removing it would let two jobs lock two files of the same name."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _describe(holder: str) -> str:
    try:
        facts = json.loads(holder)
        return f"process {facts['pid']} on {facts['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"

"""The lock under which a file of an older schema is opened, upgraded and replaced.

An upgrade renames a new file over the old one. A connection that has the old file open by then would find the log of the
new file under the old name, read it as its own, and even copy it into the old file. So whoever opens an old file holds
this lock until it is upgraded or closed. The folder itself is locked (flock), since a lock of the file would go with it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from ..errors import BusyError

try:
    import fcntl
except ImportError:  # Windows: an open file cannot be renamed over there
    fcntl = None  # type: ignore[assignment]

RETRY_SECONDS = 0.02


@dataclass(slots=True)
class _Held:
    fd: int
    thread: int
    count: int


_held: dict[tuple[int, int], _Held] = {}
_guard = threading.Lock()


class UpgradeLock:
    """Held from its creation to `release`; a thread that holds it may take it again. Raises BusyError after `timeout`."""

    def __init__(self, path: str, timeout: float) -> None:
        self._folder: tuple[int, int] | None = None
        give_up = time.monotonic() + timeout
        while not self._take(os.path.dirname(path)):
            if time.monotonic() >= give_up:
                raise BusyError(
                    f"{path} is being upgraded by another process",
                    path=path,
                    hint="an upgrade needs exclusive access to the file: try again later",
                )
            time.sleep(RETRY_SECONDS)

    def _take(self, name: str) -> bool:
        if fcntl is None:
            return True
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True  # a folder that cannot be read
        found = os.fstat(fd)
        folder = found.st_dev, found.st_ino
        with _guard:
            held = _held.get(folder)
            if held is not None and held.thread == threading.get_ident():
                os.close(fd)
                held.count += 1
                self._folder = folder
                return True
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            except OSError:
                os.close(fd)
                return True  # a file system without locks
            _held[folder] = _Held(fd, threading.get_ident(), 1)
            self._folder = folder
            return True

    def release(self) -> None:
        """Safe to call twice."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        with _guard:
            held = _held[folder]
            held.count -= 1
            if not held.count:
                del _held[folder]
                with suppress(OSError):
                    fcntl.flock(held.fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
                os.close(held.fd)

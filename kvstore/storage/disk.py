"""Blocks of the disk, taken ahead: so that a log can be copied into its file, and a delete be written, on a full disk.

Blocks behind the end of a file (fallocate, FALLOC_FL_KEEP_SIZE) belong to it but do not change its size; a truncate to
that size gives them back. Linux only: on other systems no blocks are reserved, and a full disk shows as an error of the write.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

from .geometry import SPARE_BYTES as SPARE_BYTES

KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def allocate(fd: int, at: int, n_bytes: int, mode: int = 0) -> bool:
    """Gives a file the blocks of this range; False where the disk or the file system has none."""
    # Not posix_fallocate: where the file system has no such call it writes to every block, beside SQLite's own writes.
    if sys.platform != "linux":
        return False
    try:
        fallocate = ctypes.CDLL(None).fallocate64
    except (OSError, AttributeError):
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, mode, at, n_bytes) == 0)


def free_bytes(path: str) -> int:
    """Bytes that the disk of a file has free, for a user without privileges."""
    if not hasattr(os, "statvfs"):
        return sys.maxsize
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _descriptor(path: str) -> int:
    """A descriptor that SQLite has open for writing on the file, -1 where none is found.

    Another one, opened and closed by us, would drop the locks that SQLite has on the file.
    """
    if sys.platform != "linux":
        return -1
    import fcntl

    wanted = os.stat(path)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = os.fstat(int(name))
            writable = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino) and writable:
                return int(name)
    return -1


def spare_bytes(path: str) -> int:
    """Bytes to keep in reserve: the usual amount, or what a smaller disk has free."""
    return min(SPARE_BYTES, free_bytes(path)) if os.path.exists(path) else 0


def reserve_behind(path: str, n_bytes: int) -> bool | None:
    """Takes blocks behind the end of a file that is open in this process; None where that cannot be done here."""
    with suppress(OSError):
        fd = _descriptor(path)
        if fd >= 0:
            if allocate(fd, os.fstat(fd).st_size, n_bytes, KEEP_SIZE):
                return True
            # No room, or no such call: with room for it, it is the call.
            return None if free_bytes(path) > n_bytes else False
    return None


def give_up_behind(path: str) -> None:
    """Gives the blocks behind the end of a file back; nobody else may write to it now."""
    with suppress(OSError):
        os.truncate(path, os.stat(path).st_size)


class Spare:
    """Reserve blocks in an unnamed file beside the store, to be given up when the disk is full."""

    def __init__(self, store: str) -> None:
        self._folder = os.path.dirname(store)
        self._fd = -1
        self.take()

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def take(self, n_bytes: int = SPARE_BYTES) -> None:
        """Takes the blocks where they are not held, and the disk has them."""
        flag = getattr(os, "O_TMPFILE", None)
        if self.held or flag is None:
            return
        with suppress(OSError):
            fd = os.open(self._folder, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if allocate(fd, 0, n_bytes):
                self._fd = fd
            else:
                os.close(fd)

    def give_up(self) -> bool:
        """Gives the blocks back to the disk; False where none were held."""
        if not self.held:
            return False
        fd, self._fd = self._fd, -1
        os.close(fd)
        return True

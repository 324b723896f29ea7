"""Names the writer of a staged blob, and tells every process of the machine whether that writer is still alive.

A put that is committed in steps locks one byte, at a random offset, of an empty file beside the store, `<file>-writers`.
The kernel lets go of the lock when the process ends, however it ends, and shows it to processes of other containers,
where a process id means nothing. The lock belongs to an open file description: no other descriptor of this process takes
part in it, and SQLite's own locks, on another file, are not touched. The last to unlock removes the file.

Where there are no such locks (outside Linux) or the file cannot be made (a folder that cannot be written), the writer is
known by its process id and the time that the process started.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import struct
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

from .paths import identity

SUFFIX = "-writers"
_LOCKED = re.compile(r"lock:([0-3][0-9a-f]{15}):[0-9]+")
_PROCESS = re.compile(r"([1-9][0-9]{0,9}):([0-9]*)(?::([0-9a-f]+))?")
_MAX_PID = (1 << 31) - 1
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock: type, whence, start, length, pid
_TRIES = 100
_tokens: set[str] = set()  # of the writers of this process that have no lock


def _ofd(name: str) -> int | None:
    if sys.platform != "linux":
        return None
    import fcntl

    return getattr(fcntl, name, None)


_SET, _GET = _ofd("F_OFD_SETLK"), _ofd("F_OFD_GETLK")


def _lock(fd: int, kind: str, start: int, length: int) -> bool:
    """Locks or unlocks bytes; False where another holds them."""
    import fcntl

    assert _SET is not None
    try:
        fcntl.fcntl(fd, _SET, _FLOCK.pack(getattr(fcntl, kind), os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _open(path: str, flags: int) -> int:
    # Never through a link, never waiting for a pipe: the folder may hold anything under this name.
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _same_file(fd: int, path: str) -> bool:
    found = os.fstat(fd)
    return identity(path) == (found.st_dev, found.st_ino)


class Writer:
    """A put under way: `name` is what its staged blobs say of it, until `close`."""

    def __init__(self, store: str | None) -> None:
        """`store` is the path of the file, None for a store in memory."""
        self._pid = os.getpid()
        self._fd = -1
        self._path = "" if store is None else store + SUFFIX
        offset = secrets.randbits(62)
        if store is not None and _SET is not None:
            with suppress(OSError):
                self._fd = self._locked(store, offset)
        if self._fd >= 0:
            self.name = f"lock:{offset:016x}:{self._pid}"
            _writers.add(self)
        else:
            _tokens.add(f"{offset:016x}")
            self.name = f"{self._pid}:{_started(self._pid)}:{offset:016x}"

    def _locked(self, store: str, offset: int) -> int:
        """A descriptor of the file that has the name, with this byte locked; -1 where that cannot be had."""
        for _ in range(_TRIES):
            fd = _open(self._path, os.O_RDWR | os.O_CREAT)
            try:
                _like_the_store(fd, store)
                # A process that has locked the whole file is about to remove it.
                if _lock(fd, "F_WRLCK", offset, 1) and _same_file(fd, self._path):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            time.sleep(0.001)
        return -1

    def close(self) -> None:
        """Ends the put: blobs that it leaves staged are now abandoned."""
        if self._fd < 0:
            _tokens.discard(self.name.rpartition(":")[2])
            return
        fd, self._fd = self._fd, -1
        try:
            if self._pid == os.getpid():
                with suppress(OSError):
                    _lock(fd, "F_UNLCK", 0, 0)  # first: of two that close at once one must find it free
                    _remove_unused(fd, self._path)
        finally:
            os.close(fd)


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _forked() -> None:
    """A child that keeps the descriptor would keep its parent's lock after the parent's death."""
    for writer in list(_writers):
        if writer._fd >= 0:
            with suppress(OSError):
                os.close(writer._fd)
            writer._fd = -1
    _tokens.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _like_the_store(fd: int, store: str) -> None:
    """Gives a new file the mode and owner of the store, as SQLite does with its log: who may write that may see this."""
    own, wanted = os.fstat(fd), os.stat(store)
    if own.st_size or own.st_nlink != 1:
        return
    with suppress(OSError):
        if os.geteuid() == 0 and (own.st_uid, own.st_gid) != (wanted.st_uid, wanted.st_gid):
            os.fchown(fd, wanted.st_uid, wanted.st_gid)
        if own.st_mode & 0o777 != wanted.st_mode & 0o666:
            os.fchmod(fd, wanted.st_mode & 0o666)


def _remove_unused(fd: int, path: str) -> None:
    if _lock(fd, "F_WRLCK", 0, 0) and _same_file(fd, path):
        os.unlink(path)


def sweep(store: str) -> None:
    """Removes the file of locks where nobody holds one: a process that was killed left it."""
    if _SET is None:
        return
    with suppress(OSError):
        fd = _open(store + SUFFIX, os.O_RDWR)
        try:
            _remove_unused(fd, store + SUFFIX)
        finally:
            os.close(fd)


def process_name() -> str:
    """For a blob that is staged and handed over in one transaction, so that nobody ever reads it."""
    return f"{os.getpid()}:"


def alive(name: str, store: str | None) -> bool:
    """Whether the put of this name is under way. False if the name is not a writer's; True if it cannot be known."""
    locked = _LOCKED.fullmatch(name)
    if locked is not None:
        return store is not None and _holds(store + SUFFIX, int(locked[1], 16))
    process = _PROCESS.fullmatch(name)
    if process is None or int(process[1]) > _MAX_PID:
        return False
    pid, started, token = int(process[1]), process[2], process[3]
    if pid == os.getpid() and token is not None and token not in _tokens:
        return False
    return _process_alive(pid, started)


def _holds(path: str, offset: int) -> bool:
    try:
        fd = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if _GET is None:
            return True
        import fcntl

        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        kind, _, _, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, _GET, asked))
        # A process that holds more than one byte is removing the file, after finding no other lock.
        return bool(kind != fcntl.F_UNLCK and length == 1)
    except OSError:
        return True
    finally:
        os.close(fd)


def _started(pid: int) -> str:
    """When the process started, as Linux counts it; '' elsewhere, or where it cannot be seen."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def _process_alive(pid: int, started: str) -> bool:
    """Whether the process that started then is running: its id alone may be in use again."""
    if pid != os.getpid():
        if sys.platform == "win32":
            import ctypes

            handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
            if handle:
                ctypes.windll.kernel32.CloseHandle(handle)
            return bool(handle)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            pass
    now = _started(pid)
    return now in ("", started)

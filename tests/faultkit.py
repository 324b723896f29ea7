"""A VFS that counts SQLite's writes and syncs, and at one of them fails, kills the process, or loses power."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw

FAILURES: dict[str, tuple[type[apsw.Error], int]] = {
    "read": (apsw.IOError, apsw.SQLITE_IOERR_READ),
    # What SQLite's own VFS gives for an EIO: it surfaces as "database disk image is malformed".
    "eio": (apsw.IOError, apsw.SQLITE_IOERR_CORRUPTFS),
    "write": (apsw.IOError, apsw.SQLITE_IOERR_WRITE),
    "sync": (apsw.IOError, apsw.SQLITE_IOERR_FSYNC),
    "truncate": (apsw.IOError, apsw.SQLITE_IOERR_TRUNCATE),
    "full": (apsw.FullError, apsw.SQLITE_FULL),
}


class Faults(apsw.VFS):
    """The default VFS while it is registered. `act(call)` is called before every call of a kind in `kinds`."""

    def __init__(self, kinds: set[str], act: Callable[[Faults, str], None]) -> None:
        self.kinds = kinds
        self.act = act
        self.n = 0
        self.alter: Callable[[bytes, int], bytes] | None = None  # by bytes and offset: what a connection that only reads gets
        self.lock = threading.RLock()  # who holds it when power is lost never lets go
        # By path: what one connection wrote is safe when another one syncs the file.
        self.unsynced: dict[str, list[tuple[int, bytes, int]]] = {}
        super().__init__("faults", "", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> File:
        return File(name, flags, self)

    def count(self, kind: str) -> None:
        if kind in self.kinds:
            with self.lock:
                self.n += 1
                self.act(self, kind)

    def lose_power(self, keep: int) -> None:
        """Takes back, in every file, the writes since its last sync but for the first `keep`."""
        for path, writes in self.unsynced.items():
            fd = os.open(path, os.O_RDWR | os.O_CREAT)  # the process is about to end: SQLite's locks do not matter
            for at, old, size in reversed(writes[keep:]):
                if old:
                    os.pwrite(fd, old, at)
                os.ftruncate(fd, size)


class File(apsw.VFSFile):
    def __init__(self, name: Any, flags: list[int], owner: Faults) -> None:
        self.owner = owner
        self.path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self.refused = False
        self.reads_only = bool(flags[0] & apsw.SQLITE_OPEN_READONLY)
        super().__init__("unix", name, flags)

    def remember(self, at: int, n: int) -> None:
        size = self.xFileSize()
        old = super().xRead(min(n, size - at), at) if at < size else b""
        self.owner.unsynced.setdefault(self.path, []).append((at, bytes(old), size))

    def xRead(self, amount: int, offset: int) -> Any:
        try:
            self.owner.count("eio" if "eio" in self.owner.kinds else "read")
        except apsw.IOError as error:
            self.refused = self.refused or error.extendedresult == apsw.SQLITE_IOERR_CORRUPTFS
            raise
        data = super().xRead(amount, offset)
        return data if self.owner.alter is None or not self.reads_only else self.owner.alter(bytes(data), offset)

    def xFileControl(self, op: int, pointer: int) -> bool:
        if op == apsw.SQLITE_FCNTL_LAST_ERRNO and self.refused:
            ctypes.c_int.from_address(pointer).value = errno.EIO
            return True
        return bool(super().xFileControl(op, pointer))

    def xWrite(self, data: Any, offset: int) -> None:
        with self.owner.lock:
            self.owner.count("write")
            if "power" in self.owner.kinds:
                self.remember(offset, len(data))
            super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        with self.owner.lock:
            self.owner.count("truncate")
            if "power" in self.owner.kinds:
                self.remember(size, max(0, self.xFileSize() - size))
            super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        with self.owner.lock:
            self.owner.count("sync")
            super().xSync(flags)
            self.owner.unsynced.pop(self.path, None)


@contextmanager
def failing(kind: str, at: int, times: int = 1) -> Iterator[Faults]:
    """Call number `at` of this kind fails, and the next ones up to `times` in all. The disk is full for `kind` "full"."""

    def act(vfs: Faults, call: str) -> None:
        if at <= vfs.n < at + times:
            cls, code = FAILURES[kind]
            error = cls(f"{call} fails")
            error.extendedresult = code
            raise error

    vfs = Faults({"write" if kind == "full" else kind}, act)
    try:
        yield vfs
    finally:
        vfs.unregister()


def in_child(run: Callable[[Callable[[bytes], None]], None]) -> tuple[bytes, int]:
    """Runs `run(say)` in a forked child; what it said, and how it ended (negative: the signal)."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(reader)
            run(lambda text: [os.write(writer, text), None][1])
            code = 0
        except BaseException:  # noqa: BLE001  told to the parent
            import traceback

            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    said = b""
    while part := os.read(reader, 65536):
        said += part
    os.close(reader)
    return said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

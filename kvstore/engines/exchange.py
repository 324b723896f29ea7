"""The files through which a state passes between kvstore and llama-server: on the disk, or in memory.

    on the disk   DIR/NAME.bin, created here with mode 0600; one for a restore gets its name when it is complete
    in memory     DIR/NAME.bin -> /proc/PID/fd/N, a symbolic link to a memfd of this process

llama-server follows the link as it opens any file. The bytes belong to descriptors and mappings, so they are gone with the
process, however it ends; what a killed process leaves is a link that leads nowhere. N is a random high number: a server in
another pid namespace, where PID is another process, finds nothing there. Only Linux has memfds.

Nothing here follows a link of the folder: a file is read through the descriptor that created it.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import numpy as np

from ..errors import SlotFileError
from ..types import Bytes
from ..util import fsutil

if sys.platform == "linux":
    import fcntl
    import resource

_TARGET = re.compile(r"/proc/(\d+)/fd/\d+")
_NOEXEC = 0x8  # MFD_NOEXEC_SEAL, since Linux 6.3; a system can be set up to refuse other memfds
_BINARY = getattr(os, "O_BINARY", 0)


class Mapping(mmap.mmap):
    """The bytes of a memfd; the memory is free when nothing refers to them any more."""


def owner_of(link: str | os.PathLike[str]) -> int | None:
    """The id of the process whose descriptor a link names; None for any other link."""
    try:
        found = _TARGET.fullmatch(os.readlink(link))
    except OSError:
        return None
    return None if found is None else int(found[1])


class Exchange:
    """A file on the disk. `path` is its name in the folder; `close` removes it."""

    in_memory = False

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def for_save(cls, path: Path) -> Exchange:
        """An empty file for the server to write into: this way it has our mode, not the one of the server's umask."""
        return cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, fsutil.PRIVATE))

    @classmethod
    def for_restore(cls, path: Path, parts: Iterable[bytes | memoryview]) -> Exchange:
        """A complete file with these bytes. It is not synced: it need not survive a power cut."""
        made = cls.for_save(path.with_name(f".{path.stem}.tmp"))
        try:
            made._fill(parts)
            made._close_descriptor()  # Windows renames no open file
            os.rename(made.path, path)
        except BaseException:
            made.close()
            raise
        made.path = path
        return made

    def _fill(self, parts: Iterable[bytes | memoryview]) -> None:
        sink = fsutil.Sink(self._fd)
        for part in parts:
            sink.write(part)

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self) -> Bytes:
        """All bytes. Raises SlotFileError where the file becomes shorter meanwhile, and OSError."""
        data = np.empty(self.size, np.uint8)
        view = data.data
        with FileIO(self._fd, "rb", closefd=False) as f:
            f.seek(0)
            while view.nbytes:
                n = f.readinto(view)
                if not n:
                    raise SlotFileError(f"{self.path} became shorter while it was read", hint="save the slot again")
                view = view[n:]
        return data

    def close(self) -> None:
        if os.name == "nt":  # Windows removes no open file
            self._close_descriptor()
        # The name goes first: a closed descriptor's number may be another file's at once.
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class MemoryExchange(Exchange):
    """A file in memory. Every method raises OSError where the system has no such files."""

    in_memory = True
    mapping: Mapping | None = None  # of what was read, until `close`

    @classmethod
    def for_save(cls, path: Path) -> MemoryExchange:
        made = cls(path, _memfd())
        made._link()
        return made

    @classmethod
    def for_restore(cls, path: Path, parts: Iterable[bytes | memoryview]) -> MemoryExchange:
        made = cls(path, _memfd())
        try:
            made._fill(parts)
            made._seal()
        except BaseException:
            made._close_descriptor()
            raise
        made._link()
        return made

    def _link(self) -> None:
        try:
            os.symlink(f"/proc/{os.getpid()}/fd/{self._fd}", self.path)
        except BaseException:
            self._close_descriptor()
            raise

    def _seal(self) -> None:
        """From now on nobody can change the bytes. A file cut short under a mapping would end this process."""
        if sys.platform == "linux":
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)

    def read(self) -> Bytes:
        """All bytes, read-only and without a copy: an array over `mapping`."""
        self._seal()
        if not self.size:
            return np.empty(0, np.uint8)
        self.mapping = Mapping(self._fd, self.size, access=mmap.ACCESS_READ)
        return np.frombuffer(self.mapping, np.uint8)

    def close(self) -> None:
        super().close()
        self.mapping = None


def _memfd() -> int:
    """The descriptor of an empty file in memory, with a number that no other process is likely to use."""
    if sys.platform != "linux":
        raise OSError("this system has no files in memory")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("kvstore-slot", flags | _NOEXEC)
    except OSError:
        fd = os.memfd_create("kvstore-slot", flags)
    try:
        os.fchmod(fd, fsutil.PRIVATE)
        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, limit // 2 + secrets.randbelow(max(1, limit // 2 - 64)))
    finally:
        os.close(fd)

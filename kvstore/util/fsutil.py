"""Files: atomic writes, reads of files and pipes, and the errors of kvstore for those of the operating system.

    a regular file, or a new one   a temporary file in the same folder, fsync, rename, fsync of the folder
    a symbolic link                the same for its target; the link stays
    /dev/stdout, /dev/fd/N         written to that descriptor of this process
    a device, a FIFO               opened and written to; nothing is replaced
    a folder, a socket             refused
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from typing import Any

from ..errors import DiskFullError, KVStoreError, StoreIOError

PRIVATE = 0o600  # files that contain prompts are readable only by their owner
MAX_LINKS = 40
_BINARY = getattr(os, "O_BINARY", 0)
_NOT_A_TERMINAL = getattr(os, "O_NOCTTY", 0)
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Sink:
    """Writes bytes to a descriptor until all of them are written."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        left = view.cast("B")
        while left:
            left = left[os.write(self._fd, left) :]
        return view.nbytes


# -- what a path is


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of a path that is not a regular file, such as "a directory"; None for a regular or missing file."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except OSError:
        return None


def descriptor_of(path: str | os.PathLike[str]) -> int | None:
    """The descriptor of this process that a path such as /dev/stdout or /dev/fd/3 names; else None."""
    if os.name == "nt":
        return None
    own = {"/dev/fd", os.path.realpath("/proc/self/fd")}
    here = os.path.abspath(os.fspath(path))
    for _ in range(MAX_LINKS):
        folder, name = os.path.split(here)
        folder = os.path.realpath(folder)
        if name.isascii() and name.isdecimal() and folder in own:
            return int(name)
        try:
            here = os.path.normpath(os.path.join(folder, os.readlink(os.path.join(folder, name))))
        except OSError:
            return None
    return None


def temporary_name(path: str) -> str:
    """A new name in the folder of a file, for its temporary copy. It is not too long where the name itself is not."""
    folder, name = os.path.split(os.path.abspath(path))
    short = os.fsencode(name)[:200].decode("utf-8", "ignore")
    return os.path.join(folder, f".{short}.{secrets.token_hex(6)}.tmp")


# -- writing


def atomic_write(
    path: str | os.PathLike[str], *, sync: bool = True, temporary: str | None = None, replace: bool = True
) -> AbstractContextManager[Sink]:
    """Yields a Sink for the bytes of a file of mode 0600. Afterwards the file is complete and synced, or as it was.

    Paths that are not regular files are treated as the top of this module says. A file that root replaces keeps its owner.
    `sync=False`: the file need not survive a power cut. `temporary`: the name of the file until it is complete.
    `replace=False` raises FileExistsError if the file exists. Raises OSError: see `error_of`.
    """
    path = os.fspath(path)
    fd = descriptor_of(path)
    if fd is not None:
        return _borrowed(fd)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        return _through(path, stat.S_IFMT(found.st_mode))
    target = os.path.realpath(path) if os.path.islink(path) else path
    return _replaced(target, found, sync, temporary or temporary_name(target), replace)


@contextmanager
def _borrowed(fd: int) -> Iterator[Sink]:
    os.fstat(fd)  # raises if it is closed
    yield Sink(fd)


@contextmanager
def _through(path: str, kind: int) -> Iterator[Sink]:
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if kind == stat.S_IFSOCK:
        raise OSError(errno.EOPNOTSUPP, "it is a socket", path)
    fd = os.open(path, os.O_WRONLY | _BINARY | _NOT_A_TERMINAL)
    try:
        yield Sink(fd)
        if kind == stat.S_IFBLK:
            os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _replaced(
    path: str, found: os.stat_result | None, sync: bool, temporary: str, replace: bool
) -> Iterator[Sink]:
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, PRIVATE)
        try:
            if found is not None and hasattr(os, "geteuid") and os.geteuid() == 0:
                with suppress(PermissionError):  # in a container, root may not be allowed to
                    os.fchown(fd, found.st_uid, found.st_gid)
            yield Sink(fd)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        give_name(temporary, path, replace=replace)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if sync:
        fsync_dir(os.path.dirname(os.path.abspath(path)))


def give_name(temporary: str, path: str, *, replace: bool) -> None:
    """Renames a finished file. With replace=False it raises FileExistsError if another file has that name."""
    if replace:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)  # unlike a rename, a link never replaces a file of another process
    except FileExistsError:
        raise
    except (OSError, NotImplementedError) as error:  # a file system without hard links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def fsync_file(path: str) -> None:
    fd = os.open(path, os.O_RDWR | _BINARY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(folder: str) -> None:
    """Syncs the names in a folder."""
    if os.name == "nt":  # directories cannot be opened there; the journal has the rename
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- reading


def open_source(path: str | os.PathLike[str]) -> FileIO:
    """Opens a file, a FIFO, a device, or a duplicate of a descriptor of this process for reading. Raises OSError."""
    fd = descriptor_of(path)
    return FileIO(path, "rb") if fd is None else FileIO(os.dup(fd), "rb")


# -- errors


class MissingFileError(StoreIOError, FileNotFoundError):
    """A file that must exist does not."""

    def __init__(self, path: str, hint: str = "give the path of a kvstore file") -> None:
        super().__init__(f"{path} does not exist", path=path, hint=hint)
        self.errno, self.filename = errno.ENOENT, path


def error_of(
    error: OSError,
    path: str | os.PathLike[str],
    doing: str = "write",
    *,
    kind: type[KVStoreError] = StoreIOError,
    denied: type[KVStoreError] | None = None,
) -> KVStoreError:
    """The error of kvstore for an OSError: DiskFullError, `denied` (if given) for missing permissions, else `kind`."""
    path = os.fspath(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no room to {doing} {path}", hint="free some space on the disk", path=path)
    denial = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    reason, hint = error.strerror or str(error), f"check the path and its permissions, then {doing} again"
    target = os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path)
    folder = os.path.dirname(target)
    if error.errno == errno.ENOENT and not os.path.isdir(folder):
        reason, hint = f"the folder {folder} does not exist", "create the folder, or give another path"
    elif error.errno == errno.ENOENT and doing == "read":
        reason, hint = "there is no such file", "check the path"
    elif error.errno == errno.EISDIR:
        reason, hint = "it is a directory", "give the path of a file"
    elif denial:
        hint = "give a path in a folder that you can write" if doing != "read" else "give its user permission to read it"
    return (denied if denial and denied else kind)(f"cannot {doing} {path}: {reason}", hint=hint, path=path)

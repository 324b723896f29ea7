"""The one real path of a store's file, and the checks of that path that need no SQLite."""

from __future__ import annotations

import errno
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidInputError, ReadOnlyError, StoreIOError, UnsafeFilesystemError
from ..util import fsutil

_NETWORK_FILESYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gfs2", "ocfs2", "beegfs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "davfs", "fuse.davfs2",
}  # fmt: skip


def resolve(path: str) -> str:
    """The absolute path of a file with every symbolic link followed; the target of a dangling link need not exist.

    SQLite keeps a file's log beside the file itself, so a store is known by this path and by no other. Raises
    InvalidInputError for what is not a path, StoreIOError for links that lead back to themselves.
    """
    if "\0" in path:
        raise InvalidInputError(f"path is {path!r}", hint="a path cannot hold a NUL character")
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreIOError(
                f"{path} cannot be opened: its symbolic links lead back to themselves",
                path=path,
                hint="remove the link, or let it name a file",
            ) from error
    return os.path.realpath(path)


def resolve_new(path: str) -> str:
    """The absolute path of a file to be made: links in its folder are followed, its own name is taken as it is."""
    folder, name = os.path.split(path)
    if not name or name in (os.curdir, os.pardir):
        raise InvalidInputError(f"{path!r} does not name a file", hint="give the name of a new file")
    return os.path.join(resolve(folder or os.curdir), name)


def identity(path: str) -> tuple[int, int] | None:
    """Which file has this name now; None where none has."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def other_name_in_use(path: str) -> str | None:
    """Another name of the file, in the same folder, that has a log: a second log beside this name would not fit it."""
    with suppress(OSError):
        inode = os.stat(path)
        if inode.st_nlink < 2:
            return None
        for item in os.scandir(os.path.dirname(path)):
            same = item.path != path and item.inode() == inode.st_ino and not item.is_symlink()
            if same and os.path.exists(item.path + "-wal"):
                return item.path
    return None


def network_filesystem(path: Path, mountinfo: str) -> str | None:
    """The type of the network file system that `path` lies on, by the text of /proc/self/mountinfo, or None."""
    best, kind = "", None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right.strip():
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = point == "/" or str(path) == point or str(path).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind if kind in _NETWORK_FILESYSTEMS else None


def refuse_network_filesystem(path: str) -> None:
    """Raises UnsafeFilesystemError where the write-ahead log's shared memory would not be shared."""
    kind: str | None = None
    if sys.platform == "win32":
        if path.startswith(("\\\\", "//")) and not path.startswith("\\\\?\\"):
            kind = "a network share"
    else:
        with suppress(OSError):
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
            kind = network_filesystem(Path(path).resolve(), mountinfo)
    if kind:
        raise UnsafeFilesystemError(f"{path} is on a network file system ({kind})", path=path, filesystem=kind)


def reserve_file(path: str, shown: str | None = None) -> bool:
    """Creates an empty file that only its owner can read and write; False where there already is one.

    SQLite gives its log and shared memory the mode of the database, so those are private as well. `shown` is the path that
    an error names.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, fsutil.PRIVATE))
    except FileExistsError:
        return False
    except OSError as error:
        raise fsutil.error_of(error, shown or path, "create", denied=ReadOnlyError) from error
    return True

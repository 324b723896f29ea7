"""The files of an upgrade: the lock on the old store, the new one beside it, the backup, and the moment they change names.

    1. The log of the old file is copied into it and switched off. The file is locked against readers and writers.
    2. The new store is built in `<file>.upgrading`, synced and closed.
    3. The old file gets a second name, `<file>.v1-backup`: no copy, so the disk holds two stores, not three.
    4. The new file is renamed over the first name. Before this, every process opens the old store; afterwards, the new one.

A process killed before 4 leaves the old store, a file that the next upgrade starts again, and at worst a second name of
the old file, which the next upgrade takes as its backup. A process that still has the old file open cannot write to it:
SQLite sees that it was renamed (SQLITE_READONLY_DBMOVED) before it makes a journal, and the log is switched off in step 1.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvstore.errors import BusyError, DiskFullError, KVStoreError, MigrationError, StoreIOError
from kvstore.storage import db, geometry
from kvstore.storage.db import Connection, Database
from kvstore.util import fsutil

UPGRADING = ".upgrading"
RETRY_SECONDS = 0.05  # between attempts to lock the file
LEFTOVERS = ("", "-journal", "-wal", "-shm")


def identity(path: str) -> tuple[int, int]:
    """The identity of the file that has this name now."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


@contextmanager
def locked(database: Database) -> Iterator[Connection]:
    """Yields a connection to the file at the path of the store, with an exclusive lock.

    The lock ends with the block, or earlier if the block commits or closes.
    """
    path = database.path
    give_up = time.monotonic() + database.timeout
    while True:
        before = identity(path)
        database.reopen()
        with database.exclusive() as c:
            try:
                with db.translated(path, connection=c):
                    if c.pragma("journal_mode") == "wal":
                        c.pragma("journal_mode", "delete")
                    c.pragma("locking_mode", "exclusive")  # also between transactions
                    c.execute("BEGIN EXCLUSIVE")
            except BusyError as error:
                if time.monotonic() < give_up:  # SQLite does not wait when it changes the journal mode
                    time.sleep(RETRY_SECONDS)
                    continue
                what = "being upgraded by another process" if os.path.exists(path + UPGRADING) else "open in another process"
                raise BusyError(
                    f"{path} is {what}", path=path, hint="an upgrade needs exclusive access to the file: try again later"
                ) from error
            try:
                # If another process upgraded the file while this one waited, the old file is open here: start again.
                if identity(path) == before:
                    yield c
                    return
            finally:
                with suppress(KVStoreError), db.translated(path):  # the connection may be closed already
                    if not c.get_autocommit():
                        c.execute("ROLLBACK")


def backup_name(path: str, version: int) -> str:
    """An unused name for the backup, or the name that an interrupted upgrade gave to the old file."""
    name = first = f"{path}.v{version}-backup"
    n = 1
    while os.path.lexists(name) and not (os.path.exists(name) and os.path.samefile(name, path)):
        n += 1
        name = f"{first}-{n}"
    return name


def check_room(path: str, needed: int) -> None:
    """Raises DiskFullError if the disk does not have this number of bytes free."""
    free = free_bytes(path)
    if free < needed:
        raise DiskFullError(
            f"to upgrade {path}, {needed / (1 << 20):.1f} MiB are needed beside it, and {free / (1 << 20):.1f} MiB are free",
            path=path,
            needed=needed,
            free=free,
            hint="free some space on the disk, or move the file to a larger disk",
        )


def free_bytes(path: str) -> int:
    return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


def build(database: Database, path: str, fills: Sequence[Callable[[Connection], None]]) -> None:
    """Creates the file `path` and calls `fills`, each in a transaction. The file is synced; if a call fails, it is removed."""
    remove(path)
    db.reserve_file(path)
    try:
        new = database.sibling(path)
        try:
            with new.exclusive() as c:
                # An interrupted build is deleted, so it does not need a journal; the commit syncs the file.
                # The cache size is set again: SQLite keeps it in pages of the old size, which would be 124 MiB instead of 8.
                for pragma, value in (
                    ("page_size", geometry.PAGE_SIZE),
                    ("auto_vacuum", db.AUTO_VACUUM),
                    ("cache_size", -db.CACHE_KIB),
                    ("journal_mode", "off"),
                ):
                    c.pragma(pragma, value)
                    if c.pragma(pragma) != value:
                        raise StoreIOError(f"{path}: PRAGMA {pragma} cannot be set to {value!r}", path=path)
            for fill in fills:
                with new.write() as c:
                    fill(c)
            new.use_wal()  # now: once it has the name of the old file, nobody makes or deletes a rollback journal
        finally:
            new.close()
        sync(path)
    except BaseException:
        remove(path)
        raise


def keep(path: str, backup: str, old: Connection, database: Database) -> bool:
    """Gives the old file a second name, or copies it if hard links are impossible. False if it had that name already."""
    refuse_other(backup, path)
    if os.path.lexists(backup):
        return False
    try:
        os.link(path, backup)
    except FileExistsError:
        refuse_other(backup, path)
        return False
    except (OSError, NotImplementedError):
        check_room(path, os.stat(path).st_size)
        copy(old, backup, database)
        return True
    with suppress(OSError):
        os.chmod(backup, 0o600)
    return True


def refuse_other(backup: str, path: str) -> None:
    """Raises MigrationError if another file has taken the name of the backup since it was chosen."""
    if os.path.lexists(backup) and not (os.path.exists(backup) and os.path.samefile(backup, path)):
        raise MigrationError(f"{backup} exists already", path=path, hint="try again: the backup gets another name")


def copy(old: Connection, backup: str, database: Database) -> None:
    """Copies a locked store to a new file, in steps. The copy is complete and synced; if it fails, it is removed."""
    old.execute("COMMIT")  # nothing was written; SQLite cannot copy from a connection with an open write transaction
    partial = backup + ".partial"
    remove(partial)
    db.reserve_file(partial)
    try:
        target = database.sibling(partial)
        try:
            with target.exclusive() as c, c.backup("main", old, "main") as copying:
                while not copying.done:
                    copying.step(1024)
        finally:
            target.close()
        sync(partial)
        refuse_other(backup, database.path)
        os.rename(partial, backup)
    except BaseException:
        remove(partial)
        raise
    sync_folder(backup)
    old.execute("BEGIN EXCLUSIVE")


def replace(new: str, path: str, old: Connection) -> None:
    """Renames the new file over the old one."""
    own = os.stat(path)
    if hasattr(os, "chown"):
        with suppress(OSError):  # root may upgrade the file of another user
            os.chown(new, own.st_uid, own.st_gid)
    for suffix in ("-wal", "-shm"):
        if os.path.exists(path + suffix):
            raise MigrationError(f"{path}{suffix} is in use: another process has opened the file", path=path)
    with suppress(FileNotFoundError):
        os.unlink(path + "-journal")  # it is empty: a journal with content was rolled back when the file was locked
    sync_folder(path)
    if sys.platform == "win32":
        old.close(True)  # an open file cannot be replaced there; so no other process can have it open and write
    try:
        os.replace(new, path)
    except PermissionError as error:
        raise BusyError(f"{path} is open in another process", path=path, hint="close it there and try again") from error
    sync_folder(path)


def remove(path: str) -> None:
    """Removes a file of ours and the files that SQLite keeps beside it."""
    for suffix in LEFTOVERS:
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)


def sync(path: str) -> None:
    fsutil.fsync_file(path)


def sync_folder(path: str) -> None:
    """Syncs the names in the folder of a file."""
    fsutil.fsync_dir(os.path.dirname(os.path.abspath(path)))

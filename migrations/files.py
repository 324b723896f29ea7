"""The files of an upgrade: the lock on the old store, the new one beside it, the backup, and the moment they change names.

    1. The old file is made self-contained (its log copied into it and switched off) and locked against readers and writers.
    2. The new store is built in `<file>.upgrading`, synced and closed.
    3. The old file gets a second name, `<file>.v1-backup`: no copy, so the disk holds two stores, not three.
    4. The new file is renamed over the first name. Until here the old store is what anyone opens, from here the new one.

A process killed before 4 leaves the old store, a file that the next upgrade starts again, and at worst a second name of
the old file, which the next upgrade takes as its backup. A process that still has the old file open can not write to it:
SQLite sees that it was renamed (SQLITE_READONLY_DBMOVED) before it makes a journal, and a log is off since 1.
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
RETRY_SECONDS = 0.05  # between tries to have the file alone
LEFTOVERS = ("", "-journal", "-wal", "-shm")


def identity(path: str) -> tuple[int, int]:
    """Which file has this name now."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


@contextmanager
def locked(database: Database) -> Iterator[Connection]:
    """A connection to the file that has the name, under a lock that keeps everyone else out of it.

    The lock is let go before the block ends where the block commits or closes.
    """
    path = database.path
    give_up = time.monotonic() + database.timeout
    while True:
        before = identity(path)
        database.reopen()
        with database.exclusive() as c:
            try:
                with db.translated(path):
                    if c.pragma("journal_mode") == "wal":
                        c.pragma("journal_mode", "delete")
                    c.pragma("locking_mode", "exclusive")  # also between the transactions
                    c.execute("BEGIN EXCLUSIVE")
            except BusyError as error:
                if time.monotonic() < give_up:  # SQLite does not wait where it would leave the journal mode
                    time.sleep(RETRY_SECONDS)
                    continue
                what = "being upgraded by another process" if os.path.exists(path + UPGRADING) else "open in another process"
                raise BusyError(
                    f"{path} is {what}", path=path, hint="an upgrade needs the file alone: try again later"
                ) from error
            try:
                # Who waited for another's upgrade holds the old file, and starts again with the new one.
                if identity(path) == before:
                    yield c
                    return
            finally:
                with suppress(KVStoreError), db.translated(path):  # closed, where the old file had to be
                    if not c.get_autocommit():
                        c.execute("ROLLBACK")


def backup_name(path: str, version: int) -> str:
    """A name for the backup that no other file has; one that the old file has already, from an upgrade cut short."""
    name = first = f"{path}.v{version}-backup"
    n = 1
    while os.path.lexists(name) and not (os.path.exists(name) and os.path.samefile(name, path)):
        n += 1
        name = f"{first}-{n}"
    return name


def check_room(path: str, needed: int) -> None:
    """Raises DiskFullError where the disk has not so many bytes free."""
    free = free_bytes(path)
    if free < needed:
        raise DiskFullError(
            f"to upgrade {path}, {needed / (1 << 20):.1f} MiB are needed beside it, {free / (1 << 20):.1f} MiB are free",
            path=path,
            needed=needed,
            free=free,
            hint="free some space on the disk, or move the file to one that has it",
        )


def free_bytes(path: str) -> int:
    return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


def build(database: Database, path: str, fills: Sequence[Callable[[Connection], None]]) -> None:
    """Makes the file `path` with what `fills` write, a transaction each; it is on the disk afterwards, or is not there."""
    remove(path)
    db.reserve_file(path)
    try:
        new = database.sibling(path)
        try:
            with new.exclusive() as c:
                # A cut-off build is thrown away, so it needs no journal; the commit syncs the file.
                # SQLite counts the cache in pages of the size before: 124 MiB instead of 8 where it is not told again.
                for pragma, value in (
                    ("page_size", geometry.PAGE_SIZE),
                    ("auto_vacuum", db.AUTO_VACUUM),
                    ("cache_size", -db.CACHE_KIB),
                    ("journal_mode", "off"),
                ):
                    c.pragma(pragma, value)
                    if c.pragma(pragma) != value:
                        raise StoreIOError(f"{path}: PRAGMA {pragma} can not be set to {value!r}", path=path)
            for fill in fills:
                with new.write() as c:
                    fill(c)
        finally:
            new.close()
        sync(path)
    except BaseException:
        remove(path)
        raise


def keep(path: str, backup: str, old: Connection, database: Database) -> bool:
    """Gives the old file a second name; a copy where the file system knows no second names. False where it had it already."""
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
    """Raises MigrationError where the name of the backup went to another file since it was chosen."""
    if os.path.lexists(backup) and not (os.path.exists(backup) and os.path.samefile(backup, path)):
        raise MigrationError(f"{backup} is there already", path=path, hint="try again: the backup gets another name")


def copy(old: Connection, backup: str, database: Database) -> None:
    """Copies a locked store to a new file, in bites; complete and on the disk, or not there."""
    old.execute("COMMIT")  # nothing was written; SQLite copies no file that its connection writes to
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
        os.unlink(path + "-journal")  # empty: a journal with something in it was played back for the lock
    sync_folder(path)
    if sys.platform == "win32":
        old.close(True)  # nobody may have the file open there, so neither may anyone else write now
    try:
        os.replace(new, path)
    except PermissionError as error:
        raise BusyError(f"{path} is open in another process", path=path, hint="close it there and try again") from error
    sync_folder(path)


def remove(path: str) -> None:
    """Removes a file of our own with what SQLite keeps beside it."""
    for suffix in LEFTOVERS:
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)


def sync(path: str) -> None:
    fsutil.fsync_file(path)


def sync_folder(path: str) -> None:
    """Makes the names in a file's folder durable."""
    fsutil.fsync_dir(os.path.dirname(os.path.abspath(path)))

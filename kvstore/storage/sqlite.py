"""SQLite as `apsw` gives it: the only module that imports apsw.

Every exception of SQLite leaves `storage` as one of `kvstore.errors`: `translate` recognises it by its class, never by its
message. Beside it: how connections are opened, and what can be asked of a database whatever its schema is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from ..errors import (
    BusyError,
    CorruptStoreError,
    DiskFullError,
    InvalidInputError,
    KVStoreError,
    NotAStoreError,
    ReadOnlyError,
    StoreIOError,
)
from . import keys

try:
    import apsw

    _ = apsw.Connection  # the folder can be there without its files
except (ImportError, AttributeError) as _error:
    raise ImportError(keys.damaged_installation()) from _error

Connection: TypeAlias = apsw.Connection
Error = apsw.Error  # the base of all that SQLite raises
MalformedError = apsw.CorruptError  # what SQLite raises on a damaged page, and on a read that the system refused
ConstraintError = apsw.ConstraintError  # a value that a rule of the schema forbids
LOCKED = (apsw.BusyError, apsw.LockedError)  # another connection holds a lock
zeroblob = apsw.zeroblob
VERSION = apsw.sqlite_lib_version()
HAS_CIPHER = hasattr(apsw, "mc_version")


def open_file(path: str, *, writable: bool) -> Connection:
    """A connection to a file that must be there."""
    return apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE if writable else apsw.SQLITE_OPEN_READONLY)


def open_memory() -> Connection:
    return apsw.Connection(":memory:", flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)


def open_immutable(path: str) -> Connection:
    """A connection that takes no lock and reads no log: for a file that nobody writes."""
    return apsw.Connection(Path(path).as_uri() + "?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def checkpoint(connection: Connection, *, truncate: bool) -> bool:
    """Copies the log into the file; True where all of it was. `truncate` also empties the log."""
    mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if truncate else apsw.SQLITE_CHECKPOINT_PASSIVE
    in_log, done = connection.wal_checkpoint(mode=mode)
    return bool(in_log == done)


def keep_log(connection: Connection) -> None:
    """Lets a connection leave the log's file where it is when it closes: SQLite deletes it by its name."""
    keep = ctypes.c_int(1)
    with suppress(apsw.Error):
        connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(keep))


# The errors of a read that SQLite reports as damage ("database disk image is malformed") instead of an I/O error.
_READ_ERRORS = (errno.EIO, errno.ENXIO, errno.ERANGE)


def read_failed(connection: Connection) -> bool:
    """Whether the system refused a read of the file or its log on this connection.

    SQLite turns such a refusal into SQLITE_CORRUPT, so only this tells a disk that failed now from damaged bytes.
    """
    if sys.platform == "win32":
        return False
    last = ctypes.c_int(0)
    if connection.file_control("main", apsw.SQLITE_FCNTL_LAST_ERRNO, ctypes.addressof(last)) and last.value in _READ_ERRORS:
        return True
    log = ctypes.c_void_p()
    if not connection.file_control("main", apsw.SQLITE_FCNTL_JOURNAL_POINTER, ctypes.addressof(log)) or not log.value:
        return False
    # sqlite3_file starts with a pointer to sqlite3_io_methods: a version, then xClose, ..., the tenth is xFileControl
    # (https://sqlite.org/c3ref/io_methods.html).
    methods = ctypes.c_void_p.from_address(log.value).value
    if not methods:
        return False
    address = ctypes.c_void_p.from_address(methods + 10 * ctypes.sizeof(ctypes.c_void_p)).value
    if not address:
        return False
    control = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(address)
    last.value = 0
    return control(log, apsw.SQLITE_FCNTL_LAST_ERRNO, ctypes.addressof(last)) == 0 and last.value in _READ_ERRORS


def translate(error: apsw.Error, path: str, key: bool = False, connection: Connection | None = None) -> KVStoreError:
    """The error of kvstore for an error of SQLite; `connection` is where it was raised."""
    if isinstance(error, apsw.CorruptError) and connection is not None and read_failed(connection):
        reason = os.strerror(errno.EIO)
        return StoreIOError(f"{path} cannot be read: {reason}", path=path, hint="check the disk, then try again")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return BusyError(f"{path} is locked by another connection", path=path)
    if isinstance(error, apsw.FullError) or getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:
        return DiskFullError(f"the disk of {path} is full", path=path)
    if isinstance(error, apsw.ReadOnlyError):
        return ReadOnlyError(
            f"{path} cannot be written", path=path, hint="give its owner write permission, or open it with readonly=True"
        )
    if isinstance(error, apsw.NotADBError):
        if key:
            return keys.refused(path)
        return NotAStoreError(
            f"{path} is not a kvstore: it is not an SQLite database, or it is encrypted",
            path=path,
            hint=f"{NotAStoreError.hint}; an encrypted one needs its key (key=, --key-file)",
        )
    cut_short = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHORT_READ
    if isinstance(error, apsw.CorruptError) or cut_short:
        return CorruptStoreError(f"{path} is damaged: {error}", path=path)
    if isinstance(error, apsw.ConstraintError | apsw.SQLError | apsw.MismatchError):
        return CorruptStoreError(f"{path} does not keep to the schema: {error}", path=path)
    if isinstance(error, apsw.CantOpenError):
        return StoreIOError(f"{path} cannot be opened", path=path, hint="check that its folder exists and can be written")
    if isinstance(error, apsw.PermissionsError | apsw.AuthError):
        return ReadOnlyError(f"{path}: permission denied", path=path, hint="check the permissions of the file")
    if isinstance(error, apsw.TooBigError):
        return InvalidInputError(f"{path}: a value is larger than SQLite holds", path=path)
    return StoreIOError(f"{path}: {error}", path=path, hint="check the disk and the permissions of the file")


def deleted_by_another(error: Error) -> bool:
    """Whether SQLite failed because another connection deleted the rollback journal first: to try again is right."""
    return getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DELETE_NOENT


@contextmanager
def translated(path: str, key: bool = False, connection: Connection | None = None) -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        raise translate(error, path, key, connection) from error


@contextmanager
def snapshot(connection: Connection) -> Iterator[None]:
    """What is read in the block is of one state of the file. Inside a transaction that is so anyway."""
    begun = connection.get_autocommit()
    if begun:
        connection.execute("BEGIN")
    try:
        yield
    finally:
        if begun and not connection.get_autocommit():
            connection.execute("ROLLBACK")


@contextmanager
def immediate(connection: Connection) -> Iterator[None]:
    """A transaction that takes the lock for writing at its start; it is rolled back where the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(apsw.Error):
            connection.execute("ROLLBACK")
        raise


def user_version(connection: Connection) -> int:
    return int(connection.pragma("user_version"))


def application_id(connection: Connection) -> int:
    return int(connection.pragma("application_id"))


def is_empty(connection: Connection) -> bool:
    """True where the database holds nothing at all."""
    return int(connection.execute("SELECT count(*) FROM sqlite_schema").get) == 0


def views(connection: Connection) -> dict[str, str]:
    """The SQL of each view by its name."""
    return {str(r[0]): str(r[1]) for r in connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'view'")}


def schema_names(connection: Connection) -> set[str]:
    """The names of all tables, indexes, triggers and views."""
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}


def run_script(connection: Connection, sql: str) -> None:
    """Runs statements inside the transaction that is open."""
    for _ in connection.execute(sql):
        pass

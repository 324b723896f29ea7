"""Connections, pragmas and transactions of one store file.

One connection writes, under a lock; readers come from a pool and never wait for it (write-ahead log).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import (
    BusyError,
    ClosedError,
    DiskFullError,
    ForkedError,
    InvalidInputError,
    ReadOnlyError,
    StoreIOError,
)
from ..util.workers import Workers
from . import disk, keys, sqlite
from .geometry import PAGE_SIZE as PAGE_SIZE
from .paths import identity as identity
from .paths import other_name_in_use
from .paths import refuse_network_filesystem as refuse_network_filesystem
from .paths import reserve_file as reserve_file
from .paths import resolve as resolve
from .paths import resolve_new as resolve_new
from .peek import SCHEMA_VERSION, refuse_other_programs
from .peek import refuse_other_kinds as refuse_other_kinds
from .sniff import EMPTY, Header
from .sqlite import Connection as Connection
from .sqlite import translated as translated
from .upgrade_lock import UpgradeLock
from .wal import Syncer, reserve

MEMORY = ":memory:"
# INCREMENTAL (2): the file shrinks in steps, without VACUUM's second copy; costs 1 % of a put (FULL would move pages
# at every commit, and NONE cannot shrink).
AUTO_VACUUM = 2
# WAL: readers never wait for a put (with a rollback journal each waited up to 0.13 s, the flush of 256 MiB), at the
# price of writing twice; the second write, the checkpoint, is done behind the put.
JOURNAL_MODE = "wal"
JOURNAL_TRIES = 16
# Pages; the pager spills into the log beyond this. 8 MiB was as fast as any; 100 MiB was a third slower.
CACHE_KIB = 8192
READERS_KEPT = 8
# With less free than this beside what a transaction adds, its blocks are taken before the commit.
NEARLY_FULL = 256 << 20
# Releases whose readers can stay at an old state of the file, seen with the tests of this project (3.54.1 is right again).
_BROKEN_SQLITE = {"3.54.0"}


class Database:
    """The connections to one store file.

    Thread rules: `write` holds a lock for the whole transaction, `read` lends a connection to one thread at a time.
    A process that was forked off gets ForkedError: SQLite's locks and memory do not survive a fork.
    """

    def __init__(self, path: str, *, readonly: bool = False, timeout: float = 30.0, key: str | None = None) -> None:
        if sqlite.VERSION in _BROKEN_SQLITE:
            raise StoreIOError(
                f"SQLite {sqlite.VERSION} can give old states of a file to its readers",
                hint=keys.install(keys.CIPHERS if sqlite.HAS_CIPHER else keys.PLAIN),
            )
        if key is not None:
            keys.check(key)
        self.path = path if path == MEMORY else resolve(path)
        self.readonly = readonly
        self.timeout = timeout
        self.memory = path == MEMORY
        self.new_page_size = PAGE_SIZE  # of a file that this object creates
        self._key = key
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self._pool_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._idle: list[Connection] = []
        self._checkpointer: Connection | None = None
        self._closed = False
        self._synchronous = ""
        self._log: tuple[int, int] | None = None
        self._frozen: tuple[int, int, int, int] | None = None
        self._no_room = False
        self._upgrade_lock: UpgradeLock | None = None
        found = self._refuse()
        if not self.memory and (found is None or 0 < found.user_version < SCHEMA_VERSION):
            self._upgrade_lock = UpgradeLock(self.path, timeout)
        try:
            self._open()
            if self._upgrade_lock is not None and found is None and not self._is_old():
                self.may_be_replaced()
        except BaseException:
            self.may_be_replaced()
            raise
        _OPEN.add(self)

    def _open(self) -> None:
        self._identity = None if self.memory else identity(self.path)
        try:
            self._writer = self._connect(writable=not self.readonly)
        except DiskFullError:
            self._no_room = True  # for the shared memory, which a file without a log can be read without
            if not self.readonly or self._without_log() is None:
                raise
            self._writer = self._connect(writable=False)

    def _is_old(self) -> bool:
        """Whether an upgrade may replace the file, which a connection alone can tell: it is encrypted, or damaged."""
        try:
            return 0 < sqlite.user_version(self._writer) < SCHEMA_VERSION
        except sqlite.LOCKED:
            return True  # `prepare` waits for it
        except sqlite.Error:
            return False

    def may_be_replaced(self) -> None:
        """Lets other processes upgrade the file; called when it is of the current version, or closed."""
        if self._upgrade_lock is not None:
            self._upgrade_lock.release()

    def _refuse(self) -> Header | None:
        """What the file says it is. Raises where it cannot be opened this way: before a connection could change it."""
        if self.memory:
            if self.encrypted:
                raise InvalidInputError("a store in memory cannot be encrypted", hint="open it without a key")
            return None
        refuse_other_kinds(self.path)
        found = refuse_other_programs(self.path)
        if self.encrypted and found is not None and found != EMPTY:
            raise keys.not_encrypted(self.path)
        if self.encrypted and not sqlite.HAS_CIPHER:
            raise keys.no_cipher(self.path)
        if (other := other_name_in_use(self.path)) is not None:
            raise StoreIOError(
                f"{self.path} is a hard link to {other}, which has a log", path=self.path, hint=f"open it as {other}"
            )
        return found

    def _connect(self, writable: bool) -> Connection:
        with translated(self.path, self._key is not None):
            frozen = None if writable or self.memory else self._without_log()
            self._frozen = frozen
            if self.memory:
                connection = sqlite.open_memory()
            elif frozen is not None:
                # Without a folder to keep the shared memory in, only a file that nobody writes can be read.
                connection = sqlite.open_immutable(self.path)
            else:
                connection = sqlite.open_file(self.path, writable=writable)
            self.refuse_if_moved()
        with translated(self.path, self._key is not None, connection):
            connection.set_busy_timeout(int(self.timeout * 1000))
            if self._key is not None:
                connection.pragma("key", self._key)
            self._set(connection, "foreign_keys", 1)  # off by default; deletes rely on it
            self._set(connection, "recursive_triggers", 0)  # the delete trigger spells out its one level
            self._set(connection, "cache_size", -CACHE_KIB)
            self._set(connection, "wal_autocheckpoint", 0)  # we checkpoint behind the put, not inside its commit
            self._set(connection, "secure_delete", 0)  # builds with ciphers turn it on: evictions then fill the log with zeros
            self._set(connection, "temp_store", 2)  # nothing of a prompt in temporary files
            self._set(connection, "trusted_schema", 0)  # the file may come from anywhere
            self._set(connection, "cell_size_check", 1)  # reports a damaged page when it is read, not a later consequence
            if not writable:
                self._set(connection, "query_only", 1)
        return connection

    def _without_log(self) -> tuple[int, int, int, int] | None:
        """(device, inode, size, mtime) of the file if it has no log and no shared memory can be made; else None."""
        with suppress(OSError):
            if (os.access(os.path.dirname(self.path), os.W_OK) and not self._no_room) or self.wal_bytes():
                return None
            found = os.stat(self.path)
            return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        return None

    def refuse_if_moved(self) -> None:
        """Raises StoreIOError where the file was replaced or deleted: the log beside its name is another file's."""
        if self.memory or self._identity is None or identity(self.path) == self._identity:
            return
        raise StoreIOError(
            f"{self.path} is no longer the file that was opened: it was replaced, moved or deleted",
            path=self.path,
            hint="close the store and open it again",
        )

    def _set(self, connection: Connection, pragma: str, value: int | str) -> None:
        """Sets a pragma and reads it back: SQLite ignores what it does not know."""
        connection.pragma(pragma, value)
        if (got := connection.pragma(pragma)) != value:
            raise StoreIOError(f"{self.path}: PRAGMA {pragma} is {got!r}, not {value!r}", path=self.path)

    def check(self) -> None:
        """Raises ClosedError or ForkedError where this object cannot be used."""
        if self._closed:
            raise ClosedError(f"the store {self.path} was closed", path=self.path)
        if os.getpid() != self.pid:
            raise ForkedError(f"the store {self.path} was opened before this process was forked", path=self.path)

    def initialise(self) -> None:
        """Page size, vacuum mode and journal mode of a new, empty file; called before the first table is made."""
        with self._lock, translated(self.path, connection=self._writer):
            self._set(self._writer, "page_size", self.new_page_size)
            self._set(self._writer, "auto_vacuum", AUTO_VACUUM)
            # Again: SQLite has counted it in pages of the size before, which makes 124 MiB of 8.
            self._set(self._writer, "cache_size", -CACHE_KIB)
            self.use_wal()

    def use_wal(self) -> None:
        """Sets the journal mode of the file, which several processes may do at once."""
        with self._lock, translated(self.path, connection=self._writer):
            for left in reversed(range(JOURNAL_TRIES)):
                try:
                    if not self.memory and self._writer.pragma("journal_mode") != JOURNAL_MODE:
                        self._set(self._writer, "journal_mode", JOURNAL_MODE)
                    return
                except sqlite.Error as error:
                    if not left or not sqlite.deleted_by_another(error):
                        raise

    @contextmanager
    def write(self, *, durable: bool = True, wait: bool = True) -> Iterator[Connection]:
        """A write transaction (BEGIN IMMEDIATE); committed at the end, rolled back on any exception.

        durable: the commit returns only after the log was synced. Otherwise a power loss may undo it, never damage it.
        wait=False raises BusyError at once where another thread or process writes.
        """
        self.check()
        if self.readonly:
            raise ReadOnlyError(f"the store {self.path} is open read-only", path=self.path, hint="open it without readonly")
        if not self._lock.acquire(blocking=wait):
            raise BusyError(f"{self.path} is being written by another thread", path=self.path)
        try:
            self.check()
            connection = self._writer
            with translated(self.path, connection=connection):
                synchronous = "full" if durable else "normal"
                if synchronous != self._synchronous:
                    connection.pragma("synchronous", synchronous)
                    self._synchronous = synchronous
                if not wait:
                    connection.set_busy_timeout(0)
                try:
                    connection.execute("BEGIN IMMEDIATE")
                finally:
                    if not wait:
                        connection.set_busy_timeout(int(self.timeout * 1000))
                if self._log is None and not self.memory:
                    self._log = identity(self.path + "-wal")
                try:
                    yield connection
                    self._secure_room(connection)
                    connection.execute("COMMIT")
                except BaseException:
                    if not connection.get_autocommit():
                        with suppress(sqlite.Error):  # the first error is the one to report
                            connection.execute("ROLLBACK")
                    raise
        finally:
            self._lock.release()

    def _secure_room(self, connection: Connection) -> None:
        """Takes, on a disk that is nearly full, the blocks that the log will need when it is copied into the file.

        A log that cannot be copied can never be emptied, and then even a delete finds no room. Raises DiskFullError.
        """
        if self.memory:
            return
        self.refuse_if_moved()
        size = os.stat(self.path).st_size
        growth = int(connection.pragma("page_count")) * int(connection.pragma("page_size")) - size
        short = growth > 0 and disk.free_bytes(self.path) < growth + NEARLY_FULL
        if short and disk.reserve_behind(self.path, growth) is False:
            raise DiskFullError(f"the disk of {self.path} is full", path=self.path)

    def leave_spare(self) -> None:
        """Leaves blocks behind the end of the file for the next open on a full disk; `relieve` gives them back."""
        if not self.memory and not self.readonly and identity(self.path) == self._identity:
            disk.reserve_behind(self.path, disk.spare_bytes(self.path))

    @contextmanager
    def read(self, *, fresh: bool = False) -> Iterator[Connection]:
        """A read transaction: all its statements see one state of the file.

        fresh: on a new connection, which holds no page that another read brought in.
        """
        self.check()
        if self.memory:
            with self._lock, translated(self.path):
                yield self._writer
            return
        self._notice_writers()
        with self._pool_lock:
            connection = self._idle.pop() if self._idle and not fresh else None
        if connection is None:
            connection = self._connect(writable=False)
        try:
            with translated(self.path, connection=connection):
                connection.execute("BEGIN")
                try:
                    yield connection
                finally:
                    if not connection.get_autocommit():
                        connection.execute("ROLLBACK")
        except BaseException:
            connection.close(True)
            raise
        with self._pool_lock:
            if not self._closed and len(self._idle) < READERS_KEPT:
                self._idle.append(connection)
                return
        connection.close(True)

    def _notice_writers(self) -> None:
        """Connects again if another process wrote to a file that was opened as immutable."""
        if self._frozen is None or self._without_log() == self._frozen:
            return
        with self._lock, self._pool_lock, translated(self.path):
            idle, self._idle = self._idle, []
            for connection in (*idle, self._writer):
                connection.close(True)
            self._writer = self._connect(writable=False)

    @contextmanager
    def exclusive(self) -> Iterator[Connection]:
        """The writing connection outside any transaction, for what SQLite does not allow inside one."""
        self.check()
        self._notice_writers()
        with self._lock, translated(self.path, connection=self._writer):
            self.check()
            yield self._writer

    def checkpoint(self, *, truncate: bool = False, wait: bool = True) -> bool:
        """Copies the log into the file; True where all of it was.

        truncate also empties the log, and waits for readers of older states of the file, if it may.
        """
        if self.memory or self.readonly:
            return True
        self.check()
        # A connection of its own: a checkpoint does not keep writers of this process waiting.
        with self._checkpoint_lock, translated(self.path):
            if self._checkpointer is None:
                self._checkpointer = self._connect(writable=True)
            try:
                if not wait:
                    self._checkpointer.set_busy_timeout(0)
                with translated(self.path, connection=self._checkpointer):
                    return sqlite.checkpoint(self._checkpointer, truncate=truncate)
            except BusyError:
                return False
            finally:
                self._checkpointer.set_busy_timeout(int(self.timeout * 1000))

    def reserve_log(self, n_bytes: int) -> None:
        """Makes the log's file as large as it will be with n_bytes of frames, where the system can."""
        if not self.memory:
            reserve(self.path + "-wal", n_bytes)

    @contextmanager
    def sync_ahead(self, workers: Workers) -> Iterator[Callable[[], None]]:
        """Yields a callback that starts an early fsync of the WAL, so COMMIT's fsync has little left to flush.

        256 MiB took 0.27 s instead of 0.36. Only the log is opened here: closing any descriptor of the database itself would
        drop SQLite's locks on it.
        """
        if self.memory or sys.platform == "win32":
            yield lambda: None
            return
        syncer = Syncer(self.path + "-wal", workers)
        try:
            yield syncer.kick
        finally:
            syncer.close()

    def truncate_log(self) -> None:
        """Copies the log into the file and empties it, as far as readers allow."""
        self.checkpoint(truncate=True)

    def wal_bytes(self) -> int:
        """Bytes of the write-ahead log's file."""
        if self.memory:
            return 0
        try:
            return os.stat(self.path + "-wal").st_size
        except FileNotFoundError:
            return 0

    def file_bytes(self) -> int:
        """Bytes of the file and its log."""
        if self.memory:
            with self.read() as connection:
                return int(connection.pragma("page_count")) * int(connection.pragma("page_size"))
        return os.stat(self.path).st_size + self.wal_bytes()

    @property
    def encrypted(self) -> bool:
        return self._key is not None

    def sibling(self, path: str) -> Database:
        """Another file, opened for writing as this one is: with the same key and timeout."""
        return Database(path, timeout=self.timeout, key=self._key)

    def reopen(self) -> None:
        """Connects anew, after another file took the name of this one; not while other threads use it."""
        self.check()
        with self._lock, self._checkpoint_lock, self._pool_lock, translated(self.path):
            idle, self._idle = self._idle, []
            for connection in (*idle, self._checkpointer, self._writer):
                if connection is not None:
                    connection.close(True)
            self._checkpointer = None
            self._synchronous = ""
            self._identity, self._log = identity(self.path), None
            self._writer = self._connect(writable=not self.readonly)

    def close(self) -> None:
        """Closes every connection; safe to call twice, and after a fork (then it leaves SQLite alone)."""
        with self._pool_lock:
            if self._closed:
                return
            self._closed = True
            idle, self._idle = self._idle, []
        if os.getpid() != self.pid:
            return
        try:
            self._close(idle)
        finally:
            self.may_be_replaced()

    def _close(self, idle: list[Connection]) -> None:
        moved = not self.memory and identity(self.path) != self._identity
        with self._lock, self._checkpoint_lock, translated(self.path):
            errors = []
            for connection in (*idle, self._checkpointer, self._writer):
                if connection is not None:
                    try:
                        connection.close(True)
                    except sqlite.Error as error:  # the other connections are closed nevertheless
                        errors.append(error)
            if moved and self._log is not None and identity(self.path + "-wal") == self._log:
                # SQLite leaves the log of a file that was moved: it would be read as that of the file that has the name now.
                for suffix in ("-wal", "-shm"):
                    with suppress(OSError):
                        os.unlink(self.path + suffix)
            if errors:
                raise errors[0]


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()


def open_here(path: str) -> bool:
    """Whether this process has connections to the file: reading it by other means would then drop their locks."""
    others = [d.path for d in list(_OPEN) if not d._closed and not d.memory and os.path.exists(d.path)]
    return any(os.path.samefile(path, other) for other in others)

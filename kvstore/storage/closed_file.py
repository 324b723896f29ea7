"""Works on a file that is not open as a store: makes room on its full disk, removes an empty file.

A connection with an exclusive lock needs no shared memory, and so no room on the disk.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ..errors import KVStoreError
from . import disk, sqlite
from .paths import identity
from .peek import APPLICATION_ID


def relieve(path: str, key: str | None) -> None:
    """Makes what room it can on the full disk of a store that nobody has open: its log, and the blocks `leave_spare` left.

    Needs none itself: with a lock that keeps all others out SQLite needs no shared memory.
    """
    with suppress(sqlite.Error, KVStoreError, OSError):
        if not os.path.getsize(path):
            return
        connection = sqlite.open_file(path, writable=True)
        try:
            if key is not None:
                connection.pragma("key", key)
            connection.pragma("locking_mode", "exclusive")
            if connection.pragma("application_id") == APPLICATION_ID and connection.pragma("journal_mode") == "wal":
                with suppress(sqlite.Error):
                    sqlite.checkpoint(connection, truncate=True)
                disk.give_up_behind(path)
        finally:
            connection.close(True)


def remove_if_empty(path: str, created: tuple[int, int] | None, key: str | None) -> None:
    """Removes a file that was created here and stayed empty, with its log, unless another process wrote to it or has it open.

    Under a lock that keeps all others out, and that needs no shared memory: the disk may be full.
    """
    with suppress(sqlite.Error, KVStoreError, OSError):
        connection = sqlite.open_file(path, writable=True)
        try:
            if key is not None and os.path.getsize(path):
                connection.pragma("key", key)
            connection.pragma("locking_mode", "exclusive")
            connection.execute("BEGIN")
            # The read locks an empty file against commits, and one with a log against everyone: neither writes anything.
            # A process that had begun to fill the empty file sees that it was removed, and opens a new one.
            locked = sqlite.is_empty(connection) and (os.path.getsize(path) == 0 or connection.pragma("journal_mode") == "wal")
            if locked and identity(path) == created:
                sqlite.keep_log(connection)
                for suffix in ("-wal", "-shm", "-journal", ""):
                    with suppress(FileNotFoundError):
                        os.unlink(path + suffix)
        finally:
            connection.close(True)

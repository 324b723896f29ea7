"""Copies a whole store, which may be in use, to a new file."""

from __future__ import annotations

import os
from contextlib import suppress

from ..errors import InvalidInputError, KVStoreError
from ..storage import db, geometry, queries_blobs
from ..storage.db import Database
from ..util import fsutil
from .verify import Progress


def backup(database: Database, path: str, progress: Progress | None = None) -> None:
    """Copies a store, which may be in use, to a new file of mode 0600: complete, or not there at all.

    The copy has the state of the moment it began. Raises InvalidInputError where there is such a file, or link, already.
    """
    path = db.resolve_new(path)
    if os.path.lexists(path):
        raise _there_already(path)
    temporary = fsutil.temporary_name(path)
    db.reserve_file(temporary, path)
    try:
        copy = database.sibling(temporary)
        try:
            # In one read transaction, so that no writer makes it start again.
            with copy.exclusive() as to, database.read() as c:
                page_size, n_pages, _ = queries_blobs.pages(c)
                to.pragma("page_size", page_size)  # an encrypted copy cannot take over another
                with to.backup("main", c, "main") as running:
                    while not running.done:
                        running.step(geometry.pages_of(geometry.BACKUP_BYTES, page_size))
                        if progress is not None:
                            progress((n_pages - running.remaining) * page_size, n_pages * page_size)
        finally:
            copy.close()
        _publish(temporary, path)
    except BaseException:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                os.unlink(temporary + suffix)
        raise


def _there_already(path: str) -> InvalidInputError:
    return InvalidInputError(f"{path} is there already", hint="give the name of a new file")


def _publish(temporary: str, path: str) -> None:
    """Gives a finished file its name, which must be new, once it is on the disk."""
    try:
        fsutil.fsync_file(temporary)
        fsutil.give_name(temporary, path, replace=False)
        fsutil.fsync_dir(os.path.dirname(temporary))
    except FileExistsError as error:
        raise _there_already(path) from error
    except OSError as error:
        if isinstance(error, KVStoreError):
            raise
        raise fsutil.error_of(error, path) from error

"""What a file says it is, before a connection could change it: a store, one of a newer kvstore, or another program's."""

from __future__ import annotations

import time
from pathlib import Path

from ..errors import NewerStoreError, NotAStoreError, StoreIOError
from ..util import fsutil
from . import sniff, sqlite
from .sniff import EMPTY, Header

APPLICATION_ID = 0x4B565356
SCHEMA_VERSION = 3
PEEKS = 4


def refuse_other_programs(path: str) -> Header | None:
    """What the file says it is. Raises NotAStoreError or NewerStoreError where it says each time that it is not for us.

    It is read several times: another process may just be writing a page or emptying the log.
    """
    found: Header | None = None
    for n in range(PEEKS):
        try:
            found = peek(path)
            refuse(path, found)
            break
        except (NotAStoreError, NewerStoreError):
            if n == PEEKS - 1:
                raise
            time.sleep(0.005 * (n + 1))
    return found


def peek(path: str) -> Header | None:
    """What the file says it is; None if it is not a plain SQLite database.

    Takes no lock and leaves nothing beside it: an ordinary connection would make a log for a file of another program, or
    copy a log into it that its program left. (Closing a plain file descriptor would drop the locks of our connections.)
    """
    logged = sniff.in_log(path + "-wal")
    if logged is not None:
        return logged
    try:
        c = sqlite.open_immutable(str(Path(path).resolve()))
        try:
            empty = sqlite.is_empty(c)  # first, as another process may be creating it
            return Header(sqlite.application_id(c), sqlite.user_version(c), empty)
        finally:
            c.close(True)
    except sqlite.Error:
        return None  # the real open says what is wrong


def refuse(path: str, found: Header | None) -> None:
    """Raises NotAStoreError for another program's file, NewerStoreError for one of a newer kvstore."""
    if found is None or found == EMPTY:
        return
    if found.application_id != APPLICATION_ID or found.user_version < 1:
        raise NotAStoreError(
            f"{path} is an SQLite database of another program", path=path, application_id=found.application_id
        )
    if found.user_version > SCHEMA_VERSION:
        raise NewerStoreError(
            f"{path} has schema version {found.user_version}, this kvstore reads up to {SCHEMA_VERSION}",
            path=path,
            version=found.user_version,
        )


def refuse_other_kinds(path: str) -> None:
    """Raises StoreIOError where there is something else than a regular file: a directory, a FIFO, a device."""
    kind = fsutil.kind_of(path)
    if kind is not None:
        raise StoreIOError(f"{path} is {kind}", path=path, hint="give the path of a kvstore file")

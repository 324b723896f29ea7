"""Writes a file anew, so that nothing deleted is left in it."""

from __future__ import annotations

from ..errors import BusyError
from .core import StoreCore

# VACUUM builds the new file in memory up to this size, beyond it in an unnamed temporary file.
VACUUM_IN_MEMORY = 1 << 30


def wipe(core: StoreCore) -> None:
    """Leaves nothing in the file and its log but what the entries hold: it is written anew.

    Free pages are not enough: b-tree pages keep copies of rows that moved to another page. Needs room on the disk for the
    file twice more. Raises BusyError where a reader of an older state of the file does not end in time.
    """
    in_memory = core.db.encrypted or core.db.file_bytes() <= VACUUM_IN_MEMORY
    with core.db.exclusive() as c:
        c.pragma("temp_store", 2 if in_memory else 1)
        try:
            c.execute("VACUUM")
        finally:
            c.pragma("temp_store", 2)
    if not core.db.checkpoint(truncate=True) or core.db.wal_bytes():
        raise BusyError(
            f"the log of {core.db.path} still holds old pages: another process reads them",
            path=core.db.path,
            hint="try again when it has finished",
        )


"""What the people who run a store do with it: verify, repair, salvage, backup, export, restore, wipe.

Functions of an open `Store`, and of a path where the file may be damaged.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from . import check, copies, db, queries
from . import repair as repairs
from .check import Problem, Progress
from .copies import Exported
from .entry_reader import Damaged
from .errors import CorruptStoreError, InvalidInputError, KVStoreError, NotAStoreError, NotFoundError, StoreIOError
from .records import Entry, hex_id
from .repair import Salvaged
from .store import Store

__all__ = ["Exported", "Salvaged", "backup", "export", "fingerprint", "head", "repair", "restore", "salvage", "verify", "wipe"]


def verify(
    path: str | os.PathLike[str], *, key: str | None = None, jobs: int = 1, progress: Progress | None = None
) -> list[Problem]:
    """Every problem of a file, which may be damaged, and may be in use; reads only. [] is a clean store.

    `jobs` states are checked at a time. Raises NotAStoreError, NewerStoreError, WrongKeyError, StoreIOError.
    """
    return check.verify_file(_existing(path), key=key, jobs=jobs, progress=progress)


def repair(store: Store, problems: list[Problem]) -> list[int]:
    """Drops what `verify` found that cannot be served, and nothing else; the ids that went. Verify again afterwards."""
    return repairs.repair(store._engine, problems)


def salvage(
    path: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    key: str | None = None,
    progress: Progress | None = None,
) -> Salvaged:
    """Copies every readable entry of a damaged file to a new one, encrypted with the same key. Leaves the old as it is.

    Where the first page is lost, that of a new store takes its place, in a copy that goes again.
    """
    source_path, new_path = _existing(path), db.resolve_new(os.fspath(new))
    refused: KVStoreError | None = None
    found = Salvaged((), ())
    created = _new_file(new_path)
    try:
        try:
            found = _salvage(source_path, new_path, key, progress)
        except (NotAStoreError, CorruptStoreError) as error:
            refused = error
        if not found.entries and key is None and not db.open_here(source_path):
            again = _salvage_with_first_page(source_path, new_path, progress)
            if isinstance(again, Salvaged):
                return again
            refused = refused or again
        if refused is not None:
            raise refused
    except BaseException:
        repairs.remove_if_unused(new_path, created, key)
        raise
    return found


def _new_file(path: str) -> tuple[int, int] | None:
    """Creates the empty file that is to be filled; which one it is."""
    if os.path.lexists(path) or not db.reserve_file(path):
        raise InvalidInputError(f"{path} is there already", hint="give the name of a new file")
    return db.identity(path)


def _salvage_with_first_page(path: str, new: str, progress: Progress | None) -> Salvaged | KVStoreError | None:
    """Salvages a copy that begins as a new store does: what it gave, or why not; None where it gave nothing."""
    copy = f"{new[:200]}.{secrets.token_hex(6)}.tmp"
    try:
        if repairs.with_first_page(path, copy):
            again = _salvage(copy, new, None, progress)
            return again if again.entries else None
    except (NotAStoreError, CorruptStoreError) as error:
        return error
    finally:
        _remove(copy)
    return None


def _salvage(path: str, new: str, key: str | None, progress: Progress | None) -> Salvaged:
    source = check.Lenient(path, key=key)
    try:
        with Store(new, cache_ram_mib=0, key=key) as store:
            return repairs.salvage(source, store._engine, progress)
    finally:
        source.close()


def _remove(path: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):
            os.unlink(path + suffix)


def backup(store: Store, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Copies a store that may be in use to a new file, encrypted with the same key; complete, or not there at all."""
    store.flush()
    copies.backup(store._engine.db, os.fspath(path), progress)


def export(store: Store, id: int) -> Exported | None:
    """An entry with all that belongs to it, None where there is none. Raises CorruptStoreError where it is damaged."""
    store.flush()
    try:
        return copies.export(store._engine, id)
    except Damaged as error:
        raise CorruptStoreError(f"entry {hex_id(id)} can not be read: {error.reason}", id=hex_id(id)) from error


def restore(store: Store, item: Exported) -> Entry | None:
    """Puts an exported entry as what it was, under its own fingerprint; parents first. None where it has expired."""
    store.flush()
    return copies.restore(store._engine, item)


def fingerprint(store: Store, id: int) -> str:
    """The fingerprint that an entry was put with. Raises NotFoundError."""
    store.flush()
    with store._engine.db.read() as c:
        found = queries.fingerprint_of(c, id)
    if found is None:
        raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
    return found


def head(store: Store, id: int) -> bytes | None:
    """The header of the file that an entry came in, for `slotfile.with_head`; None where it came in no file."""
    store.flush()
    with store._engine.db.read() as c:
        return queries.head(c, id)


def wipe(store: Store) -> None:
    """Writes the file anew, so that nothing deleted is left in it or its log. Needs room for two copies of it."""
    store.flush()
    copies.wipe(store._engine)


def _existing(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not os.path.exists(text):
        raise StoreIOError(f"{text} does not exist", path=text, hint="give the path of a kvstore file")
    db.refuse_other_kinds(text)
    text = db.resolve(text)
    db.refuse_network_filesystem(text)
    return text

"""Admin functions: list, verify, repair, salvage, backup, export, restore, wipe.

They take an open `Store`, or a path if the file may be damaged.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator

from .errors import CorruptStoreError, InvalidInputError, KVStoreError, NotAStoreError, NotFoundError
from .storage import db, peek, queries, queries_chains, queries_lists, queries_maintenance
from .storage.entry_reader import Damaged
from .store import backup as backups
from .store import repair as repairs
from .store import transfer, vacuum
from .store import verify as check
from .store.repair import Salvaged
from .store.store import ENTRIES_PER_PAGE, Store
from .store.transfer import Exported
from .store.verify import Problem, Progress
from .types import CLASSES, Entry, EntryClass, FamilyStats, hex_id
from .util import fsutil
from .util.validate import U64, check_id, check_int, choice

__all__ = [
    "Exported", "Salvaged", "backup", "descendants", "export", "families",
    "find", "fingerprint", "head", "lineage", "listed_parents", "listing", "parents", "repair",
    "restore", "salvage", "verify", "wipe",
]  # fmt: skip


def verify(
    path: str | os.PathLike[str], *, key: str | None = None, jobs: int = 1, progress: Progress | None = None
) -> list[Problem]:
    """Lists every problem of a file, which may be damaged or in use. Only reads. [] means no problems.

    `jobs` states are checked at once. Raises NotAStoreError, NewerStoreError, WrongKeyError, StoreIOError.
    """
    return check.verify_file(_existing(path), key=key, jobs=jobs, progress=progress)


def repair(store: Store, problems: list[Problem]) -> list[int]:
    """Drops the entries and rows in `problems` that cannot be used, and nothing else. Returns the ids of dropped entries."""
    return repairs.repair(store._core, problems)


def salvage(
    path: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    key: str | None = None,
    progress: Progress | None = None,
) -> Salvaged:
    """Copies every readable entry of a damaged file to a new file with the same key. The old file stays as it is.

    If the first page is lost, entries are read from a temporary copy that has the first page of a new store.
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
    """Creates an empty file and returns its identity."""
    if os.path.lexists(path) or not db.reserve_file(path):
        raise InvalidInputError(f"{path} exists already", hint="give the name of a new file")
    return db.identity(path)


def _salvage_with_first_page(path: str, new: str, progress: Progress | None) -> Salvaged | KVStoreError | None:
    """Salvages a copy with the first page of a new store. Returns the result or the error; None if no entry was found."""
    folder, name = os.path.split(new)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name[:60]}.") as place:
            copy = os.path.join(place, "copy")
            if repairs.with_first_page(path, copy):
                again = _salvage(copy, new, None, progress)
                return again if again.entries else None
    except (NotAStoreError, CorruptStoreError) as error:
        return error
    return None


def _salvage(path: str, new: str, key: str | None, progress: Progress | None) -> Salvaged:
    source = check.Lenient(path, key=key)
    try:
        with Store(new, cache_ram_mib=0, key=key) as store:
            return repairs.salvage(source, store._core, progress)
    finally:
        source.close()


def backup(store: Store, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Copies a store, which may be in use, to a new file with the same key. If the copy fails, there is no new file."""
    store.flush()
    backups.backup(store._core.db, os.fspath(path), progress)


def export(store: Store, id: int) -> Exported | None:
    """An entry or base with all its data; None if there is no such entry. Raises CorruptStoreError if it is damaged."""
    store.flush()
    try:
        return transfer.export(store._core, id)
    except Damaged as error:
        raise CorruptStoreError(f"entry {hex_id(id)} cannot be read: {error.reason}", id=hex_id(id)) from error


def restore(store: Store, item: Exported) -> Entry | None:
    """Puts an exported entry with its own id, times and fingerprint. Restore parents first. None if it has expired."""
    store.flush()
    return transfer.restore(store._core, item)


def fingerprint(store: Store, id: int) -> str:
    """The fingerprint under which an entry was put. Raises NotFoundError."""
    store.flush()
    with store._core.db.read() as c:
        found = queries.fingerprint_of(c, id)
    if found is None:
        raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
    return found


def listing(
    store: Store,
    *,
    order: str | None = None,
    limit: int | None = None,
    family: int | None = None,
    entry_class: EntryClass | None = None,
    unused: bool = False,
    idle: float | None = None,
    parent: int | None = None,
    shared: bool | None = None,
    text: str | None = None,
    bases: bool | None = False,
) -> Iterator[Entry]:
    """The live entries that match all given filters.

    order: "used", "created", "size", "stored", "tokens" or "hits", largest or latest first. "used" has an index; the others
    read one row of each entry. Without an order, entries are read in pages, in no particular order. With an order, `limit`
    entries are in memory (without a limit: all). unused: never restored. idle: not used for this number of seconds. parent:
    stored against this id. shared: stored as a delta (True) or whole (False). text: in the excerpt, ignoring ASCII case.
    bases: what is kept only because entries are stored against it, instead of entries (True) or with them (None).
    """
    if order is not None and order not in queries_lists.ORDERS:
        raise InvalidInputError(f"order is {order!r}", hint=f"give one of {', '.join(queries_lists.ORDERS)}")
    if entry_class is not None:
        choice(entry_class, CLASSES, "class")
    limit = None if limit is None else check_int(limit, "limit", 1)
    store.flush()
    core = store._core
    with core.db.read() as c:
        scope = core.scope(c)
    wanted = queries_lists.Filter(
        fingerprint=scope,
        family=None if family is None else check_int(family, "family", 0, U64),
        entry_class=entry_class,
        unused=unused,
        used_before=None if idle is None else int(core.now() - idle),
        parent=None if parent is None else check_id(parent),
        shared=shared,
        text=text,
        base=bases,
    )
    return _listed(store, wanted, order, limit)


def _listed(store: Store, wanted: queries_lists.Filter, order: str | None, limit: int | None) -> Iterator[Entry]:
    core = store._core
    if order is not None:
        with core.db.read() as c:
            first = queries_lists.first(c, wanted, order, -1 if limit is None else limit, core.now())
        yield from map(core.with_uses, first)
        return
    after: int | None = queries_lists.FIRST
    left = limit
    while after is not None and (left is None or left > 0):
        n = ENTRIES_PER_PAGE if left is None else min(left, ENTRIES_PER_PAGE)
        with core.db.read() as c:
            page, after = queries_lists.page(c, wanted, after, n, core.now())
        yield from map(core.with_uses, page)
        left = None if left is None else left - len(page)


def parents(store: Store) -> Iterator[Entry]:
    """The entries that other entries are stored against, in no particular order; read in pages."""
    store.flush()
    core, after = store._core, queries_lists.FIRST
    while True:
        with core.db.read() as c:
            ids = queries_lists.parents_page(c, after, ENTRIES_PER_PAGE)
            page = [entry for id in ids if (entry := core.find(c, queries.unsigned(id))) is not None]
        yield from page
        if len(ids) < ENTRIES_PER_PAGE:
            return
        after = ids[-1]


def listed_parents(store: Store, entries: Iterable[Entry]) -> dict[int, int]:
    """By id of an entry, the nearest entry that it is stored against; the bases between them are passed over."""
    store.flush()
    found: dict[int, int] = {}
    with store._core.db.read() as c:
        for entry in entries:
            parent = None if entry.parent is None else queries_chains.listed_parent(c, entry.id)
            if parent is not None:
                found[entry.id] = parent
    return found


def lineage(store: Store, id: int) -> list[Entry]:
    """An entry or base with all that it is stored against, bases too, the whole one first; empty if there is none."""
    store.flush()
    core = store._core
    with core.db.read() as c:
        links = queries_chains.links(c, check_id(id))
        found = [queries.entry(c, link.id, core.scope(c), bases=True) for link in reversed(links)]
    return [core.with_uses(entry) for entry in found if entry is not None]


def descendants(store: Store, id: int) -> list[Entry]:
    """The live entries that are stored against this one, directly or through others, those with the most tokens first."""
    store.flush()
    core = store._core
    with core.db.read() as c:
        found = queries_chains.entries_below(c, check_id(id), core.scope(c), core.now())
    return [core.with_uses(entry) for entry in found]


def find(store: Store, start: str, limit: int = 100, *, bases: bool | None = False) -> list[Entry]:
    """Up to `limit` entries whose hex id begins with `start` (1 to 16 digits), in the order of ids.

    bases: as `listing` takes it.
    """
    if not re.fullmatch("[0-9a-fA-F]{1,16}", start):
        raise InvalidInputError(f"{start!r} is not the start of an id", hint="ids are 1 to 16 hex digits")
    store.flush()
    core = store._core
    low, high = int(start.ljust(16, "0"), 16), int(start.ljust(16, "f"), 16)
    with core.db.read() as c:
        # The first digit contains the sign bit, so all ids of the range have the same sign.
        ids = queries.signed(low), queries.signed(high)
        wanted = queries_lists.Filter(fingerprint=core.scope(c), ids=ids, base=bases)
        found, _ = queries_lists.page(c, wanted, queries_lists.FIRST, check_int(limit, "limit", 1), core.now())
    return [core.with_uses(entry) for entry in found]


def families(store: Store) -> Iterator[FamilyStats]:
    """All families, including those that `Store.stats` omits, in no particular order; read in pages."""
    store.flush()
    after = queries_lists.FIRST
    while True:
        with store._core.db.read() as c:
            page = queries_maintenance.families_page(c, after, ENTRIES_PER_PAGE)
        yield from page
        if len(page) < ENTRIES_PER_PAGE:
            return
        after = queries.signed(page[-1].family)


def head(store: Store, id: int) -> bytes | None:
    """The header of the file that an entry was put from, for `slotfile.with_head`; None if it was not put from a file."""
    store.flush()
    with store._core.db.read() as c:
        return queries.head(c, id)


def wipe(store: Store) -> None:
    """Rewrites the file, so that no deleted data is left in it or its log. Needs disk space for two copies of the file."""
    store.flush()
    vacuum.wipe(store._core)


def _existing(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not os.path.exists(text):
        raise fsutil.MissingFileError(text)
    peek.refuse_other_kinds(text)
    text = db.resolve(text)
    db.refuse_network_filesystem(text)
    return text

"""`repair` drops what cannot be served, and nothing else; `salvage` copies what can be read to a new file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .. import bkvd
from ..errors import KVStoreError, StoreIOError
from ..meta import MetaBlock
from ..storage import closed_file, db, queries, queries_blobs, queries_chains, queries_maintenance, sqlite
from ..storage import integrity as audit
from ..storage import schema as upgrade
from ..storage.db import Connection
from ..storage.entry_reader import Damaged, as_put, read_stored
from ..storage.policy import cuts_of
from ..storage.queries_blobs import BlobRow
from ..types import Bytes
from ..util.hashing import family
from . import delete, transfer
from . import verify as check
from .core import StoreCore
from .verify import Lenient, Problem, Progress, Unreadable

T = TypeVar("T")


def repair(core: StoreCore, problems: Sequence[Problem]) -> list[int]:
    """Applies the remedies of `problems`; gives the ids of the deleted entries.

    Children of a dropped entry that can still be rebuilt are, and stay. What cannot be done is left as it is, each in a
    transaction of its own: verify again to see what remains.
    """
    remedies = {p.remedy for p in problems}
    removed: list[int] = []
    if any(p.invariant == "sqlite" for p in problems):
        _attempt(core, audit.reindex)  # an index alone can be built again from its table
    # Children first: what is good below an entry is stored without it before it is deleted.
    bad = _still_bad(core, problems)
    for id in sorted(bad, key=lambda id: -_depth(core, id)):
        try:
            removed += delete.delete(core, id, "keep", "damaged", bases=True)
        except Unreadable:
            continue
    if "rows" in remedies or bad:
        _attempt(core, audit.clear_parents)
        _attempt(core, audit.sync_bases)
        _attempt(core, queries_maintenance.delete_orphans)
        _attempt(core, core.reclaim)
        _attempt(core, audit.clear_writers)
    for id in sorted({p.entry for p in problems if p.remedy == "cuts" and p.entry is not None} - set(removed)):
        _attempt(core, lambda c, id=id: _find_cuts(core, c, id))  # type: ignore[misc]
    if remedies & {"totals", "rows"}:
        _attempt(core, audit.rebuild_totals)
    return removed


def _still_bad(core: StoreCore, problems: Sequence[Problem]) -> set[int]:
    """The entries to drop: those that fail now as well. What verify could not read, or can be read now, stays."""
    bad = {p.entry for p in problems if p.remedy == "drop" and p.entry is not None}
    if not bad:
        return bad
    by_rows = {p.entry for p in check.structure(core.db) if p.remedy == "drop"}
    return {id for id in bad if id in by_rows or any(p.remedy == "drop" for p in check.check_entry(core.db, id)[0])}


def _attempt(core: StoreCore, step: Callable[[Connection], object]) -> None:
    try:
        with core.db.write() as c:
            step(c)
    except Unreadable:
        return  # the next verify names it again


def _depth(core: StoreCore, id: int) -> int:
    """How many entries an entry is stored against; -1 where that cannot be read."""
    try:
        with core.db.read() as c:
            return len(queries_chains.links(c, id))
    except Unreadable:
        return -1


def _find_cuts(core: StoreCore, c: Connection, id: int) -> None:
    entry = queries.entry(c, id, None, bases=True)
    if entry is None:
        return
    main, draft = core.reader.from_disk().read(c, entry)
    found = cuts_of(main, entry.n_tokens)
    audit.set_cuts(c, id, found.any, () if queries_chains.is_base(c, id) else found.counts)
    for row in queries_blobs.blobs(c, id):
        state = main if row.part == "main" else draft
        if state is not None:
            queries_chains.set_sample(c, row.id, bkvd.sample_hash(state))


# -- salvage


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What `salvage` copied, by id, and what it could not read, as problems."""

    entries: tuple[int, ...]
    lost: tuple[Problem, ...]


class _Rows:
    """Blobs and chunks of a damaged file, looked up by the indexes, or collected from the tables past the damage."""

    def __init__(self, database: Lenient) -> None:
        self._database = database
        self._blobs: dict[int, list[BlobRow]] = {}
        self._chunks: dict[int, list[tuple[int, int, int]]] = {}
        self.collected = False

    def collect(self) -> None:
        for blob in check.walk(self._database, audit.BLOB_IDS):
            found = self._row(audit.blob_row, blob)
            if found is not None:
                self._blobs.setdefault(found[0], []).append(found[1])
        for chunk in check.walk(self._database, audit.CHUNK_IDS):
            row = self._row(audit.chunk_row, chunk)
            if row is not None:
                self._chunks.setdefault(row[0], []).append(row[1:])
        for chunks in self._chunks.values():
            chunks.sort(key=lambda chunk: chunk[1])
        self.collected = True

    def _row(self, read: Callable[[Connection, int], T | None], id: int) -> T | None:
        with suppress(StoreIOError):
            return _part(self._database, lambda c: read(c, id))
        return None

    def blobs(self, c: Connection, id: int) -> list[BlobRow]:
        return self._blobs.get(id, []) if self.collected else queries_blobs.blobs(c, id)

    def read(self, c: Connection, id: int, row: BlobRow) -> Bytes:
        return read_stored(c, id, row, self._chunks.get(row.id, []) if self.collected else None)


def salvage(source: Lenient, target: StoreCore, progress: Progress | None = None) -> Salvaged:
    """Copies every entry of a damaged file that can be given back byte for byte. Writes to the target alone.

    Parents go first, so what was stored against one is again; where the parent cannot be read its children are lost.
    """
    ids, lost = check.all_ids(source)
    sizes: dict[int, int] = {}
    parents: dict[int, int] = {}
    for id in ids:
        entry = None
        with suppress(StoreIOError):  # said when the entry is copied
            entry = _part(source, lambda c, id=id: queries.meta_alone(c, id))  # type: ignore[misc]
        sizes[id] = 1 if entry is None else entry.size
        if entry is not None and entry.parent is not None:
            parents[id] = entry.parent
    listed = [(_steps(id, parents), id, size) for id, size in sizes.items()]
    total = sum(row[2] for row in listed)
    done = 0
    saved: list[int] = []
    rows = _Rows(source)
    for _, id, n_bytes in sorted(listed):
        item = _try(source, rows, id)
        if isinstance(item, str):
            item = _try(source, rows, id)  # a read may fail once
        if isinstance(item, str) and not rows.collected:
            rows.collect()  # an index may be at fault
            item = _try(source, rows, id)
        if isinstance(item, str):
            lost.append(Problem("whole-entry", id, f"it cannot be read: {item}"))
        # Expired entries are not copied.
        elif transfer.restore(target, item) is not None and not item.base:
            saved.append(id)
        done += n_bytes
        if progress is not None:
            progress(done, total)
    with target.db.write() as c:
        queries_maintenance.delete_orphans(c)  # bases whose entries are lost
    return Salvaged(tuple(saved), tuple(lost))


def _steps(id: int, parents: dict[int, int]) -> int:
    """How many entries stand above an entry, by rows that may name each other."""
    seen = {id}
    while (id := parents.get(id, 0)) and id not in seen:
        seen.add(id)
    return len(seen)


def remove_if_unused(path: str, created: tuple[int, int] | None, key: str | None) -> None:
    """Removes the new store of a salvage that failed, unless another file has its name, or another process put to it."""
    if db.identity(path) != created:
        return
    if not os.path.getsize(path):
        closed_file.remove_if_empty(path, created, None)  # whatever the key: nothing was encrypted with it
        return
    try:
        database = db.Database(path, timeout=0, key=key)
    except KVStoreError:
        return
    try:
        with database.exclusive() as c:
            c.execute("BEGIN IMMEDIATE")  # nobody puts to it now
            try:
                if sqlite.is_empty(c) or not queries.all_ids(c):
                    sqlite.keep_log(c)
                    for suffix in ("-wal", "-shm", ""):
                        with suppress(OSError):
                            os.unlink(path + suffix)
            finally:
                c.execute("ROLLBACK")
    except KVStoreError:
        return
    finally:
        database.close()


def _page_size(path: str) -> int | None:
    """The page size of a store whose first page is lost.

    The second page says of each page after it what it is: those that follow are roots of tables (SQLite, file format, 1.8).
    """
    with open(path, "rb") as f:
        for page_size in (1 << bits for bits in range(9, 17)):
            f.seek(page_size)
            if f.read(20) == b"\1\0\0\0\0" * 4:
                return page_size
    return None


def with_first_page(path: str, copy: str) -> bool:
    """Copies a file, with the first page of a new store in place of its own; False if the file cannot be a store.

    Every store of one schema has its tables at the same pages, so their first page differs in counters alone.
    """
    size = os.path.getsize(path)
    page_size = _page_size(path)
    if page_size is None or size < 2 * page_size:
        return False
    db.reserve_file(copy)
    fresh = db.Database(copy)
    fresh.new_page_size = page_size
    try:
        upgrade.prepare(fresh)
        fresh.checkpoint(truncate=True)
    finally:
        fresh.close()
    with open(copy, "r+b") as f:
        page = bytearray(f.read(page_size))
        page[28:32] = (size // page_size).to_bytes(4, "big")  # pages in the file
        page[92:96] = page[24:28]  # which that number is valid for
        page[32:40] = bytes(8)  # no free pages
        f.seek(0)
        f.truncate()
        with open(path, "rb") as old:
            shutil.copyfileobj(old, f, 1 << 20)
        f.seek(0)
        f.write(page)
    return True


def _try(source: Lenient, rows: _Rows, id: int) -> transfer.Exported | str:
    """An entry, or why it cannot be read."""
    try:
        with source.read() as c:
            states = _states(c, rows, id)
    except Unreadable as error:
        return error.reason if isinstance(error, Damaged) else error.message if isinstance(error, KVStoreError) else str(error)
    try:
        return _with_rows(source, id, states)
    except StoreIOError as error:
        return error.message


def _with_rows(source: Lenient, id: int, states: dict[str, Bytes]) -> transfer.Exported | str:
    """An entry of these states, or why it cannot be read. Raises StoreIOError."""
    # The rows that are left, and what the indexes repeat of the lost rows.
    entry = _part(source, lambda c: queries.meta_alone(c, id))
    indexed = _part(source, lambda c: audit.tokens_by_index(c, id))
    tokens = _part(source, lambda c: queries.tokens(c, id))
    if tokens is None and indexed is not None:
        tokens = np.frombuffer(indexed[1], "<i4").astype(np.int32)
    if tokens is None or not tokens.size:
        return "its tokens are lost"
    fingerprint = _part(source, lambda c: queries.fingerprint_of(c, id))
    if fingerprint is None and indexed is not None:
        fingerprint = _part(source, lambda c: audit.fingerprint_by_index(c, indexed[0]))
    if fingerprint is None:
        return "its fingerprint is lost"
    if entry is None:
        block, n_images = MetaBlock(id=id, family=family(tokens, 0, 0), n_input=len(tokens)), 0
    else:
        flags = _part(source, lambda c: queries.family_flags(c, id)) or (False, False)
        block, n_images = transfer.block_of(entry, flags), entry.n_images
    head = _part(source, lambda c: queries.head(c, id))
    base = bool(_part(source, lambda c: queries_chains.is_base(c, id)))
    return transfer.Exported(block, tokens, states["main"], states.get("draft"), fingerprint, n_images, head, base)


def _part(source: Lenient, read: Callable[[Connection], T | None]) -> T | None:
    """What is left of an entry, None where it is damaged. Raises StoreIOError where the system refuses it twice."""
    for last in (False, True):
        try:
            with source.read(fresh=last) as c:
                return read(c)
        except StoreIOError:
            if last:
                raise
        except Unreadable:
            return None
    return None


def _states(c: Connection, rows: _Rows, id: int) -> dict[str, Bytes]:
    """The states of an entry as they were put. Raises Damaged and what the layers below do."""
    found = rows.blobs(c, id)
    if not any(row.part == "main" for row in found):
        raise Damaged(id, "its main state is lost")
    return {row.part: _state(c, rows, id, row) for row in found}


def _state(c: Connection, rows: _Rows, id: int, row: BlobRow) -> Bytes:
    """A state as it was put, by the chain that the deltas themselves name. Damaged rows may name each other."""
    below: set[int] = set()
    chain: list[tuple[int, BlobRow, Bytes]] = []
    while True:
        stored = rows.read(c, id, row)
        chain.append((id, row, stored))
        if row.kind == "full":
            break
        below.add(id)
        parent = bkvd.parent_id(stored)
        above = [r for r in rows.blobs(c, parent) if r.part == row.part] if parent not in below else []
        if not above:
            raise Damaged(id, "its parent is lost")
        id, row = parent, above[0]
    state: Bytes | None = None
    for id, row, stored in reversed(chain):
        parent = bkvd.parent_id(stored) if row.kind == "bkvd" else 0
        state = as_put(id, row, stored, parent or None, state, verify=row is chain[0][1])
    assert state is not None
    return state

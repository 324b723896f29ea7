"""Reads a store of version 1, where each entry's meta was one block. Writes nothing.

Its tables: entries(id, fingerprint, n_tokens, tokens), meta(entry, block), blobs(entry, part, data). None of them is
STRICT and nothing was checked, so a column may hold anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore import bkvd
from kvstore.errors import CorruptStoreError, DeltaError, MetaBlockError
from kvstore.meta import MetaBlock
from kvstore.storage.db import Connection, translated

from ..base import Record

Bytes: TypeAlias = npt.NDArray[np.uint8]

DELTA_HEADER = 44
COLUMNS = {
    "entries": {"id", "fingerprint", "n_tokens", "tokens"},
    "meta": {"entry", "block"},
    "blobs": {"entry", "part", "data"},
}


def signed(id: int) -> int:
    """A u64 as SQLite holds it."""
    return id - (1 << 64) if id >> 63 else id


def unsigned(id: int) -> int:
    return id & (1 << 64) - 1


class Lost(Exception):
    """An entry, or one of its states, cannot be restored; the text says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One state in the old file; `parent` is the entry that its delta names, 0 where it is whole."""

    rowid: int
    size: int
    parent: int


@dataclass(frozen=True, slots=True)
class Old:
    """An entry that can be kept, as far as it can be told without reading its states."""

    fingerprint: str
    n_tokens: int
    meta: MetaBlock
    main: Part
    draft: Part | None
    use_order: int = 0

    @property
    def id(self) -> int:
        return self.meta.id


def missing_tables(c: Connection) -> str | None:
    """The name of a missing table of version 1; None if the file has them all."""
    for table, wanted in COLUMNS.items():
        have = {row[1] for row in c.execute(f"PRAGMA table_info({table})")}
        if not wanted <= have:
            return f"it has no table {table}({', '.join(sorted(wanted))})"
    return None


class Reader:
    """The entries of an old store, and their states one at a time.

    `parts` holds where the states of every entry are, also of those that are not kept: a child may need its parent once
    more. `ids` that occur in `records` with kept=False are left out.
    """

    def __init__(self, c: Connection, path: str) -> None:
        self._c = c
        self._path = path
        self.records: list[Record] = []
        self.parts: dict[int, dict[str, Part]] = {}
        self._parent: tuple[int, str, Bytes] | None = None

    # -- without reading states

    def examine(self) -> list[Old]:
        """The entries that can be kept, the whole ones first, then the others by their parent; fills `records`."""
        now = int(time.time())
        self._find_parts()
        found = []
        sql = """SELECT e.id, CAST(e.fingerprint AS BLOB), CAST(e.n_tokens AS INTEGER), typeof(e.tokens), length(e.tokens),
 CAST(m.block AS BLOB) FROM entries e LEFT JOIN meta m ON m.entry = e.id ORDER BY e.id"""
        for row in self._c.execute(sql):
            id = unsigned(row[0])
            try:
                found.append(self._entry(id, row[1:], now))
            except Lost as lost:
                self._leave_out(id, str(lost))
        self._strays()
        return _in_order(found)

    def _find_parts(self) -> None:
        sql = "SELECT rowid, entry, part, typeof(data), length(data) FROM blobs WHERE part IN ('main', 'draft')"
        for rowid, entry, part, kind, size in self._c.execute(sql):
            if kind == "blob" and isinstance(entry, int):
                self.parts.setdefault(unsigned(entry), {})[part] = Part(rowid, size, 0)
        for id, parts in self.parts.items():
            for name, part in parts.items():
                if part.size >= DELTA_HEADER:
                    try:
                        parent = bkvd.parent_id(self._read(part, DELTA_HEADER))
                    except CorruptStoreError:
                        continue  # said when the state is read
                    self.parts[id][name] = replace(part, parent=parent)

    def _entry(self, id: int, row: tuple[bytes | None, int | None, str, int, bytes | None], now: int) -> Old:
        fingerprint_bytes, n_claimed, tokens_type, tokens_bytes, block = row
        if id == 0:
            raise Lost("its id is 0")
        meta = self._meta(id, block, now)
        if meta.expires_at is not None and meta.expires_at <= now:
            raise Lost("it had expired")
        try:
            fingerprint = (fingerprint_bytes or b"").decode()
        except UnicodeDecodeError:
            raise Lost("its fingerprint is not text") from None
        if tokens_type != "blob" or tokens_bytes == 0 or tokens_bytes % 4:
            raise Lost("its tokens are empty or cut short")
        n_tokens = tokens_bytes // 4
        if n_claimed != n_tokens:
            self._note(id, f"it was said to have {n_claimed} tokens, and has {n_tokens}")
        parts = self.parts.get(id, {})
        main, draft = parts.get("main"), parts.get("draft")
        if main is None or main.size == 0:
            raise Lost("it has no state")
        if draft is not None and draft.size == 0:
            self._note(id, "its draft state was empty")
            draft = None
        if main.parent and "main" not in self.parts.get(main.parent, {}):
            raise Lost("its prefix is not in the cache")
        if (meta.parent or 0) != main.parent:
            if not main.parent:
                self._note(id, "its meta named a parent, its state is whole")
            else:
                self._note(id, "its meta did not name the parent of its delta")
        return Old(fingerprint, n_tokens, replace(meta, parent=main.parent or None), main, draft)

    def _meta(self, id: int, block: bytes | None, now: int) -> MetaBlock:
        """The meta in the block, or defaults; always with the id of the row."""
        defaults = MetaBlock(id, created_at=now, last_used=now)
        if block is None:
            self._note(id, "it had no meta")
            return defaults
        try:
            meta = MetaBlock.unpack(block)
        except MetaBlockError as error:
            self._note(id, f"its meta could not be read: {error.message}")
            return defaults
        if meta.id == 0:
            self._note(id, "its meta could not be read: it names no entry")
            return defaults
        if meta.id != id:
            self._note(id, f"its meta named another entry, {meta.id:016x}")
        for problem in meta.problems:
            self._note(id, problem)
        if meta.ttl is not None and meta.ttl < 0:
            self._note(id, f"its ttl was {meta.ttl} seconds: now none")
            meta = replace(meta, ttl=None)
        return replace(meta, id=id)

    def _strays(self) -> None:
        """Rows without an entry, as a shell without foreign keys left them."""
        sql = """SELECT entry FROM blobs WHERE entry NOT IN (SELECT id FROM entries)
 UNION SELECT entry FROM meta WHERE entry NOT IN (SELECT id FROM entries)"""
        for (entry,) in self._c.execute(sql):
            if isinstance(entry, int):
                self._leave_out(unsigned(entry), "rows without an entry")

    def _note(self, id: int, what: str) -> None:
        self.records.append(Record(id, what, True))

    def _leave_out(self, id: int, what: str) -> None:
        self.records.append(Record(id, what, False))

    # -- states

    def tokens(self, id: int) -> bytes:
        row = self._c.execute("SELECT tokens FROM entries WHERE id = ?", (signed(id),)).fetchone()
        return bytes(row[0]) if row is not None else b""

    def stored(self, part: Part) -> Bytes:
        """The bytes of a part as they are in the file. Raises Lost."""
        try:
            return self._read(part, part.size)
        except CorruptStoreError as error:
            raise Lost(f"its state cannot be read: {error.message}") from error

    def decoded(self, delta: Bytes, name: str, parent: int) -> Bytes:
        """The state that a delta encodes. Raises Lost."""
        try:
            return bkvd.decode(delta, self._state(parent, name, ()), parent)
        except DeltaError as error:
            raise Lost(error.message) from error

    def _state(self, id: int, name: str, below: tuple[int, ...]) -> Bytes:
        """A parent's state, the last one kept: the children of one parent follow each other."""
        if self._parent is not None and self._parent[:2] == (id, name):
            return self._parent[2]
        part = self.parts.get(id, {}).get(name)
        if part is None or id in below:
            raise Lost("its prefix is not in the cache")
        self._parent = None  # free its memory before reading the next parent
        data = self.stored(part)
        if part.parent:
            try:
                data = bkvd.decode(data, self._state(part.parent, name, (*below, id)), part.parent)
            except DeltaError as error:
                raise Lost("its prefix is not in the cache") from error
        self._parent = (id, name, data)
        return data

    def _read(self, part: Part, n: int) -> Bytes:
        out: Any = np.empty(n, np.uint8)
        c = self._c
        with translated(self._path, connection=c), c.blob_open("main", "blobs", "data", part.rowid, False) as handle:
            handle.read_into(out, 0, n)
        state: Bytes = out
        return state


def _in_order(found: list[Old]) -> list[Old]:
    """Gives each its place in the order of use (a parent after its children), and parents before children."""
    used = {old.id: (old.meta.last_used, 0) for old in found}
    for old in found:
        if old.main.parent in used:
            used[old.main.parent] = max(used[old.main.parent], (old.meta.last_used, 1))
    order = {id: at for at, (_, id) in enumerate(sorted((key, id) for id, key in used.items()), 1)}
    ordered = sorted(found, key=lambda old: (old.main.parent, signed(old.id)))
    return [replace(old, use_order=order[old.id]) for old in ordered]


def largest(c: Connection) -> Iterator[int]:
    """The bytes of every value that the new file will hold."""
    for table, column in (("blobs", "data"), ("entries", "tokens")):
        for (n,) in c.execute(f"SELECT length({column}) FROM {table}"):
            yield n or 0

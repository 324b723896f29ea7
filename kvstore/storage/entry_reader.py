"""Reads entries from disk or RAM, and decodes them to the bytes that were put. Every read of a state goes through here.

`as_put` decodes one stored state; `EntryReader` fetches the stored states of an entry and of its parent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import bkvd
from ..errors import CorruptStoreError, DeltaError
from ..types import Bytes, Entry, hex_id
from ..util.hashing import Hasher, digest
from . import blobs, queries_blobs
from .db import Connection
from .queries_blobs import BlobRow
from .ram_cache import CachedEntry, RamCache
from .sqlite import MalformedError, read_failed

# Below this a thread for the digest costs more than it saves.
PARALLEL_DIGEST_BYTES = 8 << 20
HASHES_KEPT = 1024


class Damaged(CorruptStoreError):
    """An entry that cannot be given back byte for byte. `id` is the entry at fault, which may be the parent.

    `invariant` names the one of schema.sql that does not hold; `version` is the blob ids that were read, None where none were.
    """

    hint = "`kvstore repair` drops what cannot be served"

    def __init__(
        self, id: int, reason: str, *, invariant: str = "digest", version: tuple[int, ...] | None = None, **facts: Any
    ) -> None:
        super().__init__(f"entry {hex_id(id)} is damaged: {reason}", entry=hex_id(id), **facts)
        self.id = id
        self.reason = reason
        self.invariant = invariant
        self.version = version


def as_put(
    entry: int,
    row: BlobRow,
    stored: Bytes,
    parent: int | None,
    of_parent: Bytes | None,
    *,
    parent_hash: int | None = None,
    known_digest: bytes | None = None,
    verify: bool = True,
) -> Bytes:
    """A state as it was put, read-only, from the bytes in the file.

    parent, of_parent: the parent's id and its state of the same part, None where there is none. parent_hash: the sample hash
    of that state, if it is known. known_digest: the digest of `stored`, if it is known. Raises Damaged.
    """
    if row.kind == "full":
        state = stored
    else:
        if parent is None or of_parent is None:
            raise Damaged(entry, "its prefix is not in the cache", invariant="delta-parent")
        if bkvd.size(stored) != row.size:
            raise Damaged(entry, f"the delta of its {row.part} state has another size than its row")
        try:
            state = bkvd.decode(stored, of_parent, parent, parent_hash=parent_hash)
        except DeltaError as error:
            wrong_parent = getattr(error, "wrong_parent", False)
            raise Damaged(
                entry, f"its {row.part} state: {error.message}", invariant="delta-parent" if wrong_parent else "digest"
            ) from error
        known_digest = None
    if verify and (known_digest or digest(state)) != row.digest:
        raise Damaged(entry, f"its {row.part} state fails its digest")
    state.flags.writeable = False
    return state


def read_stored(c: Connection, entry: int, row: BlobRow, chunks: list[tuple[int, int, int]] | None = None) -> Bytes:
    """The bytes of a state in the file, past the RAM layer; `chunks` as in `blobs.read`. Raises Damaged."""
    try:
        return blobs.read(c, row, chunks=chunks)
    except blobs.UnreadableBlob as error:
        raise Damaged(entry, f"its {row.part} state {error}", invariant="chunks-complete") from error


class EntryReader:
    """Reads entries through the RAM layer; holds no lock of its own. Timings go to `spent(name, seconds)`."""

    def __init__(self, ram: RamCache, verify: bool, spent: Callable[[str, float], None]) -> None:
        self.ram = ram
        self.verify = verify
        self.spent = spent
        self._hashes: dict[int, int] = {}

    def from_disk(self) -> EntryReader:
        """A reader that looks at the file alone, and checks every digest."""
        return EntryReader(RamCache(0), True, self.spent)

    def read(self, c: Connection, entry: Entry) -> tuple[Bytes, Bytes | None]:
        """The states of an entry as they were put: main, and draft or None; read-only. Raises Damaged."""
        rows = queries_blobs.blobs(c, entry.id)
        try:
            return self._read(c, entry, rows)
        except Damaged:
            if entry.id not in self.ram.ids() and entry.parent not in self.ram.ids():
                raise
            self.ram.discard(entry.id)  # the bytes in RAM may be at fault, not those in the file
            if entry.parent is not None:
                self.ram.discard(entry.parent)
            return self._read(c, entry, rows)

    def stored(self, c: Connection, id: int) -> CachedEntry:
        """The stored form of a whole entry, from RAM or disk. Raises Damaged."""
        rows = queries_blobs.blobs(c, id)
        if any(row.kind != "full" for row in rows):
            raise Damaged(id, "it is not whole, and others are stored against it", invariant="delta-parent")
        return self._stored(c, id, None, rows, False)[0]

    def sample_hash(self, held: CachedEntry, part: str) -> int:
        """The sample hash of a whole entry's state; computed once for each blob (of `version`: main, then draft)."""
        blob = held.version[0 if part == "main" else 1]
        found = self._hashes.get(blob)
        if found is None:
            state = held.main if part == "main" else held.draft
            assert state is not None
            if len(self._hashes) >= HASHES_KEPT:
                self._hashes.clear()
            found = self._hashes[blob] = bkvd.sample_hash(state)
        return found

    def check_whole(self, c: Connection, id: int) -> None:
        """Raises Damaged where a whole entry's own bytes are wrong."""
        rows = queries_blobs.blobs(c, id)
        version = tuple(row.id for row in rows)
        if not any(row.part == "main" for row in rows):
            raise Damaged(id, "it has no main state", invariant="whole-entry", version=version)
        for row in rows:
            if row.kind != "full":
                raise Damaged(id, "it is not whole", invariant="delta-parent", version=version)
            with _own_bytes(c, id, version):
                as_put(id, row, blobs.read(c, row), None, None)

    def _read(self, c: Connection, entry: Entry, rows: list[BlobRow]) -> tuple[Bytes, Bytes | None]:
        is_delta = any(row.kind == "bkvd" for row in rows)
        parent = self.stored(c, entry.parent) if is_delta and entry.parent is not None else None
        held, digests = self._stored(c, entry.id, entry.parent if is_delta else None, rows, self.verify)
        states: dict[str, Bytes] = {}
        for row in rows:
            stored = held.main if row.part == "main" else held.draft
            assert stored is not None
            of_parent = None if parent is None else parent.main if row.part == "main" else parent.draft
            started = time.perf_counter()
            try:
                states[row.part] = as_put(
                    entry.id, row, stored, entry.parent, of_parent,
                    parent_hash=None if parent is None or of_parent is None else self.sample_hash(parent, row.part),
                    known_digest=digests.get(row.part), verify=self.verify,
                )  # fmt: skip
            except Damaged as error:
                error.version = held.version
                if row.kind == "bkvd" and entry.parent is not None:
                    self.check_whole(c, entry.parent)  # the other children of a damaged parent fail with it
                raise
            if row.kind == "bkvd":
                self.spent("decode_us", time.perf_counter() - started)
        return states["main"], states.get("draft")

    def _stored(
        self, c: Connection, id: int, parent: int | None, rows: list[BlobRow], digests_too: bool
    ) -> tuple[CachedEntry, dict[str, bytes]]:
        """The stored form of an entry, and the digests computed while large whole states were read from disk."""
        version = tuple(row.id for row in rows)
        if not any(row.part == "main" for row in rows):
            raise Damaged(id, "it has no main state", invariant="whole-entry", version=version)
        found = self.ram.get(id, version)
        if found is not None:
            return found, {}
        n_bytes = sum(row.stored for row in rows)
        room = self.ram.reserve(n_bytes, parent)
        try:
            parts, digests = _read_parts(c, id, rows, version, digests_too)
        except BaseException:
            if room:
                self.ram.cancel(n_bytes)
            raise
        held = CachedEntry(version, parts["main"], parts.get("draft"), parent)
        # A digest that fails is found by the caller, who discards the entry.
        if room:
            self.ram.commit(id, held)
        return held, digests


@contextmanager
def _own_bytes(c: Connection, id: int, version: tuple[int, ...]) -> Iterator[None]:
    """Turns what reading the chunks of an entry raises on damage into Damaged, which names the entry."""
    try:
        yield
    except Damaged as error:
        error.version = version
        raise
    except blobs.UnreadableBlob as error:
        raise Damaged(id, f"its state {error}", invariant="chunks-complete", version=version) from error
    except MalformedError as error:
        if read_failed(c):
            raise
        raise Damaged(id, f"its state cannot be read: {error}", version=version) from error


def _read_parts(
    c: Connection, id: int, rows: list[BlobRow], version: tuple[int, ...], digests_too: bool
) -> tuple[dict[str, Bytes], dict[str, bytes]]:
    parts: dict[str, Bytes] = {}
    digests: dict[str, bytes] = {}
    for row in rows:
        hasher = Hasher() if digests_too and row.kind == "full" and row.stored >= PARALLEL_DIGEST_BYTES else None
        try:
            with _own_bytes(c, id, version):
                parts[row.part] = blobs.read(c, row, hasher=hasher)
        finally:
            if hasher is not None:
                digests[row.part] = hasher.digest()
        parts[row.part].flags.writeable = False
    return parts, digests

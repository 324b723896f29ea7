"""Entries as bytes: from disk or RAM to the bytes that were put, and from those to what is stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import bkvd, blobs, layout, policy, queries
from .db import Connection
from .errors import DeltaError, LayoutError
from .hashing import Hasher, digest
from .lru import Held, RamCache
from .policy import Cuts as Cuts
from .policy import cuts_of as cuts_of
from .queries import BlobRow
from .records import Bytes, Entry

# Below this a thread for the digest costs more than it saves.
PARALLEL_DIGEST_BYTES = 8 << 20
HASHES_KEPT = 1024


class Damaged(Exception):
    """An entry that cannot be given back byte for byte. `id` is the entry at fault, which may be the parent."""

    def __init__(self, id: int, reason: str) -> None:
        super().__init__(reason)
        self.id = id
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One state on its way in: `data` is what is stored (the state, or a delta against the parent's)."""

    name: str  # 'main' or 'draft'
    kind: str  # 'full' or 'bkvd'
    data: Bytes
    size: int
    digests: Mapping[str, bytes]  # by part; may still be being computed

    @property
    def digest(self) -> bytes:
        return self.digests[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The learned entry that something is stored against, in the version that was read."""

    id: int
    n_tokens: int
    version: tuple[int, ...]
    held: Held


class Keeping:
    """An entry on its way into the RAM layer, copied by a thread while the file is written.

    What is `owned`, and a delta, is taken as it is; a caller's buffer may change after the put.
    """

    def __init__(self, ram: RamCache, n_bytes: int, parts: list[Part], parent: int | None, owned: bool) -> None:
        self._ram = ram
        self._n_bytes = n_bytes
        self._parent = parent
        self._arrays = {part.name: part.data for part in parts}
        self._copied = [] if owned else [part.name for part in parts if part.kind == "full"]
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        if n_bytes >= PARALLEL_DIGEST_BYTES and self._copied:
            self._thread = threading.Thread(target=self._copy, name="kvstore-copy", daemon=True)
            self._thread.start()

    def _copy(self) -> None:
        try:
            for name in self._copied:
                self._arrays[name] = self._arrays[name].copy()
        except MemoryError as error:
            self._failed = error

    def _wait(self) -> None:
        if self._thread is None:
            self._copy()
        else:
            self._thread.join()

    def commit(self, id: int, version: tuple[int, ...]) -> None:
        """Shows the entry, which is on disk now in this version."""
        self._wait()
        if self._failed is not None:
            self._ram.cancel(self._n_bytes)
            return
        for array in self._arrays.values():
            array.flags.writeable = False
        self._ram.commit(id, Held(version, self._arrays["main"], self._arrays.get("draft"), self._parent))

    def cancel(self) -> None:
        """Gives the room back."""
        if self._thread is not None:
            self._thread.join()
        self._ram.cancel(self._n_bytes)


class Shelf:
    """Reads and builds entries; holds no lock of its own. Timings go to `spent(name, seconds)`."""

    def __init__(self, ram: RamCache, verify: bool, spent: Callable[[str, float], None]) -> None:
        self.ram = ram
        self.verify = verify
        self._spent = spent
        self._hashes: dict[int, int] = {}

    # -- reading

    def load(self, c: Connection, entry: Entry) -> tuple[Bytes, Bytes | None]:
        """The states of an entry as they were put, read-only. Raises Damaged."""
        rows = queries.blobs(c, entry.id)
        try:
            return self._load(c, entry, rows)
        except Damaged:
            if entry.id not in self.ram.ids():
                raise
            self.ram.discard(entry.id)  # what RAM held may be at fault, not the file
            if entry.parent is not None:
                self.ram.discard(entry.parent)
            return self._load(c, entry, rows)

    def fresh(self, c: Connection, entry: Entry) -> tuple[Bytes, Bytes | None]:
        """The states of an entry as the file gives them, past the RAM layer and unverified. Raises Damaged."""
        return Shelf(RamCache(0), False, self._spent).load(c, entry)

    def _load(self, c: Connection, entry: Entry, rows: list[BlobRow]) -> tuple[Bytes, Bytes | None]:
        parent = None
        if entry.parent is not None:
            parent = self.held(c, entry.parent)[1]
        held, fresh = self._held(c, entry.id, entry.parent, rows, self.verify)
        states: dict[str, Bytes] = {}
        for row in rows:
            stored = held.main if row.part == "main" else held.draft
            assert stored is not None
            known = fresh.get(row.part)
            if row.kind == "bkvd":
                states[row.part] = self._decode(c, entry, row, stored, parent)
                known = None
            else:
                states[row.part] = stored
            if self.verify and (known or digest(states[row.part])) != row.digest:
                if row.kind == "bkvd" and entry.parent is not None:
                    self._check_whole(c, entry.parent)
                raise Damaged(entry.id, f"its {row.part} state fails its digest")
        return states["main"], states.get("draft")

    def _decode(self, c: Connection, entry: Entry, row: BlobRow, delta: Bytes, parent: Held | None) -> Bytes:
        state = None if parent is None else parent.main if row.part == "main" else parent.draft
        if entry.parent is None or parent is None or state is None:
            raise Damaged(entry.id, "its prefix is not in the cache")
        if bkvd.size(delta) != row.size:
            raise Damaged(entry.id, "its delta has another size than its row")
        started = time.perf_counter()
        try:
            out = bkvd.decode(delta, state, entry.parent, parent_hash=self._hash(parent, row.part))
        except DeltaError as error:
            self._check_whole(c, entry.parent)  # its other children fail with it
            raise Damaged(entry.id, error.message) from error
        self._spent("decode_us", time.perf_counter() - started)
        out.flags.writeable = False
        return out

    def _hash(self, parent: Held, part: str) -> int:
        """The sample hash of a parent's state; computed once for each blob (of `version`: main, then draft)."""
        blob = parent.version[0 if part == "main" else 1]
        found = self._hashes.get(blob)
        if found is None:
            state = parent.main if part == "main" else parent.draft
            assert state is not None
            if len(self._hashes) >= HASHES_KEPT:
                self._hashes.clear()
            found = self._hashes[blob] = bkvd.sample_hash(state)
        return found

    def _check_whole(self, c: Connection, id: int) -> None:
        """Raises Damaged where a whole entry is itself at fault."""
        for row in queries.blobs(c, id):
            try:
                good = row.kind == "full" and digest(blobs.read(c, row)) == row.digest
            except blobs.UnreadableBlob:
                good = False
            if not good:
                raise Damaged(id, f"its {row.part} state fails its digest")

    def held(self, c: Connection, id: int) -> tuple[tuple[int, ...], Held]:
        """The stored form of a whole entry, from RAM or disk. Raises Damaged."""
        rows = queries.blobs(c, id)
        if not rows:
            raise Damaged(id, "it has no state")
        return tuple(row.id for row in rows), self._held(c, id, None, rows, False)[0]

    def _held(
        self, c: Connection, id: int, parent: int | None, rows: list[BlobRow], digests_too: bool
    ) -> tuple[Held, dict[str, bytes]]:
        """The stored form of an entry, and the digests computed while large whole states were read from disk."""
        if not any(row.part == "main" for row in rows):
            raise Damaged(id, "it has no main state")
        version = tuple(row.id for row in rows)
        found = self.ram.get(id, version)
        if found is not None:
            return found, {}
        n_bytes = sum(row.stored for row in rows)
        room = self.ram.reserve(n_bytes, parent)
        parts: dict[str, Bytes] = {}
        digests: dict[str, bytes] = {}
        try:
            for row in rows:
                hasher = Hasher() if digests_too and row.kind == "full" and row.stored >= PARALLEL_DIGEST_BYTES else None
                try:
                    parts[row.part] = blobs.read(c, row, hasher=hasher)
                finally:
                    if hasher is not None:
                        digests[row.part] = hasher.digest()
                parts[row.part].flags.writeable = False
        except blobs.UnreadableBlob as error:
            if room:
                self.ram.cancel(n_bytes)
            raise Damaged(id, f"its state {error}") from error
        except BaseException:
            if room:
                self.ram.cancel(n_bytes)
            raise
        held = Held(version, parts["main"], parts.get("draft"), parent)
        # A digest that fails is found by the caller, who discards the entry.
        if room:
            self.ram.commit(id, held)
        return held, digests

    # -- building

    def parent(self, c: Connection, id: int, n_tokens: int) -> Parent | None:
        """A learned entry with its bytes; None where it is damaged: the next get of it drops it."""
        try:
            version, held = self.held(c, id)
        except Damaged:
            return None
        return Parent(id, n_tokens, version, held)

    def build(
        self, main: Bytes, draft: Bytes | None, digests: Mapping[str, bytes], parent: Parent | None, min_saved: int | None
    ) -> tuple[list[Part], int]:
        """What to store for the states, against `parent` where that saves enough; and the bytes shared.

        `main` first; only if it is shared is `draft` tried, against the parent's draft, and it may stay whole.
        """
        parts = []
        shared = 0
        for name, state, of_parent in (
            ("main", main, None if parent is None else parent.held.main),
            ("draft", draft, None if parent is None else parent.held.draft),
        ):
            if state is None:
                continue
            delta = None
            if parent is not None and of_parent is not None and (name == "main" or shared):
                started = time.perf_counter()
                known = self._hash(parent.held, name)
                least = policy.least_saved(min_saved, state.size)
                delta = bkvd.encode(state, of_parent, parent.id, min_saved=least, content=True, parent_hash=known)
                self._spent("encode_us", time.perf_counter() - started)
            if delta is None:
                parts.append(Part(name, "full", state, state.size, digests))
            else:
                shared += delta.shared
                parts.append(Part(name, "bkvd", delta.data, state.size, digests))
        return parts, shared

    @staticmethod
    def why_whole(main: Bytes, parent: Parent) -> str:
        """Why a state was not stored against `parent`."""
        try:
            layout.parse(main)
            layout.parse(parent.held.main)
        except LayoutError:
            return "unknown_layout"
        return "saves_too_little"

    def keep(self, parts: list[Part], parent: int | None, *, owned: bool) -> Keeping | None:
        """Begins to take what is being stored into the RAM layer; None where it has no room."""
        n_bytes = sum(part.data.size for part in parts)
        return Keeping(self.ram, n_bytes, parts, parent, owned) if self.ram.reserve(n_bytes, parent) else None

"""Reads entries from disk or RAM, and decodes them to the bytes that were put. Every read of a state goes through here.

`as_put` turns one stored state and its parent's into what was put; `EntryReader` composes a chain, from the leaf to the root,
and reads each stored byte once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from .. import bkvd
from ..errors import CorruptStoreError, DeltaError
from ..types import Bytes, Entry, hex_id
from ..util.hashing import Hasher, digest
from . import blobs, queries_blobs, queries_chains
from .chain_feed import PARALLEL_BYTES, Feed, ThreadFeed
from .db import Connection
from .queries_blobs import BlobRow
from .queries_chains import Link
from .ram_cache import CachedEntry, RamCache
from .sqlite import MalformedError, read_failed

# Below this a thread for the digest costs more than it saves.
PARALLEL_DIGEST_BYTES = 8 << 20
HASHES_KEPT = 1024
_NO_PREFIX = "its prefix is not in the cache"


class Damaged(CorruptStoreError):
    """An entry that cannot be given back byte for byte. `id` is the entry at fault, which another may be stored against.

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
    known_digest: bytes | None = None,
    verify: bool = True,
) -> Bytes:
    """A state as it was put, read-only, from the bytes in the file.

    parent, of_parent: the parent's id and its state of the same part, None where there is none. known_digest: the digest of
    `stored`, if it is known. Raises Damaged.
    """
    if row.kind == "full":
        state = stored
    else:
        if parent is None or of_parent is None:
            raise Damaged(entry, _NO_PREFIX, invariant="delta-parent")
        if bkvd.size(stored) != row.size:
            raise Damaged(entry, f"the delta of its {row.part} state has another size than its row")
        with _delta_of(entry, row):
            state = bkvd.decode(stored, of_parent, parent)
        known_digest = None
    if verify and (known_digest or digest(state)) != row.digest:
        raise Damaged(entry, f"its {row.part} state fails its digest")
    state.flags.writeable = False
    return state


@contextmanager
def _delta_of(entry: int, row: BlobRow) -> Iterator[None]:
    """Turns what decoding a delta raises into Damaged, which names its entry."""
    try:
        yield
    except DeltaError as error:
        wrong_parent = getattr(error, "wrong_parent", False)
        raise Damaged(
            entry, f"its {row.part} state: {error.message}", invariant="delta-parent" if wrong_parent else "digest"
        ) from error


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
        self._samples: dict[int, int] = {}

    def from_disk(self) -> EntryReader:
        """A reader that looks at the file alone, and checks every digest."""
        return EntryReader(RamCache(0), True, self.spent)

    def read(self, c: Connection, entry: Entry) -> tuple[Bytes, Bytes | None]:
        """The states of an entry as they were put: main, and draft or None; read-only. Raises Damaged."""
        links = queries_chains.links(c, entry.id)
        try:
            states = self.states(c, entry.id, links, self.verify)
        except Damaged:
            held = set(self.ram.ids()).intersection(link.id for link in links)
            if not held:
                raise
            for id in held:  # the bytes in RAM may be at fault, not those in the file
                self.ram.discard(id)
            states = self.states(c, entry.id, links, self.verify)
        return states["main"], states.get("draft")

    def states(self, c: Connection, id: int, links: Sequence[Link], verify: bool) -> dict[str, Bytes]:
        """The states of the first of `links` by part. Raises Damaged for the link at fault, as far as that can be told."""
        if not links or "main" not in links[0].rows:
            raise Damaged(id, "it has no main state", invariant="whole-entry", version=links[0].version if links else ())
        states = {}
        for part, row in links[0].rows.items():
            if row.kind == "full":
                states[part] = self._whole(c, links[0], row, verify)
                continue
            try:
                states[part] = self._composed(c, links, part)
                if verify and digest(states[part]) != row.digest:
                    raise Damaged(id, f"its {part} state fails its digest", version=links[0].version)
            except Damaged:
                self.check_ancestors(c, links)  # all that needs a damaged link fails with it
                raise
            states[part].flags.writeable = False
        self.ram.use(id)
        return states

    def stored(self, c: Connection, link: Link, row: BlobRow) -> Bytes:
        """A state of a link as it is stored, from RAM or disk. Raises Damaged."""
        held = self._held(c, link, True)
        if held is not None:
            return _part(held, row)
        with own_bytes(c, link.id, link.version):
            return blobs.read(c, row)

    def sample(self, c: Connection, links: Sequence[Link], part: str) -> int:
        """The sample hash of the first link's state, by its row or, where that has none, computed once for each blob."""
        row = links[0].rows[part]
        return self.computed_sample(c, links, part) if row.sample is None else row.sample

    def computed_sample(self, c: Connection, links: Sequence[Link], part: str) -> int:
        """`sample`, by the state alone."""
        row = links[0].rows[part]
        found = self._samples.get(row.id)
        if found is None:
            held = self.ram.get(links[0].id, links[0].version, use=False) if row.kind == "full" else None
            if held is not None:
                found = bkvd.sample_hash(_part(held, row))
            elif row.kind == "full":
                found = self._sample_of_ends(c, links[0], row)
            else:
                found = bkvd.sample_hash(self._composed(c, links, part))
            if len(self._samples) >= HASHES_KEPT:
                self._samples.clear()
            self._samples[row.id] = found
        return found

    def _sample_of_ends(self, c: Connection, link: Link, row: BlobRow) -> int:
        """The sample hash of a whole state in the file, by the parts of it that are hashed."""
        with own_bytes(c, link.id, link.version):
            if row.stored < 2 * bkvd.SAMPLE_BYTES:
                return bkvd.sample_hash(blobs.read(c, row))
            found = blobs.ends(c, row, bkvd.SAMPLE_BYTES)
        return bkvd.sample_hash(found) ^ found.size ^ row.stored

    def check_ancestors(self, c: Connection, links: Sequence[Link]) -> None:
        """Raises Damaged for the first link, from the root on, whose own bytes are wrong in the file; the leaf is left out."""
        self.check_chain(c, links[1:])

    def check_chain(self, c: Connection, links: Sequence[Link]) -> None:
        """Raises Damaged for the first link, from the root on, whose own bytes are wrong in the file."""
        above: dict[str, Bytes] = {}
        for link in reversed(links):
            states: dict[str, Bytes] = {}
            if "main" not in link.rows:
                raise Damaged(link.id, "it has no main state", invariant="whole-entry", version=link.version)
            for part, row in link.rows.items():
                with own_bytes(c, link.id, link.version):
                    states[part] = as_put(link.id, row, blobs.read(c, row), link.parent, above.get(part))
            above = states

    def check(self, c: Connection, id: int) -> None:
        """Raises Damaged where an entry's own bytes, or those it is stored against, are wrong in the file."""
        links = queries_chains.links(c, id)
        if not links:
            raise Damaged(id, "it has no main state", invariant="whole-entry", version=())
        self.check_chain(c, links)

    # -- one link

    def _whole(self, c: Connection, link: Link, row: BlobRow, verify: bool) -> Bytes:
        """A state that is stored whole, with its digest checked; hashed while it is read where it is large."""
        held = self.ram.get(link.id, link.version, use=False)
        hasher = Hasher() if held is None and verify and row.stored >= PARALLEL_DIGEST_BYTES else None
        known: bytes | None = None
        try:
            if held is None:
                held = self._load(c, link, {row.part: hasher})
            if held is not None:
                stored = _part(held, row)
            else:
                with own_bytes(c, link.id, link.version):
                    stored = blobs.read(c, row, hasher=hasher)
        finally:
            if hasher is not None:
                known = hasher.digest()
        with own_bytes(c, link.id, link.version):
            return as_put(link.id, row, stored, None, None, known_digest=known, verify=verify)

    def _held(self, c: Connection, link: Link, room: bool) -> CachedEntry | None:
        """A link in the RAM layer, where it goes if it has room; None where it does not."""
        found = self.ram.get(link.id, link.version, use=False)
        return self._load(c, link, {}) if found is None and room else found

    def _load(self, c: Connection, link: Link, hashers: dict[str, Hasher | None]) -> CachedEntry | None:
        """Reads a link into the RAM layer; None where that has no room. A digest that fails is found by the caller."""
        n_bytes = link.stored
        if "main" not in link.rows or not self.ram.reserve(n_bytes):
            return None
        try:
            parts: dict[str, Bytes] = {}
            for part, row in link.rows.items():
                with own_bytes(c, link.id, link.version):
                    parts[part] = blobs.read(c, row, hasher=hashers.get(part))
                parts[part].flags.writeable = False
        except BaseException:
            self.ram.cancel(n_bytes)
            raise
        held = CachedEntry(link.version, parts["main"], parts.get("draft"), link.parent)
        self.ram.commit(link.id, held)
        return held

    # -- chains

    def _composed(self, c: Connection, links: Sequence[Link], part: str) -> Bytes:
        """The state of a delta: each link is fed to the decoder once, the leaf first, until one is whole."""
        started = time.perf_counter()
        leaf = links[0].rows[part]
        decoder = bkvd.ChainDecoder(leaf.size)
        with (ThreadFeed if leaf.size >= PARALLEL_BYTES else Feed)(decoder) as feed:
            try:
                self._feed(c, links, part, feed)
                state = feed.finish()
            except DeltaError as error:
                with _delta_of(links[feed.at].id, leaf):
                    raise error
        self.spent("decode_us", time.perf_counter() - started)
        return state

    def _feed(self, c: Connection, links: Sequence[Link], part: str, feed: Feed) -> None:
        """Feeds links up to the first that is whole. Raises Damaged where there is none, or one cannot be read."""
        room = self.ram.fits(sum(link.stored for link in links))  # else one link would evict another
        rows = [link.rows[part].id for link in links if part in link.rows]
        chunks = {} if room else queries_blobs.chunks_of(c, rows)
        expected: int | None = None
        for at, link in enumerate(links):
            row = link.rows.get(part)
            if row is None:
                raise Damaged(links[at - 1].id, _NO_PREFIX, invariant="delta-parent", version=links[at - 1].version)
            held = self._held(c, link, room)
            with own_bytes(c, link.id, link.version):
                known = chunks.get(row.id)
                pieces = blobs.pieces(c, row, feed.buffer, known) if held is None else iter([_part(held, row)])
                sample, expected = expected, None
                if row.kind == "bkvd":
                    first = next(pieces)
                    expected = self._expected(c, links[at:], part, first)
                    pieces = chain([first], pieces)
                feed.link(at, row.kind, row.stored, sample, pieces)
            if row.kind == "full":
                return
        raise Damaged(links[-1].id, _NO_PREFIX, invariant="delta-parent", version=links[-1].version)

    def _expected(self, c: Connection, links: Sequence[Link], part: str, first: Bytes) -> int:
        """The sample hash that a delta, whose first bytes are given, names; it has to name the next link as it is."""
        link, row = links[0], links[0].rows[part]
        with _delta_of(link.id, row):
            found = bkvd.header(first)
        if found.size != row.size:
            raise Damaged(link.id, f"the delta of its {part} state has another size than its row", version=link.version)
        above = links[1].rows.get(part) if len(links) > 1 else None
        named = above is not None and (found.parent_id, found.parent_size) == (link.parent, above.size)
        if not named or link.parent != links[1].id or found.parent_hash not in self._samples_of(c, links[1:], part):
            raise Damaged(link.id, f"its {part} state: {_NO_PREFIX}", invariant="delta-parent", version=link.version)
        return found.parent_hash

    def _samples_of(self, c: Connection, links: Sequence[Link], part: str) -> Iterator[int]:
        """The sample hash that the first link's row has, and the one of its state, in case the row is wrong."""
        if links[0].rows[part].sample is not None:
            yield self.sample(c, links, part)
        yield self.computed_sample(c, links, part)


def _part(held: CachedEntry, row: BlobRow) -> Bytes:
    found = held.main if row.part == "main" else held.draft
    assert found is not None
    return found


@contextmanager
def own_bytes(c: Connection, id: int, version: tuple[int, ...]) -> Iterator[None]:
    """Turns what reading the chunks of an entry raises on damage into Damaged, which names the entry."""
    try:
        yield
    except Damaged as error:
        if error.version is None:
            error.version = version
        raise
    except blobs.UnreadableBlob as error:
        raise Damaged(id, f"its state {error}", invariant="chunks-complete", version=version) from error
    except MalformedError as error:
        if read_failed(c):
            raise
        raise Damaged(id, f"its state cannot be read: {error}", version=version) from error

"""Version 1 to 2: meta blocks become columns, states go into chunks with a digest, deltas are tied to their parents.

The new file has larger pages and can shrink; neither can be had in a file that exists without writing all of it anew, so
the step rebuilds.

Frozen: `schema_v2.sql`, sizes, digest and the meaning of a cut are version 2's own, whatever later versions make of them.
Of kvstore the step uses the formats that never change (BKVD, the meta block), errors, and `layout.parse`: where a state
can be cut is a fact of the state, and a parser that understands more of them makes the upgraded store better, not other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import xxhash

from kvstore import layout
from kvstore.errors import LayoutError
from kvstore.storage.db import Connection

from ..base import Outcome, Progress, Record, Step
from . import reader_v1
from .reader_v1 import Bytes, Lost, Old, Part, Reader, signed

PAGE_SIZE = 65536
# As version 2's own writer cuts a state: a chunk fills whole pages. Any size can be read.
CHUNK_BYTES = 8199 - 17 + 16 * 65532
SCHEMA_PAGES = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Blob:
    """One state to be written: `data` are the stored bytes; `digest` and `size` belong to the decoded state."""

    part: str
    kind: str
    data: Bytes
    size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where a state can be cut: at any token, or at the counts of its checkpoints."""

    any: bool
    counts: tuple[int, ...]


def schema_sql() -> str:
    """The schema of version 2, as SQL."""
    return (resources.files(__package__) / "schema_v2.sql").read_text(encoding="utf-8")


def _digest(data: Any) -> bytes:
    """XXH3-128, big-endian."""
    return bytes(xxhash.xxh3_128_digest(data))


def _cuts(state: Bytes, n_tokens: int) -> _Cuts:
    """The token counts at which this state can be cut; none if its layout is not understood."""
    try:
        found = layout.parse(state)
    except LayoutError:
        return _Cuts(False, ())
    if found.can_crop:
        return _Cuts(True, ())
    counts = {c.n_tokens for c in found.checkpoints or () if 0 < c.n_tokens < n_tokens}
    return _Cuts(False, tuple(sorted(n for n in counts if found.crop_limit(n) == n)))


def room(c: Connection) -> int:
    """The maximum size of the new file: a small value may leave most of a page empty, a large one most of its last two."""
    values = sum(min(3 * n + 256, n + n // 256 + 2 * PAGE_SIZE) for n in reader_v1.largest(c))
    (n_entries,) = c.execute("SELECT count(*) FROM entries").fetchone() or (0,)
    return int(values + 4096 * n_entries + SCHEMA_PAGES * PAGE_SIZE)


def examine(c: Connection) -> Outcome:
    reader = Reader(c, "the store")
    return _outcome(len(reader.examine()), reader.records)


def _outcome(entries: int, records: list[Record]) -> Outcome:
    left_out = {r.id for r in records if not r.kept}
    return Outcome(entries, tuple(replace(r, kept=r.id not in left_out) for r in records))


def apply(old: Connection, new: Connection, progress: Progress) -> Outcome:
    for _ in new.execute(schema_sql()):
        pass
    reader = Reader(old, "the store")
    entries = reader.examine()
    writer = _Writer(new)
    progress(0, len(entries))
    for done, entry in enumerate(entries, 1):
        try:
            _convert(reader, writer, entry)
        except Lost as lost:
            reader.records.append(Record(entry.id, str(lost), False))
        progress(done, len(entries))
    new.execute(
        """INSERT INTO families(id, saved, reused)
 SELECT family, sum(saved), sum(reused) FROM meta GROUP BY family HAVING sum(saved) + sum(reused) > 0"""
    )
    return _outcome(len(writer.written), reader.records)


def _convert(reader: Reader, writer: _Writer, old: Old) -> None:
    """Reads an entry and writes it to the new file. Writes nothing if the entry turns out to be lost."""
    parent = old.main.parent if old.main.parent in writer.whole else 0
    main, state = _blob(reader, "main", old.main, parent)
    cuts = _cuts(state, old.n_tokens)
    del state
    blobs = [main]
    if old.draft is not None:
        try:
            blobs.append(_blob(reader, "draft", old.draft, parent)[0])
        except Lost as lost:
            reader.records.append(Record(old.id, f"its draft state is lost: {lost}", True))
    if old.main.parent and not parent:
        reader.records.append(Record(old.id, f"stored whole: its parent {old.main.parent:016x} is not kept whole", True))
    writer.write(old, reader.tokens(old.id), blobs, cuts, parent)


def _blob(reader: Reader, name: str, part: Part, parent: int) -> tuple[_Blob, Bytes]:
    """A state in the form that will be stored, and the state itself. It stays a delta only of `parent`."""
    data = reader.stored(part)
    if not part.parent:
        return _Blob(name, "full", data, data.size, _digest(data)), data
    state = reader.decoded(data, name, part.parent)
    if state.size == 0:
        raise Lost("its delta gives an empty state")
    kind, kept = ("bkvd", data) if part.parent == parent else ("full", state)
    return _Blob(name, kind, kept, state.size, _digest(state)), state


class _Writer:
    """Writes entries into a new file of version 2. `written` are the ids so far, `whole` those that can be parents."""

    def __init__(self, c: Connection) -> None:
        self._c = c
        self._fingerprints: dict[str, int] = {}
        self.written: set[int] = set()
        self.whole: set[int] = set()

    def write(self, old: Old, tokens: bytes, blobs: list[_Blob], cuts: _Cuts, parent: int) -> None:
        c, id, meta = self._c, signed(old.id), old.meta
        fingerprint = self._fingerprint(old.fingerprint)
        c.execute(
            "INSERT INTO entries(id, fingerprint, cut_any, n_tokens, tokens) VALUES(?,?,?,?,?)",
            (id, fingerprint, int(cuts.any), old.n_tokens, tokens),
        )
        c.execute(
            """INSERT INTO meta(entry, class, source, saved, reused, created_at, last_used, use_order, expires_at, ttl, hits,
 family, n_input, size, stored, parent, excerpt) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)""",
            (
                id, meta.entry_class, meta.source, int(meta.saved), int(meta.reused), meta.created_at, meta.last_used,
                old.use_order, meta.expires_at, meta.ttl, signed(meta.hits), signed(meta.family), meta.n_input,
                sum(b.size for b in blobs), sum(b.data.size for b in blobs), signed(parent) if parent else None,
                meta.excerpt,
            ),
        )  # fmt: skip
        c.executemany(
            "INSERT INTO cuts(entry, fingerprint, n_tokens, tokens) VALUES(?,?,?,?)",
            [(id, fingerprint, n, tokens[: 4 * n]) for n in cuts.counts],
        )
        for blob in blobs:
            c.execute(
                "INSERT INTO blobs(entry, part, kind, size, stored, digest) VALUES(?,?,?,?,?,?)",
                (id, blob.part, blob.kind, blob.size, blob.data.size, blob.digest),
            )
            row = c.last_insert_rowid()
            for seq, at in enumerate(range(0, blob.data.size, CHUNK_BYTES)):
                piece = blob.data[at : at + CHUNK_BYTES]
                c.execute("INSERT INTO chunks(blob, seq, data) VALUES(?,?,?)", (row, seq, piece))
        self.written.add(old.id)
        if not parent:
            self.whole.add(old.id)

    def _fingerprint(self, text: str) -> int:
        if text not in self._fingerprints:
            self._c.execute("INSERT INTO fingerprints(text) VALUES(?)", (text,))
            self._fingerprints[text] = self._c.last_insert_rowid()
        return self._fingerprints[text]


STEP = Step(
    number=2,
    name="columns, chunks and digests",
    description="Meta blocks become columns, states are cut into chunks and get a digest, deltas are tied to their parents. "
    "The file is written anew, with larger pages and so that it can shrink.",
    precondition=reader_v1.missing_tables,
    examine=examine,
    apply=apply,
    rebuilds=True,
    room=room,
)

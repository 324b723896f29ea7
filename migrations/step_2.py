"""Version 1 to 2: meta blocks become columns, states go into chunks with a digest, deltas are tied to their parents.

The new file has larger pages and can shrink; neither can be had in a file that exists without writing all of it anew, so
the step rebuilds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources

from kvstore import db, policy
from kvstore.db import Connection
from kvstore.hashing import digest
from kvstore.queries import signed
from kvstore.records import Bytes

from . import version_1
from .base import Outcome, Progress, Record, Step
from .version_1 import Lost, Old, Part, Reader

# As version 2's own writer cuts a state: a chunk fills whole pages. Any size can be read.
CHUNK_BYTES = 8199 - 17 + 16 * 65532
SCHEMA_PAGES = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Blob:
    """One state on its way into the new file: `data` is what is stored, `digest` and `size` are those of the state."""

    part: str
    kind: str
    data: Bytes
    size: int
    digest: bytes


def schema_sql() -> str:
    # A version 3 comes with a copy of version 2's schema in this folder, for this line.
    return (resources.files("kvstore") / "schema.sql").read_text(encoding="utf-8")


def room(c: Connection) -> int:
    """The most that the new file can have: a value may leave most of a page empty, a large one most of its last two."""
    page = db.PAGE_SIZE
    values = sum(min(3 * n + 256, n + n // 256 + 2 * page) for n in version_1.largest(c))
    (n_entries,) = c.execute("SELECT count(*) FROM entries").fetchone() or (0,)
    return int(values + 4096 * n_entries + SCHEMA_PAGES * page)


def examine(c: Connection) -> Outcome:
    reader = Reader(c, "the store")
    return _outcome(len(reader.examine()), reader.records)


def _outcome(entries: int, records: list[Record]) -> Outcome:
    gone = {r.id for r in records if not r.kept}
    return Outcome(entries, tuple(replace(r, kept=r.id not in gone) for r in records))


def apply(old: Connection, new: Connection, progress: Progress) -> Outcome:
    db.run_script(new, schema_sql())
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
    """Reads an entry and writes it anew; nothing is written where it turns out to be lost."""
    parent = old.main.parent if old.main.parent in writer.whole else 0
    main, state = _blob(reader, "main", old.main, parent)
    cuts = policy.cuts_of(state, old.n_tokens)
    del state
    blobs = [main]
    if old.draft is not None:
        try:
            blobs.append(_blob(reader, "draft", old.draft, parent)[0])
        except Lost as lost:
            reader.records.append(Record(old.id, f"its draft state is gone: {lost}", True))
    if old.main.parent and not parent:
        reader.records.append(Record(old.id, f"stored whole: its parent {old.main.parent:016x} is not kept whole", True))
    writer.write(old, reader.tokens(old.id), blobs, cuts, parent)


def _blob(reader: Reader, name: str, part: Part, parent: int) -> tuple[_Blob, Bytes]:
    """A state in the form that will be stored, and the state itself. It stays a delta only of `parent`."""
    data = reader.stored(part)
    if not part.parent:
        return _Blob(name, "full", data, data.size, digest(data)), data
    state = reader.decoded(data, name, part.parent)
    if state.size == 0:
        raise Lost("its delta gives an empty state")
    kind, kept = ("bkvd", data) if part.parent == parent else ("full", state)
    return _Blob(name, kind, kept, state.size, digest(state)), state


class _Writer:
    """Writes entries into a new file of version 2. `written` are the ids so far, `whole` those that can be parents."""

    def __init__(self, c: Connection) -> None:
        self._c = c
        self._fingerprints: dict[str, int] = {}
        self.written: set[int] = set()
        self.whole: set[int] = set()

    def write(self, old: Old, tokens: bytes, blobs: list[_Blob], cuts: policy.Cuts, parent: int) -> None:
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
    precondition=version_1.missing_tables,
    examine=examine,
    apply=apply,
    rebuilds=True,
    room=room,
)

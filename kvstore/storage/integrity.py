"""The SQL of `verify`, `repair` and `salvage`: a question for each invariant of schema.sql, and walks past damage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..types import CLASSES
from ..util.hashing import prefix_hash
from . import queries, queries_blobs, queries_prefixes
from .db import Connection
from .queries import signed, unsigned
from .queries_chains import CHILDLESS_BASES, MAX_DEPTH

Finding: TypeAlias = "tuple[int | None, str]"  # the entry, what is wrong with it

# The most ranges that a walk past damage looks into: a damaged page costs about 20, each 0.2 ms.
MAX_RANGES = 1 << 12


def whole_entry(c: Connection) -> Iterator[Finding]:
    for (id,) in c.execute("SELECT id FROM entries WHERE id NOT IN (SELECT entry FROM meta)"):
        yield unsigned(id), "it has no row in meta"
    sql = "SELECT id FROM entries WHERE id NOT IN (SELECT entry FROM blobs WHERE part = 'main' AND entry IS NOT NULL)"
    for (id,) in c.execute(sql):
        yield unsigned(id), "it has no main state"


def delta_parent(c: Connection) -> Iterator[Finding]:
    sql = """SELECT b.entry, b.part, m.parent, e.n_tokens, p.n_tokens, q.parent IS NULL,
 EXISTS (SELECT 1 FROM blobs d WHERE d.entry = m.parent AND d.part = b.part)
FROM blobs b JOIN meta m ON m.entry = b.entry JOIN entries e ON e.id = b.entry LEFT JOIN entries p ON p.id = m.parent
LEFT JOIN meta q ON q.entry = m.parent WHERE b.kind = 'bkvd'"""
    for id, part, parent, n, of_parent, whole, has_part in c.execute(sql):
        if parent is None:
            yield unsigned(id), f"its {part} state is a delta, and it has no parent"
        elif of_parent is None:
            yield unsigned(id), f"its parent {unsigned(parent):016x} is not there"
        elif of_parent >= n and not whole:
            yield unsigned(id), f"its parent {unsigned(parent):016x} has {of_parent} tokens, it has {n} itself"
        elif not has_part:
            yield unsigned(id), f"its parent {unsigned(parent):016x} has no {part} state"
    sql = f"""WITH RECURSIVE down(id, depth) AS (SELECT entry, 0 FROM meta WHERE parent IS NULL
 UNION ALL SELECT m.entry, d.depth + 1 FROM down d CROSS JOIN meta m ON m.parent = d.id WHERE d.depth <= {MAX_DEPTH})
 SELECT id FROM down WHERE depth > {MAX_DEPTH}"""
    for (id,) in c.execute(sql):
        yield unsigned(id), f"its chain has more than {MAX_DEPTH} entries"


def base(c: Connection) -> Iterator[Finding]:
    for (id,) in c.execute("SELECT m.entry FROM meta m JOIN entries e ON e.id = m.entry WHERE m.base <> e.base"):
        yield unsigned(id), "meta and entries do not agree whether it is a base"
    for (id,) in c.execute(CHILDLESS_BASES):
        yield unsigned(id), "it is a base, and nothing is stored against it"


def sync_bases(c: Connection) -> None:
    """Makes meta say what entries does of bases."""
    sql = """UPDATE meta SET base = 1 - base
 WHERE entry IN (SELECT m.entry FROM meta m JOIN entries e ON e.id = m.entry WHERE m.base <> e.base)"""
    c.execute(sql)


def chunks_complete(c: Connection) -> Iterator[Finding]:
    sql = """SELECT b.entry, b.part, b.stored, count(c.id), coalesce(sum(length(c.data)), 0), min(c.seq), max(c.seq)
FROM blobs b LEFT JOIN chunks c ON c.blob = b.id WHERE b.entry IS NOT NULL GROUP BY b.id"""
    for id, part, stored, n, n_bytes, first, last in c.execute(sql):
        if n_bytes != stored or not n or first != 0 or last != n - 1:
            yield unsigned(id), f"its {part} state has {n_bytes} of {stored} bytes in {n} chunks"


_ORPHANS = (
    ("meta", "entry", "entry NOT IN (SELECT id FROM entries)"),
    ("blobs", "entry", "entry IS NOT NULL AND entry NOT IN (SELECT id FROM entries)"),
    ("cuts", "entry", "entry NOT IN (SELECT id FROM entries)"),
    ("prefixes", "entry", "entry NOT IN (SELECT id FROM entries)"),
    ("chunks", "NULL", "blob NOT IN (SELECT id FROM blobs)"),
)


def no_orphan(c: Connection) -> Iterator[Finding]:
    for table, column, condition in _ORPHANS:
        if table == "prefixes" and not queries_prefixes.has_table(c):
            continue  # a file of an older program, until it is opened for writing
        for id, n in c.execute(f"SELECT {column}, count(*) FROM {table} WHERE {condition} GROUP BY 1"):
            yield None if id is None else unsigned(id), f"{n} rows of {table} refer to nothing"


_NO_DELTA = "NOT EXISTS (SELECT 1 FROM blobs WHERE blobs.entry = meta.entry AND kind <> 'full')"


def needless_parent(c: Connection) -> Iterator[Finding]:
    for (id,) in c.execute(f"SELECT entry FROM meta WHERE parent IS NOT NULL AND {_NO_DELTA}"):
        yield unsigned(id), "it names a parent, and is stored whole"


def clear_parents(c: Connection) -> None:
    """Makes whole entries that name a parent entries without one."""
    c.execute(f"UPDATE meta SET parent = NULL WHERE parent IS NOT NULL AND {_NO_DELTA}")


def lost_fingerprint(c: Connection) -> Iterator[Finding]:
    for (id,) in c.execute("SELECT id FROM entries WHERE fingerprint NOT IN (SELECT id FROM fingerprints)"):
        yield unsigned(id), "its fingerprint is not there"


def staged(c: Connection) -> Iterator[Finding]:
    for blob, has_entry in c.execute("SELECT id, entry IS NOT NULL FROM blobs WHERE (entry IS NULL) <> (writer IS NOT NULL)"):
        yield None, f"blob {blob} {'belongs to an entry and has' if has_entry else 'has no entry and no'} writer"


# Capped, so that no damaged size makes the sum an error: it then differs from the total.
_SUMS = f"""SELECT iif(base, 'base', class), count(*), sum(min(size, {1 << 52})), sum(min(stored, {1 << 52}))
 FROM meta GROUP BY 1"""


def totals(c: Connection) -> Iterator[Finding]:
    sums = {row[0]: row[1:] for row in c.execute(_SUMS)}
    held = {name: (t.entries, t.size, t.stored) for name, t in queries.totals(c).items()}
    for name in sorted(sums.keys() | held.keys()):
        if sums.get(name, (0, 0, 0)) != held.get(name):
            yield None, f"totals of {name} entries are {held.get(name)}, the sums {sums.get(name, (0, 0, 0))}"
    sql = """SELECT m.entry, m.size, m.stored, sum(b.size), sum(b.stored) FROM meta m JOIN blobs b ON b.entry = m.entry
GROUP BY m.entry HAVING m.size <> sum(b.size) OR m.stored <> sum(b.stored)"""
    for id, size, stored, b_size, b_stored in c.execute(sql):
        yield unsigned(id), f"it has {size} and {stored} bytes in meta, {b_size} and {b_stored} in its states"


def clear_writers(c: Connection) -> None:
    c.execute("UPDATE blobs SET writer = NULL WHERE entry IS NOT NULL AND writer IS NOT NULL")


def rebuild_totals(c: Connection) -> None:
    """Sets the sizes in meta and the sums in totals to what the states have."""
    c.execute("DELETE FROM totals")  # first: the triggers then add nothing to sums that may be out of range
    c.execute(
        """UPDATE meta SET (size, stored) = (SELECT sum(size), sum(stored) FROM blobs WHERE blobs.entry = meta.entry)
 WHERE EXISTS (SELECT 1 FROM blobs WHERE blobs.entry = meta.entry)"""
    )
    c.executemany("INSERT INTO totals VALUES(?, 0, 0, 0)", [(name,) for name in (*CLASSES, queries.BASE)])
    c.execute(f"INSERT OR REPLACE INTO totals {_SUMS}")


def cuts(c: Connection) -> Iterator[Finding]:
    sql = """SELECT k.entry, k.n_tokens, e.cut_any OR e.base, k.n_tokens >= e.n_tokens
 OR k.fingerprint <> e.fingerprint OR k.tokens <> substr(e.tokens, 1, 4 * k.n_tokens)
FROM cuts k JOIN entries e ON e.id = k.entry"""
    for id, n, cut_any, wrong in c.execute(sql):
        if cut_any or wrong:
            yield unsigned(id), f"its cut at {n} tokens is wrong"


_MISSING_PREFIXES = (
    """SELECT id, n_tokens FROM entries e WHERE cut_any = 0 AND base = 0 AND NOT EXISTS (SELECT 1 FROM prefixes p
 WHERE p.entry = e.id AND p.n_tokens = e.n_tokens AND p.cut = 0)""",
    """SELECT k.entry, k.n_tokens FROM cuts k JOIN entries e ON e.id = k.entry WHERE e.cut_any = 0 AND NOT EXISTS (
 SELECT 1 FROM prefixes p WHERE p.entry = k.entry AND p.n_tokens = k.n_tokens AND p.cut = 1)""",
)


def prefixes(c: Connection) -> Iterator[Finding]:
    if not queries_prefixes.has_table(c):
        return
    for sql in _MISSING_PREFIXES if queries_prefixes.complete(c) else ():
        for id, n in c.execute(sql):
            yield unsigned(id), f"its first {n} tokens are not in prefixes"
    sql = """SELECT p.entry, p.n_tokens FROM prefixes p JOIN entries e ON e.id = p.entry
 WHERE e.cut_any = 1 OR e.base = 1 OR p.fingerprint <> e.fingerprint OR CASE p.cut WHEN 0 THEN p.n_tokens <> e.n_tokens
 ELSE NOT EXISTS (SELECT 1 FROM cuts k WHERE k.entry = p.entry AND k.n_tokens = p.n_tokens) END"""
    for id, n in c.execute(sql):
        yield unsigned(id), f"its row in prefixes of {n} tokens is wrong"
    # A damaged count of tokens is another finding.
    sql = """SELECT p.entry, p.n_tokens, p.hash, substr(e.tokens, 1, 4 * p.n_tokens) FROM prefixes p
 JOIN entries e ON e.id = p.entry WHERE p.hash IS NOT NULL AND length(e.tokens) >= 4 * p.n_tokens"""
    for id, n, hash, key in c.execute(sql):
        if prefix_hash(key) != hash:
            yield unsigned(id), f"the hash of its first {n} tokens is wrong"


def set_cuts(c: Connection, id: int, cut_any: bool, counts: tuple[int, ...]) -> None:
    c.execute("DELETE FROM cuts WHERE entry = ?", (signed(id),))
    c.execute("DELETE FROM prefixes WHERE entry = ? AND entry IN (SELECT id FROM entries WHERE base = 1)", (signed(id),))
    c.execute("UPDATE entries SET cut_any = ? WHERE id = ?", (int(cut_any), signed(id)))
    row = c.execute("SELECT fingerprint, tokens FROM entries WHERE id = ?", (signed(id),)).fetchone()
    if row is not None and not cut_any:
        queries.insert_cuts(c, id, row[0], row[1], counts)


INVARIANTS: tuple[tuple[str, Callable[[Connection], Iterator[Finding]]], ...] = (
    ("whole-entry", whole_entry),
    ("delta-parent", delta_parent),
    ("base", base),
    ("chunks-complete", chunks_complete),
    ("no-orphan", no_orphan),
    ("no-orphan", needless_parent),
    ("no-orphan", lost_fingerprint),
    ("staged", staged),
    ("totals", totals),
    ("cuts", cuts),
    ("prefixes", prefixes),
)


def reindex(c: Connection) -> None:
    c.execute("REINDEX")


# -- walks past damage: ids from wherever they can be read

# A column of ids, and the b-tree it is read from (NOT INDEXED: the table itself).
ID_SOURCES = (
    "SELECT id FROM entries NOT INDEXED WHERE id BETWEEN ? AND ?",
    "SELECT entry FROM meta NOT INDEXED WHERE entry BETWEEN ? AND ?",
    "SELECT entry FROM blobs WHERE entry BETWEEN ? AND ?",
)


def walk(read: Callable[[str, int, int], tuple[list[int], bool]], sql: str) -> set[int]:
    """The values that `sql` gives between two bounds, wherever they can be read.

    `read` gives the values up to the first damage, and whether there was any. Damage is closed in from both sides; what
    lies between is halved, so that one damaged page hides its own rows alone.
    """
    found: set[int] = set()
    ranges = deque([(-(1 << 63), (1 << 63) - 1)])
    for _ in range(MAX_RANGES):
        if not ranges:
            break
        low, high = ranges.popleft()
        up, damaged = read(sql + " ORDER BY 1", low, high)
        found.update(up)
        if not damaged:
            continue
        low = up[-1] + 1 if up else low
        down, _ = read(sql + " ORDER BY 1 DESC", low, high)
        found.update(down)
        high = down[-1] - 1 if down else high
        if low < high:
            middle = (low + high) // 2
            ranges += [(low, middle), (middle + 1, high)]
    return {unsigned(id) for id in found}


def tokens_by_index(c: Connection, id: int) -> tuple[int, bytes] | None:
    """(fingerprint, tokens) of an entry from the prefix index, where its own row cannot be read."""
    sql = """SELECT fingerprint, tokens FROM entries INDEXED BY entries_by_tokens
 WHERE +id = ? AND fingerprint > 0 AND base IN (0, 1) AND cut_any IN (0, 1)"""
    row = c.execute(sql, (signed(id),)).fetchone()
    return None if row is None else (row[0], row[1])


def fingerprint_by_index(c: Connection, fingerprint: int) -> str | None:
    """The text of a fingerprint from the index that makes it unique."""
    sql = "SELECT text FROM fingerprints INDEXED BY sqlite_autoindex_fingerprints_1 WHERE +id = ? AND text >= ''"
    row = c.execute(sql, (fingerprint,)).fetchone()
    return None if row is None else row[0]


# Rows of the tables themselves, where an index cannot be trusted.
BLOB_IDS = "SELECT id FROM blobs NOT INDEXED WHERE id BETWEEN ? AND ?"
CHUNK_IDS = "SELECT id FROM chunks NOT INDEXED WHERE id BETWEEN ? AND ?"


def blob_row(c: Connection, blob: int) -> tuple[int, queries_blobs.BlobRow] | None:
    """(entry, row) of a blob that belongs to an entry."""
    sql = "SELECT entry, id, part, kind, size, stored, digest, sample FROM blobs NOT INDEXED WHERE id = ? AND entry IS NOT NULL"
    row = c.execute(sql, (blob,)).fetchone()
    return None if row is None else (unsigned(row[0]), queries_blobs.blob_row(unsigned(row[0]), row[1:]))


def chunk_row(c: Connection, chunk: int) -> tuple[int, int, int, int] | None:
    """(blob, rowid, seq, bytes) of a chunk."""
    sql = "SELECT blob, id, seq, length(data) FROM chunks NOT INDEXED WHERE id = ?"
    row: tuple[int, int, int, int] | None = c.execute(sql, (chunk,)).fetchone()
    return row

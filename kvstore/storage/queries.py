"""The SQL of entries and their meta, as typed functions of a connection. Ids are unsigned outside, signed in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CorruptStoreError, StoreIOError
from ..types import CLASSES, SOURCES, Entry, Tokens, hex_id
from . import queries_prefixes
from .db import Connection
from .sqlite import read_failed

_U64 = 1 << 64
I63 = 1 << 63
BASE = "base"  # the row of totals for entries that are kept because others are stored against them


def signed(id: int) -> int:
    return id - _U64 if id >= I63 else id


def unsigned(id: int) -> int:
    return id + _U64 if id < 0 else id


@dataclass(frozen=True, slots=True)
class Totals:
    entries: int
    size: int
    stored: int


# -- fingerprints


def fingerprint_id(c: Connection, text: str) -> int | None:
    row = c.execute("SELECT id FROM fingerprints WHERE text = ?", (text,)).fetchone()
    return None if row is None else int(row[0])


def entries_of_others(c: Connection, text: str) -> int:
    """How many entries have another fingerprint than this one."""
    sql = "SELECT count(*) FROM entries WHERE fingerprint NOT IN (SELECT id FROM fingerprints WHERE text = ?)"
    row = c.execute(sql, (text,)).fetchone()
    return 0 if row is None else int(row[0])


def add_fingerprint(c: Connection, text: str) -> int:
    c.execute("INSERT INTO fingerprints(text) VALUES(?) ON CONFLICT DO NOTHING", (text,))
    found = fingerprint_id(c, text)
    assert found is not None
    return found


# -- entries and meta

ENTRY = """e.id, e.n_tokens, m.n_images, m.class, m.source, m.created_at, m.last_used, m.expires_at, m.ttl, m.hits,
 m.family, m.n_input, CAST(m.excerpt AS BLOB), m.parent, m.size, m.stored"""
_FROM = "FROM entries e JOIN meta m ON m.entry = e.id"


# Unix seconds that a row may hold: a date with more than four digits in its year means damage, or a clock that was wrong.
_LAST_SECOND = 253402300799


def checked_int(id: int, name: str, value: Any, low: int, high: int = I63 - 1) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise damaged_row(id, f"{name} is {shown(value)}")
    return value


def _seconds(id: int, name: str, value: Any) -> int:
    return max(0, min(checked_int(id, name, value, -I63), _LAST_SECOND))


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def damaged_row(id: int, what: str) -> CorruptStoreError:
    return CorruptStoreError(f"entry {hex_id(id)} has a damaged row: {what}", entry=hex_id(id))


def entry_of(row: Sequence[Any]) -> Entry:
    """An entry from a row that anything may have written. Raises CorruptStoreError."""
    if not isinstance(row[0], int):
        raise CorruptStoreError(f"the id of an entry is {shown(row[0])}")
    id = unsigned(row[0])
    if row[3] not in CLASSES:
        raise damaged_row(id, f"its class is {shown(row[3])}")
    if row[4] not in SOURCES:
        raise damaged_row(id, f"its source is {shown(row[4])}")
    if not isinstance(row[12], bytes):
        raise damaged_row(id, f"its excerpt is {shown(row[12])}")
    return Entry(
        id=id,
        n_tokens=checked_int(id, "n_tokens", row[1], 0),
        n_images=checked_int(id, "n_images", row[2], 0),
        entry_class=row[3],
        source=row[4],
        created_at=_seconds(id, "created_at", row[5]),
        last_used=_seconds(id, "last_used", row[6]),
        expires_at=None if row[7] is None else _seconds(id, "expires_at", row[7]),
        ttl=None if row[8] is None else min(checked_int(id, "ttl", row[8], 1), _LAST_SECOND),
        hits=unsigned(checked_int(id, "hits", row[9], -I63)),
        family=unsigned(checked_int(id, "family", row[10], -I63)),
        n_input=checked_int(id, "n_input", row[11], -I63),
        excerpt=row[12].decode("utf-8", "replace"),
        parent=None if row[13] is None else unsigned(checked_int(id, "parent", row[13], -I63)),
        size=checked_int(id, "size", row[14], 1),
        stored=checked_int(id, "stored", row[15], 1),
    )


def unreadable(id: int) -> Entry:
    """An `Entry` in place of one whose row is damaged, for the report of its drop."""
    return Entry(
        id=id, n_tokens=0, n_images=0, entry_class="normal", source="default", created_at=0, last_used=0, expires_at=None,
        ttl=None, hits=0, family=0, n_input=0, excerpt="", parent=None, size=0, stored=0,
    )  # fmt: skip


def entry(c: Connection, id: int, fingerprint: int | None, *, bases: bool = False) -> Entry | None:
    """The entry of this id; with a fingerprint, only if it is the entry's. A base is none, unless `bases` are asked for."""
    sql = f"SELECT {ENTRY} {_FROM} WHERE e.id = ? AND (?2 IS NULL OR e.fingerprint = ?2) AND m.base <= ?3"
    row = c.execute(sql, (signed(id), fingerprint, int(bases))).fetchone()
    return None if row is None else entry_of(row)


def meta_alone(c: Connection, id: int) -> Entry | None:
    """An entry by its row in meta, which may be all that is left of it; its n_tokens is 0."""
    columns = ENTRY.replace("e.id", "m.entry").replace("e.n_tokens", "0")
    row = c.execute(f"SELECT {columns} FROM meta m WHERE m.entry = ?", (signed(id),)).fetchone()
    return None if row is None else entry_of(row)


def readable(rows: Iterable[Sequence[Any]]) -> Iterator[Entry]:
    """The entries of rows, without those that are damaged: `verify` names them, and their next get drops them."""
    for row in rows:
        with suppress(CorruptStoreError):
            yield entry_of(row)


def fingerprint_of(c: Connection, id: int) -> str | None:
    sql = "SELECT f.text FROM entries e JOIN fingerprints f ON f.id = e.fingerprint WHERE e.id = ?"
    row = c.execute(sql, (signed(id),)).fetchone()
    return None if row is None else str(row[0])


def tokens(c: Connection, id: int) -> Tokens | None:
    row = c.execute("SELECT tokens FROM entries WHERE id = ?", (signed(id),)).fetchone()
    if row is None:
        return None
    if not isinstance(row[0], bytes) or len(row[0]) % 4:
        raise damaged_row(id, f"its tokens are {shown(row[0])}")
    return np.frombuffer(row[0], dtype="<i4").astype(np.int32)


def head(c: Connection, id: int) -> bytes | None:
    """The header of the file that an entry came in, its tokens cut out; None if it did not come in a file."""
    row = c.execute("SELECT head FROM entries WHERE id = ?", (signed(id),)).fetchone()
    if row is not None and not isinstance(row[0], bytes | None):
        raise damaged_row(id, f"its head is {shown(row[0])}")
    return None if row is None else row[0]


def set_head(c: Connection, id: int, head: bytes | None) -> None:
    c.execute("UPDATE entries SET head = ? WHERE id = ?", (head, signed(id)))


def insert_entry(
    c: Connection,
    e: Entry,
    fingerprint: int,
    token_bytes: bytes,
    cut_any: bool,
    head: bytes | None = None,
    *,
    saved: bool = False,
) -> None:
    """saved: it is counted as saved in its family."""
    c.execute(
        "INSERT INTO entries(id, fingerprint, cut_any, n_tokens, tokens, head) VALUES(?,?,?,?,?,?)",
        (signed(e.id), fingerprint, int(cut_any), e.n_tokens, token_bytes, head),
    )
    c.execute(
        """INSERT INTO meta(entry, class, source, created_at, last_used, expires_at, ttl, hits, family, n_input, n_images,
 size, stored, parent, excerpt, use_order, saved) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)""",
        (
            signed(e.id), e.entry_class, e.source, e.created_at, e.last_used, e.expires_at, e.ttl, signed(e.hits),
            signed(e.family), e.n_input, e.n_images, e.size, e.stored,
            None if e.parent is None else signed(e.parent), e.excerpt, next_use(c), int(saved),
        ),
    )  # fmt: skip
    if not cut_any:
        queries_prefixes.set_hashes(c, signed(e.id), token_bytes)


# A place in the order of use beyond this is damage: a store that counts a million uses a second gets here in 146,000 years.
_LAST_USE = 1 << 62


_NEXT_USE = "SELECT max({})".format(
    ", ".join(
        f"ifnull((SELECT max(use_order) FROM meta WHERE class = '{name}' AND base = 0 AND use_order < {_LAST_USE}), 0)"
        for name in CLASSES
    )
)


def next_use(c: Connection) -> int:
    """The next place in the order of use."""
    return 1 + int(c.execute(_NEXT_USE).get)


def update_meta(c: Connection, e: Entry) -> None:
    """Writes every field of meta anew."""
    c.execute(
        """UPDATE meta SET class=?, source=?, created_at=?, last_used=?, expires_at=?, ttl=?, hits=?, family=?, n_input=?,
 n_images=?, size=?, stored=?, parent=?, excerpt=? WHERE entry=?""",
        (
            e.entry_class, e.source, e.created_at, e.last_used, e.expires_at, e.ttl, signed(e.hits), signed(e.family),
            e.n_input, e.n_images, e.size, e.stored, None if e.parent is None else signed(e.parent), e.excerpt, signed(e.id),
        ),
    )  # fmt: skip


def set_class(c: Connection, id: int, entry_class: str, source: str) -> None:
    c.execute("UPDATE meta SET class = ?, source = ? WHERE entry = ?", (entry_class, source, signed(id)))


def set_expiry(c: Connection, id: int, ttl: int | None, expires_at: int | None) -> None:
    c.execute("UPDATE meta SET ttl = ?, expires_at = ? WHERE entry = ?", (ttl, expires_at, signed(id)))


def set_stored(c: Connection, id: int, stored: int, parent: int | None) -> None:
    c.execute(
        "UPDATE meta SET stored = ?, parent = ? WHERE entry = ?",
        (stored, None if parent is None else signed(parent), signed(id)),
    )


def family_flags(c: Connection, id: int) -> tuple[bool, bool]:
    """Whether an entry was counted in its family as saved, and as reused."""
    row = c.execute("SELECT saved, reused FROM meta WHERE entry = ?", (signed(id),)).fetchone()
    return (False, False) if row is None else (bool(row[0]), bool(row[1]))


def set_family_flags(c: Connection, id: int, saved: bool, reused: bool) -> None:
    c.execute("UPDATE meta SET saved=?, reused=? WHERE entry=?", (int(saved), int(reused), signed(id)))


def insert_cuts(c: Connection, id: int, fingerprint: int, token_bytes: bytes, counts: Sequence[int]) -> None:
    """Registers the token counts at which an entry that cannot be cut anywhere can be cut."""
    c.executemany(
        "INSERT INTO cuts(entry, fingerprint, n_tokens, tokens) VALUES(?,?,?,?)",
        [(signed(id), fingerprint, n, token_bytes[: 4 * n]) for n in counts],
    )
    if counts:
        queries_prefixes.set_hashes(c, signed(id), token_bytes)


def cut_counts(c: Connection, id: int) -> list[int]:
    return [r[0] for r in c.execute("SELECT n_tokens FROM cuts WHERE entry = ? ORDER BY n_tokens", (signed(id),))]


def cut_any(c: Connection, id: int) -> bool:
    row = c.execute("SELECT cut_any FROM entries WHERE id = ?", (signed(id),)).fetchone()
    return row is not None and bool(row[0])


def delete_entry(c: Connection, id: int) -> None:
    """Deletes an entry; its meta, blobs and chunks, and the entries stored against it, go with it (ON DELETE CASCADE)."""
    c.execute("DELETE FROM entries WHERE id = ?", (signed(id),))


# -- the order of token sequences


def _token_rows(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[int, bytes, int | None]]:
    """(id, tokens, expires_at) of the rows that are sound."""
    for id, tokens, expires_at in rows:
        if isinstance(id, int) and isinstance(tokens, bytes) and isinstance(expires_at, int | None):
            yield unsigned(id), tokens, expires_at


def at_or_before(
    c: Connection, fingerprint: int, cut: bool, key: bytes, *, base: bool = False
) -> Iterator[tuple[int, bytes, int | None]]:
    """(id, tokens, expires_at) of the entries, or of the bases, that sort at or before `key`, nearest first.

    A base does not expire: others need it.
    """
    sql = """SELECT e.id, e.tokens, iif(m.base, NULL, m.expires_at) FROM entries e JOIN meta m ON m.entry = e.id
 WHERE e.fingerprint = ? AND e.base = ? AND e.cut_any = ? AND e.tokens <= ? ORDER BY e.tokens DESC"""
    yield from _token_rows(c.execute(sql, (fingerprint, int(base), int(cut), key)))


def after(c: Connection, fingerprint: int, key: bytes) -> Iterator[tuple[int, bytes, int | None]]:
    """(id, tokens, expires_at) of the entries that can be cut anywhere and sort after `key`, nearest first."""
    sql = """SELECT e.id, e.tokens, m.expires_at FROM entries e JOIN meta m ON m.entry = e.id
 WHERE e.fingerprint = ? AND e.base = 0 AND e.cut_any = 1 AND e.tokens > ? ORDER BY e.tokens"""
    yield from _token_rows(c.execute(sql, (fingerprint, key)))


def newest_blob(c: Connection) -> int:
    """The last id that a blob was given."""
    return int(c.execute("SELECT seq FROM sqlite_sequence WHERE name = 'blobs'").get or 0)


def expiries_put_off(c: Connection) -> int:
    """How often an entry's expiry became a later one, or an entry one that can be cut (a trigger counts)."""
    return int(c.execute("SELECT CAST(value AS INTEGER) FROM counters WHERE name = 'put_off'").get or 0)


def entries_of_blobs_after(
    c: Connection, blob: int, fingerprint: int, limit: int
) -> list[tuple[int, bytes, int | None]]:
    """(id, tokens, expires_at) of up to `limit` entries with a newer blob that can be cut anywhere."""
    sql = """SELECT e.id, e.tokens, m.expires_at FROM blobs b CROSS JOIN entries e ON e.id = b.entry
 JOIN meta m ON m.entry = e.id WHERE b.id > ? AND e.fingerprint = ? AND m.base = 0 AND e.cut_any = 1 LIMIT ?"""
    return list(_token_rows(c.execute(sql, (blob, fingerprint, limit))))


def live_at_or_before(c: Connection, fingerprint: int, key: bytes, now: int) -> tuple[int, bytes] | None:
    """(id, tokens) of the live entry that can be cut anywhere and sorts nearest to `key`, at or before it."""
    return _nearest(c, "e.tokens <= ?3", "e.tokens DESC", fingerprint, key, now)


def live_after(c: Connection, fingerprint: int, key: bytes, now: int) -> tuple[int, bytes] | None:
    """(id, tokens) of the live entry that can be cut anywhere and sorts nearest to `key`, after it."""
    return _nearest(c, "e.tokens > ?3", "e.tokens", fingerprint, key, now)


def _nearest(
    c: Connection, side: str, order: str, fingerprint: int, key: bytes, now: int
) -> tuple[int, bytes] | None:
    sql = f"""SELECT e.id, e.tokens FROM entries e CROSS JOIN meta m ON m.entry = e.id
 WHERE e.fingerprint = ?1 AND e.base = 0 AND e.cut_any = 1 AND {side} AND (m.expires_at IS NULL OR m.expires_at > ?2)
 ORDER BY {order} LIMIT 1"""
    row = c.execute(sql, (fingerprint, now, key)).fetchone()
    return None if row is None else (unsigned(row[0]), row[1])


def cut_at_or_before(c: Connection, fingerprint: int, key: bytes) -> Iterator[tuple[int, bytes, int | None]]:
    """(entry, first tokens, expires_at) of the cuts that sort at or before `key`, nearest first."""
    sql = """SELECT k.entry, k.tokens, m.expires_at FROM cuts k JOIN meta m ON m.entry = k.entry
 WHERE k.fingerprint = ? AND k.tokens <= ? ORDER BY k.tokens DESC"""
    yield from _token_rows(c.execute(sql, (fingerprint, key)))


def whole_by_end(c: Connection, fingerprint: int, key: bytes) -> list[int]:
    """The signed ids of entries whose tokens are a prefix of `key`, longest first: those that can be cut anywhere, and bases.

    One seek for each token of the key (1 us), in an index of token counts and last tokens.
    """
    sql = """WITH RECURSIVE counts(n) AS (SELECT ?3 UNION ALL SELECT n - 1 FROM counts WHERE n > 1)
 SELECT e.id FROM counts CROSS JOIN entries e
 WHERE e.fingerprint = ?1 AND (e.cut_any = 1 OR e.base = 1) AND e.n_tokens = counts.n
 AND substr(e.tokens, -64) = substr(?2, max(1, 4 * counts.n - 63), min(64, 4 * counts.n))
 AND e.tokens = substr(?2, 1, 4 * counts.n)"""
    return [r[0] for r in c.execute(sql, (fingerprint, key, len(key) // 4))]


def same_tokens(c: Connection, fingerprint: int, key: bytes) -> list[int]:
    """The entries of these very tokens, without bases."""
    sql = "SELECT id FROM entries WHERE fingerprint = ? AND base = 0 AND cut_any IN (0, 1) AND tokens = ?"
    return [unsigned(r[0]) for r in c.execute(sql, (fingerprint, key))]


def continuing(c: Connection, fingerprint: int, key: bytes) -> list[int]:
    """Entries and bases whose tokens begin with `key` and that are stored whole, or against fewer tokens than it has."""
    end = _after_prefix(key)
    sql = """SELECT e.id FROM entries e JOIN meta m ON m.entry = e.id LEFT JOIN entries p ON p.id = m.parent
 WHERE e.fingerprint = ?1 AND e.base = ?2 AND e.cut_any = ?3 AND e.tokens > ?4 AND (?5 IS NULL OR e.tokens < ?5)
 AND coalesce(p.n_tokens, 0) < ?6"""
    return [
        unsigned(r[0])
        for base in (0, 1)
        for cut in (1, 0)
        for r in c.execute(sql, (fingerprint, base, cut, key, end, len(key) // 4))
    ]


def _after_prefix(key: bytes) -> bytes | None:
    """The least bytes that sort after everything that begins with `key`; None where nothing does."""
    stripped = key.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


MANY_ENTRIES = 4096  # about 10 ms of reading their rows


def family_tokens(
    c: Connection, fingerprint: int, family: int, now: int, limit: int
) -> list[tuple[int, bytes, int, int]]:
    """What may share a prefix that is not learned yet, in a family: (id of a live entry, tokens, size, tokens of the parent).

    Tokens and size are those of the part of the entry's chain that is its own: of the last base above it. The most recently
    used entries first, up to `limit` of the last 4 * `limit`; only those that can be cut anywhere, and none that is learned.
    Of a family of MANY_ENTRIES only what is among the 4 * MANY_ENTRIES that were used last.
    """
    few = "SELECT count(*) < ?2 FROM (SELECT 1 FROM meta WHERE family = ?1 AND base = 0 LIMIT ?2)"
    if c.execute(few, (signed(family), MANY_ENTRIES)).get:
        last = "SELECT entry, use_order FROM meta WHERE family = ?1 AND base = 0"
    else:  # then its last ones are found among the last entries of all
        last = " UNION ALL ".join(
            f"""SELECT * FROM (SELECT entry, use_order FROM
 (SELECT entry, use_order, family FROM meta WHERE class = '{name}' AND base = 0
 ORDER BY use_order DESC LIMIT {4 * MANY_ENTRIES}) WHERE family = ?1)"""
            for name in CLASSES
            if name != "learned"
        )
    sql = f"""WITH RECURSIVE top(entry, place) AS (SELECT * FROM ({last}) ORDER BY use_order DESC LIMIT 4 * ?4),
 up(leaf, place, id, depth) AS (
 SELECT t.entry, t.place, t.entry, 0 FROM top t CROSS JOIN meta m ON m.entry = t.entry
 WHERE m.class <> 'learned' AND (m.expires_at IS NULL OR m.expires_at > ?3)
 UNION ALL SELECT u.leaf, u.place, p.entry, u.depth + 1 FROM up u CROSS JOIN meta m ON m.entry = u.id
 CROSS JOIN meta p ON p.entry = m.parent WHERE p.base = 1 AND u.depth < 1000)
 SELECT u.leaf, e.tokens, m.size, coalesce(q.n_tokens, 0), max(u.place) FROM up u CROSS JOIN meta m ON m.entry = u.id
 CROSS JOIN entries e ON e.id = u.id LEFT JOIN meta p ON p.entry = m.parent LEFT JOIN entries q ON q.id = m.parent
 WHERE e.fingerprint = ?2 AND e.cut_any AND p.base IS NOT 1 GROUP BY u.id ORDER BY max(u.place) DESC LIMIT ?4"""
    rows = c.execute(sql, (signed(family), fingerprint, now, limit))
    return [(unsigned(r[0]), r[1], r[2], r[3]) for r in rows if isinstance(r[1], bytes) and r[1] and not len(r[1]) % 4]


# -- policy's questions


def expired(c: Connection, now: int, limit: int) -> list[tuple[int, int]]:
    """(id, bytes) of expired entries, the longest expired first."""
    sql = "SELECT entry, stored FROM meta WHERE expires_at <= ? AND base = 0 ORDER BY expires_at LIMIT ?"
    return [(unsigned(r[0]), r[1]) for r in c.execute(sql, (now, limit))]


def least_recently_used(c: Connection, protect: int | None) -> int | None:
    """The entry to evict next: normal before learned and pinned, children before parents. `protect` is an id to keep."""
    sql = """SELECT entry, use_order FROM meta m WHERE class = ? AND base = 0 AND entry IS NOT ?
 AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry) ORDER BY use_order LIMIT 1"""
    keep = None if protect is None else signed(protect)
    for classes in (("normal",), ("learned", "pinned")):
        found = [row for row in (c.execute(sql, (name, keep)).fetchone() for name in classes) if row is not None]
        if found:
            return unsigned(min(found, key=lambda row: int(row[1]))[0])
    return None


def integrity(c: Connection) -> list[str]:
    """What SQLite's integrity and foreign key checks complain of."""
    found = [str(r[0]) for r in c.execute("PRAGMA integrity_check") if r[0] != "ok"]
    found += [f"a row of {r[0]} refers to a missing row of {r[2]}" for r in c.execute("PRAGMA foreign_key_check")]
    if found and read_failed(c):
        raise StoreIOError("SQLite's integrity check could not read the file", hint="check the disk, then try again")
    return found


def all_ids(c: Connection) -> list[int]:
    return [unsigned(r[0]) for r in c.execute("SELECT id FROM entries ORDER BY id")]


def totals(c: Connection) -> dict[str, Totals]:
    """The sums by class; zeros where their row is not there."""
    found: dict[str, Totals] = {name: Totals(0, 0, 0) for name in (*CLASSES, BASE)}
    for name, *sums in c.execute("SELECT class, entries, size, stored FROM totals"):
        if name in found and all(isinstance(n, int) for n in sums):
            found[name] = Totals(*sums)
    return found


def count_family(c: Connection, family: int, saved: int, reused: int) -> None:
    c.execute(
        """INSERT INTO families(id, saved, reused) VALUES(?1, ?2, ?3)
 ON CONFLICT(id) DO UPDATE SET saved = saved + ?2, reused = reused + ?3""",
        (signed(family), saved, reused),
    )


def count_reuse(c: Connection, id: int) -> None:
    """Counts the first hit of an entry in its family."""
    row = c.execute("SELECT family, reused FROM meta WHERE entry = ?", (signed(id),)).fetchone()
    if row is not None and not row[1]:
        count_family(c, unsigned(row[0]), 0, 1)
        c.execute("UPDATE meta SET reused = 1 WHERE entry = ?", (signed(id),))


def counters(c: Connection) -> dict[str, int]:
    rows = c.execute("SELECT name, value FROM counters")
    return {name: value for name, value in rows if isinstance(name, str) and isinstance(value, int)}


def count(c: Connection, name: str, by: int) -> None:
    c.execute(
        # A count that would leave the integers of SQLite starts again.
        """INSERT INTO counters(name, value) VALUES(?1, ?2)
 ON CONFLICT(name) DO UPDATE SET value = iif(value BETWEEN 0 AND 4611686018427387904, value, 0) + ?2""",
        (name, by),
    )

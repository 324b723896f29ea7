"""The SQL of chains: what an entry is stored against, at any depth, and what is stored against it.

Each walk is one bounded query. A parent has fewer tokens than its child, or is whole (files of version 1 have such ones): no
walk goes on where a row says otherwise, so none goes in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..types import Entry
from .db import Connection
from .queries import ENTRY, next_use, readable, signed, unsigned
from .queries_blobs import BLOB, BlobRow, blob_row

# More links than this are damage. A put makes chains of half as many at most (policy.MAX_LINKS).
MAX_DEPTH = 1000
CHILDLESS_BASES = "SELECT entry FROM meta m WHERE base = 1 AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry)"


@dataclass(frozen=True, slots=True)
class Link:
    """An entry of a chain with its states by part; `parent` is what it is stored against."""

    id: int
    n_tokens: int
    parent: int | None
    rows: dict[str, BlobRow]

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(row.id for row in self.rows.values())

    @property
    def stored(self) -> int:
        return sum(row.stored for row in self.rows.values())


def links(c: Connection, id: int) -> list[Link]:
    """An entry and all that it is stored against, itself first, as far as parents are whole or have fewer tokens.

    Empty where the entry is gone. Raises CorruptStoreError on a damaged row.
    """
    sql = f"""WITH RECURSIVE up(entry, parent, n, depth) AS (
 SELECT m.entry, m.parent, e.n_tokens, 0 FROM meta m CROSS JOIN entries e ON e.id = m.entry WHERE m.entry = ?1
 UNION ALL SELECT m.entry, m.parent, e.n_tokens, u.depth + 1 FROM up u CROSS JOIN meta m ON m.entry = u.parent
 CROSS JOIN entries e ON e.id = m.entry WHERE (e.n_tokens < u.n OR m.parent IS NULL) AND u.depth < {MAX_DEPTH})
 SELECT u.entry, u.parent, u.n, {BLOB} FROM up u LEFT JOIN blobs b ON b.entry = u.entry ORDER BY u.depth, b.part DESC"""
    found: list[Link] = []
    for entry, parent, n, *row in c.execute(sql, (signed(id),)):
        own = unsigned(entry)
        if not found or found[-1].id != own:
            found.append(Link(own, n, None if parent is None else unsigned(parent), {}))
        if row[0] is not None:
            read = blob_row(own, row)
            found[-1].rows[read.part] = read
    return found


def children(c: Connection, id: int) -> list[int]:
    return [unsigned(r[0]) for r in c.execute("SELECT entry FROM meta WHERE parent = ?", (signed(id),))]


def has_children(c: Connection, id: int) -> bool:
    return c.execute("SELECT 1 FROM meta WHERE parent = ? LIMIT 1", (signed(id),)).fetchone() is not None


_DOWN = """WITH RECURSIVE down(id) AS (SELECT entry FROM meta WHERE parent = ?1
 UNION SELECT m.entry FROM down d CROSS JOIN meta m ON m.parent = d.id)"""


def descendants(c: Connection, id: int) -> list[tuple[int, bool]]:
    """(entry, whether it is a base) of all that is stored against an entry, at any depth."""
    sql = f"{_DOWN} SELECT d.id, m.base FROM down d CROSS JOIN meta m ON m.entry = d.id"
    return [(unsigned(r[0]), bool(r[1])) for r in c.execute(sql, (signed(id),))]


def entries_below(c: Connection, id: int, fingerprint: int | None, now: int) -> list[Entry]:
    """The live entries that are stored against this one, directly or by others, those with the most tokens first."""
    sql = f"""{_DOWN} SELECT {ENTRY} FROM down d CROSS JOIN meta m ON m.entry = d.id CROSS JOIN entries e ON e.id = d.id
 WHERE m.base = 0 AND (m.expires_at IS NULL OR m.expires_at > ?2) AND (?3 IS NULL OR e.fingerprint = ?3)
 ORDER BY e.n_tokens DESC"""
    return list(readable(c.execute(sql, (signed(id), now, fingerprint))))


def has_live_descendants(c: Connection, id: int, now: int) -> bool:
    """Whether a live entry is stored against this one, at any depth."""
    sql = f"""{_DOWN} SELECT 1 FROM down d CROSS JOIN meta m ON m.entry = d.id
 WHERE m.base = 0 AND (m.expires_at IS NULL OR m.expires_at > ?2) LIMIT 1"""
    return c.execute(sql, (signed(id), now)).fetchone() is not None


def listed_ancestors(c: Connection, id: int) -> list[int]:
    """The entries that an entry is stored against, bases left out, nearest first."""
    sql = f"""WITH RECURSIVE up(id, parent, base, depth) AS (
 SELECT entry, parent, 1, 0 FROM meta WHERE entry = ?1
 UNION ALL SELECT m.entry, m.parent, m.base, u.depth + 1 FROM up u CROSS JOIN meta m ON m.entry = u.parent
 WHERE u.depth < {MAX_DEPTH}) SELECT id FROM up WHERE base = 0 ORDER BY depth"""
    return list(dict.fromkeys(unsigned(r[0]) for r in c.execute(sql, (signed(id),))))


def listed_parent(c: Connection, id: int) -> int | None:
    """The nearest entry that an entry is stored against, with bases between them passed over."""
    sql = f"""WITH RECURSIVE up(id, base, depth) AS (
 SELECT p.entry, p.base, 1 FROM meta m CROSS JOIN meta p ON p.entry = m.parent WHERE m.entry = ?1
 UNION ALL SELECT p.entry, p.base, u.depth + 1 FROM up u CROSS JOIN meta m ON m.entry = u.id
 CROSS JOIN meta p ON p.entry = m.parent WHERE u.base = 1 AND u.depth < {MAX_DEPTH})
 SELECT id FROM up WHERE base = 0 LIMIT 1"""
    row = c.execute(sql, (signed(id),)).fetchone()
    return None if row is None else unsigned(row[0])


def touch(c: Connection, id: int, hits: int, used: int) -> None:
    """Counts uses of an entry. All that it is stored against counts as used with it, and stands behind it in the order of
    eviction; bases have no place in that order."""
    c.execute(
        # At 2^63 - 1 the count stays: one more would be no integer to SQLite.
        """UPDATE meta SET hits = CASE WHEN hits > 9223372036854775807 - ?1 THEN hits ELSE hits + ?1 END,
 last_used = max(last_used, ?2), use_order = ?3 WHERE entry = ?4""",
        (hits, used, next_use(c), signed(id)),
    )
    for ancestor in listed_ancestors(c, id):
        c.execute(
            "UPDATE meta SET last_used = max(last_used, ?), use_order = ? WHERE entry = ?",
            (used, next_use(c), signed(ancestor)),
        )


def needed_by_it_alone(c: Connection, id: int) -> list[int]:
    """The bases above an entry that go with it, since nothing else is stored against them."""
    sql = """WITH RECURSIVE up(id) AS (SELECT ?1 UNION SELECT p.entry FROM up u CROSS JOIN meta m ON m.entry = u.id
 CROSS JOIN meta p ON p.entry = m.parent WHERE p.base = 1
 AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = p.entry AND k.entry <> u.id)) SELECT id FROM up WHERE id <> ?1"""
    return [unsigned(r[0]) for r in c.execute(sql, (signed(id),))]


def set_base(c: Connection, id: int, base: bool) -> None:
    """Makes an entry a base, or a base an entry again; a trigger does the same in meta, and in cuts and prefixes."""
    c.execute("UPDATE entries SET base = ? WHERE id = ?", (int(base), signed(id)))


def is_base(c: Connection, id: int) -> bool:
    row = c.execute("SELECT base FROM meta WHERE entry = ?", (signed(id),)).fetchone()
    return row is not None and bool(row[0])


def delete_childless_bases(c: Connection, ids: list[int]) -> list[int]:
    """Deletes those of some entries that are bases and that nothing is stored against; the ids that went."""
    gone: list[int] = []
    for id in ids:
        if is_base(c, id) and not has_children(c, id):
            gone += [id, *needed_by_it_alone(c, id)]
            c.execute("DELETE FROM entries WHERE id = ?", (signed(id),))
    return gone


def set_sample(c: Connection, blob: int, sample: int) -> None:
    c.execute("UPDATE blobs SET sample = ? WHERE id = ?", (signed(sample), blob))

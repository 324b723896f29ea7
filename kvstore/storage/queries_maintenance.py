"""The SQL of the maintenance: rows that refer to a missing row, and families without entries."""

from __future__ import annotations

from ..types import FamilyStats
from . import queries_prefixes
from .db import Connection
from .queries_chains import CHILDLESS_BASES

UNSWEPT = "unswept"  # in counters: grows where a change by hand may have left such rows (the triggers of schema.sql)
# Families whose entries are all gone that keep their counts: the most used ones, beside one for each entry of the store.
FAMILIES_KEPT = 4096

_ORPHANS = (
    ("chunks", "blob NOT IN (SELECT id FROM blobs)"),
    ("blobs", "entry IS NOT NULL AND entry NOT IN (SELECT id FROM entries)"),
    ("cuts", "entry NOT IN (SELECT id FROM entries)"),
    ("prefixes", "entry NOT IN (SELECT id FROM entries)"),
    ("meta", "entry NOT IN (SELECT id FROM entries)"),
    ("entries", "id NOT IN (SELECT entry FROM meta)"),
    ("entries", "id IN (SELECT entry FROM meta WHERE parent NOT IN (SELECT id FROM entries))"),
    ("entries", "fingerprint NOT IN (SELECT id FROM fingerprints)"),
    ("entries", f"id IN ({CHILDLESS_BASES})"),
    ("entries", "id NOT IN (SELECT entry FROM blobs WHERE part = 'main' AND entry IS NOT NULL)"),
    # A state without chunks, or with a gap. By the index alone: what is missing at the end is found by the next get.
    (
        "entries",
        """id IN (SELECT b.entry FROM blobs b LEFT JOIN chunks c ON c.blob = b.id WHERE b.entry IS NOT NULL
 GROUP BY b.id HAVING count(c.blob) <> 1 + coalesce(max(c.seq), -2))""",
    ),
)


def _known(c: Connection) -> list[tuple[str, str]]:
    prefixes = queries_prefixes.has_table(c)  # a file of an older program has none until it is opened for writing
    return [(table, condition) for table, condition in _ORPHANS if prefixes or table != "prefixes"]


def orphans(c: Connection) -> dict[str, int]:
    """Rows, by table, that refer to something that is not there, as a shell without foreign keys may leave them."""
    found: dict[str, int] = {}
    for table, condition in _known(c):
        n = c.execute(f"SELECT count(*) FROM {table} WHERE {condition}").get
        if n:
            found[table] = found.get(table, 0) + n
    return found


def delete_orphans(c: Connection) -> int:
    """Deletes orphaned rows until there are none; gives the number of rows."""
    deleted = 0
    while orphans(c):
        for table, condition in _known(c):
            c.execute(f"DELETE FROM {table} WHERE {condition}")
            deleted += c.changes()
    return deleted


def unswept(c: Connection) -> int:
    """0 if no row can be an orphan; else a number that grows with each change that may have left one."""
    sql = "SELECT CASE typeof(value) WHEN 'integer' THEN value ELSE 1 END FROM counters WHERE name = ?"
    return int(c.execute(sql, (UNSWEPT,)).get or 0)


def mark_unswept(c: Connection) -> None:
    c.execute("INSERT INTO counters VALUES(?, 1) ON CONFLICT(name) DO UPDATE SET value = value + 1", (UNSWEPT,))


def mark_swept(c: Connection, seen: int) -> None:
    """Notes that all rows were checked after the number was `seen`."""
    c.execute("DELETE FROM counters WHERE name = ? AND (value = ? OR typeof(value) <> 'integer')", (UNSWEPT, seen))


def top_families(c: Connection, limit: int) -> list[FamilyStats]:
    """The families that served most often, then those stored most often."""
    sql = f"""SELECT {_FAMILY} FROM (SELECT * FROM families ORDER BY reused DESC, saved DESC, id LIMIT ?) f"""
    return [_family(row) for row in c.execute(sql, (limit,))]


def families_page(c: Connection, after: int, limit: int) -> list[FamilyStats]:
    """Up to `limit` families with a signed id above `after`, in that order."""
    return [_family(r) for r in c.execute(f"SELECT {_FAMILY} FROM families f WHERE id > ? ORDER BY id LIMIT ?", (after, limit))]


_FAMILY = "f.id, (SELECT count(*) FROM meta m WHERE m.family = f.id AND m.base = 0), f.saved, f.reused"


def _family(row: tuple[int, int, int, int]) -> FamilyStats:
    return FamilyStats(row[0] % (1 << 64), row[1], row[2], row[3])


def family_count(c: Connection) -> int:
    return int(c.execute("SELECT count(*) FROM families").get)


def surplus_families(c: Connection) -> int:
    """How many families without entries there are at least beyond those that are kept."""
    return family_count(c) - int(c.execute("SELECT sum(entries) FROM totals").get or 0) - FAMILIES_KEPT


def prune_families(c: Connection, n: int) -> int:
    """Deletes the n least used families without entries; gives the number deleted."""
    c.execute(
        """DELETE FROM families WHERE id IN (SELECT id FROM families f
 WHERE NOT EXISTS (SELECT 1 FROM meta m WHERE m.family = f.id AND m.base = 0) ORDER BY reused, saved LIMIT ?)""",
        (n,),
    )
    return c.changes()

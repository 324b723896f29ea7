"""The SQL of the table `prefixes`: the hashes of what entries that cannot be cut anywhere can serve.

Ids of entries are signed here, as they are in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ..util.hashing import prefix_hash, prefix_hashes
from .db import Connection

PrefixRow: TypeAlias = "tuple[int, int, int, int, int, int | None]"  # row, entry, n_tokens, cut, hash, expires_at
UNLISTED = "unlisted"  # in counters: the entry up to which the rows of older entries were made; no row where all were
_FIRST = -(1 << 63)


def has_table(c: Connection) -> bool:
    return c.execute("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'prefixes'").fetchone() is not None


def complete(c: Connection) -> bool:
    """Whether every entry has its rows: not in a file that an older program wrote, until the maintenance has made them."""
    return has_table(c) and c.execute("SELECT 1 FROM counters WHERE name = ?", (UNLISTED,)).fetchone() is None


def set_hashes(c: Connection, entry: int, token_bytes: bytes) -> None:
    """Computes the hashes of an entry that are still missing."""
    if not has_table(c):
        return  # the disk was too full to make it
    rows: list[tuple[int, int]] = list(
        c.execute("SELECT id, n_tokens FROM prefixes WHERE entry = ? AND hash IS NULL", (entry,))
    )
    if rows:
        hashes = prefix_hashes(token_bytes)
        c.executemany(
            "UPDATE prefixes SET hash = ? WHERE id = ?",
            [(int(hashes[n - 1]), row) for row, n in rows if n <= len(hashes)],
        )


def missing_hashes(c: Connection, after: int, limit: int) -> tuple[list[int], int | None]:
    """The entries that others wrote without a hash, by up to `limit` rows above `after`; with them the row to go on after.

    No index: every row is read, once for each process that does the maintenance.
    """
    sql = "SELECT id, entry FROM prefixes WHERE hash IS NULL AND id > ? ORDER BY id LIMIT ?"
    rows: list[Any] = c.execute(sql, (after, limit)).fetchall()
    return list(dict.fromkeys(entry for _, entry in rows)), rows[-1][0] if len(rows) == limit else None


def set_missing_hashes(c: Connection, entries: Sequence[int]) -> None:
    """Computes the missing hashes of entries whose tokens are whole."""
    sql = "SELECT id, tokens FROM entries WHERE id IN (SELECT value FROM json_each(?)) AND length(tokens) = 4 * n_tokens"
    rows: list[Any] = c.execute(sql, (_json(entries),)).fetchall()
    for id, tokens in rows:
        set_hashes(c, id, tokens)


def begin_list(c: Connection) -> None:
    """Notes that the entries in the file have no rows yet."""
    sql = "INSERT OR REPLACE INTO counters(name, value) SELECT ?, ? WHERE EXISTS (SELECT 1 FROM entries)"
    c.execute(sql, (UNLISTED, _FIRST))


def continue_list(c: Connection, limit: int) -> bool:
    """Makes the rows of the next `limit` entries that are older than the table; False where all have theirs."""
    row = c.execute("SELECT value FROM counters WHERE name = ?", (UNLISTED,)).fetchone()
    if row is None:
        return False
    after = row[0]
    sql = "SELECT max(id) FROM (SELECT id FROM entries WHERE id > ? ORDER BY id LIMIT ?)"
    last = c.execute(sql, (after, limit)).get
    if last is None:
        c.execute("DELETE FROM counters WHERE name = ?", (UNLISTED,))
        return False
    missing = "NOT EXISTS (SELECT 1 FROM prefixes p WHERE p.entry = {} AND p.n_tokens = {} AND p.cut = {})"
    c.execute(
        f"""INSERT INTO prefixes(entry, fingerprint, n_tokens, cut) SELECT id, fingerprint, n_tokens, 0 FROM entries
 WHERE id > ? AND id <= ? AND cut_any = 0 AND {missing.format("entries.id", "entries.n_tokens", 0)}""",
        (after, last),
    )
    c.execute(
        f"""INSERT INTO prefixes(entry, fingerprint, n_tokens, cut) SELECT entry, fingerprint, n_tokens, 1 FROM cuts
 WHERE entry > ? AND entry <= ? AND {missing.format("cuts.entry", "cuts.n_tokens", 1)}""",
        (after, last),
    )
    c.execute("UPDATE counters SET value = ? WHERE name = ?", (last, UNLISTED))
    return True


def newest(c: Connection) -> int:
    """The highest row, 0 where there is none."""
    return int(c.execute("SELECT max(id) FROM prefixes").get or 0)


def rows_after(c: Connection, fingerprint: int, row: int) -> list[PrefixRow]:
    """What was added after a row, with its hash wherever that is not computed yet.

    The rows of other fingerprints are passed over: an index of fingerprints would be one more page that each put writes.
    """
    sql = """SELECT p.id, p.entry, p.n_tokens, p.cut, p.hash, m.expires_at, substr(e.tokens, 1, 4 * p.n_tokens)
 FROM prefixes p JOIN meta m ON m.entry = p.entry LEFT JOIN entries e ON p.hash IS NULL AND e.id = p.entry
 WHERE p.fingerprint = ? AND p.id > ? ORDER BY p.id"""
    rows: list[PrefixRow] = []
    for id, entry, n, cut, hash, expires_at, key in c.execute(sql, (fingerprint, row)):
        if hash is None and (key is None or len(key) != 4 * n):
            continue  # damaged
        rows.append((id, entry, n, cut, prefix_hash(key) if hash is None else hash, expires_at))
    return rows


def row_there(c: Connection, row: int) -> bool:
    return c.execute("SELECT 1 FROM prefixes WHERE id = ?", (row,)).fetchone() is not None


def serves(c: Connection, row: int, fingerprint: int, key: bytes, now: int) -> bool:
    """Whether a row is of a live entry that can serve the first n_tokens of `key`."""
    sql = """SELECT e.tokens, p.n_tokens FROM prefixes p JOIN entries e ON e.id = p.entry JOIN meta m ON m.entry = e.id
 WHERE p.id = ?1 AND e.fingerprint = ?2 AND e.cut_any = 0 AND (m.expires_at IS NULL OR m.expires_at > ?3)
 AND (p.n_tokens = e.n_tokens OR EXISTS (SELECT 1 FROM cuts k WHERE k.entry = e.id AND k.n_tokens = p.n_tokens))"""
    found = c.execute(sql, (row, fingerprint, now)).fetchone()
    return found is not None and found[0][: 4 * found[1]] == key[: 4 * found[1]]


_CHOSEN = {
    "any": "m.base = 0 AND (m.expires_at IS NULL OR m.expires_at > ?3)",
    "base": "m.base = 1",
    "removable": "m.base = 0 AND (m.expires_at IS NULL OR m.expires_at > ?3) AND m.class = 'normal' AND m.n_images = 0",
}


def chosen(
    c: Connection, ids: Sequence[int], fingerprint: int, key: bytes, now: int, what: str, limit: int
) -> list[tuple[int, int]]:
    """(entry, n_tokens) of those of `ids`, in that order, that are live and a prefix of `key`.

    what: "any" entry, "removable" ones (normal, without images), or a "base", which does not expire.
    """
    sql = f"""SELECT e.id, e.n_tokens FROM json_each(?1) j CROSS JOIN meta m ON m.entry = j.value
 CROSS JOIN entries e ON e.id = m.entry
 WHERE {_CHOSEN[what]} AND e.fingerprint = ?2 AND e.tokens = substr(?4, 1, 4 * e.n_tokens) ORDER BY j.key LIMIT ?5"""
    return [(r[0], r[1]) for r in c.execute(sql, (_json(ids), fingerprint, now, key, limit))]


def _json(ids: Sequence[int]) -> str:
    return "[" + ",".join(map(str, ids)) + "]"

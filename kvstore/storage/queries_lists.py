"""The SQL of lists: entries by what they are, in pages or the first of an order, with memory for a page alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from ..types import Entry
from .db import Connection
from .queries import ENTRY, readable, signed

FIRST = -(1 << 63)
LAST = (1 << 63) - 1
# Name -> the column, the largest first. "used" has an index; the others read every row of
# meta (0.3 s for a million) and hold those that are asked for.
ORDERS = {
    "used": "m.last_used",
    "created": "m.created_at",
    "size": "m.size",
    "stored": "m.stored",
    "tokens": "e.n_tokens",
    "hits": "m.hits",
}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries: those for which all that is given holds. Ids are unsigned but for the range `ids`."""

    fingerprint: int | None = None
    family: int | None = None
    entry_class: str | None = None
    unused: bool = False
    used_before: int | None = None  # unix seconds, inclusive
    parent: int | None = None
    shared: bool | None = None  # stored against a parent, or whole
    text: str | None = None  # in the excerpt, whatever the case of its letters
    ids: tuple[int, int] = (FIRST, LAST)  # signed, inclusive
    base: bool | None = False  # bases alone (True), or with the entries (None)

    def where(self, now: int) -> tuple[str, list[Any]]:
        terms = ["(m.base = 1 OR m.expires_at IS NULL OR m.expires_at > ?)"]  # a base does not expire
        values: list[Any] = [now]
        if self.base is not None:
            terms[:0] = ["m.base = 1" if self.base else "m.base = 0"]
        if self.ids != (FIRST, LAST):
            terms.append("m.entry BETWEEN ? AND ?")
            values += self.ids
        for value, term in (
            (self.fingerprint, "e.fingerprint = ?"),
            (None if self.family is None else signed(self.family), "m.family = ?"),
            (self.entry_class, "m.class = ?"),
            (self.used_before, "m.last_used <= ?"),
            (None if self.parent is None else signed(self.parent), "m.parent = ?"),
            (self.text, "instr(lower(m.excerpt), lower(?))"),
        ):
            if value is not None:
                terms.append(term)
                values.append(value)
        if self.entry_class in ("learned", "pinned"):
            terms.append("m.class <> 'normal'")  # the condition of meta_by_class
        if self.unused:
            terms.append("m.hits = 0")
        if self.shared is not None:
            terms.append("m.parent IS NOT NULL" if self.shared else "m.parent IS NULL")
        return " AND ".join(terms), values


def page(c: Connection, wanted: Filter, after: int, limit: int, now: int) -> tuple[list[Entry], int | None]:
    """Up to `limit` entries with a signed id above `after`, in that order, damaged ones left out.

    With them the signed id to go on after; None at the end.
    """
    where, values = wanted.where(now)
    sql = f"""SELECT {ENTRY} FROM meta m CROSS JOIN entries e ON e.id = m.entry
 WHERE {where} AND m.entry > ? ORDER BY m.entry LIMIT ?"""
    rows = c.execute(sql, (*values, after, limit)).fetchall()
    return list(readable(rows)), int(cast(int, rows[-1][0])) if len(rows) == limit else None


def first(c: Connection, wanted: Filter, order: str, limit: int, now: int) -> list[Entry]:
    """The first `limit` entries of an order (-1: all)."""
    where, values = wanted.where(now)
    tail = f"ORDER BY {ORDERS[order]} DESC, m.entry DESC LIMIT ?"
    sql = f"SELECT {ENTRY} FROM meta m CROSS JOIN entries e ON e.id = m.entry WHERE {where} {tail}"
    if limit >= 0 and wanted.fingerprint is None and order != "tokens":  # then no entry is read that is not listed
        sql = f"""SELECT {ENTRY} FROM (SELECT m.entry AS id FROM meta m WHERE {where} {tail}) s
 JOIN meta m ON m.entry = s.id JOIN entries e ON e.id = s.id ORDER BY {ORDERS[order]} DESC, m.entry DESC"""
    return list(readable(c.execute(sql, (*values, limit))))


def parents_page(c: Connection, after: int, limit: int) -> list[int]:
    """Up to `limit` signed ids above `after` that entries are stored against, in order."""
    sql = "SELECT DISTINCT parent FROM meta WHERE parent > ? ORDER BY parent LIMIT ?"
    return [row[0] for row in c.execute(sql, (after, limit))]

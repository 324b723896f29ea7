"""The SQL of the index of remote objects: a cache of what a listing said, in a file of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from . import sqlite
from .queries import signed, unsigned
from .sqlite import Connection

SCHEMA_VERSION = 1
# A row's id is a hash of its path, so a name that is listed again is found without an index of paths.
# seen: the number of the last full listing that had the name. refused: it was opened and must not be served.
SCHEMA = f"""
CREATE TABLE remote_objects(id INTEGER PRIMARY KEY, path TEXT NOT NULL, size INTEGER NOT NULL, modified INTEGER NOT NULL,
  seen INTEGER NOT NULL, refused INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE remote_marks(mark INTEGER NOT NULL, object INTEGER NOT NULL, PRIMARY KEY(mark, object)) STRICT, WITHOUT ROWID;
CREATE TABLE remote_local(state INTEGER PRIMARY KEY, entry INTEGER NOT NULL) STRICT;
CREATE TABLE remote_info(name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
PRAGMA user_version = {SCHEMA_VERSION};
"""


class Row(NamedTuple):
    """One object of the listing."""

    id: int
    path: str
    size: int
    modified: int
    refused: bool


_ROW = "id, path, size, modified, refused"


def create(c: Connection) -> None:
    sqlite.run_script(c, SCHEMA)


def is_current(c: Connection) -> bool:
    return sqlite.user_version(c) == SCHEMA_VERSION


def _row(values: Sequence[object]) -> Row:
    id, path, size, modified, refused = values
    return Row(int(str(id)), str(path), int(str(size)), int(str(modified)), bool(refused))


def known(c: Connection, id: int) -> tuple[int, int] | None:
    """Size and time of an object that is in the index."""
    row = c.execute("SELECT size, modified FROM remote_objects WHERE id = ?", (id,)).fetchone()
    return None if row is None else (int(row[0]), int(row[1]))


def see(c: Connection, ids: Iterable[int], generation: int) -> None:
    c.executemany("UPDATE remote_objects SET seen = ? WHERE id = ?", ((generation, id) for id in ids))


def insert(c: Connection, row: Row, marks: Iterable[int], generation: int) -> None:
    c.execute(
        "INSERT OR REPLACE INTO remote_objects(id, path, size, modified, seen, refused) VALUES(?,?,?,?,?,0)",
        (row.id, row.path, row.size, row.modified, generation),
    )
    c.executemany("INSERT OR IGNORE INTO remote_marks(mark, object) VALUES(?,?)", ((mark, row.id) for mark in marks))


def refuse(c: Connection, id: int) -> None:
    """Notes that an object must not be served: the next listing has it again."""
    c.execute("UPDATE remote_objects SET refused = 1 WHERE id = ?", (id,))


def delete_marks(c: Connection, id: int, marks: Iterable[int]) -> None:
    c.executemany("DELETE FROM remote_marks WHERE mark = ? AND object = ?", ((mark, id) for mark in marks))


def delete(c: Connection, id: int) -> None:
    c.execute("DELETE FROM remote_objects WHERE id = ?", (id,))


def unseen(c: Connection, prefix: str, generation: int, limit: int) -> list[Row]:
    """Objects below a prefix that full listing `generation` did not have."""
    found = c.execute(
        f"SELECT {_ROW} FROM remote_objects WHERE seen < ? AND substr(path, 1, ?) = ? LIMIT ?",
        (generation, len(prefix), prefix, limit),
    )
    return [_row(row) for row in found]


def with_mark(c: Connection, mark: int, limit: int) -> list[Row]:
    joined = "remote_marks JOIN remote_objects ON id = object"
    found = c.execute(f"SELECT {_ROW} FROM {joined} WHERE mark = ? AND refused = 0 LIMIT ?", (mark, limit))
    return [_row(row) for row in found]


def first_mark(c: Connection, marks: Sequence[int], start: int) -> int | None:
    """The position, from `start`, of the first of these marks that an object has."""
    execute = c.execute
    for position in range(start, len(marks)):
        if execute("SELECT 1 FROM remote_marks WHERE mark = ? LIMIT 1", (marks[position],)).fetchone() is not None:
            return position
    return None


def totals(c: Connection, prefix: str) -> tuple[int, int, int]:
    """Objects below a prefix, their bytes, and how many were refused."""
    row = c.execute(
        "SELECT count(*), coalesce(sum(size), 0), coalesce(sum(refused), 0) FROM remote_objects WHERE substr(path, 1, ?) = ?",
        (len(prefix), prefix),
    ).fetchone()
    return (0, 0, 0) if row is None else (int(row[0]), int(row[1]), int(row[2]))


def paths(c: Connection, prefix: str) -> Iterator[Row]:
    for row in c.execute(f"SELECT {_ROW} FROM remote_objects WHERE substr(path, 1, ?) = ?", (len(prefix), prefix)):
        yield _row(row)


def local_entry(c: Connection, state: int) -> int | None:
    """The id of the local entry that was put with these very bytes."""
    row = c.execute("SELECT entry FROM remote_local WHERE state = ?", (state,)).fetchone()
    return None if row is None else unsigned(int(row[0]))


def set_local_entry(c: Connection, state: int, entry: int) -> None:
    c.execute("INSERT OR REPLACE INTO remote_local(state, entry) VALUES(?,?)", (state, signed(entry)))


def forget_local_entry(c: Connection, state: int) -> None:
    c.execute("DELETE FROM remote_local WHERE state = ?", (state,))


def info(c: Connection, name: str) -> int:
    row = c.execute("SELECT value FROM remote_info WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def set_info(c: Connection, name: str, value: int) -> None:
    c.execute("INSERT OR REPLACE INTO remote_info(name, value) VALUES(?,?)", (name, value))

"""`verify`: says what is wrong with a store. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from . import blobs, queries
from .db import Database
from .errors import CorruptStoreError
from .hashing import digest
from .records import hex_id
from .shelf import Damaged, Shelf


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not hold. `invariant` is its name in schema.sql; `entry` the id it concerns, or None."""

    invariant: str
    entry: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.entry is None else f"{hex_id(self.entry)}: {self.text}"


def verify(database: Database, shelf: Shelf) -> list[Problem]:
    """Every problem of a store: SQLite's own checks, the rows that refer to nothing, and every digest."""
    problems: list[Problem] = []
    try:
        with database.read() as c:
            problems += [Problem("sqlite", None, text) for text in queries.integrity(c)]
            problems += [
                Problem("no-orphan", None, f"{n} rows of {table} refer to nothing") for table, n in queries.orphans(c).items()
            ]
            ids = queries.all_ids(c)
        for id in ids:
            with database.read() as c:
                entry = queries.entry(c, id, None)
                if entry is None:
                    continue
                try:
                    main, draft = shelf.fresh(c, entry)
                except Damaged as damage:
                    problems.append(Problem("digest", id, damage.reason))
                    continue
                for row in queries.blobs(c, id):
                    state = main if row.part == "main" else draft
                    if state is None or digest(state) != row.digest:
                        problems.append(Problem("digest", id, f"its {row.part} state fails its digest"))
    except CorruptStoreError as error:
        problems.append(Problem("sqlite", None, error.message))
    return problems


__all__ = ["Problem", "blobs", "verify"]

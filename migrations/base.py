"""The records of migrations: steps, plans and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvstore.storage.db import Connection

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the number of entries done and the number of all entries."""


@dataclass(frozen=True, slots=True)
class Record:
    """One note about one entry: what could not be read, or why the entry was left out."""

    id: int
    what: str
    kept: bool

    def __str__(self) -> str:
        return f"{self.id:016x}: {self.what}{'' if self.kept else ' (left out)'}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step, done or planned: the number of entries that are kept, and notes about entries."""

    entries: int
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """From schema version `number - 1` to `number`. A step that changes the file in place needs only the first four fields.

    apply(old, new, progress): takes the step, inside a transaction of `new` that also sets the version number. `old` is the
        same connection, unless the step `rebuilds`: then `new` is an empty file.
    precondition(c): None, or why this file cannot take the step.
    examine(c): what `apply` would do, as far as it can be told without reading states.
    room(c): the bytes that the step needs on the disk: at most the new file's size, for steps that rebuild. Without it, twice
        the size of the file.
    copies: whether the old file is kept as a copy. Not where the step, one transaction, rewrites no state: a copy of a large
        store would cost more than the step.
    """

    number: int
    name: str
    description: str
    apply: Callable[[Connection, Connection, Progress], Outcome]
    precondition: Callable[[Connection], str | None] = lambda c: None
    examine: Callable[[Connection], Outcome] = lambda c: Outcome(count_entries(c))
    rebuilds: bool = False
    room: Callable[[Connection], int] | None = None
    copies: bool = True


def count_entries(c: Connection) -> int:
    (n,) = c.execute("SELECT count(*) FROM entries").fetchone() or (0,)
    return int(n)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an upgrade. `backup` is the path of the old file, None if it was not kept."""

    path: str
    from_version: int
    to_version: int
    entries: int
    records: tuple[Record, ...]
    backup: str | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "path": self.path,
            "from_version": self.from_version,
            "to_version": self.to_version,
            "entries": self.entries,
            "records": records_as_dicts(self.records),
            "backup": self.backup,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of an upgrade. `problem` says why the upgrade is impossible; None if it is possible.

    `records` cannot list deltas that will fail to decode. `needed` and `free` are bytes on the disk beside the old file.
    """

    path: str
    from_version: int
    to_version: int
    steps: tuple[Step, ...]
    entries: int
    records: tuple[Record, ...]
    backup: str | None
    needed: int
    free: int
    problem: str | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "path": self.path,
            "from_version": self.from_version,
            "to_version": self.to_version,
            "steps": [{"number": s.number, "name": s.name, "description": s.description} for s in self.steps],
            "entries": self.entries,
            "records": records_as_dicts(self.records),
            "backup": self.backup,
            "needed": self.needed,
            "free": self.free,
            "problem": self.problem,
        }


def records_as_dicts(records: tuple[Record, ...]) -> list[dict[str, Any]]:
    return [{"id": f"{r.id:016x}", "what": r.what, "kept": r.kept} for r in records]

"""`verify`: lists what is wrong with a store. Never writes, and reads as much as a damaged file allows.

Each invariant of schema.sql is a question of its own; what fails to answer is itself a finding. The digests are checked
tree by tree, a whole entry and all that is stored against it by one job, which holds the states of a parent and a child.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from .. import bkvd
from ..errors import CorruptStoreError, KVStoreError, MigrationError, StoreIOError
from ..storage import db, peek, queries, queries_chains, sqlite
from ..storage import integrity as audit
from ..storage.db import Connection, Database
from ..storage.entry_reader import Damaged, EntryReader, as_put, read_stored
from ..storage.policy import cuts_of
from ..storage.queries_chains import Link
from ..storage.ram_cache import RamCache
from ..types import Bytes, Entry, hex_id

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all
Remedy: TypeAlias = Literal["drop", "rows", "totals", "cuts", "salvage", "retry"]
# What the layers below raise on damaged rows: a value of another type, a text that is not UTF-8.
Unreadable = (KVStoreError, UnicodeDecodeError, TypeError, ValueError)
_REMEDIES: dict[str, Remedy] = {
    "no-orphan": "rows", "staged": "rows", "totals": "totals", "cuts": "cuts",
    "prefixes": "cuts", "base": "rows",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not hold, or could not be checked; `entry` is the id that it concerns.

    `invariant` is its name in schema.sql, "sqlite" for what SQLite's own checks find, or "read" where the system refused a
    read. `remedy` is what `repair` does about it: "drop" the entry, delete "rows" that refer to nothing, count "totals" or
    find "cuts" (with the rows of `prefixes`, and the samples of its states) anew; "salvage" where only a new file helps;
    "retry" where nothing is done: verify again.
    """

    invariant: str
    entry: int | None
    text: str
    remedy: Remedy = "salvage"

    def __str__(self) -> str:
        return self.text if self.entry is None else f"{hex_id(self.entry)}: {self.text}"

    def as_dict(self) -> dict[str, str | None]:
        """JSON-ready."""
        entry = None if self.entry is None else hex_id(self.entry)
        return {"invariant": self.invariant, "entry": entry, "text": self.text, "remedy": self.remedy}


class Lenient(Database):
    """Read-only connections that can read a file which is shorter than its header says."""

    def __init__(self, path: str, *, key: str | None = None) -> None:
        super().__init__(path, readonly=True, key=key)

    def _set(self, connection: Connection, pragma: str, value: int | str) -> None:
        # Before anything is read: with this set SQLite takes the file's own size for that in its header.
        connection.pragma("writable_schema", 1)
        super()._set(connection, pragma, value)


def verify(database: Database, *, jobs: int = 1, progress: Progress | None = None) -> list[Problem]:
    """Every problem of a store, each with its entry. `progress` is called as the digests are checked."""
    problems = list(structure(database))
    ids, lost = all_ids(database)
    problems += lost
    named = {p.entry for p in problems if p.remedy == "drop"}
    problems += [p for p in _states(database, ids, jobs, progress) if p.entry not in named or p.remedy != "drop"]
    return problems


def _twice(database: Database, question: Callable[[Connection], T]) -> T:
    """Runs a check; a check that fails is run again on a new connection, since a read may fail once."""
    try:
        with database.read() as c:
            return question(c)
    except Unreadable:
        with database.read(fresh=True) as c:
            return question(c)


def structure(database: Database) -> Iterator[Problem]:
    """SQLite's checks and the invariants that rows can answer."""
    try:
        yield from [Problem("sqlite", None, text) for text in _twice(database, queries.integrity)]
    except StoreIOError as error:
        yield _unread(None, error)
    except Unreadable as error:
        yield Problem("sqlite", None, _say(error))
    for name, question in audit.INVARIANTS:
        try:
            found = _twice(database, lambda c, question=question: list(question(c)))  # type: ignore[misc]
        except StoreIOError as error:
            yield _unread(None, error, f"{name} cannot be checked: ")
            continue
        except Unreadable as error:
            yield Problem(name, None, f"cannot be checked: {_say(error)}")
            continue
        # An entry of a lost fingerprint is never served.
        remedy = "drop" if question is audit.lost_fingerprint else _REMEDIES.get(name, "drop")
        yield from [Problem(name, entry, text, remedy) for entry, text in found]


def _unread(entry: int | None, error: StoreIOError, what: str = "") -> Problem:
    return Problem("read", entry, f"{what}{error.message}", "retry")


def all_ids(database: Database) -> tuple[list[int], list[Problem]]:
    """The ids of all entries, also those whose row in one table is lost but not in another; and the problems met."""
    problems: list[Problem] = []

    try:
        return _twice(database, queries.all_ids), problems
    except StoreIOError as error:
        problems.append(_unread(None, error, "the list of entries is not complete: "))
    except Unreadable as error:
        problems.append(Problem("sqlite", None, f"the list of entries is damaged: {_say(error)}"))
    ids: set[int] = set()
    for sql in audit.ID_SOURCES:
        ids |= walk(database, sql)
    return sorted(ids), problems


def walk(database: Database, sql: str) -> set[int]:
    """The ids that a query of `audit` gives, past damage."""

    def read(sql: str, low: int, high: int) -> tuple[list[int], bool]:
        found: list[int] = []
        try:
            with database.exclusive() as c:  # which damage does not close
                for (id,) in c.execute(sql, (low, high)):
                    found.append(id)
        except Unreadable:
            return found, True
        return found, False

    return audit.walk(read, sql)


@dataclass(slots=True)
class _Tree:
    """A whole entry, and what is stored against each entry of its tree."""

    root: int
    children: dict[int, list[int]]
    n_bytes: int


def _states(database: Database, ids: list[int], jobs: int, progress: Progress | None) -> Iterator[Problem]:
    sizes: dict[int, int] = {}
    parents: dict[int, int] = {}
    for id in ids:
        try:
            entry = _twice(database, lambda c, id=id: queries.entry(c, id, None, bases=True))  # type: ignore[misc]
        except StoreIOError as error:
            yield _unread(id, error)
            continue
        except Unreadable as error:
            by_value = isinstance(error, CorruptStoreError) and "entry" in error.facts
            yield Problem("whole-entry", id, f"its rows cannot be read: {_say(error)}", "drop" if by_value else "salvage")
            continue
        if entry is None:
            continue  # removed meanwhile, or named by whole-entry
        sizes[id] = entry.size
        if entry.parent is not None:
            parents[id] = entry.parent
    trees = _trees(sizes, parents)
    total = sum(tree.n_bytes for tree in trees)
    done = 0

    def check(tree: _Tree) -> tuple[_Tree, list[Problem]]:
        return tree, list(_check_tree(database, tree))

    for tree, problems in _mapped(check, trees, jobs):
        yield from problems
        done += tree.n_bytes
        if progress is not None:
            progress(done, total)


def _trees(sizes: dict[int, int], parents: dict[int, int]) -> list[_Tree]:
    """All entries in trees. The root of one whose chain ends nowhere, or in itself, is the last entry that was met."""
    trees: dict[int, _Tree] = {}
    for id in sizes:
        root, seen = id, {id}
        while (above := parents.get(root)) in sizes and above not in seen:
            root = above
            seen.add(root)
        tree = trees.setdefault(root, _Tree(root, {}, 0))
        tree.n_bytes += sizes[id]
        if id != root:
            tree.children.setdefault(parents[id], []).append(id)
    return list(trees.values())


def _mapped(
    check: Callable[[_Tree], tuple[_Tree, list[Problem]]], groups: list[_Tree], jobs: int
) -> Iterable[tuple[_Tree, list[Problem]]]:
    if jobs <= 1 or len(groups) <= 1:
        yield from map(check, groups)
        return
    pool = ThreadPoolExecutor(jobs, "kvstore-verify")
    try:
        yield from pool.map(check, groups)
    finally:
        pool.shutdown(cancel_futures=True)


def _check_tree(database: Database, tree: _Tree) -> Iterator[Problem]:
    """Parents before children. An entry's states are handed to one child; others compose them again, so few are held."""
    left: list[tuple[int, int | None, dict[str, Bytes] | None, Problem | None]] = [(tree.root, None, {}, None)]
    seen = set()
    while left:
        id, parent, of_parent, unread = left.pop()
        if id in seen:
            continue
        seen.add(id)
        states: dict[str, Bytes] | None = None
        if unread is not None:  # what cannot be read now says nothing of what is stored against it
            yield dataclasses.replace(unread, entry=id, text=f"its base {hex_id(tree.root)}: {unread.text}")
        else:
            problems, states = check_entry(database, id, parent, of_parent)
            yield from problems
            unread = next((p for p in problems if p.remedy == "retry"), None)
        children = tree.children.get(id, [])
        left += [(child, None, None, unread) for child in children[1:]]
        left += [(child, id, states, unread) for child in children[:1]]
        of_parent = states = None


def check_entry(
    database: Database, id: int, parent: int | None = None, of_parent: Mapping[str, Bytes] | None = None
) -> tuple[list[Problem], dict[str, Bytes]]:
    """The problems of an entry, and those of its states that are right.

    `of_parent` are the states of the entry `parent`, where they are at hand. What fails is read again on a new connection.
    """
    problems: list[Problem] = []
    states: dict[str, Bytes] = {}
    for fresh in (False, True):
        try:
            with database.read(fresh=fresh) as c:
                problems, states = _look(c, id, parent, of_parent if not fresh or parent is None else None)
        except StoreIOError as error:
            problems, states = [_unread(id, error)], {}
        except Unreadable as error:
            problems, states = [Problem("digest", id, f"it cannot be read: {_say(error)}", "drop")], {}
        if not problems:
            break
    return problems, states


def _look(
    c: Connection, id: int, parent: int | None, of_parent: Mapping[str, Bytes] | None
) -> tuple[list[Problem], dict[str, Bytes]]:
    links = queries_chains.links(c, id)
    entry = queries.entry(c, id, None, bases=True)
    if entry is None or not links:
        return [], {}
    rows = links[0].rows.values()
    if entry.parent is not None and (of_parent is None or entry.parent != parent):  # not given, or rebuilt meanwhile
        needed = any(row.kind == "bkvd" for row in rows)
        of_parent = _right_states(c, links[1:]) if needed else {}
    problems: list[Problem] = []
    states: dict[str, Bytes] = {}
    # Where the state of a base is wrong, which nobody gets, the bytes that this one copies may be right: a get reads those.
    past = any(row.kind == "bkvd" and row.part not in (of_parent or {}) for row in rows)
    composed = _composed(c, id, links) if past and len(links) > 1 and queries_chains.is_base(c, links[1].id) else {}
    for row in rows:
        if row.part in composed:
            states[row.part] = composed[row.part]
            continue
        try:
            state = as_put(id, row, read_stored(c, id, row), entry.parent, (of_parent or {}).get(row.part))
        except Damaged as error:
            problems.append(Problem(error.invariant, id, error.reason, "drop"))
            continue
        states[row.part] = state
        if row.sample is not None and row.sample != bkvd.sample_hash(state):
            problems.append(Problem("delta-parent", id, f"the sample hash of its {row.part} state is wrong", "cuts"))
    if "main" in states and not queries_chains.is_base(c, id):
        problems += _check_cuts(c, entry, states["main"])
    return problems, states


def _composed(c: Connection, id: int, links: list[Link]) -> dict[str, Bytes]:
    """The states of the first of `links`, if all of them are right."""
    with suppress(Damaged):
        return EntryReader(RamCache(0), True, lambda name, seconds: None).states(c, id, links, True)
    return {}


def _right_states(c: Connection, links: list[Link]) -> dict[str, Bytes]:
    """The states of the first of `links` that are right."""
    states: dict[str, Bytes] = {}
    for link in reversed(links):
        above, states = states, {}
        for part, row in link.rows.items():
            with suppress(Damaged):
                states[part] = as_put(link.id, row, read_stored(c, link.id, row), link.parent, above.get(part))
    return states


def _check_cuts(c: Connection, entry: Entry, main: Bytes) -> list[Problem]:
    real = cuts_of(main, entry.n_tokens)
    said = queries.cut_any(c, entry.id), tuple(queries.cut_counts(c, entry.id))
    if said == (real.any, real.counts):
        return []
    text = f"it says that it can be cut at {_cuts(*said)}; it can at {_cuts(real.any, real.counts)}"
    return [Problem("cuts", entry.id, text, "cuts")]


def _cuts(any_token: bool, counts: tuple[int, ...]) -> str:
    return "any token" if any_token else ", ".join(map(str, counts)) or "none"


def _say(error: Exception) -> str:
    return error.message if isinstance(error, KVStoreError) else f"a damaged value ({error})"


def verify_file(path: str, *, key: str | None = None, jobs: int = 1, progress: Progress | None = None) -> list[Problem]:
    """`verify` of a file that nobody has open here, or that cannot even be opened. Never writes to it.

    Raises what has nothing to do with damage: NotAStoreError, NewerStoreError, WrongKeyError, StoreIOError.
    """
    database = Lenient(path, key=key)
    try:
        with suppress(CorruptStoreError), database.exclusive() as c:
            version = sqlite.user_version(c)
            if version < peek.SCHEMA_VERSION:
                raise MigrationError(f"{path} has schema version {version}", hint="upgrade it: `kvstore migrate`")
        problems = verify(database, jobs=jobs, progress=progress)
    finally:
        database.close()
    short = _missing_bytes(path)
    if short:
        problems.insert(0, Problem("sqlite", None, f"{short} bytes are missing at the end of the file"))
    return problems


def _missing_bytes(path: str) -> int:
    """By how much a file without a log is shorter than its header says."""
    if db.open_here(path) or (os.path.exists(path + "-wal") and os.path.getsize(path + "-wal")):
        return 0
    with open(path, "rb") as f:
        header = f.read(100)
    if header[:16] != b"SQLite format 3\0" or header[24:28] != header[92:96]:
        return 0
    page = int.from_bytes(header[16:18], "big")
    return max(0, (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big") - os.path.getsize(path))


"""The invariants that schema.sql names: each is broken here by SQL, and `verify` names it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import storekit

from kvstore import Store, operate
from kvstore.storage.queries import signed
from kvstore.storage.schema import schema_sql

PREFIX = list(range(100))
Ids = dict[str, int]


@pytest.fixture
def ids(path: Path) -> Iterator[Ids]:
    """A store with a parent and its child, an entry with a draft, and one with cuts; by name."""
    ids = {}
    with Store(path, min_saved_mib=0.001) as store:
        ids["parent"] = store.put(PREFIX, storekit.state(PREFIX), entry_class="learned").id
        tokens = [*PREFIX, 1000]
        ids["child"] = store.put(tokens, storekit.state(tokens)).id
        ids["draft"] = store.put([1, 2], storekit.noise(1, 2 << 20), draft=b"draft").id
        ids["cuts"] = store.put(range(200, 250), storekit.recurrent_state(50, (10, 30))).id
        assert store.verify() == []
    with closing(sqlite3.connect(path)) as c:
        assert c.execute("SELECT parent FROM meta WHERE entry = ?", (signed(ids["child"]),)).fetchone()[0] is not None
    return ids


def broken(path: Path, sql: str, ids: Ids, *, triggers: bool = True) -> set[tuple[str, str | None]]:
    """What verify finds after the statement: (invariant, name of the entry)."""
    for name, id in ids.items():
        sql = sql.replace(f"<{name}>", str(signed(id)))
    with closing(sqlite3.connect(path)) as c:
        if not triggers:
            for (trigger,) in c.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
                c.execute(f"DROP TRIGGER {trigger}")
        c.execute("PRAGMA ignore_check_constraints = on")
        assert c.execute(sql).rowcount
        c.commit()
    names = {id: name for name, id in ids.items()}
    with Store(path, readonly=True) as store:
        return {(p.invariant, None if p.entry is None else names.get(p.entry, "?")) for p in store.verify()}


def test_every_invariant_has_a_test() -> None:
    named = re.findall(r"^--   ([a-z-]+)  +\S", schema_sql(), re.MULTILINE)
    assert len(named) == 10
    assert {f"test_{name.replace('-', '_')}" for name in named} <= set(globals())


@pytest.mark.parametrize(
    "sql", ["DELETE FROM meta WHERE entry = <draft>", "DELETE FROM blobs WHERE entry = <draft> AND part = 'main'"]
)
def test_whole_entry(path: Path, ids: Ids, sql: str) -> None:
    assert ("whole-entry", "draft") in broken(path, sql, ids)


@pytest.mark.parametrize(
    ("sql", "entry"),
    [
        ("UPDATE meta SET parent = NULL WHERE entry = <child>", "child"),
        ("UPDATE meta SET parent = 77 WHERE entry = <child>", "child"),
        ("DELETE FROM blobs WHERE entry = <parent>", "child"),
        ("UPDATE blobs SET sample = sample + 1 WHERE entry = <parent>", "parent"),
        ("UPDATE blobs SET kind = 'bkvd' WHERE entry = <parent>", "parent"),
        ("UPDATE meta SET parent = <draft> WHERE entry = <child>", "child"),
        ("DELETE FROM entries WHERE id = <parent>", "child"),
    ],
)
def test_delta_parent(path: Path, ids: Ids, sql: str, entry: str) -> None:
    assert ("delta-parent", entry) in broken(path, sql, ids, triggers=False)


@pytest.mark.parametrize(
    ("sql", "entry"),
    [
        ("UPDATE entries SET base = 1 WHERE id = <draft>", "draft"),
        ("UPDATE entries SET base = 1 WHERE id = <child>", "child"),
        ("UPDATE meta SET base = 1 WHERE entry = <parent>", "parent"),
    ],
)
def test_base(path: Path, ids: Ids, sql: str, entry: str) -> None:
    assert ("base", entry) in broken(path, sql, ids)
    with Store(path) as store:
        operate.repair(store, store.verify())
        assert store.verify() == []


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM chunks WHERE blob = (SELECT id FROM blobs WHERE entry = <draft> AND part = 'main') AND seq = 0",
        "DELETE FROM chunks WHERE blob = (SELECT id FROM blobs WHERE entry = <draft> AND part = 'main') AND seq = 1",
        "DELETE FROM chunks WHERE blob = (SELECT id FROM blobs WHERE entry = <draft> AND part = 'draft')",
        "UPDATE chunks SET seq = 7 WHERE blob = (SELECT id FROM blobs WHERE entry = <draft> AND part = 'main') AND seq = 1",
        "UPDATE chunks SET data = zeroblob(3) WHERE blob = (SELECT id FROM blobs WHERE entry = <draft> AND part = 'draft')",
        "UPDATE blobs SET stored = stored + 1 WHERE entry = <draft> AND part = 'main'",
    ],
)
def test_chunks_complete(path: Path, ids: Ids, sql: str) -> None:
    assert ("chunks-complete", "draft") in broken(path, sql, ids)


@pytest.mark.parametrize(
    ("sql", "entry"),
    [
        ("UPDATE blobs SET digest = zeroblob(16) WHERE entry = <draft> AND part = 'draft'", "draft"),
        ("UPDATE chunks SET data = x'0000000000' WHERE length(data) = 5", "draft"),
        ("UPDATE blobs SET digest = zeroblob(16) WHERE entry = <child>", "child"),
    ],
)
def test_digest(path: Path, ids: Ids, sql: str, entry: str) -> None:
    assert broken(path, sql, ids) == {("digest", entry)}


@pytest.mark.parametrize(
    ("table", "sql"),
    [
        ("meta", "INSERT INTO meta SELECT 77, * FROM (SELECT * FROM meta WHERE entry = <draft>)"),
        ("blobs", "UPDATE blobs SET entry = 77 WHERE entry = <draft> AND part = 'draft'"),
        ("chunks", "UPDATE chunks SET blob = 77 WHERE seq = 1"),
        ("cuts", "UPDATE cuts SET entry = 77"),
        ("fingerprints", "DELETE FROM fingerprints"),
        ("parent", "UPDATE meta SET parent = <cuts> WHERE entry = <parent>"),
    ],
)
def test_no_orphan(path: Path, ids: Ids, table: str, sql: str) -> None:
    if table == "meta":
        with closing(sqlite3.connect(path)) as c:
            columns = ", ".join(r[1] for r in c.execute("PRAGMA table_info(meta)") if r[1] != "entry")
        sql = f"INSERT INTO meta(entry, {columns}) SELECT 77, {columns} FROM meta WHERE entry = <draft>"
    assert "no-orphan" in {invariant for invariant, _ in broken(path, sql, ids)}


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO blobs(part, kind, size, stored) VALUES('main', 'full', 1, 1)",
        "UPDATE blobs SET writer = '1:1' WHERE entry = <draft> AND part = 'main'",
    ],
)
def test_staged(path: Path, ids: Ids, sql: str) -> None:
    assert ("staged", None) in broken(path, sql, ids)


def test_staged_blobs_of_the_living_are_no_problem(path: Path, ids: Ids) -> None:
    sql = "INSERT INTO blobs(part, kind, size, stored, writer) VALUES('main', 'full', 1, 1, '1:1')"
    assert broken(path, sql, ids) == set()


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE totals SET entries = entries + 1 WHERE class = 'normal'",
        "UPDATE totals SET stored = stored - 1 WHERE class = 'learned'",
        "DELETE FROM totals WHERE class = 'normal'",
    ],
)
def test_totals(path: Path, ids: Ids, sql: str) -> None:
    assert broken(path, sql, ids) == {("totals", None)}


@pytest.mark.parametrize(
    ("sql", "entry"),
    [
        ("DELETE FROM cuts WHERE n_tokens = 10", "cuts"),
        ("UPDATE cuts SET tokens = zeroblob(40) WHERE n_tokens = 10", "cuts"),
        ("UPDATE cuts SET n_tokens = 11, tokens = (SELECT substr(tokens, 1, 44) FROM entries WHERE id = cuts.entry)"
         " WHERE n_tokens = 10", "cuts"),
        ("UPDATE entries SET cut_any = 1 WHERE id = <cuts>", "cuts"),
        ("UPDATE entries SET cut_any = 0 WHERE id = <parent>", "parent"),
    ],
)  # fmt: skip
def test_cuts(path: Path, ids: Ids, sql: str, entry: str) -> None:
    assert {("cuts", entry)} == broken(path, sql, ids)


@pytest.mark.parametrize(
    ("sql", "entry"),
    [
        ("DELETE FROM prefixes WHERE n_tokens = 10", "cuts"),
        ("DELETE FROM prefixes WHERE cut = 0 AND entry = <draft>", "draft"),
        ("UPDATE prefixes SET hash = hash + 1 WHERE n_tokens = 30", "cuts"),
        ("UPDATE prefixes SET fingerprint = 77 WHERE n_tokens = 30", "cuts"),
        ("INSERT INTO prefixes(entry, fingerprint, n_tokens, cut) VALUES(<cuts>, 1, 11, 1)", "cuts"),
        ("INSERT INTO prefixes(entry, fingerprint, n_tokens, cut) VALUES(<parent>, 1, 100, 0)", "parent"),
    ],
)
def test_prefixes(path: Path, ids: Ids, sql: str, entry: str) -> None:
    assert {("prefixes", entry)} == broken(path, sql, ids)
    with Store(path) as store:
        operate.repair(store, store.verify())
        assert store.verify() == []


def test_a_hash_that_is_not_computed_yet_is_no_problem(path: Path, ids: Ids) -> None:
    assert broken(path, "UPDATE prefixes SET hash = NULL", ids) == set()
    with Store(path, readonly=True) as store:
        found = store.match([*range(200, 240), 5])
        assert found is not None
        assert (found.entry.id, found.n_common) == (ids["cuts"], 30)

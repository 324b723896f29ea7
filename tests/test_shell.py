"""A store in the sqlite3 shell of the machine, which may be older than the SQLite of kvstore and knows no foreign keys."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import storekit
from workkit import wait_for

from kvstore import Store
from kvstore.storage import db
from kvstore.storage.schema import schema_sql
from kvstore.store import maintenance

SHELL = shutil.which("sqlite3")
INSPECT = (Path(__file__).parent.parent / "tools" / "inspect.sql").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(SHELL is None, reason="there is no sqlite3 shell here")
PREFIX = list(range(100))


def shell(path: Path, sql: str, *options: str) -> list[list[str]]:
    """The rows that a query gives in the shell."""
    command = [str(SHELL), "-bail", "-separator", "\t", *options, str(path)]
    done = subprocess.run(command, input=sql, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), sql
    return [line.split("\t") for line in done.stdout.splitlines()]


def queries() -> list[tuple[str, str]]:
    """(comment, statement) of tools/inspect.sql."""
    out = []
    for block in re.split(r"\n\n", INSPECT):
        lines = block.strip().splitlines()
        code = "\n".join(line for line in lines if not line.startswith("--"))
        if code:
            out.append((" ".join(line[3:] for line in lines if line.startswith("--")), code))
    return out


@pytest.fixture
def filled(path: Path) -> Iterator[dict[str, int]]:
    """A store with a family of three, and three entries that nobody used."""
    ids = {}
    with Store(path, fingerprint="model-a", min_saved_mib=0.001) as store:
        put = store.put
        ids["parent"] = put(PREFIX, storekit.state(PREFIX), entry_class="learned", n_system=100, excerpt="system").id
        for n in (1, 2):
            tokens = [*PREFIX, *range(1000 * n, 1000 * n + 20)]
            ids[f"child {n}"] = put(tokens, storekit.state(tokens), n_system=100, excerpt=f"child {n}").id
        ids["large"] = put([1, 2], storekit.noise(1, 3 << 20), draft=b"draft", excerpt="large").id
        ids["expiring"] = put([5, 6], b"expiring", ttl=5400, excerpt="expiring").id
        ids["cut"] = put(range(200, 250), storekit.recurrent_state(50, (10, 30)), excerpt="cut").id
        store.get(ids["child 1"])
    return ids


def where(ids: dict[str, int], *names: str) -> str:
    return ",".join(f"'{ids[name]:016x}'" for name in names)


# -- looking


def test_every_query_has_a_comment_and_runs(path: Path, filled: dict[str, int]) -> None:
    found = queries()
    assert len(found) >= 12
    before = path.read_bytes()
    for comment, sql in found:
        assert comment, sql
        shell(path, sql, "-readonly")
    assert shell(path, INSPECT, "-readonly", "-box")
    assert path.read_bytes() == before


def test_the_statements_in_its_comments_run(path: Path, filled: dict[str, int]) -> None:
    statements = re.findall(r"^--     ((?:DELETE|UPDATE)[^;]*;)", INSPECT, re.MULTILINE)
    assert len(statements) == 4
    for statement in statements:
        shell(path, re.sub(r"\n--\s+", " ", statement))
    with Store(path) as store:
        assert store.verify() == []


def test_every_view_runs_in_both(path: Path, filled: dict[str, int]) -> None:
    views = re.findall(r"^CREATE VIEW (\w+)", schema_sql(), re.MULTILINE)
    for view in views:
        rows = shell(path, f"SELECT * FROM {view}")
        database = db.Database(str(path), readonly=True)  # trusts no schema
        try:
            with database.read() as c:
                assert len(c.execute(f"SELECT * FROM {view}").fetchall()) == len(rows) > 0
        finally:
            database.close()


def test_the_list(path: Path, filled: dict[str, int]) -> None:
    sql = "SELECT excerpt, id, tokens, mib, class, age, used, expires_in, parent, hits FROM ls"
    rows = {row[0]: row[1:] for row in shell(path, sql)}
    assert {rows[name][0] for name in ("large", "child 1")} == {f"{filled[n]:016x}" for n in ("large", "child 1")}
    assert rows["large"][1:4] == ["2", "3.0", "normal"]
    assert re.fullmatch(r"\d+ (s|min)", rows["large"][4])
    assert (rows["large"][5], rows["large"][6]) == ("never", "")
    assert re.fullmatch(r"\d+ (s|min)", rows["child 1"][5])
    assert rows["child 1"][7:] == [f"{filled['parent']:016x}", "1"]
    assert re.fullmatch(r"8\d min|90 min", rows["expiring"][6])
    shell(path, f"UPDATE meta SET created_at = created_at - 3 * 86400, hits = -9223372036854775803, "
          f"expires_at = 5 WHERE printf('%016x', entry) = {where(filled, 'large')}")  # fmt: skip
    (row,) = shell(path, f"SELECT age, hits, expires_in FROM ls WHERE id = {where(filled, 'large')}")
    assert row == ["3 days", str(2**63 + 5), "expired"]


def test_the_tree_what_is_big_and_what_was_never_used(path: Path, filled: dict[str, int]) -> None:
    family = f"(SELECT family FROM ls WHERE id = {where(filled, 'parent')})"
    tree = shell(path, f"SELECT entry FROM tree WHERE family = {family}")
    assert tree[0] == [f"{filled['parent']:016x}"]
    assert sorted(tree[1:]) == sorted([f"  {filled[f'child {n}']:016x}"] for n in (1, 2))
    biggest = shell(path, "SELECT id, children, stored_mib <= frees_mib, percent FROM biggest")
    assert biggest[0][0] == f"{filled['large']:016x}"
    assert [f"{filled['parent']:016x}", "2", "1"] in [row[:3] for row in biggest]
    unused = {row[0] for row in shell(path, "SELECT id FROM unused")}
    assert unused == {f"{filled[name]:016x}" for name in ("child 2", "large", "expiring", "cut")}


# -- deleting


def sums(path: Path) -> tuple[list[list[str]], list[list[str]]]:
    """The totals as they are kept, and as they are."""
    kept = shell(path, "SELECT class, entries, size, stored FROM totals WHERE entries ORDER BY 1")
    return kept, shell(path, "SELECT class, count(*), sum(size), sum(stored) FROM meta GROUP BY 1 ORDER BY 1")


@pytest.mark.parametrize("foreign_keys", ["off", "on"])
@pytest.mark.parametrize("recursive", ["off", "on"])
def test_children_go_with_their_parent(path: Path, filled: dict[str, int], foreign_keys: str, recursive: str) -> None:
    shell(
        path,
        f"PRAGMA foreign_keys = {foreign_keys}; PRAGMA recursive_triggers = {recursive}; "
        f"DELETE FROM entries WHERE printf('%016x', id) = {where(filled, 'parent')}",
    )
    assert shell(path, "SELECT count(*) FROM entries") == [["3"]]
    assert shell(path, "PRAGMA foreign_key_check") == []
    kept, real = sums(path)
    assert kept == real
    with Store(path, fingerprint="model-a") as store:
        assert store.verify() == []
        assert {entry.id for entry in store.entries()} == {filled[name] for name in ("large", "expiring", "cut")}
        assert store.get(filled["child 1"]) is None
        assert len(storekit.dump(store)) == 3


def test_all_entries_at_once(path: Path, filled: dict[str, int]) -> None:
    shell(path, "DELETE FROM entries")
    for table in ("entries", "meta", "blobs", "chunks", "cuts"):
        assert shell(path, f"SELECT count(*) FROM {table}") == [["0"]], table
    assert sums(path) == ([], [])


ODD = {
    "meta of a child": ("DELETE FROM meta WHERE {is entry} {child 1}", {"child 1"}),
    "meta of a parent": ("DELETE FROM meta WHERE {is entry} {parent}", {"parent", "child 1", "child 2"}),
    "blobs of an entry": ("DELETE FROM blobs WHERE {is entry} {large}", {"large"}),
    "blobs of a parent": ("DELETE FROM blobs WHERE {is entry} {parent}", {"parent", "child 1", "child 2"}),
    "main of an entry": ("DELETE FROM blobs WHERE part = 'main' AND {is entry} {large}", {"large"}),
    "all chunks of an entry": ("DELETE FROM chunks WHERE blob IN (SELECT id FROM blobs WHERE {is entry} {large})", {"large"}),
    "the first chunk of an entry": (
        "DELETE FROM chunks WHERE seq = 0 AND blob IN (SELECT id FROM blobs WHERE {is entry} {large})",
        {"large"},
    ),
    "the last chunk of an entry": (
        "DELETE FROM chunks WHERE id = (SELECT max(id) FROM chunks WHERE blob IN"
        " (SELECT id FROM blobs WHERE {is entry} {large} AND part = 'main'))",
        {"large"},
    ),
    "all chunks": ("DELETE FROM chunks", {"parent", "child 1", "child 2", "large", "expiring", "cut"}),
    "all of meta": ("DELETE FROM meta", {"parent", "child 1", "child 2", "large", "expiring", "cut"}),
    "all fingerprints": ("DELETE FROM fingerprints", {"parent", "child 1", "child 2", "large", "expiring", "cut"}),
    "the trigger first": (
        "DROP TRIGGER entries_deleted; DELETE FROM entries WHERE printf('%016x', id) = {parent}",
        {"parent", "child 1", "child 2"},
    ),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("swept", [False, True])
def test_odd_deletions(path: Path, filled: dict[str, int], name: str, swept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person deletes in the wrong table is never served, and cleaned up; the rest stays."""
    with Store(path, fingerprint="model-a") as store:
        held = storekit.dump(store)
    statement, gone = ODD[name]
    statement = statement.replace("{is entry}", "printf('%016x', entry) =")
    shell(path, re.sub(r"\{([^}]+)\}", lambda m: where(filled, m[1]), statement))
    monkeypatch.setattr(maintenance, "INTERVAL_SECONDS", 0.02 if swept else 1000)
    with Store(path, fingerprint="model-a", cache_ram_mib=0) as store:
        if swept:
            maintenance_thread = store._maintenance
            assert maintenance_thread is not None
            wait_for(lambda: maintenance_thread._orphans_deleted)
        for entry in filled:
            saved = store.get(filled[entry])
            if entry in gone:
                assert saved is None, entry
            else:
                assert saved is not None, entry
                assert saved.main.tobytes() == held[filled[entry]][1]
        store.gc()
        assert store.verify() == []
        assert {entry.id for entry in store.entries()} == {filled[entry] for entry in filled.keys() - gone}
    kept, real = sums(path)
    assert kept == real

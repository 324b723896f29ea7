"""Migrations are frozen: a step brings what it needs, and a new version is one more folder."""

from __future__ import annotations

import ast
import gzip
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import legacykit
import pytest
import storekit
from kvstore.migrations.v2 import step as step_2
from kvstore.migrations.v3 import step as step_3

from kvstore import MigrationError, Store, migrations
from kvstore.storage import db, peek
from kvstore.storage.db import Database
from kvstore.storage.policy import cuts_of

FOLDER = Path(migrations.__file__).parent
STEPS = sorted(p for p in FOLDER.glob("v*") if p.is_dir())
GOLDEN = Path(__file__).parent / "data" / "golden"
STATES = Path(__file__).parent / "data" / "states"

# What a step may import of others: formats that never change, types and errors. Of modules, what it may use of them.
ALLOWED = {
    "kvstore.storage.db": {"Connection", "translated"},
    "kvstore.errors": {"CorruptStoreError", "DeltaError", "LayoutError", "MetaBlockError", "MigrationError"},
    "kvstore.meta": {"MetaBlock"},
    "kvstore.bkvd": {"decode", "parent_id"},
    "kvstore.layout": {"parse"},
    "numpy": None,
    "numpy.typing": None,
    "xxhash": None,
}


def imported(tree: ast.AST) -> Iterator[tuple[int, str, str | None, str]]:
    """(level, module, name out of it or None, the name it is used by) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, None, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, node.module or "", a.name, a.asname or a.name) for a in node.names)


def forbidden(source: str) -> list[str]:
    """The imports of a step's module that are not on the list."""
    tree = ast.parse(source)
    bad = []
    for level, module, name, used_as in imported(tree):
        if level == 1 or (level == 2 and module == "base"):
            continue
        whole = f"{module}.{name}" if module == "kvstore" and name else module
        if level == 0 and module.split(".")[0] in sys.stdlib_module_names and module != "importlib.util":
            continue
        if level or whole not in ALLOWED or (name is None and whole.startswith("kvstore")):
            bad.append(f"{'.' * level}{module} {name}")
            continue
        allowed = ALLOWED[whole]
        if allowed is None:
            continue
        if whole == module:
            names = {name}
        else:
            names = {
                n.attr
                for n in ast.walk(tree)
                if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == used_as
            }
        bad += [f"{whole}.{n}" for n in sorted(names - allowed)]  # type: ignore[type-var]
    return bad


def schema(path: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as c:
        return sorted(c.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as c:
        return int(c.execute("PRAGMA user_version").fetchone()[0])


@pytest.mark.parametrize(
    "path", [p for folder in STEPS for p in sorted(folder.glob("*.py"))], ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_a_step_imports_nothing_that_may_change(path: Path) -> None:
    assert forbidden(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "from kvstore import policy", "from kvstore.queries import signed", "import kvstore.db", "import apsw",
        "from kvstore import db\ndb.PAGE_SIZE", "from kvstore.db import PAGE_SIZE", "from kvstore import bkvd\nbkvd.encode()",
        "from ..v2 import step", "from .. import files",
        "def f():\n    from kvstore.shelf import Shelf", "from kvstore import *",
    ],
)  # fmt: skip
def test_the_list_is_kept_to(line: str) -> None:
    assert forbidden(line) != []


def test_a_migrated_file_has_the_frozen_schema(path: Path, tmp_path: Path) -> None:
    legacykit.odd(path, 1)
    database = Database(str(path))
    migrations.run(database, 1, None)  # opening it adds what a file of this version may lack
    database.close()
    with closing(sqlite3.connect(tmp_path / "frozen")) as c:
        c.executescript(step_2.schema_sql())
        c.executescript(step_3.sql())
    assert legacykit.plain(schema(path)) == legacykit.plain(schema(tmp_path / "frozen"))
    assert version(path) == 3
    with closing(sqlite3.connect(path)) as c:
        assert c.execute("PRAGMA application_id").fetchone()[0] == 0x4B565356


def test_the_frozen_schema_is_that_of_released_files(tmp_path: Path) -> None:
    """The tables of a store that version 2's own writer made: whoever edits the frozen schema breaks this."""
    (tmp_path / "golden").write_bytes(gzip.decompress((GOLDEN / "v2.db.gz").read_bytes()))
    with closing(sqlite3.connect(tmp_path / "frozen")) as c:
        c.executescript(step_2.schema_sql())
    assert [row for row in schema(tmp_path / "golden") if row[0] == "table"] == [
        row for row in schema(tmp_path / "frozen") if row[0] == "table"
    ]


@pytest.mark.parametrize("name", sorted(p.name for p in STATES.glob("*-fa-a.bin")))
def test_cuts_and_chunks_are_as_this_version_has_them(name: str) -> None:
    """The step and the store's own writer do the same, whatever the version."""
    if peek.SCHEMA_VERSION <= 3:
        state = storekit.slotfile.read(STATES / name).state
        mine, own = step_2._cuts(state, 134), cuts_of(state, 134)
        assert (mine.any, mine.counts) == (own.any, own.counts)


def test_every_file_of_a_step_is_installed() -> None:
    packages = {f"kvstore.migrations.{folder.name}" for folder in STEPS}
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    for package in packages:
        assert f'"{package}"' in text.split("packages = [")[1].split("]")[0]
        assert f'"{package}" = ["*.sql"]' in text


# One more version: a folder.

IN_PLACE = """
from ..base import Outcome, Step, count_entries

def apply(old, new, progress):
    new.execute("ALTER TABLE entries ADD COLUMN note TEXT")
    return Outcome(count_entries(new))

STEP = Step(4, "notes", "Entries get a note.", apply)
"""
REBUILT = """
from ..base import Outcome, Step, count_entries

def apply(old, new, progress):
    new.execute("CREATE TABLE entries(id INTEGER PRIMARY KEY, note TEXT)")
    ids = old.execute("SELECT id FROM entries").fetchall()
    new.executemany("INSERT INTO entries(id) VALUES(?)", ids)
    return Outcome(count_entries(new))

STEP = Step(4, "notes", "Another file.", apply, rebuilds=True, room=lambda c: 1 << 20)
"""
REFUSING = IN_PLACE.replace("apply)", 'apply, lambda c: "it has no room for notes")')


@pytest.fixture
def fourth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A folder v4 somewhere else, which is looked into as if it were here."""
    extra = tmp_path / "extra"
    (extra / "v4").mkdir(parents=True)
    (extra / "v4" / "__init__.py").write_text(request.param)
    monkeypatch.setattr(migrations, "__path__", [*migrations.__path__, str(extra)])
    yield
    sys.modules.pop("kvstore.migrations.v4", None)
    if hasattr(migrations, "v4"):
        del migrations.v4


@pytest.mark.parametrize("fourth", [IN_PLACE, REBUILT], indirect=True, ids=["in place", "a new file"])
@pytest.mark.parametrize("start", [1, 3])
def test_a_new_version_is_one_more_folder(path: Path, fourth: None, start: int) -> None:
    if start == 1:
        legacykit.odd(path, 1)
    else:
        with Store(path) as store:
            store.put([1, 2], b"state")
    old = path.read_bytes()
    assert [step.number for step in migrations.steps()] == [2, 3, 4]
    database = db.Database(str(path))
    try:
        plan = migrations.dry_run(database, start)
        assert [step.number for step in plan.steps] == list(range(start + 1, 5))
        assert path.read_bytes() == old
        report = migrations.run(database, start)
    finally:
        database.close()
    assert report is not None
    assert (report.from_version, report.to_version, report.entries) == (start, 4, plan.entries)
    assert report.entries > 0
    assert version(path) == 4
    with closing(sqlite3.connect(path)) as c:
        assert c.execute("SELECT count(*) FROM entries WHERE note IS NULL").fetchone()[0] == report.entries
        assert c.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    backup = path.with_name(f"{path.name}.v{start}-backup")
    assert {p.name for p in path.parent.glob("kv.store*")} == {path.name, backup.name}
    assert version(backup) == start


@pytest.mark.parametrize("fourth", [REFUSING], indirect=True, ids=["refusing"])
def test_a_later_step_that_cannot_be_taken_leaves_the_old_store(path: Path, fourth: None) -> None:
    legacykit.odd(path, 1)
    before = shutil.copy(path, path.with_name("before"))
    database = db.Database(str(path))
    try:
        with pytest.raises(MigrationError, match="step 4, notes: it has no room for notes"):
            migrations.run(database, 1)
    finally:
        database.close()
    assert path.read_bytes() == Path(before).read_bytes()

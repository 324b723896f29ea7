"""Old stores: what they become, and that nothing on the way there can lose one."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import legacykit
import pytest
import storekit
from legacykit import Legacy, delta

from kvstore import BusyError, MigrationError, NewerStoreError, NotAStoreError, ReadOnlyError, Store, migrations
from kvstore.storage import db, geometry, peek
from kvstore.storage import schema as upgrade
from kvstore.storage.policy import cuts_of

GOLDEN = Path(__file__).parent / "data" / "golden"


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as c:
        return int(c.execute("PRAGMA user_version").fetchone()[0])


def schema(path: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as c:
        return sorted(c.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))


def folder(path: Path) -> dict[str, bytes]:
    return {p.name: hashlib.sha256(p.read_bytes()).digest() for p in path.parent.iterdir() if p.is_file()}


def said(records: tuple[migrations.Record, ...], id: int) -> str:
    return "; ".join(str(record) for record in records if record.id == id)


# -- what entries become


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_odd_case(path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = legacykit.odd(path, seed)
    old = path.read_bytes()
    with caplog.at_level(logging.WARNING, "kvstore"):
        Store(path).close()
    warned = {record.getMessage().split("entry ")[1][:16] for record in caplog.records}
    reported = {case["id"] for case in expected.values() if case["entry"] is None or case["entry"]["reported"]}
    assert warned == reported
    legacykit.check(path, expected)
    backup = path.with_name(path.name + ".v1-backup")
    assert backup.read_bytes() == old
    assert backup.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, backup.name]


def test_an_upgraded_file_is_as_a_new_one(path: Path, tmp_path: Path) -> None:
    """Opening adds what a file of this version may lack."""
    legacykit.odd(path, 1)
    upgrade.upgrade(path)
    for at in (path, tmp_path / "new"):
        with Store(at) as store:
            store.put([1], b"x")
    assert legacykit.plain(schema(path)) == legacykit.plain(schema(tmp_path / "new"))
    with closing(sqlite3.connect(path)) as c:
        pragmas = [c.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "auto_vacuum", "journal_mode")]
    assert pragmas == [geometry.PAGE_SIZE, db.AUTO_VACUUM, db.JOURNAL_MODE]


@pytest.mark.parametrize("name", sorted(p.name.partition(".")[0] for p in GOLDEN.glob("*.db.gz")))
def test_golden_store(path: Path, name: str) -> None:
    path.write_bytes(gzip.decompress((GOLDEN / f"{name}.db.gz").read_bytes()))
    facts = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    if name == "v1":
        return legacykit.check(path, facts)
    with Store(path, cache_ram_mib=0) as store:
        assert store.verify() == []
        assert {entry.hex_id for entry in store.entries()} == {fact["id"] for fact in facts}
        for fact in facts:
            saved = store.get(int(fact["id"], 16))
            assert saved is not None
            have = saved.entry.as_dict() | {"expires_at": saved.entry.expires_at, "tokens": saved.tokens.tolist()}
            states = {"main": saved.main, "draft": saved.draft}
            have["sha256"] = {part: hashlib.sha256(s).hexdigest() for part, s in states.items() if s is not None}
            have["hits"] -= 1
            have["last_used"] = fact["last_used"]
            assert {key: have[key] for key in fact} == fact
    return None


def second(path: Path) -> Path:
    """The golden store of version 2."""
    path.write_bytes(gzip.decompress((GOLDEN / "v2.db.gz").read_bytes()))
    return path


def rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as c:
        return c.execute(sql).fetchall()


def test_version_2_is_upgraded_in_place_and_no_state_is_written(path: Path) -> None:
    tables = [
        "SELECT id, entry, part, kind, size, stored, digest, writer FROM blobs", "SELECT id, blob, seq, data FROM chunks",
        "SELECT id, fingerprint, cut_any, n_tokens, tokens, head FROM entries",
        "SELECT rootpage FROM sqlite_schema WHERE name = 'chunks'",
    ]  # fmt: skip
    before = [rows(second(path), sql) for sql in tables]
    inode = path.stat().st_ino
    plan = upgrade.dry_run(path)
    assert (plan.from_version, plan.to_version, plan.problem, plan.backup) == (2, 3, None, None)
    report = upgrade.upgrade(path)
    assert report is not None
    assert (report.from_version, report.to_version, report.backup, report.records) == (2, 3, None, ())
    assert report.entries == len(before[2])
    assert [rows(path, sql) for sql in tables] == before
    assert (path.stat().st_ino, sorted(p.name for p in path.parent.iterdir())) == (inode, [path.name])
    with Store(path) as store:
        assert store.verify() == []


def test_version_2_of_an_early_program(path: Path) -> None:
    """It lacks what was added while version 2 was the newest."""
    with closing(sqlite3.connect(second(path))) as c:
        cuts = c.execute("SELECT count(*) FROM cuts").fetchone()[0]
        whole = c.execute("SELECT count(*) FROM entries WHERE cut_any = 0").fetchone()[0]
        for kind, name in c.execute("SELECT type, name FROM sqlite_schema WHERE sql IS NOT NULL").fetchall():
            if kind == "trigger" or name.startswith("prefixes") or name in ("entries_by_end", "meta_by_last_used"):
                c.execute(f"DROP {kind} IF EXISTS {name}")
    assert upgrade.upgrade(path) is not None
    assert rows(path, "SELECT count(*) FROM prefixes") == [(cuts + whole,)]
    with Store(path) as store:
        assert store.verify() == []


def test_version_2_cannot_be_read_before_its_upgrade(path: Path) -> None:
    before = second(path).read_bytes()
    with pytest.raises(ReadOnlyError, match="has to be upgraded first"):
        Store(path, readonly=True)
    assert path.read_bytes() == before


def test_every_version_has_a_golden_store() -> None:
    assert {p.name for p in GOLDEN.glob("*.db.gz")} == {f"v{n}.db.gz" for n in range(1, upgrade.SCHEMA_VERSION + 1)}


def test_tokens_that_do_not_add_up(path: Path) -> None:
    with Legacy(path) as old:
        old.add(1, {"main": b"a"}, n_tokens=7)
        old.add(2, {"main": b"a"}, token_bytes=b"")
        old.add(3, {"main": b"a"}, token_bytes=b"12345")
        old.add(4, {"main": b"a"}, token_bytes="text")
        old.add(5, {"main": b"a"}, n_tokens="many")
    report = upgrade.upgrade(path)
    assert report is not None
    assert (report.entries, {r.id for r in report.records if not r.kept}) == (2, {2, 3, 4})
    assert "said to have 7 tokens, and has 3" in said(report.records, 1)
    with Store(path) as store:
        assert [e.n_tokens for e in store.entries()] == [3, 3]


def test_odd_rows(path: Path) -> None:
    with Legacy(path) as old:
        old.add(1, {})
        old.add(2, {"main": b""})
        old.add(3, {"draft": b"d"})
        old.add(4, {"main": "text"})
        old.add(5, {"main": b"m", "draft": b""})
        old.add(6, {"main": b"m"}, fingerprint=b"\xff\xfe")
        old.add(7, {"main": b"m"}, ttl=-5)
        old.add(8, {"main": b"m"}, parent=7)
        old.add(0, {"main": b"m"}, block=b"")
        old.add(9, {"main": b"m"})
        old.db.execute("DELETE FROM meta WHERE entry = 9")
        old.db.execute("INSERT INTO blobs VALUES(77, 'main', x'00')")
        old.add(10, {"main": b"m"}, hits=(1 << 63) - 1)
    plan = upgrade.dry_run(path)
    report = upgrade.upgrade(path)
    assert report is not None
    assert (plan.entries, plan.records) == (report.entries, report.records)
    assert {r.id for r in report.records if not r.kept} == {0, 1, 2, 3, 4, 6, 77}
    assert {r.id for r in report.records if r.kept} == {5, 7, 8, 9}
    with Store(path) as store:
        assert store.verify() == []
        assert {e.id for e in store.entries()} == {5, 7, 8, 9, 10}
        (popular,) = (e for e in store.entries() if e.id == 10)
        store.get(10)
        store.put([9], b"x")
        assert popular.hits == (1 << 63) - 1


def test_deltas(path: Path) -> None:
    parent, other = storekit.noise(1, 5000), storekit.noise(2, 5000)
    child, grandchild = parent + b"child", parent + b"child, and more"
    with Legacy(path) as old:
        old.add(10, {"main": parent, "draft": other}, entry_class="learned")
        old.add(11, {"main": delta(child, parent, 10), "draft": delta(other + b"d", other, 10)}, parent=10)
        old.add(12, {"main": delta(grandchild, child, 11)}, parent=11)
        old.add(13, {"main": delta(child, parent, 10)})
        old.add(14, {"main": delta(child, parent, 10)[:-1]}, parent=10)
        old.add(15, {"main": delta(child, parent, 10), "draft": delta(other, parent, 10)}, parent=10)
        old.add(16, {"main": child, "draft": delta(other + b"d", other, 10)})
        old.add(20, {"main": other}, entry_class="learned", expires_at=5)
        old.add(21, {"main": delta(other + b"21", other, 20)}, parent=20)
        old.add(31, {"main": delta(child, parent, 32)}, parent=32)
        old.add(32, {"main": delta(child, parent, 31)}, parent=31)
    report = upgrade.upgrade(path)
    assert report is not None
    assert {r.id for r in report.records if not r.kept} == {14, 20, 31, 32}
    assert {r.id for r in report.records if r.kept} == {12, 13, 15, 21}
    assert "truncated literal" in said(report.records, 14)
    with Store(path, cache_ram_mib=0) as store:
        assert store.verify() == []
        held = storekit.dump(store)
    assert {id: (e[1], e[2], e[4]) for id, e in held.items()} == {
        10: (parent, other, None),
        11: (child, other + b"d", 10),
        12: (grandchild, None, None),
        13: (child, None, 10),
        15: (child, None, 10),
        16: (child, other + b"d", None),
        21: (other + b"21", None, None),
    }


def test_cuts_are_those_of_a_put(path: Path) -> None:
    states = {1: storekit.state(range(50)), 2: storekit.recurrent_state(50, (10, 30)), 3: b"no layout"}
    with Legacy(path) as old:
        for id, state in states.items():
            old.add(id, {"main": state}, tokens=range(50), fingerprint="m")
    upgrade.upgrade(path)
    with closing(sqlite3.connect(path)) as c:
        for id, state in states.items():
            (cut_any,) = c.execute("SELECT cut_any FROM entries WHERE id = ?", (id,)).fetchone()
            counts = tuple(r[0] for r in c.execute("SELECT n_tokens FROM cuts WHERE entry = ? ORDER BY 1", (id,)))
            found = cuts_of(storekit.np.frombuffer(state, "u1"), 50)
            assert (bool(cut_any), counts) == (found.any, found.counts)
    with Store(path, fingerprint="m") as store:
        match = store.match([*range(50), 99])
        assert match is not None
        assert match.n_common == 50


def test_families_totals_and_order_of_use(path: Path) -> None:
    parent = storekit.noise(1, 2000)
    with Legacy(path) as old:
        old.add(1, {"main": b"1"}, last_used=300, family=(1 << 64) - 1, saved=True, reused=True)
        old.add(2, {"main": parent}, last_used=100, family=5, saved=True, entry_class="learned")
        old.add(3, {"main": delta(parent + b"3", parent, 2)}, parent=2, last_used=200, family=5, saved=True, reused=True)
        old.add(4, {"main": b"4"}, last_used=150, family=6)
    upgrade.upgrade(path)
    with closing(sqlite3.connect(path)) as c:
        assert [r[0] for r in c.execute("SELECT entry FROM meta ORDER BY use_order")] == [4, 3, 2, 1]
        assert sorted(c.execute("SELECT * FROM families")) == [(-1, 1, 1), (5, 2, 1)]
        sums = c.execute("SELECT class, count(*), sum(size), sum(stored) FROM meta GROUP BY class").fetchall()
        assert sorted(sums) == [r for r in sorted(c.execute("SELECT * FROM totals")) if r[1]]


# -- plans, refusals, backups


def test_plan_and_dry_run_write_nothing(path: Path) -> None:
    legacykit.odd(path, 4)
    before = folder(path)
    plan = upgrade.dry_run(path)
    assert [(s.number, bool(s.name), bool(s.description)) for s in plan.steps] == [(2, True, True), (3, True, True)]
    assert (plan.problem, plan.backup) == (None, f"{path}.v1-backup")
    assert folder(path) == before
    seen: list[tuple[int, int]] = []
    report = upgrade.upgrade(path, lambda done, total: seen.append((done, total)))
    assert report is not None
    assert (report.entries, report.records, report.backup) == (plan.entries, plan.records, plan.backup)
    assert seen == [(n, plan.entries) for n in range(plan.entries + 1)]
    assert path.stat().st_size <= plan.needed
    assert json.dumps(plan.as_dict())
    assert json.dumps(report.as_dict())
    assert upgrade.upgrade(path) is None
    assert upgrade.dry_run(path).steps == ()


def test_steps_are_numbered_to_the_present_version() -> None:
    assert [step.number for step in migrations.steps()] == list(range(2, upgrade.SCHEMA_VERSION + 1))


def test_a_backup_is_never_overwritten_and_need_not_be_kept(path: Path) -> None:
    backup = path.with_name(path.name + ".v1-backup")
    backup.write_bytes(b"precious")
    expected = legacykit.odd(path, 5)
    report = upgrade.upgrade(path)
    assert report is not None
    assert report.backup == f"{backup}-2"
    assert backup.read_bytes() == b"precious"
    legacykit.check(Path(report.backup), expected)  # a backup is a store like any other
    path.unlink()
    legacykit.odd(path, 5)
    report = upgrade.upgrade(path, backup=False)
    assert report is not None
    assert report.backup is None
    legacykit.check(path, expected)


def test_a_file_system_without_second_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(os, "link", refuse)
    expected = legacykit.odd(path, 6)
    report = upgrade.upgrade(path)
    assert report is not None
    assert report.backup is not None
    assert Path(report.backup).stat().st_mode & 0o777 == 0o600
    assert version(Path(report.backup)) == 1
    legacykit.check(path, expected)
    legacykit.check(Path(report.backup), expected)


def test_through_a_symbolic_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    real = tmp_path / "disk" / "real.db"
    expected = legacykit.odd(real, 7)
    path.symlink_to(real)
    legacykit.check(path, expected)
    assert path.is_symlink()
    assert sorted(p.name for p in real.parent.iterdir()) == ["real.db", "real.db.v1-backup"]


def test_read_only_is_refused(path: Path) -> None:
    legacykit.odd(path, 1)
    before = folder(path)
    with pytest.raises(ReadOnlyError, match=r"has to be upgraded.*open it once without readonly"):
        Store(path, readonly=True)
    assert folder(path) == before


def test_a_file_that_lacks_a_table_is_refused(path: Path) -> None:
    with Legacy(path) as old:
        old.db.execute("DROP TABLE meta")
    before = folder(path)
    assert "meta" in str(upgrade.dry_run(path).problem)
    with pytest.raises(MigrationError, match="no table meta"):
        Store(path)
    assert folder(path) == before


def foreign(path: Path, *, mode: str, application_id: int, user_version: int, in_log: bool) -> None:
    """A database of someone else; in_log: its program was killed, and all it wrote is in the log."""
    scratch = path.with_name("scratch")
    with closing(sqlite3.connect(scratch)) as c:
        c.execute(f"PRAGMA journal_mode = {mode}")
        c.execute(f"PRAGMA application_id = {application_id}")
        c.execute(f"PRAGMA user_version = {user_version}")
        c.execute("CREATE TABLE t(a)")
        c.commit()
        if in_log:
            shutil.copy(scratch, path)
            shutil.copy(f"{scratch}-wal", f"{path}-wal")
    if not in_log:
        shutil.copy(scratch, path)
    scratch.unlink()


@pytest.mark.parametrize(("mode", "in_log"), [("delete", False), ("wal", False), ("wal", True)])
@pytest.mark.parametrize(
    ("application_id", "user_version", "error"),
    [(0, 0, NotAStoreError), (7, 2, NotAStoreError), (peek.APPLICATION_ID, 99, NewerStoreError)],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_foreign_and_newer_files_stay_untouched(
    path: Path, mode: str, in_log: bool, application_id: int, user_version: int, error: type[Exception], readonly: bool
) -> None:
    foreign(path, mode=mode, application_id=application_id, user_version=user_version, in_log=in_log)
    before = folder(path)
    with pytest.raises(error):
        Store(path, readonly=readonly)
    assert folder(path) == before


@pytest.mark.parametrize("content", [b"not a database at all", b"x" * 100_000])
def test_other_files_stay_untouched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(NotAStoreError):
        Store(path)
    assert folder(path) == {path.name: hashlib.sha256(content).digest()}


# -- other processes


def test_a_log_that_a_killed_process_left(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    source = tmp_path / "other" / "db"
    expected = legacykit.odd(source, 8)
    with closing(sqlite3.connect(source)) as c:
        c.execute("PRAGMA journal_mode = wal")
        c.execute("UPDATE entries SET fingerprint = 'model-a'")
        c.commit()
        shutil.copy(source, path)
        shutil.copy(f"{source}-wal", f"{path}-wal")
    legacykit.check(path, expected)
    assert version(path.with_name(path.name + ".v1-backup")) == 1


def test_a_journal_that_a_killed_process_left(path: Path) -> None:
    expected = legacykit.odd(path, 13)
    script = """
import os, sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None)
c.execute("PRAGMA cache_size = 1")
c.execute("BEGIN")
c.execute("UPDATE blobs SET data = zeroblob(length(data))")
c.execute("UPDATE entries SET tokens = zeroblob(length(tokens))")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert path.with_name(path.name + "-journal").stat().st_size > 512
    legacykit.check(path, expected)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".v1-backup"]


# A process of its own: two builds of SQLite in one process do not see each other's locks.
HOLD = """
import sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None)
c.execute("PRAGMA journal_mode = " + sys.argv[2])
if sys.argv[3] == "reading":
    c.execute("BEGIN")
c.execute("SELECT count(*) FROM entries").fetchone()
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[3] == "reading":
    c.execute("COMMIT")
else:
    try:
        c.execute("DELETE FROM entries")
    except sqlite3.OperationalError as error:
        print(error, flush=True)
"""


def holder(path: Path, mode: str, how: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), mode, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_a_process_that_holds_the_old_file(path: Path) -> None:
    expected = legacykit.odd(path, 9)
    child = holder(path, "delete", "idle")
    Store(path).close()
    assert "readonly" in child.communicate("\n")[0]
    legacykit.check(path, expected)
    legacykit.check(path.with_name(path.name + ".v1-backup"), expected)


@pytest.mark.parametrize(("mode", "how"), [("delete", "reading"), ("wal", "reading"), ("wal", "idle")])
def test_a_process_that_uses_the_old_file(path: Path, mode: str, how: str) -> None:
    legacykit.odd(path, 9)
    child = holder(path, mode, how)
    before = folder(path)
    with pytest.raises(BusyError):
        Store(path, timeout=0.1)
    assert folder(path).keys() == before.keys()
    child.communicate("\n")
    Store(path).close()
    assert version(path) == peek.SCHEMA_VERSION


def test_one_of_many_upgrades(path: Path, crash_free: Callable[[Callable[[], None]], threading.Thread]) -> None:
    expected = legacykit.odd(path, 10)
    script = "import sys; from kvstore.storage.schema import upgrade; print(upgrade(sys.argv[1], timeout=240) is not None)"
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    reports: list[bool] = []
    threads = [crash_free(lambda: reports.append(upgrade.upgrade(path, timeout=240) is not None)) for _ in range(2)]
    for thread in threads:
        thread.join(240)
    out = [child.communicate(timeout=240)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert out.count("True") + reports.count(True) == 1
    legacykit.check(path, expected)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".v1-backup"]


LOCK_FOLDER = """
import fcntl, os, sys
fd = os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_an_old_file_is_not_opened_while_another_process_may_replace_it(path: Path, tmp_path: Path) -> None:
    legacykit.odd(path, 3)
    other = path.with_name("new.store")
    Store(other).close()
    child = subprocess.Popen(
        [sys.executable, "-c", LOCK_FOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    for readonly in (False, True):
        with pytest.raises(BusyError, match="is being upgraded by another process"):
            Store(path, timeout=0.1, readonly=readonly)
    Store(other, timeout=0.1).close()  # of the current version
    child.communicate("\n")
    Store(path, timeout=10).close()
    assert version(path) == peek.SCHEMA_VERSION


def test_the_new_file_has_its_log_on_before_it_gets_the_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    legacykit.odd(path, 3)
    seen: list[bytes] = []
    rename = os.replace

    def look(new: str, old: str) -> None:
        if str(new).endswith(".upgrading"):
            seen.append(Path(new).read_bytes()[18:20])  # the file format versions; 2: write-ahead log
        rename(new, old)

    monkeypatch.setattr(os, "replace", look)
    Store(path).close()
    assert seen == [b"\x02\x02"]

"""Upgrades that are cut off: killed, out of disk, failing at any step. The old store or the new one, nothing else."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import diskkit
import legacykit
import pytest
import storekit
from kvstore.migrations import files
from legacykit import Legacy
from test_migrations import folder, version

from kvstore import DiskFullError, KVStoreError, Store, migrations
from kvstore.storage import db, peek
from kvstore.storage import schema as upgrade

Usage = namedtuple("Usage", "total used free")


def alone(path: Path) -> None:
    """Nothing lies beside a store but the backup."""
    assert {p.name for p in path.parent.iterdir()} - {path.name} == {path.name + ".v1-backup"}


def test_killed_at_every_step(path: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "db"
    expected = legacykit.odd(source, 11)
    at, versions = 0, set()
    while True:
        at += 1 if at < 2 or at > 24 else 11  # those in the middle are all progress
        for p in tmp_path.glob(path.name + "*"):
            p.unlink()
        shutil.copy(source, path)
        done = subprocess.run([sys.executable, "-c", legacykit.KILLED, str(path), str(at)], check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        versions.add(version(path))
        legacykit.check(path, expected)
        assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {path.name, path.name + ".v1-backup"}
    assert versions == {1, peek.SCHEMA_VERSION}
    assert at > 30


def big(path: Path, n: int, size: int) -> dict[int, bytes]:
    states = {id: storekit.noise(id, size + id) for id in range(1, n + 1)}
    with Legacy(path) as old:
        for id, state in states.items():
            old.add(id, {"main": state}, tokens=[id, 2, 3])
    return states


def killed_at_times(path: Path, times: int, size: int) -> None:
    states = big(path, 24, size)
    script = "import sys; from kvstore.storage import schema as upgrade; print('go', flush=True); upgrade.upgrade(sys.argv[1])"
    command = [sys.executable, "-c", script]
    trial = path.with_name("trial")
    shutil.copy(path, trial)
    child = subprocess.Popen([*command, str(trial)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    started = time.monotonic()
    assert child.wait() == 0
    takes = time.monotonic() - started
    for n in range(times):
        for p in path.parent.glob("trial*"):
            p.unlink()
        shutil.copy(path, trial)
        child = subprocess.Popen([*command, str(trial)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(takes * n / times)
        child.kill()
        child.wait()
        with Store(trial, cache_ram_mib=0) as store:
            assert {id: e[1] for id, e in storekit.dump(store).items()} == states
            assert store.verify() == []
        assert not list(path.parent.glob("*.upgrading*"))


def test_killed_at_any_time(path: Path) -> None:
    killed_at_times(path, 6, 1 << 20)


@pytest.mark.slow
def test_killed_at_any_time_and_often(path: Path) -> None:
    killed_at_times(path, 40, 2 << 20)


def test_a_failure_at_every_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in the upgrade leaves the old store as it was, and nothing beside it."""
    expected = legacykit.odd(path, 12)
    before = folder(path)
    for name in ("check_room", "build", "keep", "replace", "sync", "sync_folder"):
        with monkeypatch.context() as patched:

            def fail(*_: object) -> None:
                raise OSError(5, "failed")

            patched.setattr(files, name, fail)
            with pytest.raises(OSError, match="failed"):
                upgrade.upgrade(path)
        assert folder(path) == before, name

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upgrade.upgrade(path, stop)
    assert folder(path) == before
    legacykit.check(path, expected)


# -- disk


def test_room_is_checked_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big(path, 3, 1 << 20)
    before = folder(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 30, 0, 1000))
    assert "needed" in str(upgrade.dry_run(path).problem)
    with pytest.raises(DiskFullError, match=r"MiB are needed beside it") as caught:
        upgrade.upgrade(path)
    assert 3 << 20 < caught.value.facts["needed"] < 9 << 20
    assert caught.value.facts["free"] == 1000
    assert folder(path) == before


@pytest.mark.parametrize("size", [100, 9000, 33_000, 66_000, 1 << 20, (1 << 20) + 70_000])
def test_no_more_room_is_taken_than_was_asked_for(path: Path, size: int) -> None:
    big(path, 40, size)
    needed = upgrade.dry_run(path).needed
    upgrade.upgrade(path)
    assert path.stat().st_size <= needed
    assert needed <= 3 * 40 * (size + 4096) + (5 << 20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB."""
    with diskkit.small_disk(tmp_path / "disk", 24) as point:
        yield point


def test_disk_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_disk / "db"
    states = big(path, 14, 1 << 20)
    before = folder(path)
    with pytest.raises(DiskFullError):
        upgrade.upgrade(path)
    monkeypatch.setattr(files, "check_room", lambda *_: None)  # as if another program took the room meanwhile
    with pytest.raises(DiskFullError):
        upgrade.upgrade(path)
    assert folder(path) == before
    with closing(sqlite3.connect(path)) as c:
        c.execute("DELETE FROM entries WHERE id > 6")
        c.execute("DELETE FROM blobs WHERE entry > 6")
        c.execute("DELETE FROM meta WHERE entry > 6")
        c.commit()
        c.execute("VACUUM")
    with Store(path, cache_ram_mib=0) as store:
        assert {id: e[1] for id, e in storekit.dump(store).items()} == {id: states[id] for id in range(1, 7)}


# -- steps in place, as later versions will have them


def test_steps_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(number: int, sql: str) -> migrations.Step:
        def apply(old: db.Connection, new: db.Connection, progress: migrations.Progress) -> migrations.Outcome:
            new.execute(sql)
            return migrations.Outcome(0)

        return migrations.Step(number, f"to {number}", "a test", apply)

    Store(path).close()
    good = step(4, "CREATE TABLE four(a)")
    steps = [*migrations.steps(), good, step(5, "CREATE TABLE four(a)")]
    monkeypatch.setattr(migrations, "steps", lambda: steps)
    database = db.Database(str(path))
    with pytest.raises(KVStoreError):
        migrations.run(database, 3)
    assert version(path) == 4  # the step that failed is undone, the one before it stays
    database.close()
    assert version(path.with_name(path.name + ".v3-backup")) == 3
    steps[-1] = step(5, "CREATE TABLE five(a)")
    monkeypatch.setattr(peek, "SCHEMA_VERSION", 5)
    database = db.Database(str(path))
    report = migrations.run(database, 4)
    database.close()
    assert report is not None
    assert (report.from_version, report.to_version, version(path)) == (4, 5, 5)

    old = path.with_name("old")
    legacykit.odd(old, 1)
    database = db.Database(str(old))
    report = migrations.run(database, 1)
    database.close()
    assert report is not None
    assert (report.from_version, report.to_version, version(old)) == (1, 5, 5)
    assert version(Path(str(report.backup))) == 1

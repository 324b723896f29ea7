"""Encrypted stores of version 1: what holds for plain ones holds for them, and no byte of them is written in the clear."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import legacykit
import pytest

from kvstore import NotAStoreError, Store, WrongKeyError
from kvstore.storage import peek, sqlite
from kvstore.storage import schema as upgrade

KEY = "correct horse"
pytestmark = pytest.mark.skipif(not sqlite.HAS_CIPHER, reason="needs apsw-sqlite3mc (make test-encryption)")


def odd(path: Path, seed: int, page_size: int = 4096) -> dict[str, dict[str, Any]]:
    """An encrypted store with every odd case; what each entry must become, by name."""
    expected = legacykit.odd(path, seed)
    c = apsw.Connection(str(path))
    c.pragma("page_size", page_size)
    c.execute("VACUUM")
    c.pragma("rekey", KEY)
    c.close()
    assert in_the_clear(path.parent) == set()
    return expected


def version(path: Path) -> int:
    c = apsw.Connection(str(path))
    c.pragma("key", KEY)
    found = int(c.pragma("user_version"))
    c.close()
    return found


def in_the_clear(folder: Path) -> set[str]:
    """The files that show an SQLite file's own words."""
    words = (b"SQLite format 3", b"CREATE TABLE", b"model-a")
    return {p.name for p in folder.iterdir() if p.is_file() and any(word in p.read_bytes() for word in words)}


def folder(path: Path) -> dict[str, bytes]:
    return {p.name: hashlib.sha256(p.read_bytes()).digest() for p in path.parent.iterdir() if p.is_file()}


@pytest.mark.parametrize("seed", [1, 2])
def test_every_odd_case(path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = odd(path, seed)
    old = path.read_bytes()
    with caplog.at_level(logging.WARNING, "kvstore"):
        Store(path, key=KEY).close()
    warned = {record.getMessage().split("entry ")[1][:16] for record in caplog.records}
    assert warned == {case["id"] for case in expected.values() if case["entry"] is None or case["entry"]["reported"]}
    assert KEY not in caplog.text
    legacykit.check(path, expected, KEY)
    backup = path.with_name(path.name + ".v1-backup")
    assert backup.read_bytes() == old
    assert backup.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, backup.name]
    assert in_the_clear(path.parent) == set()
    with Store(path, key=KEY) as store, store._core.db.read() as c:
        assert [c.pragma(name) for name in ("page_size", "auto_vacuum", "journal_mode")] == [8192, 2, "wal"]
    # The backup is a store like the one it was.
    shutil.copy(backup, path.with_name("again"))
    assert upgrade.dry_run(path.with_name("again"), key=KEY).from_version == 1
    legacykit.check(path.with_name("again"), expected, KEY)


def test_dry_run(path: Path) -> None:
    expected = odd(path, 3)
    before = folder(path)
    plan = upgrade.dry_run(path, key=KEY)
    assert (plan.from_version, plan.to_version, plan.problem) == (1, peek.SCHEMA_VERSION, None)
    assert plan.entries >= sum(case["entry"] is not None for case in expected.values())
    assert KEY not in str(plan)
    assert folder(path) == before
    report = upgrade.upgrade(path, key=KEY, backup=False)
    assert report is not None
    assert report.entries == sum(case["entry"] is not None for case in expected.values())
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    legacykit.check(path, expected, KEY)


def test_wrong_key(path: Path) -> None:
    odd(path, 4)
    before = folder(path)
    for key in ("wrong", KEY + " "):
        for call in (Store, upgrade.upgrade, upgrade.dry_run):
            with pytest.raises(WrongKeyError, match="does not open"):
                call(path, key=key)
    for call in (Store, upgrade.upgrade, upgrade.dry_run):
        with pytest.raises(NotAStoreError, match="or it is encrypted"):
            call(path)
    assert folder(path) == before


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
def test_a_file_system_without_second_names(path: Path, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the backup is a copy, which is encrypted as well."""
    expected = odd(path, 5, page_size)

    def no_link(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    report = upgrade.upgrade(path, key=KEY)
    assert report is not None
    assert in_the_clear(path.parent) == set()
    legacykit.check(path, expected, KEY)
    backup = Path(str(report.backup))
    assert version(backup) == 1
    legacykit.check(backup, expected, KEY)


def test_killed_at_every_step(path: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "db"
    expected = odd(source, 11)
    at, versions = 0, set()
    while True:
        at += 1 if at < 2 or at > 24 else 11  # those in the middle are all progress
        for p in tmp_path.glob(path.name + "*"):
            p.unlink()
        shutil.copy(source, path)
        command = [sys.executable, "-c", legacykit.KILLED, str(path), str(at), KEY]
        done = subprocess.run(command, check=False)
        assert in_the_clear(tmp_path) == set()
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        versions.add(version(path))
        legacykit.check(path, expected, KEY)
        assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {path.name, path.name + ".v1-backup"}
        assert version(path.with_name(path.name + ".v1-backup")) == 1
    assert versions == {1, peek.SCHEMA_VERSION}
    assert at > 30

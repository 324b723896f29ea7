"""Prompts stay private: file modes, wiping, encryption."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import numpy as np
import pytest
from storekit import noise, state

from kvstore import BusyError, KVStoreError, NotAStoreError, Store, WrongKeyError, operate

posix = pytest.mark.skipif(os.name == "nt", reason="file modes")
can_encrypt = hasattr(apsw, "mc_version")
EXCERPT = "my bank account is 4711-0815 and nobody may know"
TOKENS = [31337 + 3 * i for i in range(64)]


def needles(tokens: list[int], main: bytes) -> list[bytes]:
    """What may be left of an entry: its excerpt, tokens and state, in pieces."""
    words = np.asarray(tokens, "<i4").tobytes()
    # From behind the table of cells, which is the same in every state.
    cuts = [main[i : i + 24] for i in range(1000, len(main) - 24, max(1, len(main) // 400))]
    return [EXCERPT.encode(), EXCERPT[10:30].encode(), words, words[64:96], *cuts]


def left(folder: Path, wanted: list[bytes]) -> dict[str, int]:
    """How many of these each file holds."""
    found = {}
    for file in folder.iterdir():
        data = file.read_bytes()
        n = sum(needle in data for needle in wanted)
        if n:
            found[file.name] = n
    return found


@pytest.fixture
def lax() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@posix
@pytest.mark.usefixtures("lax")
def test_modes(path: Path, tmp_path: Path) -> None:
    with Store(path) as store:
        store.put(TOKENS, state(TOKENS), excerpt=EXCERPT)
        operate.backup(store, tmp_path / "copy")
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
        assert {"kv.store", "kv.store-wal", "kv.store-shm", "copy"} <= set(modes)
        assert set(modes.values()) == {0o600}
        operate.wipe(store)
    operate.salvage(path, tmp_path / "new")
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}


@posix
@pytest.mark.usefixtures("lax")
def test_modes_of_a_file_made_by_another(path: Path) -> None:
    """A file whose owner opened it to others stays as its owner wants it."""
    path.touch(mode=0o640)
    os.chmod(path, 0o640)
    with Store(path) as store:
        store.put(TOKENS, state(TOKENS))
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("whole", [True, False])
def test_wipe(path: Path, whole: bool) -> None:
    """Deleted, replaced and moved rows: no byte is left in the file, its log or its free pages."""
    secret = state(TOKENS, row=512)
    with Store(path, min_saved_mib=0.001) as store:
        store.put(list(range(50)), state(range(50)), excerpt="harmless")
        gone = store.put(TOKENS, secret, excerpt=EXCERPT)
        # Rows that move to other pages, and pages that are used again.
        for i in range(300):
            store.put([i, 7, *TOKENS[:10]], noise(i, 3000), excerpt=f"{EXCERPT} {i}")
        kept = store.put([1, 2, 3], noise(5, 100_000), excerpt="kept")
        assert left(path.parent, needles(TOKENS, secret))
        for entry in list(store.entries()):
            if EXCERPT in entry.excerpt:
                store.delete(entry.id)
        assert gone.id not in {e.id for e in store.entries()}
        if whole:
            store.gc()
        operate.wipe(store)
        assert left(path.parent, needles(TOKENS, secret)) == {}
        assert store.verify() == []
        got = store.get(kept.id)
        assert got is not None
        assert got.main.tobytes() == noise(5, 100_000)
        store.put([4, 5], noise(6, 50_000))
    assert left(path.parent, needles(TOKENS, secret)) == {}
    with Store(path) as store:
        assert store.verify() == []


def test_wipe_waits_for_readers(path: Path) -> None:
    """Where a reader keeps old pages in the log, wiping says so."""
    with Store(path, timeout=2) as store:
        store.put(TOKENS, state(TOKENS), excerpt=EXCERPT)
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchall()
        with pytest.raises(BusyError):
            operate.wipe(store)
        reader.close()
        operate.wipe(store)


def test_no_temporary_files(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SQLite sorts and vacuums in memory."""
    with Store(path) as store:
        store.put(TOKENS, state(TOKENS))
        with store._core.db.read() as c:
            assert c.pragma("temp_store") == 2
        operate.wipe(store)
        with store._core.db.exclusive() as c:
            assert c.pragma("temp_store") == 2


# -- encryption


@pytest.mark.skipif(can_encrypt, reason="this apsw can encrypt")
def test_a_key_without_encryption_is_an_error(path: Path) -> None:
    with pytest.raises(WrongKeyError, match="apsw-sqlite3mc"):
        Store(path, key="secret")
    assert not path.exists()


encryption = pytest.mark.skipif(not can_encrypt, reason="needs apsw-sqlite3mc")


@encryption
def test_encrypted(path: Path, tmp_path: Path) -> None:
    secret = state(TOKENS, row=512)
    with Store(path, key="correct horse") as store:
        entry = store.put(TOKENS, secret, excerpt=EXCERPT)
        big = store.put([1, 2], noise(1, 3 << 20))
        with store._core.db.read() as c:
            assert c.pragma("page_size") == 8192
            assert c.pragma("journal_mode") == "wal"
        operate.backup(store, tmp_path / "copy")
        assert left(tmp_path, [*needles(TOKENS, secret), b"SQLite format 3", b"CREATE TABLE"]) == {}
        store.delete(big.id)
        operate.wipe(store)
        assert left(tmp_path, needles(TOKENS, secret)) == {}
    for file in (path, tmp_path / "copy"):
        with Store(file, key="correct horse", readonly=True) as store:
            got = store.get(entry.id)
            assert got is not None
            assert got.main.tobytes() == secret
        assert operate.verify(file, key="correct horse") == []
    operate.salvage(path, tmp_path / "new", key="correct horse")
    assert left(tmp_path, needles(TOKENS, secret)) == {}
    assert operate.verify(tmp_path / "new", key="correct horse") == []


@encryption
@pytest.mark.parametrize("readonly", [False, True])
def test_wrong_key(path: Path, readonly: bool) -> None:
    with Store(path, key="correct horse") as store:
        store.put(TOKENS, state(TOKENS))
    before = path.read_bytes()
    calls: list[Callable[[], object]] = [
        lambda: Store(path, key="wrong", readonly=readonly),
        lambda: operate.verify(path, key="wrong"),
    ]
    for call in calls:
        with pytest.raises(WrongKeyError, match="does not open"):
            call()
    with pytest.raises(KVStoreError) as caught:
        Store(path, readonly=readonly)
    assert isinstance(caught.value, NotAStoreError | WrongKeyError)
    assert "encrypted" in caught.value.message
    assert path.read_bytes() == before


@encryption
def test_key_for_a_plain_store(path: Path) -> None:
    with Store(path) as store:
        store.put(TOKENS, state(TOKENS))
    with pytest.raises(WrongKeyError):
        Store(path, key="secret")
    with Store(path) as store:
        assert store.verify() == []

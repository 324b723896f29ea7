"""verify names what is wrong, repair drops that and nothing else, salvage copies what can be read."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from storekit import dump, recurrent_state, state

import kvstore
from kvstore import (
    CorruptStoreError,
    InvalidInputError,
    KVStoreError,
    MigrationError,
    NotAStoreError,
    NotFoundError,
    Problem,
    Store,
    StoreIOError,
    operate,
)

BASE = list(range(1, 101))
PAGE = 8192
Dump = dict[int, tuple[bytes, bytes, "bytes | None", str, "int | None"]]


def child_tokens(i: int) -> list[int]:
    return [*BASE, *[1000 + i] * 20]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Dump]:
    """A closed store: a learned prefix, three deltas against it (one with a draft), one that can be cut at a checkpoint."""
    path = tmp_path_factory.mktemp("check") / "kv.store"
    with Store(path, fingerprint="model", min_saved_mib=0.001) as store:
        entries = [store.put(BASE, state(BASE, row=1024), entry_class="learned", excerpt="the prefix")]
        for i in range(3):
            tokens = child_tokens(i)
            draft = state(tokens) if i == 2 else None
            entries.append(store.put(tokens, state(tokens, row=1024), draft=draft, excerpt=f"child {i}"))
        entries.append(store.put([7] * 40, recurrent_state(40, [20]), excerpt="recurrent"))
        assert [e.parent for e in entries] == [None, *[entries[0].id] * 3, None]
        return path, [e.id for e in entries], dump(store)


@pytest.fixture
def damaged(template: tuple[Path, list[int], Dump], path: Path) -> tuple[Path, list[int], Dump]:
    """A copy of it to damage."""
    shutil.copy(template[0], path)
    return path, template[1], template[2]


def edit(path: Path, *statements: str) -> None:
    """Changes rows behind the store's back, as no program of ours would."""
    c = apsw.Connection(str(path))
    for sql in statements:
        c.execute(sql)
    c.pragma("wal_checkpoint", "truncate")
    c.close()


def signed(id: int) -> int:
    return id - (1 << 64) if id >= 1 << 63 else id


def names(problems: list[Problem]) -> set[tuple[str, int | None]]:
    return {(p.invariant, p.entry) for p in problems}


def contents(path: Path) -> Dump:
    with Store(path) as store:
        return dump(store)


def test_clean(damaged: tuple[Path, list[int], Dump]) -> None:
    path = damaged[0]
    before = path.read_bytes()
    moved: list[tuple[int, int]] = []
    for jobs in (1, 3):
        assert operate.verify(path, jobs=jobs, progress=lambda done, total: moved.append((done, total))) == []
        assert moved[-1][0] == moved[-1][1] > 0
    assert path.read_bytes() == before
    with Store(path) as store:
        assert store.verify() == []
        store.put([1, 2, 3], b"not understood")
        assert operate.verify(path) == []


# -- the invariants of schema.sql; each breaks alone

L, A, B, C, R = range(5)  # the template's entries
BROKEN: list[tuple[str, str, list[str], int | None]] = [
    ("whole-entry", "no meta", ["DROP TRIGGER meta_deleted", "DELETE FROM meta WHERE entry = {A}"], A),
    ("whole-entry", "no main state", ["DELETE FROM blobs WHERE entry = {R}"], R),
    ("delta-parent", "no parent", ["UPDATE meta SET parent = NULL WHERE entry = {A}"], A),
    ("delta-parent", "parent is no whole entry", ["UPDATE meta SET parent = {B} WHERE entry = {A}"], A),
    ("delta-parent", "parent is gone", ["PRAGMA foreign_keys = 0", "UPDATE meta SET parent = 12345 WHERE entry = {A}"], A),
    ("delta-parent", "parent is another", ["UPDATE meta SET parent = {R} WHERE entry = {A}"], A),
    (
        "chunks-complete", "a chunk is missing",
        ["DELETE FROM chunks WHERE blob = (SELECT id FROM blobs WHERE entry = {A})"], A,
    ),
    (
        "chunks-complete", "chunks are misnumbered",
        ["UPDATE chunks SET seq = 5 WHERE blob = (SELECT id FROM blobs WHERE entry = {R})"], R,
    ),
    (
        "chunks-complete", "bytes are missing",
        ["UPDATE chunks SET data = x'00' WHERE blob = (SELECT id FROM blobs WHERE entry = {R})"], R,
    ),
    ("digest", "another digest", ["UPDATE blobs SET digest = zeroblob(16) WHERE entry = {B}"], B),
    ("no-orphan", "a cut", ["INSERT INTO cuts(entry, fingerprint, n_tokens, tokens) VALUES(99, 1, 1, x'00000000')"], None),
    ("no-orphan", "chunks", ["INSERT INTO chunks(blob, seq, data) VALUES(99, 0, x'00')"], None),
    (
        "no-orphan", "meta",
        ["INSERT INTO meta(entry, class, source, created_at, last_used, family, n_input, size, stored) "
         "VALUES(99, 'normal', 'default', 0, 0, 0, 1, 1, 1)"], None,
    ),
    ("no-orphan", "fingerprint", ["UPDATE entries SET fingerprint = 77 WHERE id = {R}", "DELETE FROM cuts"], R),
    ("staged", "a writer of what is done", ["UPDATE blobs SET writer = '1:2' WHERE entry = {R}"], None),
    ("totals", "sums", ["UPDATE totals SET stored = 1 WHERE class = 'normal'"], None),
    ("totals", "an entry's size", ["UPDATE meta SET size = 1, stored = 1 WHERE entry = {R}"], R),
    ("cuts", "none are listed", ["DELETE FROM cuts"], R),
    ("cuts", "too many are listed",
     ["INSERT INTO cuts(entry, fingerprint, n_tokens, tokens) SELECT id, fingerprint, 30, substr(tokens, 1, 120) "
      "FROM entries WHERE id = {R}"], R),
    ("cuts", "cut_any of a state that cannot be cut", ["UPDATE entries SET cut_any = 1 WHERE id = {R}"], R),
]  # fmt: skip


@pytest.mark.parametrize(
    ("invariant", "what", "statements", "entry"), BROKEN, ids=[f"{b[0]}: {b[1]}" for b in BROKEN]
)
def test_invariant(
    damaged: tuple[Path, list[int], Dump], invariant: str, what: str, statements: list[str], entry: int | None
) -> None:
    path, ids, before = damaged
    words = dict(zip("LABCR", map(signed, ids), strict=True))
    # The shell has foreign keys off, and so has this connection.
    edit(path, "PRAGMA foreign_keys = 0", *(sql.format(**words) for sql in statements))
    problems = operate.verify(path)
    wanted = None if entry is None else ids[entry]
    assert any(p.invariant == invariant and p.entry in (wanted, 99) for p in problems), problems
    if wanted is not None:
        assert {p.entry for p in problems} <= {wanted, None}
    with Store(path) as store:
        assert set(operate.repair(store, problems)) <= {wanted}
    assert operate.verify(path) == []
    after = contents(path)
    may_go = {wanted} if any(p.remedy == "drop" for p in problems) else set()
    assert before.keys() - after.keys() == may_go
    assert all(after[id] == before[id] for id in after)


def test_damaged_parent_keeps_the_children_that_do_not_need_what_is_damaged(path: Path) -> None:
    with Store(path, min_saved_mib=0.001) as store:
        parent = store.put(BASE, state(BASE, row=1024), draft=state(BASE), entry_class="learned")
        kept = [store.put(child_tokens(i), state(child_tokens(i), row=1024)) for i in range(2)]
        assert all(e.parent == parent.id for e in kept)
        before = dump(store)
    edit(path, "UPDATE blobs SET digest = zeroblob(16) WHERE part = 'draft'")
    problems = operate.verify(path)
    assert names(problems) == {("digest", parent.id)}
    with Store(path) as store:
        assert operate.repair(store, problems) == [parent.id]
        after = dump(store)
    assert {id: d[:3] for id, d in after.items()} == {id: d[:3] for id, d in before.items() if id != parent.id}
    assert operate.verify(path) == []


def test_damaged_parent_takes_what_needs_it(damaged: tuple[Path, list[int], Dump]) -> None:
    path, ids, before = damaged
    edit(path, f"UPDATE blobs SET digest = zeroblob(16) WHERE entry = {signed(ids[L])}")
    problems = operate.verify(path)
    assert {p.entry for p in problems} == set(ids[: R])
    with Store(path) as store:
        assert set(operate.repair(store, problems)) == set(ids[:R])
    assert contents(path) == {ids[R]: before[ids[R]]}


# -- a damaged file

def place_of(path: Path, needle: bytes) -> int:
    at = path.read_bytes().find(needle)
    assert at > 0
    return at


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        f.write(data)


def check_salvage(path: Path, before: Dump) -> set[int]:
    """What salvage copies is right, and leaves the file as it was."""
    data = path.read_bytes()
    new = path.with_name("new.store")
    new.unlink(missing_ok=True)
    found = operate.salvage(path, new)
    assert path.read_bytes() == data
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert operate.verify(new) == []
    after = contents(new)
    assert all(after[id][:3] == before[id][:3] for id in after)
    assert not {p.entry for p in found.lost} & set(after)
    return set(after)


def test_flipped_byte_in_a_chunk(damaged: tuple[Path, list[int], Dump]) -> None:
    path, ids, before = damaged
    at = place_of(path, before[ids[R]][1][100:200])
    overwrite(path, at + 50, bytes([path.read_bytes()[at + 50] ^ 1]))
    problems = operate.verify(path)
    assert names(problems) == {("digest", ids[R])}
    assert check_salvage(path, before) == set(ids) - {ids[R]}
    with Store(path) as store:
        assert operate.repair(store, problems) == [ids[R]]
    assert contents(path) == {id: before[id] for id in ids if id != ids[R]}
    assert operate.verify(path) == []


@pytest.mark.slow
def test_zeroed_pages(damaged: tuple[Path, list[int], Dump]) -> None:
    """Every page in turn: no traceback, nothing wrong is copied, and what an index repeats is not lost."""
    path, ids, before = damaged
    whole = path.read_bytes()
    c = apsw.Connection(str(path))
    root = dict(c.execute("SELECT rootpage, name FROM sqlite_schema WHERE rootpage > 0"))
    chunk_pages = {r[0] for r in c.execute("SELECT pageno FROM dbstat WHERE name = 'chunks'")}
    c.close()
    for number in range(2, len(whole) // PAGE + 1):
        name = root.get(number, "")
        path.write_bytes(whole[: (number - 1) * PAGE] + bytes(PAGE) + whole[number * PAGE :])
        problems = operate.verify(path)
        copied = check_salvage(path, before)
        assert problems or copied == set(ids)
        if number not in chunk_pages and name not in ("blobs", "chunks", "meta"):
            assert copied == set(ids), name or number
        # Without its meta an entry is a normal one, and those that others continue are contained in them.
        if name == "meta":
            assert copied >= set(ids[A:])


@pytest.mark.parametrize("n_bytes", [16, 100, PAGE])
def test_lost_first_page(damaged: tuple[Path, list[int], Dump], n_bytes: int) -> None:
    path, ids, before = damaged
    overwrite(path, 0, bytes(n_bytes))
    with pytest.raises(NotAStoreError):
        operate.verify(path)
    assert check_salvage(path, before) == set(ids)
    assert {p.name for p in path.parent.iterdir()} == {"kv.store", "new.store"}


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.2, 0.02])
def test_cut_end(damaged: tuple[Path, list[int], Dump], keep: float) -> None:
    path, _, before = damaged
    os.truncate(path, int(path.stat().st_size * keep))
    try:
        assert operate.verify(path)
        check_salvage(path, before)
    except NotAStoreError:
        assert path.stat().st_size < PAGE
    with pytest.raises(KVStoreError), Store(path, readonly=True) as store:
        list(store.entries())


def test_last_byte_missing(damaged: tuple[Path, list[int], Dump]) -> None:
    path = damaged[0]
    os.truncate(path, path.stat().st_size - 1)
    assert "1 bytes are missing" in str(operate.verify(path)[0])


def test_lost_log(path: Path, tmp_path: Path) -> None:
    """A store without its log is the store of the last checkpoint."""
    with Store(path) as store:
        store.put(BASE, state(BASE))
        store.gc()  # also a checkpoint
        before = dump(store)
        copy = tmp_path / "copy"
        shutil.copy(path, copy)
        store.put([5, 6, 7], b"only in the log")
    assert operate.verify(copy) == []
    assert contents(copy) == before


@pytest.mark.parametrize("content", [b"", b"hello", b"x" * 200_000, b"SQLite format 3\0" + bytes(200_000)])
def test_no_store(path: Path, tmp_path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for call in (lambda: operate.verify(path), lambda: operate.salvage(path, tmp_path / "new")):
        with contextlib.suppress(KVStoreError):
            assert call()
    assert path.read_bytes() == content
    assert sorted(p.name for p in tmp_path.iterdir()) in (["kv.store"], ["kv.store", "new"])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StoreIOError):
        operate.verify(tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_old_store(path: Path) -> None:
    edit(path, "CREATE TABLE entries(id)", "PRAGMA application_id = 0x4B565356", "PRAGMA user_version = 1")
    with pytest.raises(MigrationError):
        operate.verify(path)


def test_damaged_text_is_no_traceback(damaged: tuple[Path, list[int], Dump]) -> None:
    path, ids, before = damaged
    edit(path, f"UPDATE meta SET excerpt = CAST(x'ff41' AS TEXT) WHERE entry = {signed(ids[A])}")
    assert contents(path) == before
    with Store(path) as store:
        entry = store.entry(ids[A])
        assert entry is not None
        assert entry.excerpt == "\ufffdA"


def test_reindex(damaged: tuple[Path, list[int], Dump]) -> None:
    """An index that lost a row is built again; no entry goes."""
    path, _, before = damaged
    edit(
        path, "PRAGMA writable_schema = 1",
        "CREATE TABLE elsewhere(a)",
        "UPDATE sqlite_schema SET sql = 'CREATE INDEX meta_by_parent ON meta(hits)' WHERE name = 'meta_by_parent'",
    )  # fmt: skip
    problems = operate.verify(path)
    assert {p.invariant for p in problems} == {"sqlite"}
    with Store(path) as store:
        assert operate.repair(store, problems) == []
    assert operate.verify(path) == []
    assert contents(path) == before


# -- backup, export

def test_backup_while_in_use(open_store: Callable[..., Store], tmp_path: Path) -> None:
    store = open_store(fingerprint="model")
    store.put(BASE, state(BASE), entry_class="learned")
    copy = tmp_path / "copy"

    def write(done: int, total: int) -> None:
        store.put([9, 9, len(moved)], b"written meanwhile")
        moved.append((done, total))

    moved: list[Any] = []
    before = dump(store)
    operate.backup(store, copy, progress=write)
    assert moved
    assert contents(copy) == before
    assert len(dump(store)) > len(before)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with pytest.raises(InvalidInputError):
        operate.backup(store, copy)


def test_backup_cut_off_leaves_nothing(store: Store, tmp_path: Path) -> None:
    store.put(BASE, state(BASE))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        operate.backup(store, tmp_path / "copy", progress=stop)
    assert sorted(tmp_path.iterdir()) == before


def test_export_and_restore(damaged: tuple[Path, list[int], Dump], tmp_path: Path) -> None:
    path, ids, before = damaged
    with Store(path) as store, Store(tmp_path / "other") as other:
        changed = store.set(ids[A], entry_class="pinned", ttl=1000)
        for id in ids:
            item = operate.export(store, id)
            assert item is not None
            assert operate.restore(other, item) is not None
            assert operate.restore(other, item) is not None  # and again, as the same entry
            assert operate.fingerprint(other, id) == "model"
        assert {i: (*d[:3], d[4]) for i, d in dump(other).items()} == {i: (*d[:3], d[4]) for i, d in before.items()}
        got = other.entry(ids[A])
        assert got is not None
        assert (got.entry_class, got.expires_at, got.excerpt) == ("pinned", changed.expires_at, "child 0")
        assert other.verify() == []
        assert operate.export(store, 12345) is None
        with pytest.raises(NotFoundError):
            operate.fingerprint(store, 12345)


def test_export_of_a_damaged_entry(damaged: tuple[Path, list[int], Dump]) -> None:
    path, ids, _ = damaged
    edit(path, f"UPDATE blobs SET digest = zeroblob(16) WHERE entry = {signed(ids[R])}")
    with Store(path, readonly=True) as store, pytest.raises(CorruptStoreError):
        operate.export(store, ids[R])


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the locks of a file are read from Linux's /proc")
def test_verifying_an_open_file_leaves_its_locks(tmp_path: Path) -> None:
    """Closing a plain descriptor of the file would drop them, and another process might then delete the log in use."""
    path = tmp_path / "cache.db"

    def locks() -> list[str]:
        inode = f":{path.stat().st_ino} "
        return [line for line in Path("/proc/locks").read_text().splitlines() if inode in line and str(os.getpid()) in line]

    with kvstore.Store(path, cache_ram_mib=0) as store:
        store.put([1, 2, 3], b"state" * 1000)
        store.flush()
        assert store._maintenance is not None
        store._maintenance.stop()
        store._core.db.checkpoint(truncate=True)  # with an empty log the file's own bytes are looked at
        assert locks()
        assert kvstore.operate.verify(str(path)) == []
        assert locks()

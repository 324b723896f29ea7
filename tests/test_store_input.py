"""What a store refuses, and how: bad arguments, other files, forks, use after close; and what it says in its log."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from storekit import dump, noise, state

import kvstore
from kvstore import InvalidInputError, KVStoreError, LayoutError, Store

PREFIX = list(range(100, 200))
Opener = Callable[..., Store]
NAN = float("nan")
INF = float("inf")


# -- arguments

TOKENS: dict[str, tuple[Any, str]] = {
    "none": (None, "tokens"),
    "number": (5, "tokens"),
    "text": ("abc", "tokens"),
    "empty": ([], "tokens"),
    "set": ({1, 2}, "tokens"),
    "floats": ([1.0, 2.0], "float64"),
    "bools": ([True, False], "bool"),
    "nested": ([[1, 2]], "shape"),
    "ragged": ([[1], [1, 2]], "tokens"),
    "with none": ([1, None], "object"),
    "too large": ([1, 1 << 31], "2147483648"),
    "too small": ([1, -(1 << 31) - 1], "-2147483649"),
    "beyond 64 bits": ([1 << 80], "tokens"),
    "strings": (["1"], "tokens"),
    "bytes": (b"\1\0\0\0", "tokens"),
}
STATES: dict[str, tuple[Any, str]] = {
    "none": (None, "state is NoneType"),
    "number": (5, "state is int"),
    "text": ("abc", "state is str"),
    "list": ([1, 2], "state is list"),
    "empty": (b"", "state is empty"),
    "empty array": (np.zeros((0, 4)), "state is empty"),
    "with gaps": (np.zeros((4, 4))[:, 1], "contiguous"),
}
OPTIONS: list[tuple[str, Any]] = [
    ("draft", b""), ("draft", 5), ("draft", "abc"), ("entry_class", "best"), ("entry_class", None), ("entry_class", ["normal"]),
    ("source", "me"), ("source", None), ("ttl", 0), ("ttl", -1), ("ttl", 1.5), ("ttl", "5"), ("ttl", True),
    ("ttl", 1 << 70), ("n_system", -1), ("n_system", 101), ("n_system", 1.0), ("user_start", -1), ("user_start", 101),
    ("excerpt", None), ("excerpt", 5), ("n_input", -1), ("n_input", 1 << 64), ("n_input", "1"), ("n_images", -1),
    ("n_images", None),
]  # fmt: skip
NAMED = {"draft": "draft", "entry_class": "class", "source": "source"}


@pytest.fixture
def kept(open_store: Opener) -> Any:
    """A store with two entries, and a check that they are still there, and nothing else."""
    store = open_store(write_behind=False)
    store.put(PREFIX[:50], state(PREFIX[:50]), entry_class="learned")
    store.put(PREFIX, state(PREFIX))
    before = dump(store)
    yield store
    assert dump(store) == before
    assert store.verify() == []


@pytest.mark.parametrize("case", TOKENS)
def test_bad_tokens_are_refused(case: str, kept: Store) -> None:
    tokens, says = TOKENS[case]
    for call in (lambda: kept.put(tokens, b"x"), lambda: kept.match(tokens)):
        with pytest.raises(InvalidInputError, match=says):
            call()


@pytest.mark.parametrize("case", STATES)
def test_bad_states_are_refused(case: str, kept: Store) -> None:
    data, says = STATES[case]
    with pytest.raises(InvalidInputError, match=says):
        kept.put([1, 2], data)


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_bad_options_of_put_are_refused(name: str, value: Any, kept: Store) -> None:
    with pytest.raises(InvalidInputError, match=NAMED.get(name, name)):
        kept.put(PREFIX, b"other", **{name: value})


@pytest.mark.parametrize("id", [0, -1, 1 << 64, "5", 1.0, None, True, b"x"])
def test_bad_ids_are_refused(id: Any, kept: Store) -> None:
    for call in (kept.get, kept.take, kept.entry, kept.delete, kept.set):
        with pytest.raises(InvalidInputError, match=r"is not the id of an entry"):
            call(id)


def test_an_entry_and_its_hex_digits_are_ids(open_store: Opener) -> None:
    store = open_store()
    for form in (lambda e: e, lambda e: e.hex_id, lambda e: e.hex_id.upper(), lambda e: np.uint64(e.id)):
        entry = store.put(PREFIX, state(PREFIX))
        id = form(entry)
        assert bytes(store.get(id).main) == state(PREFIX)
        assert store.entry(id).id == entry.id
        assert store.set(id, ttl="1h").ttl == 3600
        assert store.learn(id, 50).n_tokens == 50
        assert store.take(id).entry.id == entry.id
        assert store.entry(id) is None
        again = store.put(PREFIX, state(PREFIX))
        assert store.delete(form(again)) == [again.id]


def test_a_lifetime_is_seconds_or_a_duration(open_store: Opener) -> None:
    store = open_store()
    for given, seconds in ((60, 60), ("7d", 604_800), ("90s", 90), (timedelta(hours=2), 7200), (np.int64(5), 5)):
        assert store.put([1, 2], b"opaque", ttl=given).ttl == seconds


@pytest.mark.parametrize(("says", "call"), [
    (r"tokens must be integers, shape \(n,\); got str.*swapped", lambda s: s.put("hello", b"x")),
    (r"tokens must be integers, shape \(n,\); got bytes.*swapped", lambda s: s.put(b"state", [1, 2])),
    (r"tokens must be integers, shape \(n,\); got bytearray.*swapped", lambda s: s.match(bytearray(b"state"))),
    (r"n_system must be an integer in \[0, 1\], the number of tokens", lambda s: s.put([1], b"x", n_system=7)),
    (r"user_start must be an integer in \[0, 1\], the number of tokens", lambda s: s.put([1], b"x", user_start=7)),
    (r"ttl must be at least 1 second; None means never", lambda s: s.put([1], b"x", ttl=0)),
    (r"ttl must be at least 1 second", lambda s: s.put([1], b"x", ttl=timedelta(0))),
    (r"ttl is in seconds; 'soon' is not a duration", lambda s: s.put([1], b"x", ttl="soon")),
    (r"head is str, not bytes", lambda s: s.put([1], b"x", head="abc")),
    (r"n_tokens must be an integer in \[1, 100\], the number of tokens", lambda s: s.get(next(s.entries()), n_tokens=101)),
    (r"'3f2a' is not the id of an entry.*16 hex digits", lambda s: s.get("3f2a")),
])  # fmt: skip
def test_what_is_wrong_is_said(says: str, call: Callable[[Store], Any], open_store: Opener) -> None:
    store = open_store()
    store.put(PREFIX, state(PREFIX))
    with pytest.raises(InvalidInputError, match=says):
        call(store)


def test_an_opaque_state_is_not_cut(open_store: Opener) -> None:
    store = open_store()
    entry = store.put([1, 2, 3], b"opaque bytes" * 20)
    with pytest.raises(LayoutError, match=rf"entry {entry.hex_id} is not a llama.cpp state, so it cannot be cut"):
        store.get(entry, n_tokens=2)
    assert bytes(store.get(entry).main) == b"opaque bytes" * 20


def test_entries_of_another_fingerprint_are_told_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store(path, fingerprint="a") as store:
        store.put([1, 2], b"x")
        store.put([3, 4], b"x")
    with Store(path, fingerprint="b") as store, caplog.at_level(logging.DEBUG, "kvstore"):
        assert store.match([1, 2, 3]) is None
        assert [r.getMessage() for r in caplog.records] == ["no match: 2 entries have another fingerprint than 'b'"]


def test_other_bad_arguments_are_refused(kept: Store) -> None:
    entry = next(iter(kept.entries()))
    for says, call in (
        ("class", lambda: kept.entries(entry_class="best")),  # type: ignore[arg-type]
        ("family", lambda: kept.entries(family=-1)),
        ("family", lambda: kept.entries(family="x")),  # type: ignore[arg-type]
        ("class", lambda: kept.set(entry.id, entry_class="best")),  # type: ignore[arg-type]
        ("source", lambda: kept.set(entry.id, source="me")),  # type: ignore[arg-type]
        ("ttl", lambda: kept.set(entry.id, ttl=-1)),
        ("children", lambda: kept.delete(entry.id, children="some")),
        ("n_tokens", lambda: kept.learn(entry.id, 0)),
        ("n_tokens", lambda: kept.learn(entry.id, 1000)),
        ("n_tokens", lambda: kept.learn(PREFIX, 101)),
        ("tokens", lambda: kept.learn([])),
    ):
        with pytest.raises(InvalidInputError, match=says):
            call()


@pytest.mark.parametrize(("name", "value"), [
    ("fingerprint", 5), ("fingerprint", None), ("fingerprint", "\ud800"), ("cache_ram_mib", "8"), ("cache_ram_mib", NAN),
    ("cache_ram_mib", INF), ("cache_ram_mib", True), ("cache_disk_mib", None), ("cache_disk_mib", NAN), ("min_saved_mib", -1),
    ("min_saved_mib", INF), ("timeout", -1), ("timeout", "5"), ("timeout", INF), ("timeout", 1e12),
])  # fmt: skip
def test_bad_options_of_a_store_are_refused_and_leave_no_file(name: str, value: Any, path: Path) -> None:
    with pytest.raises(InvalidInputError, match=name):
        Store(path, **{name: value})
    assert list(path.parent.iterdir()) == []


def test_a_refused_put_in_write_behind_mode_holds_no_memory(open_store: Opener) -> None:
    store = open_store(write_behind=True, cache_ram_mib=1)
    for _ in range(20):
        with pytest.raises(InvalidInputError, match="ttl"):
            store.put([1, 2], bytes(200_000), ttl=-1)
    assert store.stats().ram_bytes == 0


def test_errors_have_a_code_a_hint_and_their_facts() -> None:
    with pytest.raises(KVStoreError) as caught:
        Store("", cache_ram_mib=1)
    assert caught.value.as_dict() == {
        "code": "invalid_input",
        "message": "path is ''",
        "hint": 'give the path of a file, or ":memory:"',
        "retry": False,
    }


# -- paths


@pytest.mark.parametrize("path", [b"bytes", 5, None, ""])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(InvalidInputError):
        Store(path)


def untouched(path: Path) -> Callable[[], bool]:
    before, names = path.read_bytes(), sorted(p.name for p in path.parent.iterdir())
    mode = path.stat().st_mode
    return lambda: (
        path.read_bytes() == before
        and sorted(p.name for p in path.parent.iterdir()) == names
        and path.stat().st_mode == mode
    )


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("content", [b"xy", b"hello world" * 1000, b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 3000])
def test_a_file_that_is_no_database_is_left_alone(content: bytes, readonly: bool, path: Path) -> None:
    path.write_bytes(content)
    same = untouched(path)
    with pytest.raises((kvstore.NotAStoreError, kvstore.CorruptStoreError), match=r"not a kvstore|damaged"):
        Store(path, readonly=readonly)
    assert same()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_database_of_another_program_is_left_alone(journal: str, readonly: bool, path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.execute("CREATE TABLE entries(id INTEGER PRIMARY KEY, text)")
    connection.execute("INSERT INTO entries VALUES(1, 'mine')")
    connection.commit()
    connection.close()
    same = untouched(path)
    with pytest.raises(kvstore.NotAStoreError, match="another program"):
        Store(path, readonly=readonly)
    assert same()


@pytest.mark.parametrize("readonly", [False, True])
def test_a_store_of_a_newer_version_is_left_alone(readonly: bool, open_store: Opener, path: Path) -> None:
    with open_store() as store:
        store.put(PREFIX, state(PREFIX))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.execute("PRAGMA journal_mode = delete")
    connection.close()
    same = untouched(path)
    with pytest.raises(kvstore.NewerStoreError, match="99") as caught:
        Store(path, readonly=readonly)
    assert same()
    assert "upgrade kvstore" in caught.value.hint


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(kvstore.StoreIOError, match=tmp_path.name):
        Store(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(kvstore.StoreIOError, match=r"the folder .* does not exist"):
        Store(tmp_path / "no" / "kv.store")
    assert list(tmp_path.iterdir()) == []


def test_a_readonly_store_must_exist(path: Path) -> None:
    with pytest.raises(kvstore.StoreIOError, match="does not exist"):
        Store(path, readonly=True)
    assert not path.exists()


def test_an_empty_file_becomes_a_store_but_not_read_only(path: Path, open_store: Opener) -> None:
    path.touch()
    with pytest.raises(kvstore.ReadOnlyError, match="created first"):
        Store(path, readonly=True)
    assert path.stat().st_size == 0
    assert open_store().put([1], b"x").size == 1


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_only_the_owner_can_read_a_store(path: Path, open_store: Opener) -> None:
    old = os.umask(0)
    try:
        store = open_store()
        store.put(PREFIX, state(PREFIX))
        found = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    finally:
        os.umask(old)
    assert found == {"kv.store": 0o600, "kv.store-wal": 0o600, "kv.store-shm": 0o600}


def test_a_store_opened_with_a_relative_path_stays_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with Store("kv.store") as store:
        entry = store.put([1], b"x" * 100_000)
        monkeypatch.chdir(tmp_path / "other")
        store.put([2], b"y" * 100_000)
        assert store.stats().file_bytes > 0
        threads = [threading.Thread(target=lambda: store.get(entry.id)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.verify() == []
    assert list((tmp_path / "other").iterdir()) == []
    assert (tmp_path / "kv.store").exists()


# -- life


CALLS: dict[str, Callable[[Store, int], Any]] = {
    "put": lambda s, id: s.put([1], b"x"),
    "get": lambda s, id: s.get(id),
    "take": lambda s, id: s.take(id),
    "match": lambda s, id: s.match([1]),
    "entry": lambda s, id: s.entry(id),
    "entries": lambda s, id: list(s.entries()),
    "set": lambda s, id: s.set(id, ttl=5),
    "delete": lambda s, id: s.delete(id),
    "learn": lambda s, id: s.learn(id),
    "stats": lambda s, id: s.stats(),
    "verify": lambda s, id: s.verify(),
    "gc": lambda s, id: s.gc(),
    "flush": lambda s, id: s.flush(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("write_behind", [False, True])
def test_use_after_close_is_an_error(name: str, write_behind: bool, open_store: Opener) -> None:
    store = open_store(write_behind=write_behind)
    entry = store.put([1], b"x")
    walk = store.entries()
    store.close()
    store.close()
    with pytest.raises(kvstore.ClosedError, match="was closed"):
        CALLS[name](store, entry.id)
    with pytest.raises(kvstore.ClosedError):
        list(walk)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    entry = store.put(PREFIX, state(PREFIX))
    store.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            wrong = []
            for name, call in CALLS.items():
                try:
                    call(store, entry.id)
                    wrong.append(name)
                except kvstore.ForkedError:
                    pass
            store.close()
            # Its own Store works.
            with Store(path) as own:
                saved = own.get(entry.id)
                if saved is None or saved.main.tobytes() != state(PREFIX):
                    wrong.append("own store")
                own.put([4, 5], b"from the child")
            code = 2 if wrong else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    saved = store.get(entry.id)
    assert saved is not None
    assert saved.main.tobytes() == state(PREFIX)
    found = store.match([4, 5])
    assert found is not None
    assert found.n_common == 2
    store.put([7], b"y")
    assert store.verify() == []


def test_a_store_that_is_never_closed_is_closed_at_exit(path: Path) -> None:
    code = (
        "import sys\nfrom kvstore import Store\n"
        "s = Store(sys.argv[1], write_behind=True)\n"
        "for n in range(20): s.put([n, 1], bytes([n + 1]) * 300_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(p.name for p in path.parent.iterdir()) == ["kv.store"]
    with Store(path) as store:
        assert sorted(v[1][0] for v in dump(store).values()) == list(range(1, 21))


def test_a_store_that_is_dropped_is_closed(path: Path) -> None:
    import gc

    store = Store(path)
    store.put([1], b"x")
    del store
    gc.collect()
    assert sorted(p.name for p in path.parent.iterdir()) == ["kv.store"]


def test_a_writer_elsewhere_makes_a_busy_error_after_the_timeout(open_store: Opener, path: Path) -> None:
    store = open_store(timeout=1)
    entry = store.put([1], b"x")
    other = apsw.Connection(str(path))
    try:
        other.execute("BEGIN IMMEDIATE")
        for call in (lambda: store.put([2], b"y"), lambda: store.delete(entry.id), lambda: store.set(entry.id, ttl=5)):
            with pytest.raises(kvstore.BusyError) as caught:
                call()
            assert caught.value.retry
        assert store.get(entry.id) is not None  # readers do not wait
        assert store.match([1]) is not None
        other.execute("ROLLBACK")
    finally:
        other.close()
    assert store.put([2], b"y").size == 1


# -- what it says


def test_a_shared_put_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    parent = store.put(PREFIX[:50], state(PREFIX[:50]), entry_class="learned")
    caplog.set_level(logging.INFO, "kvstore")
    entry = store.put(PREFIX, state(PREFIX))
    lines = [r.getMessage() for r in caplog.records if r.name == "kvstore" and r.levelno == logging.INFO]
    said = [line for line in lines if "100 tokens" in line]
    assert len(said) == 1
    for part in (
        entry.hex_id, "50 of them", parent.hex_id, f"{entry.stored / 2**20:.1f} MiB instead of {entry.size / 2**20:.1f} MiB",
    ):  # fmt: skip
        assert part in said[0]
    assert said[0].endswith(" s")


def test_every_entry_that_is_dropped_is_warned_of_with_the_reason(
    open_store: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(cache_disk_mib=16)
    ids = {store.put([n, n], noise(n, 1 << 20)).hex_id for n in range(30)}
    left = {e.hex_id for e in store.entries()}
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == len(ids - left) > 0
    for id in ids - left:
        assert any(id in line and "disk_budget" in line for line in warned)


def test_it_is_silent_by_default(path: Path) -> None:
    code = (
        "import sys\nfrom kvstore import Store\n"
        "with Store(sys.argv[1], cache_disk_mib=8, min_saved_mib=0.001) as s:\n"
        "    for n in range(20): s.put([n, 1], bytes([n + 1]) * 1_000_000)\n"
        "    assert s.stats().evictions['disk_budget']\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

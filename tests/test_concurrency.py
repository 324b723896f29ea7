"""Several threads and several processes on one file."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from storekit import dump, noise, state
from workkit import wait_for

import kvstore
from kvstore import BusyError, Store
from kvstore.storage import db, peek, schema, sqlite
from kvstore.store import entry_codec

Opener = Callable[..., Store]
PREFIXES = [list(range(1000 * k, 1000 * k + 80)) for k in range(1, 4)]
spawn = multiprocessing.get_context("spawn")


def content(tokens: list[int]) -> bytes:
    """The one right state for some tokens, whoever puts them."""
    return state(tokens) if tokens[-1] % 5 else noise(sum(tokens), 3000 + 1000 * (tokens[-1] % 60))


def checked(saved: kvstore.SavedState | None) -> None:
    if saved is not None:
        tokens = saved.tokens.tolist()
        right = [content(tokens), state(tokens)]  # the latter where a prefix was cut out of a longer one
        assert saved.main.tobytes() in right, saved.entry.hex_id


def busy_worker(path: str, seed: int, rounds: int, options: dict[str, Any], results: Any) -> None:
    """Four threads that put, get, match, take and delete; what goes wrong in one is told to the test."""
    failures: list[str] = []
    counts = {"calls": 0, "busy": 0}

    def work(store: Store, chance: random.Random) -> None:
        ids: list[int] = []
        for _ in range(rounds):
            tokens = [*chance.choice(PREFIXES), *(chance.randint(0, 9) for _ in range(chance.randint(1, 4)))]
            action = chance.random()
            try:
                if action < 0.35:
                    ids.append(store.put(tokens, content(tokens), entry_class=chance.choice(["normal", "normal", "pinned"])).id)
                elif action < 0.40:
                    prefix = chance.choice(PREFIXES)
                    store.put(prefix, content(prefix), entry_class="learned")
                elif action < 0.60 and ids:
                    checked(store.get(chance.choice(ids)))
                elif action < 0.80:
                    found = store.match(tokens)
                    if found is not None:
                        saved = store.get(found.entry.id)
                        checked(saved)
                        if saved is not None:
                            assert saved.tokens.tolist()[: found.n_common] == tokens[: found.n_common]
                elif action < 0.85 and ids:
                    checked(store.take(chance.choice(ids)))
                elif action < 0.90 and ids:
                    store.delete(ids.pop(), children=chance.choice(["resident", "keep", "drop"]))
                elif action < 0.93:
                    learned = [e.id for e in store.entries(entry_class="learned")]
                    if learned:
                        store.delete(chance.choice(learned), children=chance.choice(["resident", "keep", "drop"]))
                elif action < 0.96 and ids:
                    store.set(chance.choice(ids), ttl=chance.choice([0, 1, 100]))
                else:
                    store.stats()
                counts["calls"] += 1
            except BusyError:
                counts["busy"] += 1
            except kvstore.NotFoundError:
                pass

    def guarded(store: Store, number: int) -> None:
        try:
            work(store, random.Random(100 * seed + number))
        except BaseException:  # noqa: BLE001  told to the test
            failures.append(traceback.format_exc())

    try:
        with Store(path, min_saved_mib=0.001, timeout=60, **options) as store:
            threads = [threading.Thread(target=guarded, args=(store, n)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(3600)
                assert not thread.is_alive(), "a thread hangs"
    except BaseException:  # noqa: BLE001
        failures.append(traceback.format_exc())
    results.put((seed, failures, counts))


def stressed(path: Path, rounds: int, options: list[dict[str, Any]]) -> None:
    Store(path).close()
    results = spawn.Queue()
    processes = [
        spawn.Process(target=busy_worker, args=(str(path), seed, rounds, given, results))
        for seed, given in enumerate(options)
    ]
    for process in processes:
        process.start()
    told = [results.get(timeout=3600) for _ in processes]
    for process in processes:
        process.join(240)
    assert [p.exitcode for p in processes] == [0] * len(processes)
    assert [failure for _, failures, _ in told for failure in failures] == []
    # SQLite's lock is not fair: one process may get little done while others are at it.
    assert all(counts["calls"] for _, _, counts in told), told
    with Store(path) as store:
        assert store.verify() == []
        for entry in store.entries():
            checked(store.get(entry.id))
        connection = apsw.Connection(str(path))
        assert connection.execute("SELECT count(*) FROM blobs WHERE entry IS NULL").get == 0
        connection.close()


MIXED: list[dict[str, Any]] = [{}, {"cache_ram_mib": 0}, {"cache_ram_mib": 0.2}, {"write_behind": True, "auto_learn": True}]


@pytest.mark.slow
def test_processes_and_threads_share_a_file(path: Path) -> None:
    stressed(path, 150, MIXED)


@pytest.mark.slow
def test_processes_and_threads_share_a_file_for_long(path: Path) -> None:
    stressed(path, 1500, MIXED)


@pytest.mark.slow
def test_processes_and_threads_share_a_file_with_a_budget(path: Path) -> None:
    stressed(path, 500, [{**options, "cache_disk_mib": 16} for options in MIXED])


# -- threads of one store


def test_threads_share_a_store(
    open_store: Opener, crash_free: Callable[[Callable[[], Any]], threading.Thread]
) -> None:
    store = open_store(cache_ram_mib=0.5)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        mine: dict[int, list[int]] = {}
        for _ in range(60):
            tokens = [*chance.choice(PREFIXES), seed, chance.randint(0, 99)]
            mine[store.put(tokens, content(tokens), entry_class="pinned").id] = tokens
            id = chance.choice(list(mine))
            checked(store.get(id))
        assert all(store.match(tokens) is not None for tokens in mine.values())

    threads = [crash_free(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert store.verify() == []


def test_one_of_several_who_take_gets_it(
    open_store: Opener, crash_free: Callable[[Callable[[], Any]], threading.Thread]
) -> None:
    stores = [open_store(), open_store()]
    for n in range(15):
        entry = stores[0].put([n, 1], b"x" * 100)
        got: list[int] = []
        barrier = threading.Barrier(4)

        def work(store: Store, barrier: threading.Barrier = barrier, id: int = entry.id, got: list[int] = got) -> None:
            barrier.wait()
            if store.take(id) is not None:
                got.append(1)

        threads = [crash_free(lambda s=stores[k % 2]: work(s)) for k in range(4)]  # type: ignore[misc]
        for thread in threads:
            thread.join()
        assert got == [1]


def test_close_while_threads_use_the_store(
    open_store: Opener, crash_free: Callable[[Callable[[], Any]], threading.Thread]
) -> None:
    store = open_store(write_behind=True)
    ids = [store.put([n, 1], noise(n, 20_000)).id for n in range(10)]
    started = threading.Barrier(5)
    done = [0] * 4

    def work(seed: int) -> None:
        chance = random.Random(seed)
        started.wait()
        try:
            for n in range(100_000):
                store.put([seed, n, 2], noise(n, 5_000))
                assert store.get(chance.choice(ids)) is not None
                store.match([seed, n])
                done[seed] += 1
        except kvstore.ClosedError:
            return
        raise AssertionError("the store was not closed")

    threads = [crash_free(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
    started.wait()
    wait_for(lambda: all(n > 3 for n in done))
    store.close()
    for thread in threads:
        thread.join()
    again = open_store()
    assert again.verify() == []
    assert all(again.get(id) is not None for id in ids)


@pytest.mark.parametrize("name", ["is_empty", "application_id", "user_version"])
def test_a_file_that_another_process_creates_meanwhile_is_not_taken_for_a_foreign_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    db.reserve_file(str(path))
    ours, theirs = db.Database(str(path)), db.Database(str(path))
    ours.initialise()
    asked = getattr(sqlite, name)

    def interrupted(c: sqlite.Connection) -> Any:
        monkeypatch.undo()
        found = asked(c)
        with theirs.write() as other:
            sqlite.run_script(other, schema.schema_sql())
        return found

    monkeypatch.setattr(sqlite, name, interrupted)
    with ours.exclusive() as c:
        assert schema.version_of(c, ours.path) == 0
        assert schema.version_of(c, ours.path) == peek.SCHEMA_VERSION
    ours.close()
    theirs.close()


def test_many_open_a_new_file_at_once(path: Path, crash_free: Callable[[Callable[[], Any]], threading.Thread]) -> None:
    for round_ in range(5):
        at = path.with_name(f"new{round_}")
        barrier = threading.Barrier(6)

        def work(n: int, at: Path = at, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            with Store(at) as store:
                store.put([n], b"x")

        threads = [crash_free(lambda n=n: work(n)) for n in range(6)]  # type: ignore[misc]
        for thread in threads:
            thread.join()
        with Store(at) as store:
            assert {v[0] for v in dump(store).values()} == {np.array([n], "<i4").tobytes() for n in range(6)}


# -- what another process does


def test_ram_never_serves_what_another_deleted_or_replaced(open_store: Opener) -> None:
    mine, other = open_store(cache_ram_mib=64), open_store(cache_ram_mib=64)
    prefix = PREFIXES[0]
    parent = mine.put(prefix, state(prefix), entry_class="learned")
    child = mine.put([*prefix, 1], state([*prefix, 1]))
    lone = mine.put([5, 6], b"one")
    assert mine.stats().ram_entries == 3
    assert all(other.get(e.id) is not None for e in (parent, child, lone))
    # replaced
    new = other.put([5, 6], b"two")
    assert mine.get(lone.id) is None
    saved = mine.get(new.id)
    assert saved is not None
    assert saved.main.tobytes() == b"two"
    # stored in another form, under the same id
    assert other.delete(parent.id, children="keep") == [parent.id]
    assert mine.get(parent.id) is None
    saved = mine.get(child.id)
    assert saved is not None
    assert (saved.main.tobytes(), saved.entry.parent) == (state([*prefix, 1]), None)
    # shared again, against another parent
    learned = other.learn([*prefix, 1], 40)
    saved = mine.get(child.id)
    assert saved is not None
    assert (saved.main.tobytes(), saved.entry.parent) == (state([*prefix, 1]), learned.id)
    # deleted
    other.delete(learned.id, children="drop")
    assert mine.get(child.id) is None
    assert mine.get(learned.id) is None
    assert mine.match(prefix) is None


def test_a_parent_that_another_removed_during_a_put_is_not_relied_on(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = open_store(), open_store()
    prefix = PREFIXES[0]
    parent = mine.put(prefix, state(prefix), entry_class="learned")
    encode = entry_codec.encode_entry
    calls = []

    def slow(*args: Any, **options: Any) -> Any:
        result = encode(*args, **options)
        if not calls:
            other.delete(parent.id, children="drop")
        calls.append(1)
        return result

    monkeypatch.setattr(entry_codec, "encode_entry", slow)
    entry = mine.put([*prefix, 1], state([*prefix, 1]))
    assert len(calls) == 2
    assert entry.parent is None
    saved = other.get(entry.id)
    assert saved is not None
    assert saved.main.tobytes() == state([*prefix, 1])
    assert other.verify() == []


def reader(path: str, parent: int, n: int, started: Any, results: Any) -> None:
    """Counts a family, again and again, until it is gone."""
    seen = set()
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(10_000)
        end = time.monotonic() + 240
        signed = parent - (1 << 64 if parent >> 63 else 0)
        while time.monotonic() < end:
            (count,) = connection.execute(
                "SELECT (SELECT count(*) FROM entries WHERE id = ?1) + (SELECT count(*) FROM meta WHERE parent = ?1)", (signed,)
            ).fetchone()
            seen.add(count)
            started.set()
            if count == 0:
                break
        connection.close()
    finally:
        results.put(seen)


def family_of(store: Store, n: int) -> int:
    """A learned entry with n children, put at once: the rows that n puts would make."""
    prefix = PREFIXES[0]
    parent = store.put(prefix, state(prefix), entry_class="learned")
    child = store.put([*prefix, 0, 0], state([*prefix, 0, 0]))
    assert child.parent == parent.id
    key = np.array([*prefix, 0, 0], "<i4")
    connection = apsw.Connection(store.path)
    old = child.id - (1 << 64 if child.id >> 63 else 0)
    columns = [c for c in connection.execute("SELECT name FROM pragma_table_info('meta')").get if c != "entry"]
    with connection:
        for k in range(1, n):
            key[-2:] = 1 + k // 1000, k
            id = 1_000_000 + k
            connection.execute(
                "INSERT INTO entries(id, fingerprint, cut_any, n_tokens, tokens) SELECT ?, fingerprint, cut_any, n_tokens, ?"
                " FROM entries WHERE id = ?", (id, key.tobytes(), old),
            )  # fmt: skip
            names = ", ".join(columns)
            connection.execute(f"INSERT INTO meta(entry, {names}) SELECT ?, {names} FROM meta WHERE entry = ?", (id, old))
            connection.execute(
                "INSERT INTO blobs(entry, part, kind, size, stored, digest) SELECT ?, part, kind, size, stored, digest"
                " FROM blobs WHERE entry = ?", (id, old),
            )  # fmt: skip
            connection.execute(
                "INSERT INTO chunks(blob, seq, data) SELECT (SELECT id FROM blobs WHERE entry = ?), seq, data FROM chunks"
                " WHERE blob = (SELECT id FROM blobs WHERE entry = ?)", (id, old),
            )  # fmt: skip
    connection.close()
    return parent.id


@pytest.mark.parametrize("n", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_reader_sees_all_or_nothing_of_a_family_delete(
    n: int, open_store: Opener, path: Path
) -> None:
    store = open_store(cache_ram_mib=0)
    parent = family_of(store, n)
    started, results = spawn.Event(), spawn.Queue()
    process = spawn.Process(target=reader, args=(str(path), parent, n, started, results))
    process.start()
    assert started.wait(240)
    removed = store.delete(parent)
    seen = results.get(timeout=240)
    process.join(240)
    assert process.exitcode == 0
    assert len(removed) == len(set(removed)) == n + 1
    assert seen == {n + 1, 0}
    assert list(store.entries()) == []
    assert store.stats().entries == {"normal": 0, "learned": 0, "pinned": 0}


def test_entries_may_be_walked_while_others_delete(open_store: Opener) -> None:
    store, other = open_store(), open_store()
    ids = [store.put([n, 1], b"x").id for n in range(700)]
    walk = store.entries()
    first = next(walk)
    for id in ids[:300]:
        other.delete(id)
    rest = [e.id for e in walk]
    assert len(rest) == len(set(rest))
    assert set(ids[300:]) <= {first.id, *rest}

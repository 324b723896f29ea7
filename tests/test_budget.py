"""The disk budget, the RAM budget and write-behind, each in a whole store."""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from storekit import MIB, dump, file_bytes, noise, state

import kvstore
from kvstore import Store
from kvstore.storage import geometry

Opener = Callable[..., Store]
PREFIX = list(range(100, 600))


@contextmanager
def watched(sample: Callable[[], int]) -> Iterator[list[int]]:
    """The largest value that `sample` had meanwhile, as the only element; a sample that fails fails the test."""
    largest = [0]
    failed: list[BaseException] = []
    stop = threading.Event()

    def watch() -> None:
        try:
            while not stop.is_set():
                largest[0] = max(largest[0], sample())
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    try:
        yield largest
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def sizes(seed: int, n: int, largest: int) -> list[int]:
    chance = random.Random(seed)
    return [int(largest ** chance.random()) + 1 for _ in range(n)]


# -- on disk


@pytest.mark.parametrize("seed", [1, 2])
def test_file_and_log_stay_inside_the_budget_at_every_moment(seed: int, open_store: Opener, path: Path) -> None:
    budget = 24
    store = open_store(cache_disk_mib=budget, cache_ram_mib=0)
    with watched(lambda: file_bytes(path)) as largest:
        for n, size in enumerate(sizes(seed, 120, 6 * MIB)):
            store.put([n, 1], noise(n, size))
    assert largest[0] <= budget * MIB
    assert store.stats().evictions["disk_budget"] > 0
    assert store.verify() == []


def test_a_large_entry_fits_after_many_small_ones(open_store: Opener, path: Path) -> None:
    store = open_store(cache_disk_mib=32, cache_ram_mib=0)
    for n in range(300):
        store.put([n, 1], noise(n, 100_000))
    with watched(lambda: file_bytes(path)) as largest:
        big = store.put([7, 7, 7], noise(1, 8 * MIB))
    assert store.get(big.id) is not None
    assert len(list(store.entries())) > 50  # and not everything else had to go for it
    assert largest[0] <= 32 * MIB


def test_most_of_the_budget_is_used(open_store: Opener) -> None:
    store = open_store(cache_disk_mib=64, cache_ram_mib=0)
    for n in range(200):
        store.put([n, 1], noise(n, 500_000))
    assert store.stats().size > 0.6 * 64 * MIB


def test_a_smaller_budget_at_reopen_shrinks_the_file(open_store: Opener, path: Path) -> None:
    with open_store(cache_disk_mib=48) as store:
        for n in range(40):
            store.put([n, 1], noise(n, 1_000_000))
        newest = store.put([1, 2, 3], b"newest")
    assert path.stat().st_size > 24 * MIB
    with open_store(cache_disk_mib=16) as store:
        assert file_bytes(path) <= 16 * MIB
        assert store.get(newest.id) is not None
        assert len(list(store.entries())) > 5
        with watched(lambda: file_bytes(path)) as largest:
            for n in range(100, 120):
                store.put([n, 1], noise(n, 1_000_000))
        assert largest[0] <= 16 * MIB
        assert store.verify() == []


def test_the_least_recently_used_goes_first(open_store: Opener) -> None:
    store = open_store(cache_disk_mib=24, cache_ram_mib=0)
    ids = [store.put([n, 1], noise(n, MIB)).id for n in range(10)]
    assert [store.entry(id) is not None for id in ids] == [True] * 10
    for id in (ids[0], ids[3]):
        assert store.get(id) is not None
    n = 100
    order = []
    alive = list(ids)
    while any(store.entry(id) for id in ids):
        store.put([n, 1], noise(n, MIB))
        n += 1
        gone = [id for id in alive if store.entry(id) is None]
        order += gone
        alive = [id for id in alive if id not in gone]
        assert n < 200
    assert order.index(ids[0]) > order.index(ids[9])
    assert order.index(ids[3]) > order.index(ids[9])
    assert [id for id in order if id not in (ids[0], ids[3])] == [id for id in ids if id not in (ids[0], ids[3])]


def test_children_go_before_their_parents_and_learned_and_pinned_last(open_store: Opener) -> None:
    store = open_store(cache_disk_mib=24, cache_ram_mib=0)
    pinned = store.put([1, 2], noise(1, MIB), entry_class="pinned")
    parent = store.put(PREFIX, state(PREFIX, row=512), entry_class="learned")
    children = []
    for n in range(4):
        tokens = [*PREFIX, *range(1000 * n, 1000 * n + 100)]
        children.append(store.put(tokens, state(tokens, row=512)))
    assert all(c.parent == parent.id for c in children)
    for n in range(60):
        store.put([n, 5], noise(n, MIB))
        left = {e.id for e in store.entries()}
        assert {pinned.id, parent.id} <= left
    assert not {c.id for c in children} & left
    assert all(e.entry_class != "normal" or e.n_tokens == 2 for e in store.entries())


def test_learned_and_pinned_go_when_they_must(open_store: Opener) -> None:
    store = open_store(cache_disk_mib=24, cache_ram_mib=0)
    for n in range(8):
        store.put([n, 1], noise(n, MIB), entry_class="pinned" if n % 2 else "learned")
    store.put([99, 1], noise(99, 14 * MIB))
    left = list(store.entries())
    assert any(e.size == 14 * MIB for e in left)
    assert 1 <= sum(e.entry_class != "normal" for e in left) < 8


def test_what_cannot_fit_is_refused_and_leaves_everything_as_it_was(open_store: Opener, path: Path) -> None:
    store = open_store(cache_disk_mib=24)
    for n in range(6):
        store.put([n, 1], noise(n, MIB))
    store.flush()
    before, stats = dump(store), store.stats()
    for size in (23 * MIB, 25 * MIB, 60 * MIB):
        with pytest.raises(kvstore.OverBudgetError, match=r"MiB") as caught:
            store.put([7, 7], noise(7, size))
        assert caught.value.facts["missing"] > 0
        assert caught.value.facts["budget"] == 24 * MIB
        assert f"{caught.value.facts['missing'] / MIB:.1f} MiB" in caught.value.message
    assert dump(store) == before
    after = store.stats()
    assert (after.entries, after.stored, after.evictions) == (stats.entries, stats.stored, stats.evictions)
    assert file_bytes(path) <= 24 * MIB
    assert store.verify() == []


@pytest.mark.parametrize("children", ["keep", "resident"])
def test_keeping_children_stays_inside_the_budget(children: str, open_store: Opener, path: Path) -> None:
    store = open_store(cache_disk_mib=24, cache_ram_mib=64)
    parent = store.put(PREFIX, state(PREFIX, row=512), entry_class="learned")
    for n in range(30):
        store.put([*PREFIX, n, n], state([*PREFIX, n, n], row=512))
    assert len(list(store.entries())) == 31
    with watched(lambda: file_bytes(path)) as largest:
        removed = store.delete(parent.id, children=children)
    assert parent.id in removed
    assert largest[0] <= 24 * MIB
    left = list(store.entries())
    assert len(left) >= 5
    for entry in left:
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == state(saved.tokens.tolist(), row=512)
    assert store.verify() == []


def test_gc_gives_free_space_back(open_store: Opener, path: Path) -> None:
    store = open_store()
    ids = [store.put([n, 1], noise(n, MIB)).id for n in range(20)]
    for id in ids[2:]:
        store.delete(id)
    store.gc()
    assert file_bytes(path) < 4 * MIB
    assert store.stats().free_bytes == 0
    assert store.verify() == []


@pytest.mark.slow
def test_the_space_of_expired_entries_comes_back_by_itself(
    open_store: Opener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    kept = store.put([1], noise(1, MIB))
    for n in range(15):
        store.put([n, 1], noise(n, MIB), ttl=1000)
    assert file_bytes(path) > 15 * MIB
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 1001)
    deadline = time.monotonic() + 240
    while file_bytes(path) > 5 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    assert file_bytes(path) <= 5 * MIB
    assert [e.id for e in store.entries()] == [kept.id]


def _put_much(path: str, seed: int, budget: float, failed: Any) -> None:
    try:
        with Store(path, cache_disk_mib=budget, cache_ram_mib=4, timeout=240) as store:
            for n, size in enumerate(sizes(seed, 40, 2 * MIB)):
                entry = store.put([seed, n], noise(1000 * seed + n, size))
                saved = store.get(entry.id)
                assert saved is None or saved.main.tobytes() == noise(1000 * seed + n, size)
    except BaseException as error:
        failed.put(f"{seed}: {type(error).__name__}: {error}")
        raise


def test_the_budget_holds_with_several_processes(path: Path) -> None:
    budget = 24
    context = multiprocessing.get_context("spawn")
    failed = context.Queue()
    Store(path, cache_disk_mib=budget).close()
    processes = [context.Process(target=_put_much, args=(str(path), seed, budget, failed)) for seed in (1, 2, 3)]
    with watched(lambda: file_bytes(path)) as largest:
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
    assert failed.empty(), failed.get()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert largest[0] <= budget * MIB
    with Store(path, cache_disk_mib=budget) as store:
        assert len(list(store.entries())) > 3
        assert store.verify() == []


# -- in RAM


def test_ram_stays_inside_the_budget_at_every_moment(
    open_store: Opener, crash_free: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    store = open_store(cache_ram_mib=4)
    parent = store.put(PREFIX, state(PREFIX), entry_class="learned")
    ram = store._core.ram

    def work(seed: int) -> None:
        chance = random.Random(seed)
        ids = []
        for n, size in enumerate(sizes(seed, 25, 3 * MIB)):
            if n % 3:
                tokens = [*PREFIX, seed, n]
                ids.append((store.put(tokens, state(tokens)).id, state(tokens)))
            else:
                ids.append((store.put([seed, n], noise(n, size)).id, noise(n, size)))
            id, data = chance.choice(ids)
            saved = store.get(id)
            assert saved is not None
            assert saved.main.tobytes() == data

    with watched(lambda: ram.n_bytes) as largest:
        threads = [crash_free(lambda seed=seed: work(seed)) for seed in (1, 2)]  # type: ignore[misc]
        for thread in threads:
            thread.join()
    assert 0 < largest[0] <= 4 * MIB
    assert store.entry(parent.id) is not None
    assert store.stats().evictions["ram_budget"] > 0


def test_ram_holds_what_is_stored_so_sharing_saves_it_too(open_store: Opener) -> None:
    store = open_store(cache_ram_mib=64)
    store.put(PREFIX, state(PREFIX), entry_class="learned")
    for n in range(10):
        tokens = [*PREFIX, n]
        store.put(tokens, state(tokens))
    stats = store.stats()
    assert stats.ram_entries == 11
    assert stats.ram_bytes == stats.stored
    assert stats.ram_bytes < 0.2 * stats.size


def test_ram_off_and_without_limit(open_store: Opener) -> None:
    off, endless = open_store(cache_ram_mib=0), open_store(cache_ram_mib=-1)
    ids = [off.put([n, 1], noise(n, 100_000)).id for n in range(20)]
    for id in ids:
        assert off.get(id) is not None
        assert endless.get(id) is not None
    assert (off.stats().ram_bytes, off.stats().ram_entries) == (0, 0)
    assert (endless.stats().ram_bytes, endless.stats().ram_entries) == (2_000_000, 20)


@pytest.mark.parametrize("write_behind", [False, True])
def test_an_entry_larger_than_the_ram_budget_goes_to_disk_alone(write_behind: bool, open_store: Opener) -> None:
    store = open_store(cache_ram_mib=1, write_behind=write_behind)
    small = store.put([1], noise(1, 500_000))
    big = store.put([2], noise(2, 2 * MIB))
    stats = store.stats()
    assert (stats.ram_entries, stats.ram_bytes) == (1, 500_000)
    for entry, data in ((big, noise(2, 2 * MIB)), (small, noise(1, 500_000))):
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == data


# -- write-behind


@contextmanager
def blocked(path: Path) -> Iterator[None]:
    """Nothing is written meanwhile: another connection holds the write lock."""
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def on_disk(path: Path) -> list[bytes]:
    connection = apsw.Connection(str(path))
    try:
        return [row[0] for row in connection.execute("SELECT tokens FROM entries ORDER BY rowid")]
    finally:
        connection.close()


def test_put_returns_before_it_is_durable_and_flush_waits(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    data = bytearray(noise(1, 300_000))
    with blocked(path):
        entry = store.put([1, 2], data)
        data[:] = bytes(len(data))  # the caller's buffer is the caller's
        assert on_disk(path) == []
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == noise(1, 300_000)
        assert store.entry(entry.id) is not None
        found = store.match([1, 2, 3])
        assert found is not None
        assert found.entry.id == entry.id
    store.flush()
    assert len(on_disk(path)) == 1
    again = store.entry(entry.id)
    assert again is not None
    assert again.hits == 1
    saved = store.get(entry.id)
    assert saved is not None
    assert saved.main.tobytes() == noise(1, 300_000)


def test_close_drains(open_store: Opener, path: Path) -> None:
    with open_store(write_behind=True) as store:
        for n in range(30):
            store.put([n, 1], noise(n, 50_000))
    with open_store() as store:
        assert sorted(v[1] for v in dump(store).values()) == sorted(noise(n, 50_000) for n in range(30))


def test_puts_are_written_in_order(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    with blocked(path):
        ids = [store.put([5, 5], noise(n, 10_000)).id for n in range(10)]
        others = [store.put([n, 6], noise(n, 10_000)).id for n in range(10)]
    store.flush()
    # The last of the same tokens is the one that stays.
    assert [store.get(id) is not None for id in ids] == [False] * 9 + [True]
    connection = apsw.Connection(str(path))
    order = [r[0] % (1 << 64) for r in connection.execute("SELECT entry FROM blobs ORDER BY id")]
    connection.close()
    assert order == [ids[-1], *others]


def test_the_same_bytes_again_have_an_id_that_works(open_store: Opener) -> None:
    store = open_store(write_behind=True)
    for _ in range(4):
        entry = store.put([5, 5], noise(1, 10_000))
        assert store.get(entry.id) is not None
        store.flush()
        assert store.get(entry.id) is not None
        assert [e.id for e in store.entries()] == [entry.id]
    a, b = store.put([6], b"x"), store.put([6], b"x")
    store.flush()
    assert store.get(b.id) is not None
    assert a.id == b.id or store.get(a.id) is None


def test_the_queue_is_bounded_by_the_ram_budget(
    open_store: Opener, path: Path, crash_free: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    store = open_store(write_behind=True, cache_ram_mib=1)
    returned: list[int] = []

    def work() -> None:
        for n in range(6):
            store.put([n, 1], noise(n, 400_000))
            returned.append(n)

    with blocked(path):
        thread = crash_free(work)
        deadline = time.monotonic() + 240
        while len(returned) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        thread.join(0.3)
        assert returned == [0, 1]  # two fit; the third waits
        assert store._core.ram.n_bytes <= MIB
    thread.join(240)
    assert returned == list(range(6))
    store.flush()
    assert len(on_disk(path)) == 6


def test_a_failed_write_is_reported_at_the_next_call_and_not_shown(open_store: Opener) -> None:
    store = open_store(write_behind=True, cache_disk_mib=16, cache_ram_mib=256)
    kept = store.put([1, 1], noise(1, 10_000))
    for n, call in enumerate((store.flush, store.stats, lambda: list(store.entries()), store.verify)):
        lost = store.put([n, 2], noise(n, 40 * MIB))
        with pytest.raises(kvstore.WriteBehindError, match="MiB") as caught:
            call()
        assert caught.value.facts["ids"] == [lost.id]
        assert isinstance(caught.value.__cause__, kvstore.OverBudgetError)
        assert store.get(lost.id) is None
        assert store.entry(lost.id) is None
        assert store.match([n, 2]) is None
    assert [e.id for e in store.entries()] == [kept.id]
    assert store._core.ram.n_bytes == 10_000


def test_close_reports_a_failed_write_and_closes(path: Path) -> None:
    store = Store(path, write_behind=True, cache_disk_mib=16)
    store.put([1, 1], noise(1, 10_000))
    store.put([2, 2], noise(2, 40 * MIB))
    with pytest.raises(kvstore.WriteBehindError):
        store.close()
    store.close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["kv.store"]
    with Store(path) as again:
        assert len(list(again.entries())) == 1


def test_sharing_and_learning_see_what_is_on_its_way(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    with blocked(path):
        parent = store.put(PREFIX, state(PREFIX), entry_class="learned")
        child = store.put([*PREFIX, 1], state([*PREFIX, 1]))
    store.flush()
    stored = store.entry(child.id)
    assert stored is not None
    assert stored.parent == parent.id
    other = store.put([9, *PREFIX], state([9, *PREFIX]))
    learned = store.learn(other.id, 100)
    assert learned.n_tokens == 100
    assert store.take(store.put([3], b"x").id) is not None


def test_batches_of_a_large_put_let_others_write(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BATCH_CHUNKS", 1)
    store = open_store(cache_ram_mib=0)
    other = open_store(cache_ram_mib=0)
    done = threading.Event()
    small: list[int] = []

    def work() -> None:
        n = 0
        while not done.is_set():
            n += 1
            small.append(other.put([n, 3], b"x" * 1000).id)

    thread = threading.Thread(target=work)
    thread.start()
    big = store.put([1, 2], noise(1, 30 * MIB))
    during = len(small)
    done.set()
    thread.join()
    assert during > 0
    saved = store.get(big.id)
    assert saved is not None
    assert saved.main.tobytes() == noise(1, 30 * MIB)
    assert store.verify() == []

"""The RAM layer by itself: its budget, its order, its races."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.storage.ram_cache import CachedEntry, RamCache


def held(size: int, parent: int | None = None, version: int = 1, draft: int = 0) -> CachedEntry:
    return CachedEntry((version,), np.zeros(size, np.uint8), np.zeros(draft, np.uint8) if draft else None, parent)


def add(cache: RamCache, id: int, entry: CachedEntry) -> bool:
    room = cache.reserve(entry.n_bytes)
    if room:
        cache.commit(id, entry)
    return room


def test_the_least_recently_used_goes_first() -> None:
    cache = RamCache(100)
    for id in (1, 2, 3):
        assert add(cache, id, held(30))
    assert cache.get(1, (1,)) is not None
    assert add(cache, 4, held(30))
    assert cache.ids() == [3, 1, 4]
    assert (cache.n_bytes, cache.evictions) == (90, 1)


def test_a_parent_counts_as_used_when_a_child_is_and_goes_after_its_children() -> None:
    cache = RamCache(100)
    assert add(cache, 1, held(30))
    assert add(cache, 2, held(10, parent=1))
    assert add(cache, 3, held(20))
    assert add(cache, 4, held(10, parent=1))
    assert cache.ids() == [2, 3, 4, 1]
    assert cache.get(2, (1,)) is not None
    assert cache.ids() == [3, 4, 2, 1]
    assert cache.get(1, (1,)) is not None
    assert cache.ids() == [3, 4, 2, 1]
    assert add(cache, 5, held(70))
    assert cache.ids() == [1, 5]


def test_all_links_of_a_chain_count_as_used_when_the_leaf_is() -> None:
    cache = RamCache(-1)
    for id, parent in ((4, 3), (3, 2), (2, 1), (1, None), (9, None)):
        assert add(cache, id, held(10, parent=parent))
    assert cache.get(4, (1,)) is not None
    assert cache.ids() == [9, 4, 3, 2, 1]
    assert cache.get(9, (1,), use=False) is not None
    assert cache.ids() == [9, 4, 3, 2, 1]
    cache.use(9)
    cache.use(77)
    assert cache.ids() == [4, 3, 2, 1, 9]


def test_rows_that_name_each_other_as_parents_end_nothing() -> None:
    cache = RamCache(-1)
    for id, parent in ((1, 2), (2, 1), (3, 3)):
        assert add(cache, id, held(10, parent=parent))
        assert cache.get(id, (1,)) is not None
    assert len(cache) == 3


def test_a_link_is_held_without_the_others() -> None:
    """What is missing is read from the file."""
    cache = RamCache(100)
    assert add(cache, 2, held(60, parent=1))
    assert add(cache, 1, held(50))
    assert cache.ids() == [1]
    assert add(cache, 2, held(50, parent=1))
    cache.discard(1)
    assert cache.ids() == [2]


def test_zero_holds_nothing_and_minus_one_everything() -> None:
    off, endless = RamCache(0), RamCache(-1)
    assert not off.reserve(1)
    assert not off.reserve(0)
    for id in range(1, 100):
        assert add(endless, id, held(1000))
    assert (len(endless), endless.n_bytes, endless.evictions) == (99, 99_000, 0)


def test_an_entry_larger_than_the_budget_pushes_nothing_out() -> None:
    cache = RamCache(100)
    assert add(cache, 1, held(80))
    assert not cache.reserve(101)
    assert cache.ids() == [1]


def test_drafts_count() -> None:
    cache = RamCache(100)
    assert add(cache, 1, held(50, draft=40))
    assert cache.n_bytes == 90
    assert not cache.reserve(101)


def test_another_version_is_dropped() -> None:
    """What is stored against it stays: a new version of an entry has the same states."""
    cache = RamCache(100)
    assert add(cache, 1, held(10))
    assert add(cache, 2, held(10, parent=1))
    assert cache.get(1, (2,)) is None
    assert (cache.ids(), cache.n_bytes) == ([2], 10)


def test_a_new_version_takes_the_place_of_the_old() -> None:
    cache = RamCache(100)
    assert add(cache, 1, held(40))
    assert add(cache, 2, held(10, parent=1))
    assert add(cache, 1, held(30, version=2))
    assert cache.n_bytes == 40
    assert cache.get(1, (2,)) is not None
    assert cache.get(2, (1,)) is not None


def test_room_that_is_reserved_counts_at_once() -> None:
    cache = RamCache(100)
    assert cache.reserve(60)
    assert cache.n_bytes == 60
    assert not cache.reserve(50)
    cache.cancel(60)
    assert cache.reserve(100)
    cache.cancel(100)
    assert cache.n_bytes == 0


def check(cache: RamCache) -> None:
    """What the cache holds adds up and fits."""
    ids = cache.ids()
    total = sum(e.n_bytes for e in cache._entries.values())
    assert cache.n_bytes == total
    assert cache.budget < 0 or total <= cache.budget
    assert len(ids) == len(set(ids)) == len(cache)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 120),
    st.lists(st.tuples(st.sampled_from(["add", "child", "get", "stale", "discard"]), st.integers(1, 8), st.integers(1, 60))),
)
def test_any_order_of_calls_keeps_the_rules(budget: int, calls: list[tuple[str, int, int]]) -> None:
    cache = RamCache(budget)
    for name, id, size in calls:
        if name == "add":
            add(cache, id, held(size))
        elif name == "child":
            add(cache, 100 + id, held(size, parent=1 + id % 2))
        elif name == "get":
            cache.get(id if size % 2 else 100 + id, (1,))
        elif name == "stale":
            cache.get(id, (2,))
        else:
            cache.discard(id)
        check(cache)


def test_the_budget_holds_while_threads_race(crash_free: Callable[[Callable[[], Any]], threading.Thread]) -> None:
    cache = RamCache(1000)
    stop = threading.Event()
    over: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            n = cache.n_bytes
            if not 0 <= n <= 1000:
                over.append(n)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3000):
            id = chance.randint(1, 20)
            action = chance.random()
            if action < 0.4:
                add(cache, id, held(chance.randint(1, 300)))
            elif action < 0.6:
                add(cache, 100 + chance.randint(1, 20), held(chance.randint(1, 100), parent=id))
            elif action < 0.9:
                entry = cache.get(chance.choice([id, 100 + id]), (1,))
                assert entry is None or entry.version == (1,)
            else:
                cache.discard(id)

    watcher = crash_free(watch)
    workers = [crash_free(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
    for worker in workers:
        worker.join()
    stop.set()
    watcher.join()
    assert over == []
    check(cache)

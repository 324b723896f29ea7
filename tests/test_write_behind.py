"""Write-behind: what a store gives while puts are queued is what it would give had each been written at once."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from storekit import MIB, dump, noise, recurrent_state, state

import kvstore
from kvstore import Entry, SavedState, Store
from kvstore.storage import prefix_index as prefixes
from kvstore.store import put as puts

Opener = Callable[..., Store]
Start = Callable[[Callable[[], Any]], threading.Thread]
TOKENS = tuple(range(10, 50))


@contextmanager
def blocked(path: Path) -> Iterator[None]:
    """Nothing is written meanwhile: another connection holds the write lock."""
    other = apsw.Connection(str(path))
    other.set_busy_timeout(10_000)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = int(time.time())
        monkeypatch.setattr(time, "time", lambda: float(self.time))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def main_of(saved: SavedState | None) -> bytes | None:
    return None if saved is None else saved.main.tobytes()


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")}


# -- the newest put of the same tokens


def test_the_older_bytes_put_again_are_the_newest(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    first = store.put([1, 2], b"one")
    store.flush()
    with blocked(path):
        second = store.put([1, 2], b"two")
        found = store.match([1, 2])
        assert found is not None
        assert found.entry.id == second.id
        assert store.get(first.id) is None
        assert store.entry(first.id) is None
        third = store.put([1, 2], b"one")
        assert store.get(second.id) is None
        assert main_of(store.get(third.id)) == b"one"
    store.flush()
    assert main_of(store.get(third.id)) == b"one"
    assert [e.id for e in store.entries()] == [third.id]
    assert store.verify() == []


def test_the_same_bytes_again_refresh_what_is_queued(open_store: Opener, path: Path, clock: Clock) -> None:
    store = open_store(write_behind=True)
    with blocked(path):
        first = store.put([1, 2], b"one", entry_class="pinned", source="admin", excerpt="a", ttl=5)
        store.get(first.id)
        clock.time += 3
        again = store.put([1, 2], b"one", excerpt="b", ttl=100)
        assert (again.id, again.entry_class, again.source, again.excerpt) == (first.id, "pinned", "admin", "b")
        assert (again.hits, again.created_at, again.last_used) == (1, first.created_at, first.created_at + 3)
        store.get(first.id)
        clock.time += 3
        known = store.entry(first.id)
        assert known is not None
        assert known.hits == 2
        assert known.expires_at == again.created_at + 103
    store.flush()
    assert store.entry(first.id) == known
    assert main_of(store.get(first.id)) == b"one"


def test_a_queued_put_keeps_its_time_and_the_class_it_had_when_it_was_made(
    open_store: Opener, path: Path, clock: Clock
) -> None:
    store = open_store(write_behind=True)
    store.put([1, 2], b"one", entry_class="pinned", source="request", ttl=5)
    store.flush()
    with blocked(path):
        queued = store.put([1, 2], b"two", ttl=60)
        assert (queued.entry_class, queued.source) == ("pinned", "request")
        clock.time += 10
        store.match([1])
    store.flush()
    stored = store.entry(queued.id)
    assert stored is not None
    assert (stored.entry_class, stored.created_at, stored.expires_at) == ("pinned", clock.time - 10, clock.time + 50)


def test_a_queued_entry_that_expired_is_neither_served_nor_matched_nor_live_in_the_file(
    open_store: Opener, path: Path, clock: Clock
) -> None:
    store = open_store(write_behind=True)
    old = store.put([1, 2], b"old")
    store.flush()
    with blocked(path):
        entry = store.put([1, 2], b"new", ttl=5)
        assert main_of(store.get(entry.id)) == b"new"
        clock.time += 5
        assert store.get(entry.id) is None
        assert store.entry(entry.id) is None
        assert store.match([1, 2]) is None
        assert store.get(old.id) is None
    assert list(store.entries()) == []
    assert store.take(entry.id) is None
    with pytest.raises(kvstore.NotFoundError):
        store.set(entry.id, ttl=50)
    assert store.match([1, 2]) is None
    store.gc()
    connection = apsw.Connection(str(path))
    assert connection.execute("SELECT count(*) FROM entries").get == 0
    connection.close()


@pytest.mark.parametrize("on_file", [True, False])
def test_what_a_longer_queued_entry_serves_leaves_the_list(on_file: bool, open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    shorter, longer = TOKENS[:20], TOKENS[:30]
    ids: dict[str, int] = {}

    def put_shorter() -> None:
        ids["normal"] = store.put(shorter, state(shorter)).id
        ids["pinned"] = store.put(shorter[:10], state(shorter[:10]), entry_class="pinned").id
        ids["draft"] = store.put(shorter[:11], state(shorter[:11]), draft=b"draft").id

    if on_file:
        put_shorter()
        store.flush()
    with blocked(path):
        if not on_file:
            put_shorter()
        last = store.put(longer, state(longer))
        assert store.get(ids["normal"]) is None
        assert store.entry(ids["normal"]) is None
        found = store.match(shorter)
        assert found is not None
        assert (found.entry.id, found.n_common) == (last.id, 20)
        assert store.get(ids["pinned"]) is not None
        assert store.get(ids["draft"]) is not None
    assert {e.id for e in store.entries()} == {last.id, ids["pinned"], ids["draft"]}


def test_a_failed_put_shows_again_what_it_would_have_replaced(open_store: Opener) -> None:
    store = open_store(write_behind=True, cache_disk_mib=16, cache_ram_mib=256)
    old = store.put([1, 2], b"old")
    store.flush()
    lost = store.put([1, 2], noise(1, 40 * MIB))
    with pytest.raises(kvstore.WriteBehindError) as caught:
        store.flush()
    assert caught.value.facts["ids"] == [lost.id]
    assert store.get(lost.id) is None
    assert main_of(store.get(old.id)) == b"old"
    found = store.match([1, 2])
    assert found is not None
    assert found.entry.id == old.id
    assert store.put([1, 2], b"new").id != old.id
    assert [main_of(store.get(e.id)) for e in store.entries()] == [b"new"]


def test_a_put_that_never_fits_into_ram_is_written_after_the_earlier_ones(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True, cache_ram_mib=1)
    for n in range(5):
        store.put([1, 2], noise(n, 100_000))
    large = store.put([1, 2], noise(9, 2 * MIB))
    last = store.put([1, 2], noise(4, 100_000))
    assert store.get(large.id) is None
    assert main_of(store.get(last.id)) == noise(4, 100_000)
    assert [e.id for e in store.entries()] == [last.id]


@pytest.mark.slow
def test_match_finds_its_way_through_a_long_queue(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    chance = random.Random(1)
    with blocked(path):
        known = {}
        for n in range(2000):
            tokens = (*TOKENS[: chance.randint(1, 40)], 1000 + n)
            known[tokens] = store.put(tokens, state(tokens, row=8, layers=1)).id
        walked = []
        original = prefixes.common_tokens
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefixes, "common_tokens", lambda a, b: walked.append(1) or original(a, b))
            for tokens in chance.sample(sorted(known), 50):
                found = store.match((*tokens, 5))
                assert found is not None
                assert (found.entry.id, found.n_common) == (known[tokens], len(tokens))
        assert len(walked) < 50 * 100  # not every entry of the queue
    store.flush()


# -- beside a store that writes at once


def content(tokens: tuple[int, ...], form: str, version: int) -> bytes:
    if form == "any":
        return state(tokens, row=16, model=version)
    if form == "none":
        return noise(sum(tokens) & 0xFF | version << 8, 700)
    return recurrent_state(len(tokens), [n for n in (10, 20) if n < len(tokens)])


# A queued entry is not encoded yet, so nobody knows whether it will be a delta.
UNKNOWN = ("id", "stored", "parent")
# Between two flushes a use may be on its way to the file, in either store.
ON_THEIR_WAY = (*UNKNOWN, "hits", "last_used")


class Pair:
    """Two stores that are told the same; what the queue does must not show in any answer, but for ids."""

    def __init__(self, direct: Store, behind: Store, chance: random.Random) -> None:
        self.stores = (direct, behind)
        self.chance = chance
        self.ids: list[tuple[int, int]] = []
        self.checkpointed: set[int | None] = set()  # indexes of `ids`

    def plain(self, side: int, value: Any, without: tuple[str, ...] = ON_THEIR_WAY) -> Any:
        """An answer, with one name for the ids of both stores."""
        if isinstance(value, Entry):
            known = {pair[side]: n for n, pair in enumerate(self.ids)}
            return known.get(value.id), {f: getattr(value, f) for f in Entry.__slots__ if f not in without}
        if isinstance(value, SavedState):
            draft = None if value.draft is None else value.draft.tobytes()
            return self.plain(side, value.entry), value.tokens.tobytes(), value.main.tobytes(), draft
        if isinstance(value, kvstore.Match):
            entry = self.plain(side, value.entry)
            # Of entries with a checkpoint at the same tokens any may serve.
            tie = value.n_common < value.entry.n_tokens and entry[0] in self.checkpointed
            return None if tie else entry, value.n_common
        return value

    def same(self, call: Callable[[Store, int], Any], n: int = -1) -> Any:
        """Calls both stores, with the ids of the n-th entry; gives the answer of the direct one."""
        answers: list[Any] = []
        for side, store in enumerate(self.stores):
            try:
                answers.append(call(store, self.ids[n][side] if self.ids else 0))
            except kvstore.KVStoreError as error:
                answers.append(type(error))
        if all(isinstance(answer, Entry) for answer in answers):
            pair = (answers[0].id, answers[1].id)
            if pair not in self.ids:
                assert all(pair[side] not in {p[side] for p in self.ids} for side in (0, 1)), "one is new, one is not"
                self.ids.append(pair)
        assert (a := self.plain(0, answers[0])) == (b := self.plain(1, answers[1])), f"{a} and {b}"
        return answers[0]

    def tokens(self) -> tuple[int, ...]:
        start = self.chance.choice([TOKENS, TOKENS[::-1]])
        tail = [self.chance.randint(-1, 1) for _ in range(self.chance.randint(0, 2))]
        return (*start[: self.chance.choice([10, 20, 30])], *tail)

    def put(self) -> None:
        chance, tokens = self.chance, self.tokens()
        form = chance.choice(["any", "any", "any", "none", "cuts"])
        main = content(tokens, form, chance.randint(0, 1))
        draft = chance.choice([None, None, None, state(tokens, row=8, model=9)])
        options: dict[str, Any] = {
            "entry_class": chance.choice(["normal", "normal", "normal", "learned", "pinned"]),
            "source": chance.choice(["default", "default", "request"]),
            "ttl": chance.choice([None, None, None, 5]),
            "share": chance.random() < 0.7,
            "n_images": chance.choice([0, 0, 0, 1]),
            "excerpt": chance.choice("ab"),
        }
        entry = self.same(lambda store, id: store.put(tokens, main, draft=draft, **options))
        if form == "cuts":
            self.checkpointed.add([pair[0] for pair in self.ids].index(entry.id))

    def match(self) -> None:
        tokens = self.tokens()
        self.same(lambda store, id: store.match(tokens))

    def look(self) -> None:
        n, cut = self.chance.randrange(-len(self.ids), 0) if self.ids else -1, self.chance.choice([None, None, 10])
        if self.ids:
            self.same(lambda store, id: store.entry(id), n)
            self.same(lambda store, id: store.get(id, n_tokens=cut), n)

    def change(self) -> None:
        if not self.ids:
            return
        n = self.chance.randrange(len(self.ids))
        kind = self.chance.choice(["take", "delete", "class", "ttl", "learn"])
        entry_class, ttl = self.chance.choice(["normal", "learned", "pinned"]), self.chance.choice([0, 7])
        if self.same(lambda store, id: store.entry(id), n) is None:
            return
        calls: dict[str, Callable[[Store, int], Any]] = {
            "take": lambda store, id: store.take(id),
            "delete": lambda store, id: len(store.delete(id, children="keep")),
            "class": lambda store, id: store.set(id, entry_class=entry_class),
            "ttl": lambda store, id: store.set(id, ttl=ttl),
            "learn": lambda store, id: store.learn(id, 10),
        }
        self.same(calls[kind], n)

    def compare(self) -> None:
        """All that both hold, with the counts that a flush brings to the file."""
        lists, figures = [], []
        for side, store in enumerate(self.stores):
            store.flush()
            store.gc()
            lists.append(sorted((self.plain(side, entry, UNKNOWN) for entry in store.entries()), key=repr))
            stats = store.stats()
            figures.append(
                (stats.hits, stats.misses, stats.unmatched, stats.tokens_served, stats.puts,
                 sorted((f.family, f.saved) for f in stats.families))
            )  # fmt: skip
        differ = [pair for pair in zip(*lists, strict=True) if pair[0] != pair[1]] if len(lists[0]) == len(lists[1]) else lists
        assert not differ, differ
        assert figures[0] == figures[1], figures


def slowed(store: Store, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the disk were slow: the queue is long, and is written at any moment."""
    put = puts.put

    def slow(core: Any, *args: Any, **options: Any) -> Entry:
        if core is store._core and options.get("owned"):
            time.sleep(chance.choice([0, 0, 0.001, 0.01]))
        return put(core, *args, **options)

    monkeypatch.setattr(puts, "put", slow)


def step(pair: Pair, clock: Clock) -> None:
    chance = pair.chance
    chance.choices([pair.put, pair.match, pair.look, pair.change], [45, 25, 25, 3])[0]()
    if chance.random() < 0.05:
        clock.time += chance.choice([1, 3])


@pytest.mark.parametrize("seed", range(6))
def test_all_answers_are_those_of_a_store_that_writes_at_once(
    seed: int, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    options: dict[str, Any] = {"min_saved_mib": 0.0005, "cache_ram_mib": chance.choice([64, 64, 0.02])}
    with Store(tmp_path / "direct", **options) as direct, Store(tmp_path / "behind", write_behind=True, **options) as behind:
        slowed(behind, random.Random(seed), monkeypatch)
        pair = Pair(direct, behind, chance)
        for _ in range(250):
            step(pair, clock)
            if chance.random() < 0.01:
                pair.compare()
        pair.compare()
        assert behind.verify() == []


@pytest.mark.parametrize("seed", range(3))
def test_two_fingerprints_of_one_file_do_not_see_each_other(
    seed: int, open_store: Opener, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    pairs = []
    for name in ("one", "two"):
        direct = open_store(at=tmp_path / f"direct-{name}", fingerprint=name)
        behind = open_store(at=tmp_path / "behind", fingerprint=name, write_behind=True)
        slowed(behind, random.Random(seed), monkeypatch)
        pairs.append(Pair(direct, behind, chance))
    for _ in range(200):
        step(chance.choice(pairs), clock)
    for pair in pairs:
        lists = [sorted((pair.plain(n, entry) for entry in s.entries()), key=repr) for n, s in enumerate(pair.stores)]
        assert lists[0] == lists[1]
        assert pair.stores[1].verify() == []


# -- threads


def test_a_reader_sees_no_gap_and_no_older_version_while_the_queue_drains(
    open_store: Opener, crash_free: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(write_behind=True)
    tokens = TOKENS[:8]
    put_at: list[tuple[int, int]] = [(store.put(tokens, (0).to_bytes(4, "little")).id, 0)]
    done = threading.Event()
    seen: list[int] = []

    def write() -> None:
        try:
            for n in range(1, 300):
                put_at.append((store.put(tokens, n.to_bytes(4, "little")).id, n))
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            least = put_at[-1][1]
            found = store.match(tokens)
            assert found is not None
            assert found.n_common == len(tokens)
            saved = store.get(found.entry.id)
            if saved is not None:  # else replaced since
                version = int.from_bytes(saved.main.tobytes(), "little")
                assert version >= least
                seen.append(version)
            id, _ = put_at[-1]
            assert store.entry(id) is not None or put_at[-1][0] != id or not done.is_set()

    threads = [crash_free(read) for _ in range(3)]
    crash_free(write).join()
    for thread in threads:
        thread.join()
    assert len(set(seen)) > 10
    assert [main_of(store.get(e.id)) for e in store.entries()] == [(299).to_bytes(4, "little")]


def test_set_and_put_of_several_threads_have_one_order(open_store: Opener, crash_free: Start) -> None:
    """An entry that was pinned while its tokens were put again stays pinned, or the pin says that it came too late."""
    store = open_store(write_behind=True)
    for n in range(30):
        entry = store.put([n, 1], b"old")
        barrier = threading.Barrier(2)
        pinned: list[bool] = []

        def pin(id: int = entry.id, barrier: threading.Barrier = barrier, pinned: list[bool] = pinned) -> None:
            barrier.wait()
            try:
                store.set(id, entry_class="pinned")
                pinned.append(True)
            except kvstore.NotFoundError:
                pinned.append(False)

        thread = crash_free(pin)
        barrier.wait()
        new = store.put([n, 1], b"new")
        thread.join()
        known = store.entry(new.id)
        assert known is not None
        assert known.entry_class == ("pinned" if pinned == [True] else "normal")


def test_several_threads_flush_and_one_is_told_of_a_failure(open_store: Opener, crash_free: Start) -> None:
    store = open_store(write_behind=True, cache_disk_mib=16, cache_ram_mib=256)
    told: list[list[int]] = []

    def flush() -> None:
        try:
            store.flush()
        except kvstore.WriteBehindError as error:
            told.append(error.facts["ids"])

    lost = store.put([1], noise(1, 40 * MIB))
    for thread in [crash_free(flush) for _ in range(4)]:
        thread.join()
    assert told == [[lost.id]]


def test_a_flush_waits_only_for_what_was_put_before_it(
    open_store: Opener, crash_free: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(write_behind=True)
    written: list[int] = []
    flushed = threading.Event()
    put = puts.put

    def slow(core: Any, request: Any, **options: Any) -> Entry:
        if len(written) >= 2:
            assert flushed.wait(60)  # as long as someone puts, there is something in the queue
        entry = put(core, request, **options)
        written.append(entry.id)
        return entry

    monkeypatch.setattr(puts, "put", slow)
    first = [store.put([n], b"x").id for n in range(2)]
    thread = crash_free(lambda: (store._behind.drain(), flushed.set()))
    store.put([5], b"y")
    thread.join(30)
    assert flushed.is_set()
    assert written[:2] == first


def test_reads_leave_the_report_of_a_failed_put_to_the_flush(open_store: Opener) -> None:
    store = open_store(write_behind=True, cache_disk_mib=16, cache_ram_mib=256)
    lost = store.put([1], noise(1, 40 * MIB))
    store._behind.drain()
    assert store.get(lost.id) is None
    assert store.entry(lost.id) is None
    assert store.match([1]) is None
    with pytest.raises(kvstore.WriteBehindError) as caught:
        store.flush()
    assert caught.value.facts["ids"] == [lost.id]
    store.flush()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_the_queue_is_written_does_not_hang(
    open_store: Opener, crash_free: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(write_behind=True)
    slowed(store, random.Random(1), monkeypatch)
    for n in range(20):
        ids = [store.put([n, k], noise(n, 1000)).id for k in range(5)]
        held, forked = threading.Event(), threading.Event()

        def hold(held: threading.Event = held, forked: threading.Event = forked) -> None:
            with store._behind._lock:
                held.set()
                forked.wait(60)

        thread = crash_free(hold)
        held.wait(60)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store.close()
                store.match([n])
            except kvstore.ForkedError:
                code = 0
            finally:
                os._exit(code)
        forked.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.get(ids[0]) is not None
    store.flush()
    assert len(dump(store)) == 100


# -- what a failed put leaves


class Traced(np.ndarray):
    """An array that can be watched going."""


def large(seed: int) -> tuple[Any, weakref.ref[Any]]:
    array = np.frombuffer(bytearray(noise(seed, 40 * MIB)), np.uint8).view(Traced)
    return array, weakref.ref(array)


@pytest.mark.parametrize("write_behind", [False, True])
@pytest.mark.parametrize("cache_ram_mib", [0, 256])
def test_a_put_over_the_budget_leaves_no_thread_and_no_array(
    write_behind: bool, cache_ram_mib: int, open_store: Opener
) -> None:
    store = open_store(write_behind=write_behind, cache_disk_mib=16, cache_ram_mib=cache_ram_mib)
    before = threading.active_count()
    gc.collect()
    gc.disable()
    try:
        refs = []
        for n in range(5):
            array, ref = large(n)
            refs.append(ref)
            failed = False
            try:
                store.put([n], array, draft=array[: 2 * MIB])
                store.flush()
            except (kvstore.OverBudgetError, kvstore.WriteBehindError):
                failed = True
            assert failed
            del array
        left = [ref() for ref in refs]
    finally:
        gc.enable()
    assert left == [None] * 5  # without a collection
    assert store._core.ram.n_bytes == 0
    store._behind.close()
    assert threading.active_count() == before


def test_the_report_of_a_failed_put_holds_none_of_its_bytes(open_store: Opener) -> None:
    store = open_store(write_behind=True, cache_disk_mib=16, cache_ram_mib=256)
    array, _ = large(1)
    store.put([1], array)
    with store._behind._lock:
        queued = weakref.ref(store._behind._index.get(np.array([1], "<i4").tobytes()).request.main)  # type: ignore[union-attr]
    store._behind.close()
    assert queued() is None
    with pytest.raises(kvstore.WriteBehindError):
        store.flush()


@pytest.mark.parametrize("bad", [{"ttl": -1}, {"source": "x"}, {"n_system": 9}, {"draft": b""}, {"head": 5.5}])
@pytest.mark.parametrize("write_behind", [False, True])
def test_a_refused_put_leaves_no_thread_and_no_room_taken(bad: dict[str, Any], write_behind: bool, open_store: Opener) -> None:
    store = open_store(write_behind=write_behind)
    before = names()
    buffer = bytearray(3 * MIB)
    with pytest.raises((kvstore.InvalidInputError, TypeError)):
        store.put([1, 2], buffer, **bad)
    gc.collect()
    buffer.append(0)  # nobody holds it
    assert names() == before
    assert store._core.ram.n_bytes == 0


def test_puts_leave_no_thread_when_they_are_done(open_store: Opener) -> None:
    store = open_store()
    before = names()
    entry = store.put([1], noise(1, 20 * MIB), draft=noise(2, 9 * MIB))
    assert store.get(entry.id) is not None
    assert names() == before
    cold = open_store(cache_ram_mib=0, readonly=True)
    assert main_of(cold.get(entry.id)) == noise(1, 20 * MIB)
    assert names() == before

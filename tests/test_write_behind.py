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


def test_match_finds_its_way_through_a_long_queue(open_store: Opener, path: Path) -> None:
    store = open_store(write_behind=True)
    chance = random.Random(1)
    with blocked(path):
        known = {}
        for n in range(2000):
            tokens = (*TOKENS[: chance.randint(1, 40)], 1000 + n)
            known[tokens] = store.put(tokens, state(tokens, row=8, layers=1)).id
        walked = []
        original = kvstore.prefixes.common
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kvstore.prefixes, "common", lambda a, b: walked.append(1) or original(a, b))
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
        return noise(hash((tokens, version)) & 0xFFFF, 700)
    return recurrent_state(len(tokens), [n for n in (10, 20) if n < len(tokens)])


class Pair:
    """Two stores that are told the same; what the queue does must not show in any answer, but for ids."""

    def __init__(self, direct: Store, behind: Store, chance: random.Random) -> None:
        self.stores = (direct, behind)
        self.chance = chance
        self.ids: list[tuple[int, int]] = []

    def plain(self, side: int, value: Any) -> Any:
        """An answer with the ids of both stores made one. A queued entry is not stored yet, so cannot be a delta."""
        names = {pair[side]: n for n, pair in enumerate(self.ids)}
        if isinstance(value, Entry):
            out = {name: getattr(value, name) for name in Entry.__slots__ if name not in ("id", "stored", "parent")}
            return names.get(value.id), out
        if isinstance(value, SavedState):
            draft = None if value.draft is None else value.draft.tobytes()
            return self.plain(side, value.entry), value.tokens.tobytes(), value.main.tobytes(), draft
        if isinstance(value, kvstore.Match):
            return self.plain(side, value.entry), value.n_common
        return value

    def same(self, call: Callable[[Store, Callable[[int], int]], Any]) -> Any:
        answers = []
        for side, store in enumerate(self.stores):
            try:
                answer: Any = self.plain(side, call(store, lambda n, side=side: self.ids[n][side]))  # type: ignore[misc]
            except kvstore.KVStoreError as error:
                answer = type(error)
            answers.append(answer)
        assert answers[0] == answers[1]
        return answers[0]

    def put(self, tokens: tuple[int, ...], **options: Any) -> None:
        form = self.chance.choice(["any", "any", "any", "none", "cuts"])
        main = content(tokens, form, self.chance.randint(0, 1))
        draft = self.chance.choice([None, None, None, state(tokens, row=8, model=9)])
        entries = [store.put(tokens, main, draft=draft, **options) for store in self.stores]
        pair = (entries[0].id, entries[1].id)
        if pair not in self.ids:
            assert all(pair[side] not in {p[side] for p in self.ids} for side in (0, 1)), "a new id for one, an old for the other"
            self.ids.append(pair)
        assert self.plain(0, entries[0]) == self.plain(1, entries[1])

    def step(self, clock: Clock) -> None:
        chance = self.chance
        start = chance.choice([TOKENS, TOKENS[::-1]])
        tokens = (*start[: chance.choice([10, 20, 30])], *[chance.randint(-1, 1) for _ in range(chance.randint(0, 2))])
        n = chance.randrange(len(self.ids)) if self.ids else None
        what = chance.choices(["put", "match", "one", "change", "all", "clock"], [40, 20, 25, 4, 3, 5])[0]
        if what == "put":
            entry_class = chance.choice(["normal", "normal", "normal", "learned", "pinned"])
            self.put(
                tokens, entry_class=entry_class, source=chance.choice(["default", "default", "request"]),
                ttl=chance.choice([None, None, None, 5]), share=chance.random() < 0.7,
                n_images=chance.choice([0, 0, 0, 1]), excerpt=chance.choice("ab"),
            )  # fmt: skip
        elif what == "match":
            self.same(lambda s, id: s.match(tokens))
        elif what == "one" and n is not None:
            self.same(lambda s, id: s.entry(id(n)))
            if chance.random() < 0.7:
                cut = chance.choice([None, None, 10])
                self.same(lambda s, id: s.get(id(n), n_tokens=cut))
        elif what == "change" and n is not None:
            kind = chance.choice(["take", "delete", "class", "ttl", "learn"])
            if kind == "take":
                self.same(lambda s, id: s.take(id(n)))
            elif kind == "delete":
                self.same(lambda s, id: len(s.delete(id(n), children="keep")))
            elif kind == "class":
                entry_class = chance.choice(["normal", "learned", "pinned"])
                self.same(lambda s, id: s.set(id(n), entry_class=entry_class))
            elif kind == "ttl":
                ttl = chance.choice([0, 7])
                self.same(lambda s, id: s.set(id(n), ttl=ttl))
            else:
                self.learn(n)
        elif what == "all":
            self.compare()
        elif what == "clock":
            clock.time += chance.choice([1, 3])

    def learn(self, n: int) -> None:
        got: list[Entry | type[Exception]] = []
        for side, store in enumerate(self.stores):
            try:
                got.append(store.learn(self.ids[n][side], 10))
            except kvstore.KVStoreError as error:
                got.append(type(error))
        if isinstance(got[0], Entry) and isinstance(got[1], Entry):
            pair = (got[0].id, got[1].id)
            if pair not in self.ids:
                self.ids.append(pair)
        assert self.plain(0, got[0]) == self.plain(1, got[1])

    def compare(self) -> None:
        for store in self.stores:
            store.flush()
        lists = [sorted((self.plain(side, e) for e in s.entries()), key=repr) for side, s in enumerate(self.stores)]
        assert lists[0] == lists[1]
        figures = []
        for store in self.stores:
            stats = store.stats()
            figures.append(
                (stats.entries, stats.size, stats.hits, stats.misses, stats.unmatched, stats.tokens_served, stats.puts,
                 sorted((f.family, f.entries, f.saved, f.reused) for f in stats.families))
            )  # fmt: skip
        assert figures[0] == figures[1]


def compared(folder: Path, seed: int, steps: int, clock: Clock, **options: Any) -> None:
    chance = random.Random(seed)
    path = folder / f"behind{seed}"
    common = {"min_saved_mib": 0.0005, "fingerprint": "m", "timeout": 20.0}
    with Store(folder / f"direct{seed}", **common) as direct, Store(path, write_behind=True, **common, **options) as behind:
        pair = Pair(direct, behind, chance)
        try:
            for _ in range(steps):
                if chance.random() < 0.25:
                    # A few steps that find everything queued: no settling call among them.
                    with blocked(path):
                        for _ in range(6):
                            pair.queue_step()
                else:
                    pair.step(clock)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        pair.compare()
        for store in pair.stores:
            assert store.verify() == []


def _queue_step(self: Pair) -> None:
    state_of = self.chance.getstate()
    del state_of
    start = self.chance.choice([TOKENS, TOKENS[::-1]])
    tokens = (*start[: self.chance.choice([10, 20, 30])], *[self.chance.randint(-1, 1) for _ in range(self.chance.randint(0, 2))])
    if self.chance.random() < 0.5:
        self.put(tokens, ttl=self.chance.choice([None, None, 5]))
    self.same(lambda s, id: s.match(tokens))
    if self.ids:
        n = self.chance.randrange(len(self.ids))
        self.same(lambda s, id: s.get(id(n)))
        self.same(lambda s, id: s.entry(id(n)))


Pair.queue_step = _queue_step  # type: ignore[attr-defined]

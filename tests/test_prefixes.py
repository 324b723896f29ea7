"""`match` gives the exact longest common prefix, whatever is stored."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import apsw
import numpy as np
import pytest
import storekit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storekit import noise, real, recurrent_state, state

from kvstore import NotFoundError, Store
from kvstore.storage import expired_runs, prefix_filter
from kvstore.storage import prefix_index as prefixes
from kvstore.storage import schema as upgrade
from kvstore.storage.queries import signed
from kvstore.store import maintenance

# Byte patterns that a wrong order of comparison would trip over: sign bits, 0x00 and 0xff at either end of a token.
TOKENS = [0, 1, -1, 255, 256, 0x00FF0000, -(1 << 31), (1 << 31) - 1, 0x01000000, -256, 0xFF00, 0x00FFFF00]
ANYWHERE, NOWHERE = None, ()


@dataclass
class Row:
    id: int
    tokens: tuple[int, ...]
    cuts: Sequence[int] | None
    expired: bool = False

    def serves(self, request: Sequence[int]) -> int:
        n = 0
        while n < min(len(self.tokens), len(request)) and self.tokens[n] == request[n]:
            n += 1
        if self.cuts is ANYWHERE or n == len(self.tokens):
            return n
        return max((c for c in self.cuts if c <= n), default=0)


def best(rows: list[Row], request: Sequence[int]) -> int:
    return max((r.serves(request) for r in rows if not r.expired), default=0)


def check(store: Store, rows: list[Row], request: Sequence[int]) -> None:
    """The match is as long as the longest that a look at every row finds, and the entry it names gives that much."""
    found = store.match(np.array(request, np.int32))
    assert (0 if found is None else found.n_common) == best(rows, request)
    if found is not None:
        row = next(r for r in rows if r.id == found.entry.id)
        assert not row.expired
        assert row.serves(request) == found.n_common
        assert found.entry.n_tokens == len(row.tokens)


def put(store: Store, tokens: Sequence[int], cuts: Sequence[int] | None, **options: Any) -> int:
    """Stores an entry that can be cut anywhere, nowhere, or at `cuts`. Pinned: nothing is removed as contained."""
    if cuts is ANYWHERE:
        data: bytes = state(tokens, row=8, layers=1)
    elif not cuts:
        data = b"not understood"
    else:
        data = recurrent_state(len(tokens), cuts)
    return store.put(list(tokens), data, entry_class="pinned", share=False, **options).id


tokens_of = st.lists(st.sampled_from(TOKENS[:4]) | st.sampled_from(TOKENS), min_size=1, max_size=9)


@st.composite
def entry_of(draw: st.DrawFn) -> tuple[list[int], Sequence[int] | None, str, bool]:
    tokens = draw(tokens_of)
    kind = draw(st.sampled_from(["any", "any", "none", "cuts"]))
    if kind == "cuts" and len(tokens) > 1:
        cuts: Sequence[int] | None = sorted(draw(st.sets(st.integers(1, len(tokens) - 1), min_size=1, max_size=3)))
    else:
        cuts = ANYWHERE if kind == "any" else NOWHERE
    return tokens, cuts, draw(st.sampled_from("aab")), draw(st.integers(0, 3)) == 0


@settings(max_examples=25, deadline=None)
@given(entries=st.lists(entry_of(), min_size=1, max_size=14), requests=st.lists(tokens_of, min_size=1, max_size=8))
def test_match_equals_a_look_at_every_entry(
    entries: list[tuple[list[int], Sequence[int] | None, str, bool]], requests: list[list[int]]
) -> None:
    now = time.time()
    ahead = 0.0
    rows: dict[str, dict[tuple[int, ...], Row]] = {"a": {}, "b": {}}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        patch.setattr(time, "time", lambda: now + ahead)
        stores = {name: stack.enter_context(Store(f"{folder}/kv", fingerprint=name, cache_ram_mib=0)) for name in rows}
        for tokens, cuts, fingerprint, expires in entries:
            id = put(stores[fingerprint], tokens, cuts, ttl=10 if expires else None)
            rows[fingerprint][tuple(tokens)] = Row(id, tuple(tokens), cuts, expires)
        ahead = 11
        for fingerprint, known in rows.items():
            listed = list(known.values())
            for request in [*requests, *([*r.tokens, 1] for r in listed), *(r.tokens[:-1] or (5,) for r in listed)]:
                check(stores[fingerprint], listed, request)


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 4))
def test_match_is_exact_among_many_entries_with_common_starts(random: Any, alphabet: int) -> None:
    with Store(":memory:", cache_ram_mib=0) as store:
        rows: dict[tuple[int, ...], Row] = {}
        for _ in range(60):
            tokens = tuple(random.choice(TOKENS[:alphabet]) for _ in range(random.randint(1, 12)))
            cuts = random.choice([ANYWHERE, NOWHERE])
            rows[tokens] = Row(put(store, tokens, cuts), tokens, cuts)
        for _ in range(60):
            check(store, list(rows.values()), [random.choice(TOKENS[:alphabet]) for _ in range(random.randint(1, 14))])
        for tokens in random.sample(list(rows), len(rows) // 2):
            assert store.delete(rows.pop(tokens).id)
            check(store, list(rows.values()), tokens)


@pytest.mark.parametrize("model", ["jamba-2026.10.11549-fa", "gemma3-2026.10.11549-fa", "mamba-2026.10.11549-fa"])
def test_a_state_that_cannot_be_cut_matches_whole_or_up_to_a_checkpoint(model: str, store: Store) -> None:
    tokens, blob = real(f"{model}-a")
    request = [*tokens.tolist(), 7, 8]
    entry = store.put(tokens, blob)
    wrong = -12345
    for n_equal in (1, 94, 95, 96, 98, 99, 100, 129, 130, 131, 133, 134, 136):
        expected = 134 if n_equal >= 134 else max((c for c in (95, 99, 130) if c <= n_equal), default=0)
        for asked in (request[:n_equal], [*request[:n_equal], wrong] if n_equal < 136 else request):
            found = store.match(asked)
            assert (0 if found is None else found.n_common) == expected
            if found is not None:
                assert found.entry.id == entry.id
                # What match promises, get gives.
                saved = store.get(entry.id, n_tokens=found.n_common)
                assert saved is not None
                assert saved.tokens.tolist() == request[:expected]


def test_an_entry_that_can_be_cut_wins_where_it_shares_more(store: Store) -> None:
    tokens, blob = real("jamba-2026.10.11549-fa-a")
    jamba = store.put(tokens, blob)
    other = tokens.tolist()[:97]
    plain = store.put([*other, 5], state([*other, 5]), entry_class="pinned")
    for n, expected, entry in ((95, 95, None), (97, 97, plain), (98, 97, plain), (99, 99, jamba), (129, 99, jamba)):
        found = store.match(tokens[:n])
        assert found is not None
        assert found.n_common == expected
        if entry is not None:
            assert found.entry.id == entry.id


def test_expired_neighbours_are_passed_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    base = list(range(20))
    kept = put(store, [*base[:10], 500], ANYWHERE)
    for n in range(40):
        put(store, [*base, n], ANYWHERE if n % 2 else NOWHERE, ttl=5)
    monkeypatch.setattr(time, "time", lambda: now + 6)
    found = store.match([*base, 20])
    assert found is not None
    assert (found.entry.id, found.n_common) == (kept, 10)


def test_the_longest_of_nested_prefixes_is_found_through_all_of_them(store: Store) -> None:
    tokens = list(range(200))
    ids = {n: put(store, tokens[:n], NOWHERE) for n in range(1, 200, 3)}
    for n in range(1, 200):
        found = store.match([*tokens[:n], -9])
        at = max(m for m in ids if m <= n)
        assert found is not None
        assert (found.entry.id, found.n_common) == (ids[at], at)


def test_no_entry_serves_a_request_that_differs_in_its_first_token(store: Store) -> None:
    for first in TOKENS:
        if first != -1:
            put(store, [first, 1, 2], ANYWHERE)
    assert store.match([-1, 1, 2]) is None
    assert store.match([-2]) is None


def test_long_keys_are_compared_to_the_end(store: Store) -> None:
    tokens = np.arange(40_000, dtype=np.int32)
    entry = store.put(tokens, state(tokens.tolist(), row=8, layers=1))
    for n in (1, 255, 256, 257, 16_384, 39_999, 40_000):
        asked = tokens.copy()
        asked[n:] = -1
        found = store.match(asked)
        assert found is not None
        assert (found.entry.id, found.n_common) == (entry.id, n)


def test_match_sees_puts_that_are_not_on_disk_yet(open_store: Any, path: Any) -> None:
    store = open_store(write_behind=True)
    on_disk = [1, 2, 3, 4]
    put(store, on_disk, ANYWHERE)
    store.flush()
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")  # nothing gets to the disk meanwhile
    try:
        rows = [Row(store.match(on_disk).entry.id, tuple(on_disk), ANYWHERE)]  # type: ignore[union-attr]
        for tokens, cuts in (([1, 2, 3, 9, 9], ANYWHERE), ([1, 2, 5, 6], NOWHERE), ([7, 8, 9, 10], (2, 3))):
            rows.append(Row(put(store, tokens, cuts), tuple(tokens), cuts))
        for request in ([1, 2, 3, 9], [1, 2, 5, 6, 7], [1, 2, 5], [7, 8], [7], [7, 8, 9, 11], [1, 2, 3, 4], [3]):
            check(store, rows, request)
    finally:
        with suppress(apsw.Error):
            other.execute("ROLLBACK")
        other.close()
    store.flush()
    for request in ([1, 2, 3, 9], [1, 2, 5, 6, 7], [1, 2, 5], [7, 8], [7], [7, 8, 9, 11], [1, 2, 3, 4], [3]):
        check(store, rows, request)


def test_a_prefix_is_learned_only_from_an_entry_that_serves_all_of_it(store: Store) -> None:
    tokens, blob = real("jamba-2026.10.11549-fa-a")
    store.put(tokens, blob)
    with pytest.raises(NotFoundError):
        store.learn(tokens[:97])
    learned = store.learn(tokens[:99])
    assert (learned.n_tokens, learned.entry_class, learned.parent) == (99, "learned", None)


def test_equal_tokens_are_found_whatever_their_bytes(store: Store) -> None:
    for n, token in enumerate(TOKENS):
        put(store, [token] * 5, ANYWHERE if n % 2 else NOWHERE)
    for token in TOKENS:
        found = store.match([token] * 6)
        assert found is not None
        assert found.n_common == 5
        saved = store.get(found.entry.id)
        assert saved is not None
        assert saved.tokens.tolist() == [token] * 5


def test_noise_is_never_cut(store: Store) -> None:
    for seed in range(20):
        put_at = store.put([seed, 1, 2], noise(seed, 500 + 37 * seed))
        assert store.match([seed, 1]) is None
        assert store.match([seed, 1, 2]) is not None
        assert store.entry(put_at.id) is not None


# -- many entries: the walk gives way to the hashes, and to what is remembered of expired ones


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes over among many entries takes over among a few."""
    monkeypatch.setattr(prefixes, "WALK_STEPS", 0)
    monkeypatch.setattr(prefix_filter, "RECENT_ROWS", 4)
    monkeypatch.setattr(prefix_filter, "STALE_ROWS", 2)
    monkeypatch.setattr(expired_runs, "PASSED", 1)
    monkeypatch.setattr(expired_runs, "NEW_KEPT", 2)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.lists(entry_of(), min_size=1, max_size=14),
    requests=st.lists(tokens_of, min_size=1, max_size=6),
    at=st.integers(0, 12),
)
def test_the_filter_and_the_walk_find_the_same(
    few_steps: None,
    entries: list[tuple[list[int], Sequence[int] | None, str, bool]],
    requests: list[list[int]],
    at: int,
) -> None:
    """Puts, expiries, renewals and deletions between matches, through two stores that open one file."""
    now, ahead = time.time(), 0.0
    rows: dict[tuple[int, ...], Row] = {}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        patch.setattr(maintenance, "INTERVAL_SECONDS", 1000)
        patch.setattr(time, "time", lambda: now + ahead)
        mine, other = (stack.enter_context(Store(f"{folder}/kv", cache_ram_mib=0)) for _ in range(2))
        reader = stack.enter_context(Store(f"{folder}/kv", cache_ram_mib=0, readonly=True))
        for i, (tokens, cuts, _, expires) in enumerate(entries):
            store = (mine, other)[i % 2]
            rows[tuple(tokens)] = Row(put(store, tokens, cuts, ttl=10 if expires else None), tuple(tokens), cuts, False)
            if i == at:
                ahead = 11
                for row in rows.values():
                    found = other.entry(row.id)
                    row.expired = found is None
            for request in [*requests, [*tokens, 1], tokens[:-1] or [5]]:
                check(mine, list(rows.values()), request)
                check(reader, list(rows.values()), request)
        for key in list(rows)[::2]:
            (mine if len(key) % 2 else other).delete(rows.pop(key).id)
        for key, row in rows.items():
            if row.expired:  # the same tokens again make it live
                row.id, row.expired = put(other, key, row.cuts), False
        for request in [*requests, *([*key, 1] for key in rows), *map(list, rows)]:
            for store in (mine, other, reader):
                check(store, list(rows.values()), request)
        assert mine.verify() == []


def test_what_an_expiry_that_is_put_off_serves_is_found_again(
    few_steps: None, open_store: Any, path: Any
) -> None:
    """Whoever changes it: here another program."""
    store = open_store()
    store._maintenance.stop()  # the expired ones stay
    ids = {n: put(store, [1, 2, 3, n], ANYWHERE if n < 10 else NOWHERE, ttl=1000) for n in range(5, 15)}
    with closing(storekit.connect(path)) as c:
        c.execute("UPDATE meta SET expires_at = 5")
    for n in range(4, 16):
        assert store.match([1, 2, 3, n, 1]) is None
    with closing(storekit.connect(path)) as c:
        c.execute("UPDATE meta SET expires_at = NULL WHERE entry IN (?, ?)", (signed(ids[7]), signed(ids[12])))
    for n, expected in ((7, (ids[7], 4)), (12, (ids[12], 4)), (8, (ids[7], 3))):
        found = store.match([1, 2, 3, n, 1])
        assert found is not None
        assert (found.entry.id, found.n_common) == expected


def test_entries_that_sql_wrote_are_found(few_steps: None, open_store: Any, path: Any) -> None:
    store = open_store()
    id = put(store, [1, 2, 3], NOWHERE)
    assert store.match([1, 2, 3, 4, 5]) is not None
    tokens = np.arange(1, 5, dtype="<i4").tobytes()
    with closing(storekit.connect(path)) as c:
        c.execute("INSERT INTO entries(id, fingerprint, cut_any, n_tokens, tokens) VALUES(77, 1, 0, 4, ?)", (tokens,))
        columns = ", ".join(r[1] for r in c.execute("PRAGMA table_info(meta)") if r[1] != "entry")
        c.execute(f"INSERT INTO meta(entry, {columns}) SELECT 77, {columns} FROM meta WHERE entry = ?", (signed(id),))
    found = store.match([1, 2, 3, 4, 5])
    assert found is not None
    assert (found.entry.id, found.n_common) == (77, 4)


@pytest.mark.parametrize("cuts", [ANYWHERE, NOWHERE])
@pytest.mark.parametrize("steps", [0, 1000])
def test_a_put_among_many_finds_its_prefixes(
    cuts: Any, steps: int, open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest prefix that it can be stored against, and the entries that it serves: by the walk, and without."""
    monkeypatch.setattr(prefixes, "WALK_STEPS", steps)
    store = open_store()
    document = list(range(100, 160))
    for n in range(1, 60):
        put(store, [*document[:n], 5 + n % 3], cuts)
    store.put(document[:40], state(document[:40]), entry_class="learned")
    pinned = store.put(document[:45], state(document[:45]), entry_class="pinned", share=False)
    contained = store.put(document[:50], noise(3, 100) if cuts == NOWHERE else state(document[:50]))
    entry = store.put(document, state(document))
    assert entry.parent == (pinned.id if cuts == NOWHERE else contained.id)  # a state without a layout shares nothing
    assert store.entry(contained.id) is None
    assert store.entry(pinned.id) is not None
    assert len(list(store.entries())) == 59 + 3


def test_a_file_of_an_older_program_gets_its_rows(few_steps: None, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only it answers as it is; opened for writing it gets tables, indexes and triggers, in steps where it is large."""
    monkeypatch.setattr(upgrade, "LISTED_AT_OPEN", 2)
    monkeypatch.setattr(maintenance, "HASHED_PER_STEP", 2)
    keys = [[*range(n), 50, n] for n in range(1, 9)]
    with Store(path) as store:
        for key in keys:
            put(store, key, NOWHERE if len(key) % 2 else (1, 2))
    with closing(storekit.connect(path)) as c:
        sql = "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND name NOT LIKE 'meta_%'"
        for (name,) in c.execute(sql).fetchall():
            c.execute(f"DROP TRIGGER {name}")
        c.execute("DROP TABLE prefixes; DROP INDEX entries_by_end; DROP INDEX meta_by_class; DELETE FROM counters")

    def served(store: Store) -> list[int]:
        found = [store.match([*key, 9]) for key in keys]
        return [0 if m is None else m.n_common for m in found]

    with Store(path, readonly=True) as store:
        assert served(store) == [len(key) for key in keys]
        assert store.verify() == []
    with Store(path) as store:
        assert served(store) == [len(key) for key in keys]
        store.gc()
        assert store.verify() == []
        ends = time.monotonic() + 20
        while True:
            with closing(storekit.connect(path)) as c:
                left = c.execute("SELECT count(*) FROM counters WHERE name = 'unlisted'").fetchone()[0]
                left += c.execute("SELECT count(*) FROM prefixes WHERE hash IS NULL").fetchone()[0]
            if not left:
                break
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert served(store) == [len(key) for key in keys]
        assert store.verify() == []

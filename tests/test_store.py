"""The rules of a store: what put keeps, shares and removes, and what get, take, match, set and delete do."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from storekit import STATES, dump, noise, real, recurrent_state, state
from workkit import wait_for

import kvstore
from kvstore import LayoutError, NotFoundError, Store, layout

PREFIX = list(range(100, 200))
Opener = Callable[..., Store]


def put(store: Store, tokens: list[int], **options: Any) -> kvstore.Entry:
    return store.put(tokens, state(tokens), **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops the time that the store sees, and moves it."""
    moved = 0.0
    start = time.time()

    def move(seconds: float) -> None:
        nonlocal moved
        moved += seconds

    monkeypatch.setattr(time, "time", lambda: start + moved)
    return move


# -- put and get


@pytest.mark.parametrize("name", sorted(p.stem for p in STATES.glob("*.bin")))
def test_get_gives_the_bytes_that_were_put(name: str, open_store: Opener, path: Path) -> None:
    blob = (STATES / f"{name}.bin").read_bytes()
    tokens = [7, 8, 9]
    with open_store() as store:
        entry = store.put(tokens, blob)
    with open_store() as store:
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == blob
        assert saved.tokens.tolist() == tokens
        assert (saved.entry.size, saved.entry.stored, saved.entry.parent) == (len(blob), len(blob), None)


@pytest.mark.parametrize(
    "model", ["llama-2026.10.11549-fa", "llama-2026.10.11549-nofa", "qwen2vl-2026.10.11549-fa", "jamba-2026.10.11549-fa",
              "deepseek2-2026.10.11549-fa", "lfm2-2026.10.11549-fa", "gemma3-2026.10.11549-fa", "mamba-2026.10.11549-fa"]
)  # fmt: skip
def test_a_state_that_continues_a_learned_prefix_comes_back_from_its_delta(model: str, open_store: Opener) -> None:
    tokens, prefix = real(f"{model}-prefix")
    longer, child = real(f"{model}-a")
    assert longer[: len(tokens)].tolist() == tokens.tolist()
    with open_store() as store:
        parent = store.put(tokens, prefix, entry_class="learned")
        entry = store.put(longer, child)
        assert entry.parent == parent.id
        assert entry.stored < 0.75 * entry.size
        assert store.entry(parent.id) is not None
    for ram in (0, 64):
        with open_store(cache_ram_mib=ram) as store:
            for id, blob in ((entry.id, child), (parent.id, prefix), (entry.id, child)):
                saved = store.get(id)
                assert saved is not None
                assert saved.main.tobytes() == blob.tobytes()
            assert store.verify() == []


def test_bytes_like_arguments_are_accepted_and_left_alone(store: Store, tmp_path: Path) -> None:
    blob = state(PREFIX)
    (tmp_path / "f").write_bytes(blob)
    words = np.frombuffer(blob, "<i4").copy()
    with (tmp_path / "f").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for data in (blob, bytearray(blob), memoryview(blob), words, words.reshape(1, -1), mapped):
            entry = store.put(PREFIX, data)
            saved = store.get(entry.id)
            assert saved is not None
            assert saved.main.tobytes() == blob
            assert saved.main.dtype == np.uint8
            assert saved.tokens.dtype == np.int32
    assert words.tobytes() == blob


def test_a_buffer_that_changes_after_put_changes_nothing(store: Store) -> None:
    data = bytearray(state(PREFIX))
    before = bytes(data)
    entry = store.put(PREFIX, data)
    data[:] = bytes(len(data))
    saved = store.get(entry.id)
    assert saved is not None
    assert saved.main.tobytes() == before


def test_what_get_gives_cannot_change_what_is_held(store: Store) -> None:
    entry = put(store, PREFIX)
    saved = store.get(entry.id)
    assert saved is not None
    with pytest.raises(ValueError, match="read-only"):
        saved.main[0] = 1


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda t: np.array(t, np.uint16), lambda t: np.array(t, np.int64)])
def test_tokens_may_be_any_integers(kind: Any, store: Store) -> None:
    entry = store.put(kind(PREFIX), b"state")
    found = store.match(PREFIX)
    assert found is not None
    assert (found.entry.id, found.n_common) == (entry.id, len(PREFIX))


def test_tokens_span_the_whole_of_int32(store: Store) -> None:
    tokens = [-(1 << 31), -1, 0, 1, (1 << 31) - 1]
    entry = store.put(tokens, b"state")
    saved = store.get(entry.id)
    assert saved is not None
    assert saved.tokens.tolist() == tokens


def test_get_of_an_unknown_id_is_none(store: Store) -> None:
    assert store.get(12345) is None
    assert store.take(12345) is None
    assert store.entry(12345) is None
    assert store.delete(12345) == []
    assert store.stats().misses == 2


# -- sharing


def test_the_parent_is_the_longest_proper_prefix(store: Store) -> None:
    """Learned or not, itself a delta or not."""
    short = put(store, PREFIX[:40], entry_class="learned")
    middle = put(store, PREFIX[:70], entry_class="learned")
    pinned = put(store, PREFIX[:80], entry_class="pinned")
    put(store, [*PREFIX[:70], 5, 6], entry_class="learned")
    assert (middle.parent, pinned.parent) == (short.id, middle.id)
    assert put(store, PREFIX).parent == pinned.id
    assert put(store, [*PREFIX[:40], 1]).parent == short.id
    assert put(store, [*PREFIX[:39], 1]).parent is None
    assert store.verify() == []


def test_a_pinned_entry_may_be_a_delta(store: Store) -> None:
    parent = put(store, PREFIX[:50], entry_class="learned")
    assert put(store, PREFIX, entry_class="pinned").parent == parent.id


def test_share_false_stores_it_whole(store: Store) -> None:
    put(store, PREFIX[:50], entry_class="learned")
    entry = put(store, PREFIX, share=False)
    assert (entry.parent, entry.stored) == (None, entry.size)


def test_equal_tokens_are_no_proper_prefix(store: Store) -> None:
    put(store, PREFIX, entry_class="learned")
    assert store.put(PREFIX, state(PREFIX, model=3), entry_class="pinned").parent is None


def test_too_little_saved_is_stored_whole(open_store: Opener) -> None:
    store = open_store(min_saved_mib=1)
    put(store, PREFIX[:99], entry_class="learned")
    assert put(store, PREFIX).parent is None
    assert store.stats().shared_puts == 0


def test_an_expired_learned_entry_is_no_parent(store: Store, clock: Callable[[float], None]) -> None:
    put(store, PREFIX[:50], entry_class="learned", ttl=10)
    clock(11)
    assert put(store, PREFIX).parent is None


def test_draft_is_shared_only_where_main_is(store: Store) -> None:
    old, new = state(PREFIX[:50], model=1), state(PREFIX, model=1)
    parent = put(store, PREFIX[:50], draft=old, entry_class="learned")
    both = put(store, PREFIX, draft=new)
    assert both.parent == parent.id
    assert both.stored < 0.7 * both.size
    half = put(store, [*PREFIX[:99], 1], draft=noise(1, 40_000))
    assert half.parent == parent.id
    assert 40_000 < half.stored < 40_000 + len(state(PREFIX))
    none = store.put([*PREFIX, 2], noise(2, 40_000), draft=new)
    assert (none.parent, none.stored) == (None, none.size)
    for entry, main, draft in (
        (both, state(PREFIX), new),
        (half, state([*PREFIX[:99], 1]), noise(1, 40_000)),
        (none, noise(2, 40_000), new),
    ):
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.draft is not None
        assert (saved.main.tobytes(), saved.draft.tobytes()) == (main, draft)
    assert store.verify() == []


def test_draft_stays_whole_where_the_parent_has_none(store: Store) -> None:
    parent = put(store, PREFIX[:50], entry_class="learned")
    entry = put(store, PREFIX, draft=state(PREFIX, model=1))
    assert entry.parent == parent.id
    saved = store.get(entry.id)
    assert saved is not None
    assert saved.draft is not None
    assert saved.draft.tobytes() == state(PREFIX, model=1)


def test_a_layout_that_is_not_understood_is_stored_whole(store: Store) -> None:
    put(store, PREFIX[:50], entry_class="learned")
    for n, blob in enumerate((b"\0", b"x" * 100, noise(4, 50_000), state(PREFIX)[:-3])):
        entry = store.put([*PREFIX, n], blob)
        assert (entry.parent, entry.stored) == (None, len(blob))
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == blob


def test_fingerprints_never_cross(open_store: Opener) -> None:
    a, b = open_store(fingerprint="a"), open_store(fingerprint="b")
    parent = put(a, PREFIX[:50], entry_class="learned")
    child = put(a, PREFIX)
    assert child.parent == parent.id
    assert b.match(PREFIX) is None
    assert b.get(child.id) is None
    assert b.take(child.id) is None
    assert b.entry(child.id) is None
    assert b.delete(child.id) == []
    assert list(b.entries()) == []
    with pytest.raises(NotFoundError):
        b.set(child.id, ttl=5)
    with pytest.raises(NotFoundError):
        b.learn(child.id, 20)
    with pytest.raises(NotFoundError):
        b.learn(PREFIX, 20)
    mine = put(b, [*PREFIX, 1])
    assert mine.parent is None
    same = put(b, PREFIX)
    assert same.id != child.id
    assert a.get(child.id) is not None
    assert {e.id for e in a.entries()} == {parent.id, child.id}
    assert open_store(fingerprint="").match(PREFIX) is None


def test_a_store_without_a_fingerprint_finds_every_id_but_learns_only_from_its_own(open_store: Opener) -> None:
    a, plain = open_store(fingerprint="a"), open_store()
    entry = put(a, PREFIX)
    assert plain.get(entry.id) is not None
    with pytest.raises(kvstore.InvalidInputError, match="fingerprint 'a'"):
        plain.learn(entry.id, 20)
    assert plain.match(PREFIX) is None


# -- what put replaces and removes


def test_the_same_tokens_replace_the_entry(store: Store) -> None:
    old = store.put(PREFIX, b"one")
    new = store.put(PREFIX, b"two")
    assert store.get(old.id) is None or old.id == new.id
    assert [e.id for e in store.entries()] == [new.id]
    saved = store.get(new.id)
    assert saved is not None
    assert saved.main.tobytes() == b"two"


def test_the_same_bytes_again_refresh_the_entry(store: Store, clock: Callable[[float], None]) -> None:
    old = put(store, PREFIX, ttl=10, excerpt="old")
    assert store.get(old.id) is not None
    clock(5)
    new = put(store, PREFIX, ttl=100, excerpt="new", n_input=3)
    assert new.id == old.id
    assert [e.id for e in store.entries()] == [new.id]
    assert new == store.entry(new.id)
    assert (new.created_at, new.hits, new.excerpt, new.n_input) == (old.created_at, 1, "new", 3)
    assert new.expires_at is not None
    assert old.expires_at is not None
    assert new.expires_at >= old.expires_at + 95


def test_a_default_put_does_not_undo_a_class_that_was_asked_for(store: Store) -> None:
    put(store, PREFIX, entry_class="pinned", source="admin")
    again = put(store, PREFIX)
    assert (again.entry_class, again.source) == ("pinned", "admin")
    other = store.put(PREFIX, b"other bytes")
    assert (other.entry_class, other.source) == ("pinned", "admin")
    asked = put(store, PREFIX, source="request")
    assert (asked.entry_class, asked.source) == ("normal", "request")


def test_replacing_a_parent_keeps_its_children(store: Store) -> None:
    parent = put(store, PREFIX[:50], entry_class="learned")
    child = put(store, PREFIX)
    assert child.parent == parent.id
    new = store.put(PREFIX[:50], state(PREFIX[:50], model=9), entry_class="learned")
    assert new.id != parent.id
    saved = store.get(child.id)
    assert saved is not None
    assert saved.main.tobytes() == state(PREFIX)
    assert store.verify() == []


def test_contained_entries_are_removed(store: Store) -> None:
    short, middle = put(store, PREFIX[:10]), put(store, PREFIX[:60])
    other = put(store, [*PREFIX[:59], 1])
    long = put(store, PREFIX)
    assert {e.id for e in store.entries()} == {long.id, other.id}
    assert store.get(short.id) is None
    assert store.get(middle.id) is None


@pytest.mark.parametrize("kept", ["learned", "pinned"])
def test_contained_entries_that_are_not_normal_stay(kept: Any, store: Store) -> None:
    entry = put(store, PREFIX[:60], entry_class=kept)
    put(store, PREFIX)
    assert store.get(entry.id) is not None


def test_contained_entries_stay_where_the_new_state_cannot_be_cut(store: Store) -> None:
    entry = put(store, PREFIX[:60])
    store.put(PREFIX, noise(1, 1000))
    assert store.get(entry.id) is not None
    store.put([*PREFIX, 1], recurrent_state(101, (30, 50)))
    assert store.get(entry.id) is not None


def test_contained_entries_are_removed_where_a_checkpoint_serves_them(store: Store) -> None:
    a = store.put(PREFIX[:30], recurrent_state(30))
    b = store.put(PREFIX[:40], recurrent_state(40))
    store.put(PREFIX, recurrent_state(100, (30, 50)))
    assert store.get(a.id) is None
    assert store.get(b.id) is not None
    found = store.match([*PREFIX[:30], 1])
    assert found is not None
    assert found.n_common == 30


def test_a_contained_entry_with_a_draft_stays_where_the_new_one_has_none(store: Store) -> None:
    entry = put(store, PREFIX[:60], draft=b"draft")
    put(store, PREFIX)
    assert store.get(entry.id) is not None


def test_other_fingerprints_are_not_contained(open_store: Opener) -> None:
    a, b = open_store(fingerprint="a"), open_store(fingerprint="b")
    entry = put(a, PREFIX[:50])
    put(b, PREFIX)
    assert a.get(entry.id) is not None


# -- take


def test_take_gives_and_removes(store: Store) -> None:
    entry = put(store, PREFIX)
    saved = store.take(entry.id)
    assert saved is not None
    assert saved.main.tobytes() == state(PREFIX)
    assert store.get(entry.id) is None
    assert store.take(entry.id) is None
    assert store.match(PREFIX) is None


@pytest.mark.parametrize("kept", ["learned", "pinned"])
def test_take_leaves_learned_and_pinned_entries(kept: Any, store: Store) -> None:
    entry = put(store, PREFIX, entry_class=kept)
    assert store.take(entry.id) is not None
    assert store.take(entry.id) is not None


# -- get with n_tokens


def test_get_cuts_to_n_tokens(store: Store) -> None:
    entry = put(store, PREFIX, draft=state(PREFIX, model=1))
    for n in (1, 50, 99, 100):
        saved = store.get(entry.id, n_tokens=n)
        assert saved is not None
        assert saved.tokens.tolist() == PREFIX[:n]
        assert saved.main.tobytes() == state(PREFIX[:n])
        assert saved.draft is not None
        assert saved.draft.tobytes() == state(PREFIX[:n], model=1)
    for n in (0, -1, 101, "5", 2.0):
        with pytest.raises(kvstore.InvalidInputError, match="n_tokens"):
            store.get(entry.id, n_tokens=n)  # type: ignore[arg-type]
    assert store.get(99, n_tokens=5) is None


@pytest.mark.parametrize("model", ["jamba", "gemma3", "mamba"])
def test_get_cuts_a_state_only_at_its_checkpoints(model: str, store: Store) -> None:
    tokens, blob = real(f"{model}-2026.10.11549-fa-a")
    entry = store.put(tokens, blob)
    for n in (95, 99, 130):
        saved = store.get(entry.id, n_tokens=n)
        assert saved is not None
        assert saved.tokens.tolist() == tokens[:n].tolist()
        assert saved.main.tobytes() == layout.crop(blob, n).tobytes()
    with pytest.raises(LayoutError, match="100"):
        store.get(entry.id, n_tokens=100)
    assert store.get(entry.id) is not None


# -- match


def test_match_is_exact(store: Store) -> None:
    entry = put(store, PREFIX)
    for request, n in (
        (PREFIX, 100),
        ([*PREFIX, 1, 2], 100),
        (PREFIX[:30], 30),
        ([*PREFIX[:30], -5], 30),
        (PREFIX[:1], 1),
    ):
        found = store.match(request)
        assert found is not None
        assert (found.entry.id, found.n_common) == (entry.id, n)
    assert store.match([1, *PREFIX]) is None
    assert store.stats().unmatched == 1


def test_match_reads_no_blob_and_counts_no_hit(store: Store) -> None:
    entry = put(store, PREFIX)
    assert store.match(PREFIX) is not None
    found = store.entry(entry.id)
    assert found is not None
    assert found.hits == 0
    assert store.stats().hits == 0


# -- set and expiry


def test_set_changes_class_and_source(store: Store) -> None:
    entry = put(store, PREFIX)
    changed = store.set(entry.id, entry_class="pinned", source="admin")
    assert (changed.entry_class, changed.source) == ("pinned", "admin")
    assert store.entry(entry.id) == changed
    assert store.set(entry.id, entry_class="normal").source == "request"
    assert store.set(entry.id).entry_class == "normal"
    assert store.stats().entries == {"normal": 1, "learned": 0, "pinned": 0}
    with pytest.raises(NotFoundError, match="000000000000004d"):
        store.set(77, ttl=5)


def test_an_entry_that_becomes_learned_stays_as_it_is_stored(store: Store) -> None:
    prefix = put(store, PREFIX[:50], entry_class="learned")
    entry = put(store, PREFIX)
    assert entry.parent == prefix.id
    changed = store.set(entry.id, entry_class="learned")
    assert (changed.parent, changed.stored) == (prefix.id, entry.stored)
    assert put(store, [*PREFIX, 1, 2]).parent == entry.id
    assert store.verify() == []


def test_an_expired_entry_is_never_served(store: Store, clock: Callable[[float], None]) -> None:
    entry = put(store, PREFIX, ttl=60)
    clock(58)
    assert store.get(entry.id) is not None
    clock(3)
    assert store.match(PREFIX) is None
    assert store.entry(entry.id) is None
    assert list(store.entries()) == []
    assert store.get(entry.id) is None
    assert store.take(entry.id) is None
    with pytest.raises(NotFoundError):
        store.set(entry.id, ttl=100)


def test_a_clock_that_jumps_back_resurrects_nothing(store: Store, clock: Callable[[float], None]) -> None:
    entry = put(store, PREFIX, ttl=60)
    clock(61)
    assert store.match(PREFIX) is None
    clock(-61)
    assert store.match(PREFIX) is None
    assert store.get(entry.id) is None


def test_set_ttl_moves_the_expiry_and_zero_removes_it(store: Store, clock: Callable[[float], None]) -> None:
    entry = put(store, PREFIX, ttl=60)
    clock(50)
    changed = store.set(entry.id, ttl=60)
    assert changed.ttl == 60
    assert changed.expires_at == changed.as_dict()["expires_in"] + int(time.time())
    clock(50)
    assert store.get(entry.id) is not None
    forever = store.set(entry.id, ttl=0)
    assert (forever.ttl, forever.expires_at) == (None, None)
    clock(1_000_000)
    assert store.get(entry.id) is not None


def test_an_expired_prefix_serves_its_live_children_and_nobody_else(
    open_store: Opener, clock: Callable[[float], None]
) -> None:
    store = open_store(cache_ram_mib=0)
    parent = put(store, PREFIX[:50], entry_class="learned", ttl=10)
    child = put(store, PREFIX, ttl=20)
    clock(11)
    store.gc()
    assert store.get(parent.id) is None
    assert [e.id for e in store.entries()] == [child.id]
    saved = store.get(child.id)
    assert saved is not None
    assert saved.main.tobytes() == state(PREFIX)
    clock(10)
    store.gc()
    assert store.stats().entries == {"normal": 0, "learned": 0, "pinned": 0}
    assert store.verify() == []


def test_gc_removes_what_expired(store: Store, clock: Callable[[float], None]) -> None:
    gone = [put(store, [n, *PREFIX], ttl=5).id for n in range(3)]
    kept = put(store, PREFIX, ttl=50)
    clock(6)
    removed = store.gc()
    assert set(removed) <= set(gone)
    assert [e.id for e in store.entries()] == [kept.id]
    assert store.stats().evictions == {"expired": 3}
    assert store.stats().entries["normal"] == 1


def test_expiry_comes_without_anyone_asking(store: Store) -> None:
    put(store, PREFIX, ttl=1)
    wait_for(lambda: not store.stats().entries["normal"])
    assert store.stats().entries["normal"] == 0
    assert store.stats().evictions == {"expired": 1}


# -- delete


@pytest.fixture
def family(open_store: Opener) -> Callable[..., tuple[Store, kvstore.Entry, list[kvstore.Entry]]]:
    def make(ram: float, **options: Any) -> tuple[Store, kvstore.Entry, list[kvstore.Entry]]:
        store = open_store(cache_ram_mib=ram, **options)
        parent = put(store, PREFIX[:50], entry_class="learned")
        children = [put(store, [*PREFIX, n]) for n in range(4)]
        assert all(c.parent == parent.id for c in children)
        return store, parent, children

    return make


@pytest.mark.parametrize(("children", "ram", "stay"), [
    ("resident", 64, 4), ("resident", 0, 0), ("keep", 64, 4), ("keep", 0, 4), ("drop", 64, 0), ("drop", 0, 0),
])  # fmt: skip
def test_delete_of_a_parent(children: str, ram: float, stay: int, family: Any) -> None:
    store, parent, kids = family(ram)
    removed = store.delete(parent.id, children=children)
    assert parent.id in removed
    assert len(removed) == len(set(removed)) == 1 + 4 - stay
    left = {e.id: e for e in store.entries()}
    assert set(left) | set(removed) == {parent.id, *(k.id for k in kids)}
    for n, kid in enumerate(kids):
        saved = store.get(kid.id)
        if stay:
            assert saved is not None
            assert saved.main.tobytes() == state([*PREFIX, n])
            assert (left[kid.id].parent, left[kid.id].stored) == (None, kid.size)
        else:
            assert saved is None
    assert store.verify() == []


def test_delete_keeps_the_children_that_ram_holds_and_no_others(family: Any) -> None:
    store, parent, kids = family(64)
    store.close()
    with Store(store.path) as again:
        assert again.get(kids[2].id) is not None
        removed = again.delete(parent.id)
        assert set(removed) == {parent.id, kids[0].id, kids[1].id, kids[3].id}
        assert [e.id for e in again.entries()] == [kids[2].id]


def test_delete_of_a_child_leaves_the_others(family: Any) -> None:
    store, parent, kids = family(64)
    assert store.delete(kids[0].id) == [kids[0].id]
    assert {e.id for e in store.entries()} == {parent.id, *(k.id for k in kids[1:])}


def test_an_unknown_value_of_children_is_refused(family: Any) -> None:
    store, parent, _ = family(64)
    with pytest.raises(kvstore.InvalidInputError, match="one of resident, keep, drop"):
        store.delete(parent.id, children="all")
    assert len(list(store.entries())) == 5


# -- what is known of entries


def test_family_is_the_hash_of_the_system_block_or_the_first_user_turn(store: Store) -> None:
    def of(tokens: list[int]) -> int:
        return xxhash.xxh3_64_intdigest(np.array(tokens, "<i4").tobytes())

    tokens = list(range(1000, 1400))
    assert store.put(tokens, b"a", n_system=10).family == of(tokens[:10])
    assert store.put(tokens, b"b", n_system=300).family == of(tokens[:256])
    assert store.put(tokens, b"c").family == of(tokens[:32])
    assert store.put(tokens, b"d", user_start=7).family == of(tokens[7:39])
    assert store.put(tokens, b"e", user_start=390).family == of(tokens[390:])


def test_families_count_what_was_saved_and_reused(store: Store) -> None:
    a = [put(store, [*PREFIX, n], n_system=20) for n in range(3)]
    b = put(store, [1, *PREFIX], n_system=20)
    for _ in range(5):
        assert store.get(a[0].id) is not None
    assert store.get(a[1].id) is not None
    store.flush()
    found = {f.family: (f.entries, f.saved, f.reused) for f in store.stats().families}
    assert found == {a[0].family: (3, 3, 2), b.family: (1, 1, 0)}
    store.delete(a[0].id)
    found = {f.family: (f.entries, f.saved, f.reused) for f in store.stats().families}
    assert found[a[0].family] == (2, 3, 2)


def test_entries_are_filtered_by_family_and_class(store: Store) -> None:
    a = put(store, PREFIX, n_system=10, entry_class="learned")
    b = put(store, [*PREFIX, 1], n_system=10)
    c = put(store, [5, *PREFIX], n_system=10)
    assert {e.id for e in store.entries()} == {a.id, b.id, c.id}
    assert {e.id for e in store.entries(family=a.family)} == {a.id, b.id}
    assert {e.id for e in store.entries(entry_class="normal")} == {b.id, c.id}
    assert {e.id for e in store.entries(family=a.family, entry_class="learned")} == {a.id}
    assert list(store.entries(entry_class="pinned")) == []


def test_entries_gives_each_of_many_once(store: Store) -> None:
    ids = {store.put([n + 1], b"x").id for n in range(600)}
    found = [e.id for e in store.entries()]
    assert len(found) == 600
    assert set(found) == ids


def test_hits_and_last_used_are_counted(store: Store, clock: Callable[[float], None]) -> None:
    entry = put(store, PREFIX)
    clock(100)
    for _ in range(3):
        assert store.get(entry.id) is not None
    store.flush()
    used = store.entry(entry.id)
    assert used is not None
    assert used.hits == 3
    assert 99 <= used.last_used - entry.last_used <= 102
    assert used.created_at == entry.created_at


def test_hits_survive_a_reopen(open_store: Opener) -> None:
    with open_store() as store:
        entry = put(store, PREFIX)
        assert store.get(entry.id) is not None
    with open_store() as store:
        found = store.entry(entry.id)
        assert found is not None
        assert found.hits == 1
        assert store.stats().hits == 1


def test_stats_add_up(open_store: Opener) -> None:
    store = open_store(cache_ram_mib=64)
    parent = put(store, PREFIX[:50], entry_class="learned")
    child = put(store, PREFIX)
    put(store, [9, *PREFIX], entry_class="pinned")
    assert store.get(child.id) is not None
    assert store.get(parent.id, n_tokens=20) is not None
    assert store.get(4711) is None
    assert store.match([4711]) is None
    store.delete(parent.id, children="drop")
    store.flush()
    stats = store.stats()
    assert stats.entries == {"normal": 0, "learned": 0, "pinned": 1}
    assert stats.size == stats.stored == len(state([9, *PREFIX]))
    assert (stats.hits, stats.misses, stats.tokens_served) == (2, 1, 120)
    assert (stats.puts, stats.shared_puts) == (3, 1)
    assert stats.unmatched == 1
    assert stats.evictions == {}  # what someone asked for is none
    assert stats.ram_entries == 1
    assert stats.ram_bytes == stats.size
    assert stats.encode_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.file_bytes > stats.stored
    json.dumps(stats.as_dict())


def test_as_dict_is_json_ready_and_has_these_keys(store: Store) -> None:
    parent = put(store, PREFIX[:50], entry_class="learned")
    entry = put(store, PREFIX, ttl=60, excerpt="hello\nworld", n_images=2, n_input=40, source="policy")
    found = entry.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert list(found) == [
        "id", "n_tokens", "n_images", "bytes", "stored_bytes", "class", "source", "created_at", "last_used", "hits",
        "expires_in", "family", "excerpt", "shared_from",
    ]  # fmt: skip
    assert found["id"] == f"{entry.id:016x}" == entry.hex_id
    assert found["shared_from"] == parent.hex_id
    assert 0 < found["expires_in"] <= 60
    assert (found["bytes"], found["stored_bytes"]) == (entry.size, entry.stored)
    assert (found["excerpt"], found["n_images"], found["source"]) == ("hello world", 2, "policy")
    assert entry.n_input == 40
    assert parent.as_dict()["shared_from"] is None
    assert parent.as_dict()["expires_in"] is None


def test_the_excerpt_is_cut_and_cleaned(store: Store) -> None:
    entry = store.put(PREFIX, b"x", excerpt="é" * 300 + "\x00")
    assert entry.excerpt == "é" * 215
    assert store.put(PREFIX, b"y", excerpt="a\ud800b\tc").excerpt == "a\ufffdb c"


# -- damage


def damage(path: Path, sql: str, *values: Any) -> None:
    import apsw

    connection = apsw.Connection(str(path))
    connection.execute(sql, values)
    connection.close()


def test_an_entry_that_fails_its_check_is_dropped_and_the_rest_stays(
    open_store: Opener, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store() as store:
        bad, good = store.put([1, 2], noise(1, 5000)), store.put([2, 3], noise(2, 5000))
    damage(path, "UPDATE chunks SET data = zeroblob(5000) WHERE blob = (SELECT id FROM blobs WHERE entry = ?)",
           bad.id - (1 << 64 if bad.id >> 63 else 0))  # fmt: skip
    with open_store() as store:
        problems = store.verify()
        assert [p.entry for p in problems] == [bad.id]
        assert store.entry(bad.id) is not None
        assert store.get(bad.id) is None
        warned = [r for r in caplog.records if r.levelname == "WARNING"]
        assert len(warned) == 1
        assert bad.hex_id in warned[0].getMessage()
        assert store.entry(bad.id) is None
        assert store.get(good.id) is not None
        assert store.stats().misses == 1
        assert store.stats().evictions == {"damaged": 1}


def test_a_child_of_a_damaged_parent_is_a_miss_that_names_the_parent(
    open_store: Opener, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store() as store:
        parent = put(store, PREFIX[:50], entry_class="learned")
        child = put(store, PREFIX)
        other = put(store, [1, 2, 3])
    damage(path, "UPDATE chunks SET data = zeroblob(length(data)) WHERE blob = (SELECT id FROM blobs WHERE entry = ?)",
           parent.id - (1 << 64 if parent.id >> 63 else 0))  # fmt: skip
    with open_store() as store:
        assert store.get(child.id) is None
        assert any(parent.hex_id in r.getMessage() for r in caplog.records if r.levelname == "WARNING")
        assert [e.id for e in store.entries()] == [other.id]
        assert store.verify() == []


def test_without_verify_the_digest_is_not_checked(open_store: Opener, path: Path) -> None:
    with open_store() as store:
        entry = store.put([1, 2], noise(1, 5000))
    damage(path, "UPDATE chunks SET data = zeroblob(5000)")
    with open_store(verify=False) as store:
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == bytes(5000)


# -- other kinds of store


def test_a_store_in_memory_keeps_the_rules(open_store: Opener) -> None:
    store = open_store(":memory:")
    parent = put(store, PREFIX[:50], entry_class="learned")
    child = put(store, PREFIX)
    assert child.parent == parent.id
    assert {k: v[1] for k, v in dump(store).items()} == {parent.id: state(PREFIX[:50]), child.id: state(PREFIX)}
    assert store.verify() == []
    assert store.delete(parent.id, children="keep") == [parent.id]
    assert store.gc() == []
    assert not Path(":memory:").exists()
    assert open_store(":memory:").match(PREFIX) is None


def test_a_readonly_store_reads_and_refuses_to_write(open_store: Opener, path: Path) -> None:
    with open_store() as store:
        entry = put(store, PREFIX)
    before = path.read_bytes()
    with open_store(readonly=True) as store:
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == state(PREFIX)
        assert store.match(PREFIX) is not None
        assert store.verify() == []
        store.flush()
        for call in (
            lambda: put(store, [1]), lambda: store.take(entry.id), lambda: store.delete(entry.id),
            lambda: store.set(entry.id, ttl=5), lambda: store.learn(entry.id, 5),
        ):  # fmt: skip
            with pytest.raises(kvstore.ReadOnlyError, match="read-only"):
                call()
        assert store.get(entry.id) is not None
    assert path.read_bytes() == before


def test_many_states_of_one_put_are_told_apart(store: Store) -> None:
    states = {}
    for n in range(40):
        tokens = [*PREFIX[:20], n]
        states[store.put(tokens, noise(n, 1000 + n)).id] = noise(n, 1000 + n)
    assert {k: v[1] for k, v in dump(store).items()} == states

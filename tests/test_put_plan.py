"""A put is planned once, and looked at once more before it is published: the file is asked each question twice at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from storekit import noise, state

from kvstore import Store, layout
from kvstore.storage import geometry, prefix_index, queries
from kvstore.store import entry_codec

Opener = Callable[..., Store]
PREFIX = list(range(100, 160))


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, counts: Counter[str]) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        counts[name] += 1
        return real(*args, **options)

    monkeypatch.setattr(owner, name, call)


def parses(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """The states that are parsed, each with how often."""
    found: Counter[bytes] = Counter()
    real = layout.parse

    def parse(blob: Any, cell_ext: int | None = None) -> layout.Layout:
        found[bytes(blob)] += 1
        return real(blob, cell_ext)

    monkeypatch.setattr(layout, "parse", parse)
    return found


@pytest.mark.parametrize("write_behind", [False, True], ids=["written at once", "queued"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_put_parses_its_states_once(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, write_behind: bool, shared: bool
) -> None:
    store = open_store(write_behind=write_behind, min_saved_mib=0.001 if shared else 1000)
    tokens = [*PREFIX, 1, 2]
    store.put(PREFIX, state(PREFIX), draft=state(PREFIX, layers=1), entry_class="learned")
    store.flush()
    found = parses(monkeypatch)
    main, draft = state(tokens), state(tokens, layers=1)
    entry = store.put(tokens, main, draft=draft)
    store.flush()
    kept = store.entry(entry.id)
    assert kept is not None
    assert (kept.parent is not None) == shared
    assert (found[main], found[state(PREFIX)]) == (1, 1)
    assert found[draft] == shared  # tried only where the main state is shared
    saved = store.get(entry.id)
    assert saved is not None
    assert (saved.main.tobytes(), saved.draft is not None and saved.draft.tobytes()) == (main, draft)


def test_a_queued_put_is_parsed_as_it_was_when_it_was_put(open_store: Opener) -> None:
    store = open_store(write_behind=True)
    store.put(PREFIX, state(PREFIX), entry_class="learned")
    tokens = [*PREFIX, 1]
    buffer = bytearray(state(tokens))
    entry = store.put(tokens, buffer)
    buffer[:] = bytes(len(buffer))
    store.flush()
    saved = store.get(entry.id)
    assert saved is not None
    assert saved.main.tobytes() == state(tokens)
    assert saved.entry.parent is not None
    assert store.verify() == []


@pytest.mark.parametrize("entry_class", ["normal", "learned"])
def test_the_file_is_asked_once_while_planning_and_once_before_publishing(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, entry_class: str
) -> None:
    store = open_store()
    store.put(PREFIX, state(PREFIX), entry_class="learned")
    store.put([*PREFIX, 1], state([*PREFIX, 1]))
    counts: Counter[str] = Counter()
    counted(monkeypatch, queries, "same_tokens", counts)
    counted(monkeypatch, prefix_index, "stored_prefixes", counts)
    counted(monkeypatch, prefix_index, "find_bases", counts)
    store.put([*PREFIX, 1, 2], state([*PREFIX, 1, 2]), entry_class=entry_class)
    assert counts == {"same_tokens": 2, "find_bases": 2, "stored_prefixes": 1}
    assert {tuple(PREFIX), (*PREFIX, 1, 2)} == {tuple(store.get(e.id).tokens.tolist()) for e in store.entries()}  # type: ignore[union-attr]


def during_encode(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[int]:
    """Does something once, between the plan of the next put and its transaction; the list gets an item for each encode."""
    real = entry_codec.encode_entry
    calls: list[int] = []

    def encode(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        calls.append(1)
        if len(calls) == 1:
            act()
        return result

    monkeypatch.setattr(entry_codec, "encode_entry", encode)
    return calls


def test_a_longer_prefix_that_another_learned_meanwhile_becomes_the_base(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = open_store(), open_store()
    mine.put(PREFIX[:30], state(PREFIX[:30]), entry_class="learned")
    learned: list[int] = []
    calls = during_encode(
        monkeypatch, lambda: learned.append(other.put(PREFIX, state(PREFIX), entry_class="learned").id)
    )
    entry = mine.put([*PREFIX, 1], state([*PREFIX, 1]))
    assert entry.parent == learned[0]
    assert len(calls) == 3  # this put, the other store's, and this one again
    assert mine.verify() == []


def test_a_put_whose_tokens_another_learned_meanwhile_is_learned(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put of no class of its own takes the class of what it replaces."""
    mine, other = open_store(), open_store()
    prefix = mine.put(PREFIX, state(PREFIX), entry_class="learned")
    tokens = [*PREFIX, 1]
    during_encode(monkeypatch, lambda: other.put(tokens, noise(1, 5000), entry_class="learned", share=False))
    entry = mine.put(tokens, state(tokens))
    assert (entry.entry_class, entry.parent) == ("learned", prefix.id)
    saved = other.get(entry.id)
    assert saved is not None
    assert saved.main.tobytes() == state(tokens)
    assert other.verify() == []


def test_an_entry_that_comes_meanwhile_and_is_contained_is_dropped(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = open_store(), open_store()
    during_encode(monkeypatch, lambda: other.put(PREFIX, state(PREFIX)))
    entry = mine.put([*PREFIX, 1], state([*PREFIX, 1]))
    assert [e.id for e in mine.entries()] == [entry.id]


def test_sizes_follow_from_the_page() -> None:
    """The numbers that files and tests of other versions rely on."""
    assert geometry.PAGE_SIZE == 8192
    assert [geometry.leaf_bytes(n) for n in (8192, 65536)] == [1003, 8199]
    assert geometry.chunk_bytes(8192) == 1003 - 17 + 192 * 8188
    assert geometry.chunk_bytes(65536) == 8199 - 17 + 24 * 65532
    assert geometry.chunk_bytes(65536, 1) == 8199 - 17 + 65532


def test_a_chunk_fills_whole_pages(open_store: Opener) -> None:
    """Seven chunks share the leaf in which each keeps its start; the rest of each fills its own pages."""
    store = open_store(cache_ram_mib=0)
    data = np.frombuffer(noise(1, 7 * geometry.chunk_bytes(8192)), np.uint8)
    store.put([1], b"x")
    with store._core.db.exclusive() as c:
        before = c.pragma("page_count")
    store.put([2], data)
    with store._core.db.exclusive() as c:
        added = c.pragma("page_count") - before
    assert 7 * 192 <= added <= 7 * 192 + 4

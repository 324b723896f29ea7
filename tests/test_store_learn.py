"""Learned prefixes: cut out of stored states, asked for or found by the store itself; and stores of many entries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import numpy as np
import pytest
from storekit import dump, real, recurrent_state, state
from workkit import counted_steps, wait_for, wait_for_maintenance

from kvstore import LayoutError, NotFoundError, Store, layout

Opener = Callable[..., Store]
PREFIX = list(range(2_000))


def conversations(n: int, turns: int) -> list[list[int]]:
    return [[*PREFIX, *range(10_000 * (k + 1), 10_000 * (k + 1) + turns + k)] for k in range(n)]


def assert_shrunk(store: Store, talks: list[list[int]], row: int) -> None:
    """The bytes of prefix and what is new in each, and 5 % at most."""
    ideal = len(state(PREFIX, row=row)) + sum(len(state(t, row=row)) - len(state(PREFIX, row=row)) for t in talks)
    assert store.stats().stored <= 1.05 * ideal
    states = {v[0]: v[1] for v in dump(store).values()}
    for tokens in talks:
        assert states[np.array(tokens, "<i4").tobytes()] == state(tokens, row=row)
    assert store.verify() == []


def test_learn_shrinks_fifty_conversations_to_prefix_and_what_is_new(open_store: Opener, path: Path) -> None:
    talks = conversations(50, 40)
    store = open_store(min_saved_mib=0.1)
    for tokens in talks:
        store.put(tokens, state(tokens, row=64), n_system=100)
    before = store.stats().stored
    learned = store.learn(PREFIX)
    assert (learned.entry_class, learned.source, learned.n_tokens, learned.parent) == ("learned", "request", 2_000, None)
    assert store.stats().stored < before / 15
    assert_shrunk(store, talks, 64)
    assert all(e.parent == learned.id for e in store.entries(entry_class="normal"))
    store.gc()
    assert path.stat().st_size < before / 4


def test_auto_learn_does_the_same_by_itself(open_store: Opener) -> None:
    talks = conversations(50, 40)
    store = open_store(min_saved_mib=0.1, auto_learn=True)
    for tokens in talks:
        store.put(tokens, state(tokens, row=64), n_system=100)
    wait_for(lambda: sum(e.parent is not None for e in store.entries()) == 50)
    (learned,) = store.entries(entry_class="learned")
    assert (learned.n_tokens, learned.source) == (2_000, "policy")
    assert_shrunk(store, talks, 64)


def test_auto_learn_needs_three_that_save_enough(open_store: Opener) -> None:
    store = open_store(min_saved_mib=0.1, auto_learn=True)
    for tokens in conversations(2, 40):
        store.put(tokens, state(tokens, row=64), n_system=100)
    for k in range(5):  # too little in common
        tokens = [*PREFIX[:150], *range(90_000 + 1000 * k, 90_000 + 1000 * k + 300)]
        store.put(tokens, state(tokens, row=64), n_system=100)
    wait_for_maintenance(store)
    assert list(store.entries(entry_class="learned")) == []


@pytest.mark.parametrize("model", ["llama", "qwen2vl", "deepseek2"])
def test_learn_cuts_a_real_state_at_any_token(model: str, store: Store) -> None:
    tokens, blob = real(f"{model}-2026.10.11549-fa-a")
    entry = store.put(tokens, blob)
    learned = store.learn(entry.id, 99)
    saved = store.get(learned.id)
    assert saved is not None
    assert saved.main.tobytes() == layout.crop(blob, 99).tobytes()
    assert saved.tokens.tolist() == tokens[:99].tolist()
    child = store.entry(entry.id)
    assert child is not None
    assert child.parent == learned.id
    again = store.get(entry.id)
    assert again is not None
    assert again.main.tobytes() == blob.tobytes()
    assert store.verify() == []


@pytest.mark.parametrize("model", ["jamba", "gemma3", "mamba"])
def test_learn_cuts_a_state_with_checkpoints_only_there(model: str, store: Store) -> None:
    tokens, blob = real(f"{model}-2026.10.11549-fa-a")
    entry = store.put(tokens, blob)
    before = dump(store)
    with pytest.raises(LayoutError):
        store.learn(entry.id, 100)
    with pytest.raises(NotFoundError):
        store.learn(tokens[:100])
    assert dump(store) == before
    learned = store.learn(tokens[:99])
    saved = store.get(learned.id)
    assert saved is not None
    assert saved.main.tobytes() == layout.crop(blob, 99).tobytes()
    again = store.get(entry.id)
    assert again is not None
    assert again.main.tobytes() == blob.tobytes()
    assert store.verify() == []


def test_what_cannot_be_cut_is_left_alone(open_store: Opener) -> None:
    store = open_store(auto_learn=True, min_saved_mib=0.0001)
    entries = []
    for k in range(4):
        tokens = [*PREFIX[:60], k]
        entries.append(store.put(tokens, recurrent_state(61), n_system=10))
    wait_for_maintenance(store)
    assert {e.id: e.parent for e in store.entries()} == {e.id: None for e in entries}


def test_learning_of_a_longer_prefix_moves_children_to_it(store: Store) -> None:
    talks = [[*PREFIX[:300], k, *range(50)] for k in range(3)]
    short = store.put(PREFIX[:100], state(PREFIX[:100]), entry_class="learned")
    ids = [store.put(t, state(t)).id for t in talks]
    assert all(store.entry(id).parent == short.id for id in ids)  # type: ignore[union-attr]
    long = store.learn(PREFIX[:300])
    assert all(store.entry(id).parent == long.id for id in ids)  # type: ignore[union-attr]
    assert long.parent == short.id
    assert {v[1] for v in dump(store).values()} >= {state(t) for t in talks}


def test_opening_and_matching_do_not_grow_with_the_number_of_entries(path: Path) -> None:
    """The steps of SQLite's machine in an open and in a match, at 1,000 and at 20,000 entries of 200 tokens."""
    chance = np.random.default_rng(1)
    opens, matches = [], []
    for n in (1_000, 20_000):
        at = path.with_name(f"kv{n}")
        with Store(at) as store:
            first = store.put([1, 2, 3], b"x")
        rows = chance.integers(0, 50_000, (200, 100), np.int32)
        connection = apsw.Connection(str(at))
        with connection:
            for k in range(n):
                tokens = np.concatenate([rows[k % 200], chance.integers(0, 50_000, 100, np.int32)])
                connection.execute("INSERT INTO entries(id, fingerprint, cut_any, n_tokens, tokens) VALUES(?, 1, 1, 200, ?)",
                                   (k + 1, tokens.astype("<i4").tobytes()))  # fmt: skip
                connection.execute("INSERT INTO meta(entry, class, source, created_at, last_used, family, n_input, size,"
                                   " stored) VALUES(?, 'normal', 'default', 1, 1, 1, 1, 1, 1)", (k + 1,))  # fmt: skip
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        connection.close()
        with counted_steps() as steps:
            store = Store(at)
            opens.append(steps())
            assert store.entry(first.id) is not None
            steps()
            for k in range(300):
                found = store.match(np.concatenate([rows[k % 200], chance.integers(0, 50_000, 50, np.int32)]))
                assert found is not None
                assert found.n_common >= 100
            matches.append(steps())
            store.close()
    assert matches[0] > 300
    assert matches[1] < 1.5 * matches[0]
    assert opens[1] < 1.5 * opens[0]

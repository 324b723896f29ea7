"""Chains: entries stored against entries that are deltas themselves, and the bases that others need."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storekit
from storekit import state

from kvstore import Store, bkvd, layout, operate
from kvstore.storage import integrity, policy, queries, queries_chains
from kvstore.storage.queries import signed

Opener = Callable[..., Store]
Turn = tuple[list[int], bytes]
START = list(range(60))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops the time that the store sees, and moves it."""
    moved, start = 0.0, time.time()

    def move(seconds: float) -> None:
        nonlocal moved
        moved += seconds

    monkeypatch.setattr(time, "time", lambda: start + moved)
    return move


def turns(n: int, start: list[int] = START, seed: int = 0) -> list[Turn]:
    """The tokens and states of a conversation that grows by ten tokens a turn."""
    tokens, out = list(start), []
    for turn in range(n):
        if turn:
            tokens = [*tokens, *range(1000 * turn + seed, 1000 * turn + seed + 10)]
        out.append((tokens, state(tokens, row=32, layers=1)))
    return out


def talk(store: Store, said: list[Turn], **options: Any) -> list[int]:
    return [store.put(tokens, main, **options).id for tokens, main in said]


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(storekit.connect(path)) as c:
        return c.execute(sql).fetchall()


def parents(path: Path) -> dict[int, tuple[int | None, int]]:
    """(parent, base) by id."""
    found = rows(path, "SELECT entry, parent, base FROM meta")
    return {id % 2**64: (None if parent is None else parent % 2**64, base) for id, parent, base in found}


def clean(store: Store, path: Path) -> None:
    """Nothing is wrong, and nothing had to be looked for."""
    assert store.verify() == []
    assert rows(path, "SELECT count(*) FROM counters WHERE name = 'unswept'") == [(0,)]


def served(store: Store, id: int, main: bytes) -> None:
    saved = store.get(id)
    assert saved is not None
    assert saved.main.tobytes() == main


# -- put and get


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "queued"])
@pytest.mark.parametrize("ram", [0, 0.02, 64])
@pytest.mark.parametrize("n", [2, 41, 201])
def test_a_conversation_is_one_entry_and_the_bases_that_it_needs(
    path: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch, n: int, ram: float, behind: bool
) -> None:
    monkeypatch.setattr(policy, "FOLDED_BYTES", 100)
    store = open_store(cache_ram_mib=ram, write_behind=behind)
    said = turns(n)
    ids = talk(store, said)
    store.flush()
    assert [e.id for e in store.entries()] == ids[-1:]
    stats = store.stats()
    assert (sum(stats.entries.values()), stats.size) == (1, len(said[-1][1]))
    assert n == 2 or stats.stored < sum(len(main) for _, main in said) / 3
    served(store, ids[-1], said[-1][1])
    served(store, ids[-1], said[-1][1])
    for tokens, _ in said[: n : max(1, n // 10)]:
        found = store.match([*tokens, 5])
        assert found is not None
        assert (found.entry.id, found.n_common) == (ids[-1], len(tokens))
    assert all(store.entry(id) is None and store.get(id) is None for id in ids[:-1])
    above = parents(path)
    assert all(base == (id != ids[-1]) for id, (_, base) in above.items())
    clean(store, path)


def test_an_exported_record_decodes_with_the_bytes_of_its_parent(path: Path, open_store: Opener) -> None:
    store = open_store()
    said = turns(5)
    ids = talk(store, said)
    store.flush()
    by_id = {id: main for id, (_, main) in zip(ids, said, strict=True)}
    sql = "SELECT b.entry, c.data FROM blobs b JOIN chunks c ON c.blob = b.id WHERE b.kind = 'bkvd'"
    found = {id % 2**64: data for id, data in rows(path, sql)}
    assert found.keys() == set(ids[1:])
    for id, data in found.items():
        parent = bkvd.parent_id(data)
        assert bkvd.decode(data, by_id[parent], parent).tobytes() == by_id[id]


def test_a_branch_shares_with_the_longest_base_below_it(path: Path, open_store: Opener) -> None:
    store = open_store()
    said = turns(12)
    ids = talk(store, said)
    again = turns(9, seed=500)
    # An answer made again: the first six turns are the same.
    tokens = [*said[5][0], *again[8][0][-20:]]
    other = store.put(tokens, state(tokens, row=32, layers=1))
    assert other.parent == ids[5]
    assert {e.id for e in store.entries()} == {ids[-1], other.id}
    served(store, other.id, state(tokens, row=32, layers=1))
    served(store, ids[-1], said[-1][1])
    assert store.delete(ids[-1]) == [ids[-1]]
    assert set(parents(path)) == {*ids[:6], other.id}
    served(store, other.id, state(tokens, row=32, layers=1))
    clean(store, path)
    assert store.delete(other.id) == [other.id]
    assert parents(path) == {}
    assert rows(path, "SELECT count(*) FROM blobs") == rows(path, "SELECT count(*) FROM chunks") == [(0,)]
    clean(store, path)


def depth(path: Path, id: int) -> int:
    above = parents(path)
    n = 1
    while (parent := above[id][0]) is not None:
        id, n = parent, n + 1
    return n


@pytest.mark.parametrize("drafts", [False, True])
def test_small_links_of_a_long_chain_are_folded(path: Path, open_store: Opener, drafts: bool) -> None:
    store = open_store()
    said = turns(60)
    for turn, (tokens, main) in enumerate(said):
        draft = state(tokens, row=16, layers=1, model=9) if drafts and turn > 20 else None
        entry = store.put(tokens, main, draft=draft)
        assert depth(path, entry.id) <= policy.FREE_LINKS + 1
    served(store, entry.id, said[-1][1])
    assert len(parents(path)) == depth(path, entry.id)
    # A branch of a turn that was folded shares with the turn before it.
    tokens = [*said[30][0], 5, 6]
    other = store.put(tokens, state(tokens, row=32, layers=1))
    assert other.parent is not None
    served(store, other.id, state(tokens, row=32, layers=1))
    clean(store, path)


def test_what_others_need_is_not_folded(path: Path, open_store: Opener) -> None:
    store = open_store()
    said = turns(40)
    for turn, (tokens, main) in enumerate(said):
        entry = store.put(tokens, main, entry_class="pinned" if turn % 4 == 0 else "normal")
        if turn % 5 == 0:
            branch = [*tokens, 7, 7]
            store.put(branch, state(branch, row=32, layers=1), entry_class="pinned")
    for entry in store.entries():
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == state(saved.tokens.tolist(), row=32, layers=1)
    assert sum(e.entry_class == "pinned" for e in store.entries()) == 18
    clean(store, path)


def test_large_links_are_not_written_again(path: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "FOLDED_BYTES", 100)
    store = open_store()
    ids = talk(store, turns(40))
    assert depth(path, ids[-1]) == 40
    clean(store, path)


def test_a_chain_has_an_end(path: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "FOLDED_BYTES", 100)
    monkeypatch.setattr(policy, "MAX_LINKS", 12)
    store = open_store()
    for tokens, main in turns(60):
        entry = store.put(tokens, main)
        assert depth(path, entry.id) <= 12
        served(store, entry.id, main)
    clean(store, path)


def test_what_shares_nothing_goes_where_it_is_contained(path: Path, open_store: Opener) -> None:
    store = open_store()
    store.put(START, storekit.noise(1, 3000))
    tokens = [*START, 1]
    last = store.put(tokens, state(tokens))
    assert last.parent is None
    assert set(parents(path)) == {last.id}


def test_documents_over_one_system_prompt_hold_it_once(path: Path, open_store: Opener) -> None:
    store = open_store()
    system = store.put(START, state(START), entry_class="learned")
    documents = [[*START, *range(1000 * n, 1000 * n + 50)] for n in range(1, 4)]
    learned = [store.put(d, state(d), entry_class="learned") for d in documents]
    assert {e.parent for e in learned} == {system.id}
    chats = [[*d, 7, 8, 9] for d in documents]
    asked = [store.put(t, state(t)) for t in chats]
    assert [e.parent for e in asked] == [e.id for e in learned]
    for entry, tokens in zip(asked, chats, strict=True):
        served(store, entry.id, state(tokens))
    clean(store, path)


def test_learning_a_prefix_stores_the_root_of_a_chain_against_it(path: Path, open_store: Opener) -> None:
    store = open_store()
    said = turns(6)
    ids = talk(store, said)
    learned = store.learn(said[-1][0], 40)
    above = parents(path)
    assert above[ids[0]] == (learned.id, 1)
    assert [above[id][0] for id in ids[1:]] == ids[:-1]
    served(store, ids[-1], said[-1][1])
    served(store, learned.id, layout.crop(said[0][1], 40).tobytes())
    clean(store, path)


def test_three_conversations_teach_their_common_prefix(path: Path, open_store: Opener) -> None:
    store = open_store()
    last = {}
    for k in range(3):
        tokens = [*START, k]
        for turn in range(4):
            tokens = [*tokens, *range(1000 * k + 10 * turn, 1000 * k + 10 * turn + 10)]
            entry = store.put(tokens, state(tokens), n_system=60)
        last[entry.id] = state(tokens)
    from kvstore.store.learning import AutoLearn

    learned = AutoLearn(store._core).run()
    assert [e.n_tokens for e in learned] == [60]
    above = parents(path)
    assert sum(parent == learned[0].id for parent, _ in above.values()) == 3
    for id, main in last.items():
        served(store, id, main)
    assert AutoLearn(store._core).run() == []
    clean(store, path)


def test_the_same_tokens_again_keep_what_is_stored_against_the_old(path: Path, open_store: Opener) -> None:
    store = open_store()
    old = store.put(START, state(START), entry_class="learned")
    tokens = [*START, 1, 2]
    child = store.put(tokens, state(tokens))
    new = store.put(START, state(START, model=4))
    assert (new.entry_class, new.id != old.id) == ("learned", True)
    assert {e.id for e in store.entries()} == {new.id, child.id}
    assert parents(path) == {old.id: (None, 1), child.id: (old.id, 0), new.id: (None, 0)}
    served(store, child.id, state(tokens))
    served(store, new.id, state(START, model=4))
    store.delete(child.id)
    assert set(parents(path)) == {new.id}
    clean(store, path)


def test_the_same_tokens_again_need_the_same_base(path: Path, open_store: Opener) -> None:
    store = open_store()
    said = turns(3)
    ids = talk(store, said)
    tokens = said[-1][0]
    changed = bytearray(said[-1][1])
    changed[-1] ^= 1
    again = store.put(tokens, bytes(changed))
    assert again.parent == ids[1]
    assert set(parents(path)) == {ids[0], ids[1], again.id}
    served(store, again.id, bytes(changed))
    clean(store, path)


def test_drafts_chain_where_both_have_one(path: Path, open_store: Opener) -> None:
    store = open_store()
    said = turns(8)
    for turn, (tokens, main) in enumerate(said):
        draft = None if turn in (2, 5) else state(tokens, row=16, layers=1, model=9)
        entry = store.put(tokens, main, draft=draft)
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == main
        assert (None if saved.draft is None else saved.draft.tobytes()) == draft
    clean(store, path)


@pytest.mark.parametrize("name", ["gemma3-2026.10.11549-fa", "jamba-2026.10.11549-fa", "lfm2-2026.10.11549-fa"])
def test_window_and_recurrent_states_chain(path: Path, open_store: Opener, name: str) -> None:
    """They are contained only where a checkpoint has just their tokens; else they stay in the list, and are a base too."""
    store = open_store(min_saved_mib=0.0001)
    found = {}
    for part in ("prefix", "a"):
        tokens, main = storekit.real(f"{name}-{part}")
        found[store.put(tokens, main).id] = main.tobytes()
    for id, main in found.items():
        if store.entry(id) is not None:
            served(store, id, main)
    clean(store, path)


def test_a_match_looks_at_no_base(path: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number: an edited question parts from a conversation whose turns are all bases."""
    monkeypatch.setattr(policy, "FOLDED_BYTES", 100)
    store = open_store()
    said = turns(120)
    ids = talk(store, said)
    read: list[int] = []
    real = queries._token_rows

    def counted(found: Any) -> Any:
        for row in real(found):
            read.append(row[0])
            yield row

    monkeypatch.setattr(queries, "_token_rows", counted)
    found = store.match([*said[100][0], 5, 5])
    assert found is not None
    assert (found.entry.id, found.n_common) == (ids[-1], len(said[100][0]))
    assert set(read) == {ids[-1]}
    read.clear()
    tokens = [*said[100][0], 5, 5]
    assert store.put(tokens, state(tokens, row=32, layers=1)).parent == ids[100]
    assert len(read) < 12  # the longest bases alone


# -- deleting


def tree(store: Store) -> dict[str, tuple[int, bytes]]:
    """root <- middle <- base <- leaf, and a branch of the base; all but the base are listed."""
    said = turns(4)
    names = {}
    for name, (tokens, main), entry_class in zip(
        ("root", "middle", "base", "leaf"), said, ("pinned", "learned", "normal", "normal"), strict=True
    ):
        names[name] = store.put(tokens, main, entry_class=entry_class).id, main  # type: ignore[arg-type]
    tokens = [*said[2][0], 5, 6, 7]
    main = state(tokens, row=32, layers=1)
    names["branch"] = store.put(tokens, main).id, main
    return names


def held(store: Store, path: Path, names: dict[str, tuple[int, bytes]]) -> set[str]:
    """The names of what is in the file; those that are listed are served right."""
    there = parents(path)
    listed = {e.id for e in store.entries()}
    for name, (id, main) in names.items():
        if id in listed:
            served(store, id, main)
        assert (id in listed) == (id in there and name != "base")
    clean(store, path)
    return {name for name, (id, _) in names.items() if id in there}


@pytest.mark.parametrize("children", ["keep", "drop"])
@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("root", {"root", "middle", "base", "leaf", "branch"}),
        ("middle", {"middle", "base", "leaf", "branch"}),
        ("leaf", {"leaf"}),
    ],
)
def test_delete_at_any_depth(path: Path, open_store: Opener, name: str, dropped: set[str], children: str) -> None:
    store = open_store(cache_ram_mib=0)
    names = tree(store)
    removed = store.delete(names[name][0], children=children)
    if children == "keep":
        assert removed == [names[name][0]]
        assert held(store, path, names) == set(names) - {name}
    else:
        assert set(removed) == {names[n][0] for n in dropped - {"base"}}
        assert held(store, path, names) == set(names) - dropped


def test_a_link_that_goes_is_composed_away(path: Path, open_store: Opener) -> None:
    """What was stored against it is stored against the next one: the bytes of both, not the whole state."""
    store = open_store()
    names = tree(store)
    stored = dict(rows(path, "SELECT entry, stored FROM meta"))
    store.delete(names["middle"][0], children="keep")
    above = parents(path)
    assert above[names["base"][0]] == (names["root"][0], 1)
    size = dict(rows(path, "SELECT entry, stored FROM meta"))[signed(names["base"][0])]
    assert size <= stored[signed(names["base"][0])] + stored[signed(names["middle"][0])]
    store.delete(names["root"][0], children="keep")
    assert parents(path)[names["base"][0]] == (None, 1)
    assert held(store, path, names) == {"base", "leaf", "branch"}


def test_children_that_are_held_in_ram_stay(path: Path, open_store: Opener) -> None:
    """The leaf is held, so what it needs stays; with nothing in RAM all goes."""
    store = open_store(cache_ram_mib=64)
    names = tree(store)
    store._core.ram.clear()
    served(store, names["leaf"][0], names["leaf"][1])
    assert store.delete(names["middle"][0]) == [names["middle"][0]]
    assert held(store, path, names) == {"root", "base", "leaf", "branch"}
    store._core.ram.clear()
    assert set(store.delete(names["root"][0])) == {names[n][0] for n in ("root", "leaf", "branch")}
    assert parents(path) == {}


def test_take_of_a_leaf_takes_the_bases_with_it(path: Path, open_store: Opener) -> None:
    store = open_store()
    said = turns(20)
    ids = talk(store, said)
    saved = store.take(ids[-1])
    assert saved is not None
    assert saved.main.tobytes() == said[-1][1]
    assert (parents(path), store._core.ram.ids()) == ({}, [])
    clean(store, path)


SHELL = shutil.which("sqlite3")


def in_shell(path: Path, sql: str) -> None:
    done = subprocess.run([str(SHELL), "-bail", str(path)], input=sql, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def in_program(path: Path, sql: str) -> None:
    with closing(storekit.connect(path)) as c:
        c.execute(sql)


@pytest.mark.parametrize(
    "run", [pytest.param(in_shell, marks=pytest.mark.skipif(SHELL is None, reason="no shell")), in_program]
)
@pytest.mark.parametrize("keys", ["on", "off"])
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("root", set()),
        ("middle", {"root"}),
        ("base", {"root", "middle"}),
        ("leaf", {"root", "middle", "base", "branch"}),
        ("leaf, branch", {"root", "middle"}),
        ("leaf, root", set()),
        ("branch, base", {"root", "middle"}),
    ],
)
def test_delete_by_hand_at_any_depth(
    path: Path, open_store: Opener, run: Callable[[Path, str], None], keys: str, name: str, left: set[str]
) -> None:
    with open_store() as store:
        names = tree(store)
        wanted = ", ".join(str(signed(names[n][0])) for n in name.split(", "))
    run(path, f"PRAGMA foreign_keys = {keys}; DELETE FROM entries WHERE id IN ({wanted});")
    for table, column in (("meta", "entry"), ("blobs", "entry"), ("entries", "id")):
        assert {r[0] % 2**64 for r in rows(path, f"SELECT {column} FROM {table}")} == {names[n][0] for n in left}
    assert rows(path, "SELECT count(*) FROM chunks WHERE blob NOT IN (SELECT id FROM blobs)") == [(0,)]
    with open_store() as store:
        assert held(store, path, names) == left


@pytest.mark.parametrize("keys", ["on", "off"])
def test_a_long_chain_goes_by_one_statement(
    path: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.setattr(policy, "FOLDED_BYTES", 100)
    with open_store() as store:
        ids = talk(store, turns(150))
    whole = shutil.copy(path, path.with_name("copy"))
    for id in (ids[-1], ids[0], ids[70]):
        shutil.copy(whole, path)
        in_program(path, f"PRAGMA foreign_keys = {keys}; DELETE FROM entries WHERE id = {signed(id)}")
        assert rows(path, "SELECT count(*) FROM entries") == rows(path, "SELECT count(*) FROM chunks") == [(0,)]
        with open_store() as store:
            clean(store, path)


# -- expiry and eviction


def test_what_expires_stays_as_a_base_while_it_is_needed(
    path: Path, open_store: Opener, clock: Callable[[float], None]
) -> None:
    store = open_store()
    said = turns(4)
    first = store.put(*said[0], entry_class="pinned", ttl=10)
    second = store.put(*said[1], entry_class="pinned", ttl=30)
    third = store.put(*said[2], entry_class="pinned", ttl=20)
    last = store.put(*said[3])
    clock(11)
    assert store.gc() == [first.id]
    assert parents(path)[first.id] == (None, 1)
    clock(10)
    assert store.gc() == [third.id]
    assert {e.id for e in store.entries()} == {second.id, last.id}
    served(store, last.id, said[3][1])
    clean(store, path)
    store.delete(last.id)
    assert set(parents(path)) == {first.id, second.id}
    clock(10)
    assert store.gc() == [second.id]
    assert parents(path) == {}
    clean(store, path)


def test_an_expired_chain_goes_at_once(path: Path, open_store: Opener, clock: Callable[[float], None]) -> None:
    store = open_store()
    ids = talk(store, turns(30), ttl=10)
    clock(11)
    assert store.gc() == ids[-1:]
    assert parents(path) == {}
    clean(store, path)


def test_conversations_are_evicted_one_by_one(path: Path, open_store: Opener) -> None:
    """The least recently used first, each with its bases; what is left is served right."""
    store = open_store(cache_ram_mib=0)
    last: dict[int, bytes] = {}
    for k in range(6):
        said = turns(5, start=[9000 + k, *range(40)], seed=k)
        last[talk(store, said)[-1]] = said[-1][1]
    oldest = next(iter(last))
    served(store, oldest, last[oldest])
    before = rows(path, "SELECT count(*) FROM entries")[0][0]
    order = []
    while list(store.entries()):
        with store._core.transaction() as (c, dropped):
            victim = storekit_least(c)
            store._core.drop(c, victim, "disk_budget", dropped)
        order.append(victim)
        clean(store, path)
        before -= 5
        assert rows(path, "SELECT count(*) FROM entries") == [(before,)]
    ids = list(last)
    assert order == [*ids[1:], oldest]


def storekit_least(c: Any) -> int:
    from kvstore.storage import queries

    found = queries.least_recently_used(c, None)
    assert found is not None
    return found


# -- damage


def test_rows_that_name_each_other_hang_nothing(path: Path, open_store: Opener) -> None:
    with open_store(cache_ram_mib=0) as store:
        ids = talk(store, turns(6))
    in_program(path, f"UPDATE meta SET parent = {signed(ids[4])} WHERE entry = {signed(ids[1])}")
    with open_store(readonly=True) as store:
        assert store.get(ids[-1]) is None
        assert store.match(turns(6)[-1][0]) is not None
        found = {(p.invariant, p.entry) for p in store.verify()}
        assert ("delta-parent", ids[1]) in found
    with open_store() as store:
        operate.repair(store, store.verify())
        assert store.verify() == []
        in_program(path, f"DELETE FROM entries WHERE id = {signed(ids[4])}")
        assert store.verify() == []


def test_more_links_than_a_reader_follows(path: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(cache_ram_mib=0)
    said = turns(12)
    ids = talk(store, said)
    for module in (queries_chains, integrity):
        monkeypatch.setattr(module, "MAX_DEPTH", 11)
    served(store, ids[-1], said[-1][1])
    assert store.verify() == []
    for module in (queries_chains, integrity):
        monkeypatch.setattr(module, "MAX_DEPTH", 10)
    assert ("delta-parent", ids[-1]) in {(p.invariant, p.entry) for p in store.verify()}
    assert store.get(ids[-1]) is None


@pytest.mark.parametrize("ram", [0, 64])
def test_a_damaged_link_goes_with_what_needs_it_and_nothing_else(path: Path, open_store: Opener, ram: float) -> None:
    with open_store() as store:
        names = tree(store)
        other = talk(store, turns(3, start=[4000, *START]))
    sql = "UPDATE chunks SET data = CAST(substr(data, 1, length(data) - 2) || x'5555' AS BLOB)"
    in_program(path, f"{sql} WHERE blob = (SELECT id FROM blobs WHERE entry = {signed(names['base'][0])})")
    with open_store(cache_ram_mib=ram) as store:
        named = {p.entry for p in store.verify() if p.invariant == "digest"}
        assert names["base"][0] in named
        assert named <= {names[n][0] for n in ("base", "leaf", "branch")}
        assert store.get(names["leaf"][0]) is None
        there = set(parents(path))
        assert there == {names["root"][0], names["middle"][0], *other}
        clean(store, path)


def test_a_chain_that_is_wrong_only_in_ram_is_read_from_the_file(path: Path, open_store: Opener) -> None:
    store = open_store(cache_ram_mib=64)
    said = turns(6)
    ids = talk(store, said)
    entry = store._core.ram._entries[ids[2]]
    entry.main.flags.writeable = True
    entry.main[-40:] = 0
    served(store, ids[-1], said[-1][1])
    assert {e.id for e in store.entries()} == {ids[-1]}
    clean(store, path)


def test_repair_keeps_what_is_good_below_a_damaged_base(path: Path, open_store: Opener) -> None:
    """The position of a cell is each state's own: no descendant copies it."""
    with open_store() as store:
        said = turns(4)
        ids = talk(store, said)
    sql = "SELECT c.id, c.data FROM chunks c JOIN blobs b ON b.id = c.blob WHERE b.entry = {}"
    ((chunk, data),) = rows(path, sql.format(signed(ids[1])))
    at = data.index(np.array([60, 1, 0, 61], "<i4").tobytes())
    with closing(storekit.connect(path)) as c:
        c.execute("UPDATE chunks SET data = ? WHERE id = ?", (data[:at] + b"\x07" + data[at + 1 :], chunk))
    with open_store(cache_ram_mib=0) as store:
        served(store, ids[-1], said[-1][1])
        problems = store.verify()
        assert {p.entry for p in problems} == {ids[1]}
        operate.repair(store, problems)
        assert store.verify() == []
        assert ids[1] not in parents(path)
        served(store, ids[-1], said[-1][1])


def test_a_sample_that_is_recorded_wrong_loses_nothing(path: Path, open_store: Opener) -> None:
    said = turns(5)
    with open_store() as store:
        ids = talk(store, said)
    in_program(path, "UPDATE blobs SET sample = 5")
    with open_store() as store:
        served(store, ids[-1], said[-1][1])
        operate.repair(store, store.verify())
        assert store.verify() == []


def test_samples_that_are_missing_are_recorded_when_they_are_needed(path: Path, open_store: Opener) -> None:
    """A file of version 2 has none."""
    said = turns(5)
    with open_store() as store:
        ids = talk(store, said[:4])
    in_program(path, "UPDATE blobs SET sample = NULL")
    with open_store(cache_ram_mib=0) as store:
        served(store, ids[-1], said[3][1])
        assert store.verify() == []
        last = store.put(*said[4])
        assert last.parent == ids[3]
        served(store, last.id, said[4][1])
        samples = dict(rows(path, "SELECT entry, sample FROM blobs"))
        assert samples[signed(ids[3])] == signed(bkvd.sample_hash(said[3][1]))
        assert samples[signed(ids[0])] is None
        clean(store, path)


# -- copies


def shape(path: Path) -> set[tuple[int, int, int]]:
    """(tokens, tokens of the parent, base) of each row."""
    sql = """SELECT e.n_tokens, coalesce(p.n_tokens, 0), m.base FROM entries e JOIN meta m ON m.entry = e.id
 LEFT JOIN entries p ON p.id = m.parent"""
    return set(rows(path, sql))


def listed(store: Store) -> dict[int, bytes]:
    found = {}
    for entry in store.entries():
        saved = store.get(entry.id)
        assert saved is not None
        found[entry.id] = saved.main.tobytes()
    return found


def test_exports_take_the_bases_with_them(path: Path, open_store: Opener) -> None:
    store = open_store()
    tree(store)
    talk(store, turns(6, start=[4000, *START]))
    new = path.with_name("new")
    with open_store(new) as copy:
        for entry in sorted(operate.listing(store, bases=None), key=lambda e: e.n_tokens):
            item = operate.export(store, entry.id)
            assert item is not None
            operate.restore(copy, item)
        assert listed(copy) == listed(store)
        assert shape(new) == shape(path)
        assert copy.verify() == []
        assert copy.gc() == []
        assert shape(new) == shape(path)


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "kvstore.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("to", ["folder/", "archive.tar"])
def test_export_and_import_by_the_command(path: Path, open_store: Opener, tmp_path: Path, to: str) -> None:
    with open_store() as store:
        names = tree(store)
        before = listed(store)
    one, new = tmp_path / "one", tmp_path / "new"
    assert "4 entries exported" in command("export", str(path), "--to", str(tmp_path / to))
    command("import", str(new), str(tmp_path / to))
    assert shape(new) == shape(path)
    command("export", str(path), f"{names['leaf'][0]:016x}", "--to", str(tmp_path / f"one-{to}"))
    command("import", str(one), str(tmp_path / f"one-{to}"))
    assert {row[0] for row in shape(one)} == {80, 90}  # the base, which is whole there, and the leaf
    for at, ids in ((new, set(before)), (one, {names["leaf"][0]})):
        with open_store(at) as store:
            assert listed(store) == {id: before[id] for id in ids}
            clean_but_swept(store)


def clean_but_swept(store: Store) -> None:
    assert store.verify() == []
    store.gc()
    assert store.verify() == []


def test_a_base_that_nothing_needs_goes_after_an_import(path: Path, open_store: Opener) -> None:
    store = open_store()
    names = tree(store)
    new = path.with_name("new")
    with open_store(new) as copy:
        item = operate.export(store, names["base"][0])
        assert item is not None
        assert item.base
        operate.restore(copy, item)
        assert list(copy.entries()) == []
        copy.gc()
        assert shape(new) == set()
        assert copy.verify() == []


def test_salvage_and_backup_keep_chains(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        names = tree(store)
        talk(store, turns(20, start=[4000, *START]))
        before, was = listed(store), shape(path)
        operate.backup(store, path.with_name("backup"))
    found = operate.salvage(path, path.with_name("salvaged"))
    assert (set(found.entries), found.lost) == (set(before), ())
    for name in ("backup", "salvaged"):
        with open_store(path.with_name(name)) as store:
            assert listed(store) == before
            assert shape(path.with_name(name)) == was
            clean_but_swept(store)
    assert names["base"][0] not in before


def test_the_command_shows_bases_as_such(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        names = {name: f"{id:016x}" for name, (id, _) in tree(store).items()}
        stats = store.stats()
    assert (stats.bases, sum(stats.entries.values())) == (1, 4)
    assert 0 < stats.base_bytes < stats.stored
    plain, everything = command("ls", str(path)), command("ls", str(path), "--all")
    assert names["base"] not in plain.replace(f"  {names['base']}  ", "") or plain.count(names["base"]) == 2  # as a parent
    assert f"{names['base']}" in everything
    facts = {e["id"]: e for e in json.loads(command("ls", str(path), "--all", "--json"))}
    assert {id for id, e in facts.items() if e["base"]} == {names["base"]}
    assert {e["id"] for e in json.loads(command("ls", str(path), "--json"))} == set(names.values()) - {names["base"]}
    (root,) = json.loads(command("tree", str(path), "--json"))
    assert root["id"] == names["root"]
    assert {(e["id"], e["base"]) for e in root["children"]} == {
        (id, name == "base") for name, id in names.items() if name != "root"
    }
    drawn = command("tree", str(path))
    assert re.search(rf"{names['base']}.* base", drawn)
    assert "1 base" in drawn
    views = {r[0]: r[1:] for r in rows(path, "SELECT trim(entry), class FROM tree")}
    assert views[names["base"]] == ("base",)
    for view in ("ls", "biggest", "unused"):
        assert {r[0] for r in rows(path, f"SELECT id FROM {view}")} == set(names.values()) - {names["base"]}
    frees = dict(rows(path, "SELECT id, children FROM biggest"))
    assert frees == {names["root"]: 3, names["middle"]: 2, names["leaf"]: 0, names["branch"]: 0}


def test_rm_sees_what_is_stored_against_an_entry_at_any_depth(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        names = tree(store)
    ids = {name: f"{id:016x}" for name, (id, _) in names.items()}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "rm", str(path), ids["middle"]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "2 entries are stored against" in done.stderr
    command("rm", str(path), ids["middle"], ids["leaf"], "--children", "keep", "--yes")
    with open_store() as store:
        assert held(store, path, names) == {"root", "base", "branch"}
    command("rm", str(path), ids["root"], "--children", "drop", "--yes")
    assert parents(path) == {}


# -- RAM


def test_links_are_held_as_they_are_stored_and_used_with_the_leaf(path: Path, open_store: Opener) -> None:
    store = open_store(cache_ram_mib=64)
    said = turns(10)
    ids = talk(store, said)
    assert store.stats().ram_bytes == store.stats().stored
    alone = store.put([1, 2, 3], b"x").id
    assert store._core.ram.ids()[-1] == alone
    served(store, ids[-1], said[-1][1])
    assert store._core.ram.ids() == [alone, *reversed(ids)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_get_needs_memory_for_the_state_alone(path: Path, open_store: Opener) -> None:
    """With nothing held in RAM: whatever the root and the links have, they pass through a few buffers."""
    tokens = list(range(2000))
    with open_store(cache_ram_mib=0) as store:
        for n in (1000, 1500, 2000):
            entry = store.put(tokens[:n], state(tokens[:n], row=4096, layers=4))
        assert entry.parent is not None
    script = """if True:
        import re, sys
        from kvstore import Store
        def most():
            return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
        with Store(sys.argv[1], cache_ram_mib=0) as store:
            (entry,) = store.entries()
            store.match([1])
            before = most()
            saved = store.get(entry.id)
            print(1024 * (most() - before) / saved.main.size)
    """
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 1.2


KILLED = """if True:
    import sys
    sys.path.insert(0, sys.argv[2])
    from test_chains import turns
    from kvstore import Store
    with Store(sys.argv[1], min_saved_mib=0.001) as store:
        for tokens, main in turns(60):
            print(store.put(tokens, main).id, flush=True)
"""


@pytest.mark.parametrize("after", [1, 3, 20, 31, 47])
def test_a_writer_that_is_killed_leaves_whole_chains(path: Path, open_store: Opener, after: int) -> None:
    """Also while links are folded into what is put."""
    command = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parent)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    ids = [int(child.stdout.readline()) for _ in range(after)]
    child.kill()
    ids += [int(line) for line in child.stdout]
    child.wait()
    with open_store() as store:
        (entry,) = store.entries()
        assert entry.id == ids[-1] or entry.n_tokens == 60 + 10 * len(ids)
        served(store, entry.id, turns(60)[(entry.n_tokens - 60) // 10][1])
        assert store.verify() == []
        last = store.put(*turns(61)[-1])
        assert last.parent is not None
        assert [e.id for e in store.entries()] == [last.id]
        assert store.verify() == []


# -- random operations


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_beside_a_dict(
    path: Path, open_store: Opener, clock: Callable[[float], None], seed: int
) -> None:
    """Conversations grow and branch; entries expire, and are deleted by the store or by hand: nothing is lost or wrong."""
    chance = random.Random(seed)
    options = {"cache_ram_mib": chance.choice([0, 0.02, 64]), "write_behind": chance.random() < 0.5}
    store = open_store(**options)
    model: dict[int, tuple[tuple[int, ...], bytes, str]] = {}

    def put() -> None:
        start = chance.choice([e[0] for e in model.values()] or [tuple(START)])
        tokens = (*start[: chance.choice([30, 60, len(start), len(start)])], *(chance.randint(0, 2) for _ in range(8)))
        entry_class = chance.choice(["normal"] * 6 + ["learned", "pinned"])
        main = state(tokens, row=16, layers=1)
        entry = store.put(tokens, main, entry_class=entry_class, source="request", share=chance.random() < 0.9)  # type: ignore[arg-type]
        store.flush()
        for id, (theirs, _, kind) in list(model.items()):
            if theirs == tokens or (kind == "normal" and tokens[: len(theirs)] == theirs):
                del model[id]
        model[entry.id] = tokens, main, entry_class

    def below(id: int) -> set[int]:
        sql = f"""WITH RECURSIVE d(id) AS (SELECT {signed(id)} UNION SELECT m.entry FROM d JOIN meta m ON m.parent = d.id)
 SELECT m.entry FROM d JOIN meta m ON m.entry = d.id WHERE m.base = 0"""
        return {r[0] % 2**64 for r in rows(path, sql)}

    def delete() -> None:
        id, children = chance.choice(list(model)), chance.choice(["keep", "drop", "resident"])
        going = below(id)
        removed = set(store.delete(id, children=children))
        assert removed <= going
        assert children == "resident" or removed == (going if children == "drop" else {id})
        for one in removed:
            del model[one]

    def by_hand() -> None:
        id = chance.choice(list(model))
        going = below(id)
        in_program(path, f"PRAGMA foreign_keys = {chance.choice(['on', 'off'])}; DELETE FROM entries WHERE id = {signed(id)}")
        for one in going:
            del model[one]

    def take() -> None:
        id = chance.choice(list(model))
        going = below(id)
        _, main, kind = model[id]
        saved = store.take(id)
        assert saved is not None
        assert saved.main.tobytes() == main
        if kind == "normal":
            here = {e.id for e in store.entries()}
            assert id not in here
            for one in going - here:
                del model[one]

    def expire() -> None:
        id = chance.choice(list(model))
        store.set(id, ttl=1)
        clock(2)
        del model[id]
        store.gc()

    def learn() -> None:
        tokens = chance.choice([e[0] for e in model.values()])
        n = chance.randint(1, len(tokens))
        entry = store.learn(tokens, n)
        for id, (theirs, _, _) in list(model.items()):
            if theirs == tokens[:n]:
                del model[id]
        model[entry.id] = tokens[:n], state(tokens[:n], row=16, layers=1), "learned"

    for _ in range(60):
        act = chance.choice([put] * 8 + [delete, by_hand, take, expire, learn, None])
        if act is None:
            store.close()
            store = open_store(**options)
        elif act is put or model:
            act()
        assert {e.id: (e.n_tokens, e.entry_class) for e in store.entries()} == {
            id: (len(tokens), kind) for id, (tokens, _, kind) in model.items()
        }
        for id in chance.sample(list(model), min(3, len(model))):
            served(store, id, model[id][1])
        if chance.random() < 0.2:
            clean(store, path)
    for id, (_, main, _) in model.items():
        served(store, id, main)
    clean(store, path)
    for id in list(model):
        store.delete(id, children="drop")
    assert parents(path) == {}
    clean(store, path)

"""What becomes of a chain when entries of it are deleted, expire, are evicted or damaged."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storekit
from chainkit import SHELL, START, Opener, clean, held, in_program, in_shell, parents, rows, served, talk, tree, turns
from storekit import state

from kvstore import bkvd, operate
from kvstore.storage import integrity, policy, queries, queries_chains
from kvstore.storage.queries import signed
from kvstore.store import maintenance


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops the time that the store sees, and moves it."""
    moved, start = 0.0, time.time()

    def move(seconds: float) -> None:
        nonlocal moved
        moved += seconds

    monkeypatch.setattr(time, "time", lambda: start + moved)
    return move


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread leaves the expired entries to the test."""
    monkeypatch.setattr(maintenance.Maintenance, "_expire", lambda self, core: None)


def test_what_expires_stays_as_a_base_while_it_is_needed(
    path: Path, open_store: Opener, clock: Callable[[float], None], alone: None
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


def test_an_expired_chain_goes_at_once(
    path: Path, open_store: Opener, clock: Callable[[float], None], alone: None
) -> None:
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
            victim = queries.least_recently_used(c, None)
            assert victim is not None
            store._core.drop(c, victim, "disk_budget", dropped)
        order.append(victim)
        clean(store, path)
        before -= 5
        assert rows(path, "SELECT count(*) FROM entries") == [(before,)]
    ids = list(last)
    assert order == [*ids[1:], oldest]


def test_the_base_of_a_put_outlives_the_entry_that_goes_for_its_room(path: Path, open_store: Opener) -> None:
    store = open_store(cache_ram_mib=0)
    said = turns(6)
    ids = talk(store, said)
    tokens = [*said[3][0], 5, 6]
    real = store._core.budget.reserve

    def reserve(need: int, log: int, protect: int | None, **options: Any) -> Any:
        assert protect == ids[3]
        with store._core.transaction() as (c, dropped):
            assert store._core.budget._evict(c, dropped, 0, -1000, protect) > 0
        return real(need, log, protect, **options)

    store._core.budget.reserve = reserve  # type: ignore[method-assign]
    entry = store.put(tokens, state(tokens, row=32, layers=1))
    assert entry.parent == ids[3]
    assert [e.id for e in store.entries()] == [entry.id]
    assert parents(path) == {
        ids[0]: (None, 1), ids[1]: (ids[0], 1), ids[2]: (ids[1], 1), ids[3]: (ids[2], 1), entry.id: (ids[3], 0)
    }  # fmt: skip
    served(store, entry.id, state(tokens, row=32, layers=1))
    clean(store, path)


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

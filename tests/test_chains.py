"""Chains: entries stored against entries that are deltas themselves, and the bases that others need."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storekit
from chainkit import START, Opener, clean, depth, parents, rows, served, talk, turns
from storekit import state

from kvstore import bkvd, layout
from kvstore.storage import policy, queries
from kvstore.store import put
from kvstore.store.put_request import new_request


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "queued"])
@pytest.mark.parametrize("ram", [0, 0.02, 64])
@pytest.mark.parametrize("n", [2, 41, pytest.param(201, marks=pytest.mark.slow)])
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
    from chainkit import turns
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


@pytest.mark.parametrize("again", ["the same bytes", "other bytes"])
@pytest.mark.parametrize("n_before", [0, 1])
def test_a_queued_put_keeps_its_id_though_its_entry_became_a_base(
    path: Path, open_store: Opener, again: str, n_before: int
) -> None:
    """Another process has put what contains the entry, after the caller was given the entry's id."""
    store = open_store()
    said = turns(3)
    for turn in said[:n_before]:
        store.put(*turn)
    (tokens, main), longer = said[n_before], said[n_before + 1]
    entry = store.put(tokens, main)
    last = store.put(*longer)
    assert parents(path)[entry.id][1] == 1
    main = main if again == "the same bytes" else state(tokens, row=48, layers=1)
    request = new_request(
        np.array(tokens, np.int32), np.frombuffer(main, np.uint8).copy(), None, entry_class="normal", source="default",
        ttl=None, family=1, excerpt="", n_input=len(tokens), n_images=0, share=True, head=None, id=entry.id,
    )  # fmt: skip
    assert put.put(store._core, replace(request, promised=replace(entry, size=len(main))), owned=True).id == entry.id
    assert {e.id for e in store.entries()} == {entry.id, last.id}
    served(store, entry.id, main)
    served(store, last.id, longer[1])
    clean(store, path)

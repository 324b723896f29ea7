"""Random operations on conversations, beside a model of the store that is a dict."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chainkit import START, Opener, clean, in_program, parents, rows, served
from storekit import state

from kvstore.storage.queries import signed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops the time that the store sees, and moves it."""
    moved, start = 0.0, time.time()

    def move(seconds: float) -> None:
        nonlocal moved
        moved += seconds

    monkeypatch.setattr(time, "time", lambda: start + moved)
    return move


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

"""Conversations for the tests of chains, and what is in the file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import storekit
from storekit import state

from kvstore import Store

Opener = Callable[..., Store]
Turn = tuple[list[int], bytes]
START = list(range(60))


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


def depth(path: Path, id: int) -> int:
    above = parents(path)
    n = 1
    while (parent := above[id][0]) is not None:
        id, n = parent, n + 1
    return n


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


def in_program(path: Path, sql: str) -> None:
    with closing(storekit.connect(path)) as c:
        c.execute(sql)


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


def clean_but_swept(store: Store) -> None:
    assert store.verify() == []
    store.gc()
    assert store.verify() == []

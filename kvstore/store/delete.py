"""Deletes an entry; what is stored against it is deleted with it, or stored without it first."""

from __future__ import annotations

import time
from contextlib import suppress

from ..errors import CorruptStoreError, OverBudgetError
from ..storage import queries, queries_chains
from ..storage.db import Connection
from .core import StoreCore
from .update import keep_children, rebuilt_bytes


def delete(core: StoreCore, id: int, children: str, why: str = "deleted", *, bases: bool = False) -> list[int]:
    """Deletes an entry (with `bases` also a base); the ids of all entries that were. `children`: see `Store.delete`."""
    removed = core.removing(lambda: _delete(core, id, children, why, bases))
    core.last_write = time.monotonic()  # a put that takes the place may come
    return removed


def _delete(core: StoreCore, id: int, children: str, why: str, bases: bool) -> list[int]:
    if children != "drop":
        _make_room_for_children(core, id, children == "keep")
    with core.transaction() as (c, dropped):
        try:
            found = queries.entry(c, id, core.scope(c), bases=bases) is not None
        except CorruptStoreError:
            found = True  # what cannot be read can be deleted
        if not found:
            return []
        if children != "drop":
            keep_children(core, c, _children_to_keep(core, c, id, children == "keep"), dropped)
        core.drop(c, id, why, dropped)
        return [e.id for e, _ in dropped]


def _children_to_keep(core: StoreCore, c: Connection, id: int, all_of_them: bool) -> list[int]:
    """What is stored against an entry and stays: all of it, or what is in RAM, or needed by an entry that is."""
    children = queries_chains.children(c, id)
    if all_of_them:
        return children
    cached = set(core.ram.ids())

    def resident(child: int) -> bool:
        below = [(child, queries_chains.is_base(c, child)), *queries_chains.descendants(c, child)]
        return any(entry in cached for entry, is_base in below if not is_base)

    return [child for child in children if resident(child)]


def _make_room_for_children(core: StoreCore, id: int, all_of_them: bool) -> None:
    """Room in the budget for children without their parent; where it is not enough, some are evicted as others are."""
    if not core.budget.limited:
        return
    with core.db.read() as c:
        kept = _children_to_keep(core, c, id, all_of_them)
        found = (core.row_to_drop(c, child) for child in kept)
        entries = sorted((e for e in found if e is not None), key=lambda e: e.last_used)
        need = 0
        for entry in entries:
            with suppress(CorruptStoreError):
                need += rebuilt_bytes(queries_chains.links(c, entry.id))
    if not entries:
        return
    with core.transaction(durable=False) as (c, _):
        for entry in entries:
            queries_chains.touch(c, entry.id, 0, entry.last_used)  # they are in use: others are evicted first
    need = min(need, core.budget.max_entry_bytes())
    with suppress(OverBudgetError):
        core.budget.evict_until(need, need, id)

"""Deletes an entry; what is stored against it is deleted with it, or stored whole first."""

from __future__ import annotations

import time
from contextlib import suppress

from ..errors import CorruptStoreError, OverBudgetError
from ..storage import queries
from ..storage.db import Connection
from .core import StoreCore
from .update import keep_children


def delete(core: StoreCore, id: int, children: str, why: str = "deleted") -> list[int]:
    """Deletes an entry; the ids of all that were deleted. `children`: see `Store.delete`."""
    removed = core.removing(lambda: _delete(core, id, children, why))
    core.last_write = time.monotonic()  # a put that takes the place may come
    return removed


def _delete(core: StoreCore, id: int, children: str, why: str) -> list[int]:
    if children != "drop":
        _make_room_for_children(core, id, children == "keep")
    with core.transaction() as (c, dropped):
        try:
            found = queries.entry(c, id, core.scope(c)) is not None
        except CorruptStoreError:
            found = True  # what cannot be read can be deleted
        if not found:
            return []
        if children != "drop":
            keep_children(core, c, _children_to_keep(core, c, id, children == "keep"), dropped)
        core.drop(c, id, why, dropped)
        return [e.id for e, _ in dropped]


def _children_to_keep(core: StoreCore, c: Connection, id: int, all_of_them: bool) -> list[int]:
    cached = set() if all_of_them else set(core.ram.ids())
    return [child for child in queries.children(c, id) if all_of_them or child in cached]


def _make_room_for_children(core: StoreCore, id: int, all_of_them: bool) -> None:
    """Evicts until the budget has room for the children as whole entries; if it cannot hold all, children go too."""
    if not core.budget.limited:
        return
    with core.db.read() as c:
        found = (core.row_to_drop(c, child) for child in _children_to_keep(core, c, id, all_of_them))
        entries = sorted((e for e in found if e is not None), key=lambda e: e.last_used)
    if not entries:
        return
    with core.transaction(durable=False) as (c, _):
        for entry in entries:
            queries.touch(c, entry.id, 0, entry.last_used)  # they are in use: others are evicted first
    need = min(sum(e.size for e in entries), core.budget.max_entry_bytes())
    with suppress(OverBudgetError):
        core.budget.evict_until(need, need, id)

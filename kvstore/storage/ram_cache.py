"""The RAM layer: entries as they are stored (whole or delta), least recently used out first, inside a budget.

Thread rules: every public method takes the one lock and none calls out while holding it. `reserve` makes the room, the
caller fills its arrays without the lock, `commit` shows them: so the bytes held never pass the budget, not even while an
entry is being copied in. Arrays in the cache are read-only and never change; a reader keeps what it was given alive, not
the cache's place for it.

Order: an entry that is used moves to the end, and its parent behind it. So a parent always stands behind its children and
is put out after them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ..types import Bytes


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An entry in RAM. `version` is the blob ids it was read from: another version on disk makes it stale."""

    version: tuple[int, ...]
    main: Bytes
    draft: Bytes | None
    parent: int | None

    @property
    def n_bytes(self) -> int:
        return self.main.size + (0 if self.draft is None else self.draft.size)


class RamCache:
    """Held entries by id, within `budget` bytes (0: nothing is held, -1: no limit)."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Held] = OrderedDict()
        self._children: dict[int, set[int]] = {}
        self._bytes = 0
        self._reserved = 0
        self.evictions = 0

    @property
    def n_bytes(self) -> int:
        """Bytes held, with what is reserved for entries on their way in."""
        with self._lock:  # between two reads of an unlocked sum an entry could go and a larger one be reserved
            return self._bytes + self._reserved

    def __len__(self) -> int:
        return len(self._held)

    def ids(self) -> list[int]:
        """The ids held, least recently used first."""
        with self._lock:
            return list(self._held)

    def reserve(self, n_bytes: int, parent: int | None = None) -> bool:
        """Makes room for an entry; False where it does not fit, even alone, or its parent is not held."""
        with self._lock:
            if self.budget == 0 or (parent is not None and parent not in self._held):
                return False
            if self.budget > 0:
                spare = 0 if parent is None else self._held[parent].n_bytes
                if n_bytes + spare + self._reserved > self.budget:
                    return False
                if parent is not None:
                    self._held.move_to_end(parent)
                while self._bytes + self._reserved + n_bytes > self.budget:
                    oldest = next(iter(self._held))
                    if oldest == parent:
                        return False
                    self._drop(oldest)
                    self.evictions += 1
            self._reserved += n_bytes
            return True

    def cancel(self, n_bytes: int) -> None:
        """Gives a reservation back."""
        with self._lock:
            self._reserved -= n_bytes

    def commit(self, id: int, held: Held) -> bool:
        """Shows a reserved entry; False where its parent went meanwhile (the reservation is given back)."""
        with self._lock:
            self._reserved -= held.n_bytes
            if held.parent is not None and held.parent not in self._held:
                return False
            if id in self._held:
                children = self._children.get(id)
                self._remove(id)
                if children:
                    self._children[id] = children
            self._held[id] = held
            self._bytes += held.n_bytes
            if held.parent is not None:
                self._children.setdefault(held.parent, set()).add(id)
            self._use(id)
            return True

    def get(self, id: int, version: tuple[int, ...]) -> Held | None:
        """The entry, if it is held in this version, and counts it as used; an older version is dropped."""
        with self._lock:
            held = self._held.get(id)
            if held is None:
                return None
            if held.version != version:
                self._drop(id)
                return None
            self._use(id)
            return held

    def discard(self, id: int) -> None:
        """Forgets an entry, and those held that need it."""
        with self._lock:
            if id in self._held:
                self._drop(id)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._children.clear()
            self._bytes = 0

    def _use(self, id: int) -> None:
        self._held.move_to_end(id)
        parent = self._held[id].parent
        if parent is not None and parent in self._held:
            self._held.move_to_end(parent)

    def _remove(self, id: int) -> None:
        held = self._held.pop(id)
        self._bytes -= held.n_bytes
        self._children.pop(id, None)
        if held.parent is not None:
            siblings = self._children.get(held.parent)
            if siblings is not None:
                siblings.discard(id)
                if not siblings:
                    del self._children[held.parent]

    def _drop(self, id: int) -> None:
        for child in list(self._children.get(id, ())):
            self._remove(child)
        self._remove(id)

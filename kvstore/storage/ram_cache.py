"""The RAM layer: an LRU cache of entries as they are stored (whole or delta), bounded in bytes.

Thread rules: every public method takes the one lock and none calls out while holding it. `reserve` makes the room, the
caller fills its arrays without the lock, `commit` shows them: so the bytes held never pass the budget, not even while an
entry is being copied in. Arrays in the cache are read-only and never change. Readers keep
their arrays alive by reference; that does not pin the cache slot.

Order: an entry that is used moves to the end, and its parent behind it. A parent is always more recently used than its
children, so it is evicted after them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ..types import Bytes


@dataclass(frozen=True, slots=True, eq=False)
class CachedEntry:
    """An entry in RAM. `version` is the blob ids it was read from: another version on disk makes it stale."""

    version: tuple[int, ...]
    main: Bytes
    draft: Bytes | None
    parent: int | None

    @property
    def n_bytes(self) -> int:
        return self.main.size + (0 if self.draft is None else self.draft.size)


class RamCache:
    """Cached entries by id, within `budget` bytes (0: nothing is cached, -1: no limit)."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, CachedEntry] = OrderedDict()
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
        return len(self._entries)

    def ids(self) -> list[int]:
        """The ids held, least recently used first."""
        with self._lock:
            return list(self._entries)

    def reserve(self, n_bytes: int, parent: int | None = None) -> bool:
        """Makes room for an entry; False where it does not fit, even alone, or its parent is not held."""
        with self._lock:
            if self.budget == 0 or (parent is not None and parent not in self._entries):
                return False
            if self.budget > 0:
                of_parent = 0 if parent is None else self._entries[parent].n_bytes
                if n_bytes + of_parent + self._reserved > self.budget:
                    return False
                if parent is not None:
                    self._entries.move_to_end(parent)
                while self._bytes + self._reserved + n_bytes > self.budget:
                    oldest = next(iter(self._entries))
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

    def commit(self, id: int, entry: CachedEntry) -> bool:
        """Makes a reserved entry visible; False if its parent was dropped meanwhile (the reservation is given back)."""
        with self._lock:
            self._reserved -= entry.n_bytes
            if entry.parent is not None and entry.parent not in self._entries:
                return False
            if id in self._entries:
                children = self._children.get(id)
                self._remove(id)
                if children:
                    self._children[id] = children
            self._entries[id] = entry
            self._bytes += entry.n_bytes
            if entry.parent is not None:
                self._children.setdefault(entry.parent, set()).add(id)
            self._use(id)
            return True

    def get(self, id: int, version: tuple[int, ...]) -> CachedEntry | None:
        """The entry, if it is held in this version, and counts it as used; an older version is dropped."""
        with self._lock:
            entry = self._entries.get(id)
            if entry is None:
                return None
            if entry.version != version:
                self._drop(id)
                return None
            self._use(id)
            return entry

    def discard(self, id: int) -> None:
        """Forgets an entry, and those held that need it."""
        with self._lock:
            if id in self._entries:
                self._drop(id)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._children.clear()
            self._bytes = 0

    def _use(self, id: int) -> None:
        self._entries.move_to_end(id)
        parent = self._entries[id].parent
        if parent is not None and parent in self._entries:
            self._entries.move_to_end(parent)

    def _remove(self, id: int) -> None:
        entry = self._entries.pop(id)
        self._bytes -= entry.n_bytes
        self._children.pop(id, None)
        if entry.parent is not None:
            siblings = self._children.get(entry.parent)
            if siblings is not None:
                siblings.discard(id)
                if not siblings:
                    del self._children[entry.parent]

    def _drop(self, id: int) -> None:
        for child in list(self._children.get(id, ())):
            self._remove(child)
        self._remove(id)

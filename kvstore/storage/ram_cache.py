"""The RAM layer: an LRU cache of entries as they are stored (whole or delta), bounded in bytes.

Thread rules: every public method takes the one lock and none calls out while holding it. `reserve` makes the room, the
caller fills its arrays without the lock, `commit` shows them: so the bytes held never pass the budget, not even while an
entry is being copied in. Arrays in the cache are read-only and never change. Readers keep
their arrays alive by reference; that does not pin the cache slot.

Order: an entry that is used moves to the end, and all that it is stored against behind it, the root of the chain last. What
others need is always more recently used than they are, so it is evicted after them.
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

    def fits(self, n_bytes: int) -> bool:
        """Whether so much would fit with everything else evicted."""
        return self.budget < 0 or 0 < n_bytes + self._reserved <= self.budget

    def reserve(self, n_bytes: int) -> bool:
        """Makes room for an entry; False where it does not fit, even alone."""
        with self._lock:
            if self.budget == 0:
                return False
            if self.budget > 0:
                if n_bytes + self._reserved > self.budget:
                    return False
                while self._bytes + self._reserved + n_bytes > self.budget:
                    self._remove(next(iter(self._entries)))
                    self.evictions += 1
            self._reserved += n_bytes
            return True

    def cancel(self, n_bytes: int) -> None:
        """Gives a reservation back."""
        with self._lock:
            self._reserved -= n_bytes

    def commit(self, id: int, entry: CachedEntry) -> None:
        """Shows a reserved entry."""
        with self._lock:
            self._reserved -= entry.n_bytes
            if id in self._entries:
                self._remove(id)
            self._entries[id] = entry
            self._bytes += entry.n_bytes
            self._use(id)

    def get(self, id: int, version: tuple[int, ...], *, use: bool = True) -> CachedEntry | None:
        """The entry, if it is held in this version, and counts it as used; an older version is dropped.

        use=False: it is one link of a chain; the use of its leaf counts for all.
        """
        with self._lock:
            entry = self._entries.get(id)
            if entry is None:
                return None
            if entry.version != version:
                self._remove(id)
                return None
            if use:
                self._use(id)
            return entry

    def use(self, id: int) -> None:
        """Counts an entry as used, where it is held, with all that it is stored against."""
        with self._lock:
            if id in self._entries:
                self._use(id)

    def discard(self, id: int) -> None:
        """Forgets an entry."""
        with self._lock:
            if id in self._entries:
                self._remove(id)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _use(self, id: int) -> None:
        self._entries.move_to_end(id)
        for _ in range(len(self._entries)):  # a bound: rows that name each other as parents are damage
            parent = self._entries[id].parent
            if parent is None or parent not in self._entries:
                return
            self._entries.move_to_end(parent)
            id = parent

    def _remove(self, id: int) -> None:
        self._bytes -= self._entries.pop(id).n_bytes

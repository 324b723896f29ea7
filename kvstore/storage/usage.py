"""What a store counts between two writes: uses of entries, hits and misses, seconds spent."""

from __future__ import annotations

import threading
from collections import Counter

from . import queries, queries_chains
from .db import Connection


class PendingCounters:
    """Counts in memory until the next write transaction takes the uses to the file, and the background thread the rest.

    A get would otherwise write five pages; a crash loses the counts of a few seconds, never an entry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[int, tuple[int, int]] = {}
        self._counts: Counter[str] = Counter()

    def use(self, id: int, now: int, hits: int = 1) -> None:
        with self._lock:
            before = self._uses.pop(id, (0, 0))  # moves to the end: the order of use
            self._uses[id] = (before[0] + hits, max(before[1], now))

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def spent(self, name: str, seconds: float) -> None:
        """Adds a time to the counter `name`, in whole microseconds."""
        self.count(name, round(seconds * 1e6))

    def uses_of(self, id: int) -> tuple[int, int]:
        """(hits, last used) of an entry that the file does not have yet."""
        with self._lock:
            return self._uses.get(id, (0, 0))

    def counts(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counts)

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._uses or self._counts)

    def take(self, *, counts: bool) -> tuple[dict[int, tuple[int, int]], Counter[str]]:
        """The uses, which decide what is evicted; with `counts` those too, which take one more page of the file."""
        with self._lock:
            taken = self._uses, self._counts if counts else Counter()
            self._uses = {}
            if counts:
                self._counts = Counter()
        return taken

    def give_back(self, taken: tuple[dict[int, tuple[int, int]], Counter[str]]) -> None:
        """Undoes `take` after a transaction that was rolled back."""
        uses, counts = taken
        with self._lock:
            self._counts.update(counts)
            newer, self._uses = self._uses, dict(uses)
        for id, (hits, used) in newer.items():
            self.use(id, used, hits)


def write(c: Connection, taken: tuple[dict[int, tuple[int, int]], Counter[str]]) -> None:
    """Adds the counts to the file, inside a write transaction."""
    uses, counts = taken
    for id, (hits, used) in uses.items():
        if hits:
            queries.count_reuse(c, id)
        queries_chains.touch(c, id, hits, used)
    for name, by in counts.items():
        queries.count(c, name, by)

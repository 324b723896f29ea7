"""The disk budget: what has to go before something is written, and how the file shrinks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from . import policy, queries
from .db import Connection, Database
from .errors import OverBudgetError
from .records import Entry

# Pages that a transaction writes beside its chunks: the b-trees of entries, meta, blobs and totals, and the free list.
OVERHEAD_PAGES = 24
PAGES_EVICTED = 4  # and what dropping one entry adds to them
Evict: TypeAlias = Callable[[Connection, int, str], None]
Dropped: TypeAlias = list[tuple[Entry, str]]
Writing: TypeAlias = Callable[[], AbstractContextManager[tuple[Connection, Dropped]]]


class Space:
    """Keeps the file and its write-ahead log inside `budget` bytes (-1: no limit)."""

    def __init__(self, database: Database, budget: int) -> None:
        self.database = database
        self.budget = budget

    @property
    def limited(self) -> bool:
        return self.budget >= 0 and not self.database.memory

    def batch_bytes(self, largest: int) -> int:
        """How much one transaction may write: a small budget gets a small log."""
        return largest if not self.limited else max(1 << 20, min(largest, self.budget // 16))

    def before(self) -> None:
        """Called before a transaction that needs room: empties the log, so that it counts for nothing."""
        if self.limited and self.database.wal_bytes():
            self.database.checkpoint(truncate=True)

    def make_room(self, c: Connection, need_bytes: int, log_bytes: int, spare: int | None, evict: Evict) -> None:
        """Evicts, inside the transaction, until `need_bytes` more fit; OverBudgetError where they cannot.

        `log_bytes` of them are written at once, and so lie in the log as well for a while. `spare` is not evicted.
        """
        if not self.limited:
            return
        overhead = OVERHEAD_PAGES
        while missing := self._missing(c, need_bytes, log_bytes, overhead):
            overhead += PAGES_EVICTED
            victim = queries.least_recently_used(c, spare)
            if victim is None:
                raise OverBudgetError(
                    f"the entry does not fit into cache_disk_mib = {self.budget / policy.MIB:g}: "
                    f"{missing / policy.MIB:.1f} MiB are missing with everything else dropped",
                    missing=missing,
                    budget=self.budget,
                )
            evict(c, victim, "disk_budget")

    def _missing(self, c: Connection, need_bytes: int, log_bytes: int, overhead: int) -> int:
        page_size, pages, free = queries.pages(c)
        wal = self.database.wal_bytes()
        return policy.missing(self.budget, page_size, pages, free, wal, need_bytes, log_bytes, overhead)

    def shrink_to_budget(self, writing: Writing, evictor: Callable[[Dropped], Evict]) -> None:
        """After an open with a smaller budget: evicts and gives the pages back."""
        if not self.limited or self.database.file_bytes() <= self.budget:
            return
        self.database.checkpoint(truncate=True)
        while True:
            with writing() as (c, dropped):
                evict = evictor(dropped)
                page_size, pages, free = queries.pages(c)
                while (pages - free) * page_size > self.budget:
                    victim = queries.least_recently_used(c, None)
                    if victim is None:
                        break
                    evict(c, victim, "disk_budget")
                    page_size, pages, free = queries.pages(c)
                queries.incremental_vacuum(c, 256)
            self.database.checkpoint(truncate=True)
            if free == 0 or self.database.file_bytes() <= self.budget:
                return

    def give_back(self, n_pages: int) -> int:
        """Gives up to so many free pages back to the file system; how many remain free."""
        with self.database.write(durable=False, wait=False) as c:
            queries.incremental_vacuum(c, n_pages)
            free = queries.pages(c)[2]
        self.database.checkpoint(truncate=True, wait=False)
        return free

    def give_back_all(self) -> None:
        """Gives every free page back, in bites, so that other writers get their turn."""
        while True:
            with self.database.write(durable=False) as c:
                before = queries.pages(c)[2]
                queries.incremental_vacuum(c, 1024)
                left = queries.pages(c)[2]
            self.database.checkpoint(truncate=True)
            if left == 0 or left >= before:
                return

"""The disk budget: what is evicted before something is written, and how the file shrinks.

The file may grow to the budget less a part that is kept for the log: while the log is emptied before a transaction that could
make it larger than that part, file and log fit at every moment. Room is made ahead, in transactions of
their own that are as small: eviction frees pages, and free pages are given back where the file is larger than it may be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ..errors import BusyError, DiskFullError, InvalidInputError, OverBudgetError
from ..storage import geometry, policy, queries, queries_blobs, queries_chains
from ..storage.db import Connection, Database
from ..storage.disk import free_bytes
from ..types import Entry

LARGEST_LOG_PART = 64 << 20
EVICTED_PER_STEP = 64  # by one transaction that prunes: others get their turn in between


class Dropped(list[tuple[Entry, str]]):
    """What a transaction drops: entries, each with the reason.

    `bases` are the ids of bases that go with them. `kept` are entries that are entries no more, but stay as bases of others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bases: list[int] = []
        self.kept: list[tuple[Entry, str]] = []



class Core(Protocol):
    """What the budget needs of an open store."""

    db: Database

    def transaction(self, *, durable: bool = True, wait: bool = True) -> AbstractContextManager[tuple[Connection, Dropped]]:
        """A write transaction, and the list of what it drops."""
        ...

    def drop(self, c: Connection, id: int, why: str, dropped: Dropped) -> None: ...

    def relieve(self) -> bool:
        """Makes what room it can on a full disk; False where there was none to make."""
        ...


class DiskBudget:
    """Keeps the file and its write-ahead log inside `budget` bytes (-1: no limit)."""

    def __init__(self, core: Core, budget: int) -> None:
        self.budget = budget
        self._core = core
        self._db = core.db
        self._page_size = 0

    @property
    def limited(self) -> bool:
        return self.budget >= 0 and not self._db.memory

    @property
    def page_size(self) -> int:
        if not self._page_size:
            with self._db.read() as c:
                self._page_size = queries_blobs.pages(c)[0]
        return self._page_size

    def batch_bytes(self) -> int:
        """How much one transaction may write: a small budget gets a small log."""
        largest = geometry.BATCH_CHUNKS * geometry.chunk_bytes(self.page_size)
        return min(largest, self._log_part()) if self.limited else largest

    def _log_part(self) -> int:
        """The bytes of the budget that are kept for the log."""
        least = max(geometry.SMALLEST_BATCH_BYTES, 16 * self.page_size)
        return max(least, min(LARGEST_LOG_PART, self.budget // 16))

    def chunk_bytes(self) -> int:
        """The size of a chunk, of which a batch holds at least one."""
        return geometry.chunk_bytes(self.page_size, self.batch_bytes() if self.limited else None)

    def max_batch(self, n: int, pages_each: int) -> int:
        """How many of n steps one transaction may do, where each writes `pages_each` pages."""
        if not self.limited:
            return n
        return max(1, min(n, (geometry.LOG_PAGES + self.batch_bytes() // self.page_size) // pages_each))

    def empty_log(self, *, wait: bool = True) -> None:
        """Empties the log, so that the next transaction need not count it."""
        if self.limited and self._db.wal_bytes():
            self._db.checkpoint(truncate=True, wait=wait)

    def max_entry_bytes(self) -> int:
        """The largest entry that fits, with everything else evicted."""
        pages = self.budget // self.page_size - geometry.BASE_PAGES - geometry.NEW_PAGES - geometry.LOG_PAGES
        return max(0, pages // 2 * self.page_size)

    def _most_pages(self, log_bytes: int) -> int:
        """Pages that the file may have while its log has log_bytes."""
        log_bytes = max(log_bytes, self._log_part())
        return self.budget // self.page_size - self._pages(log_bytes) - geometry.LOG_PAGES

    def _pages(self, n_bytes: int) -> int:
        return -(-n_bytes // self.page_size)

    def fits(self, c: Connection, need_bytes: int, log_bytes: int) -> bool:
        """Whether a transaction that has begun may store need_bytes more, and write log_bytes of them itself."""
        if not self.limited:
            return True
        _, pages, free = queries_blobs.pages(c)
        most = self._most_pages(log_bytes + self._db.wal_bytes())
        return pages + max(0, self._pages(need_bytes) + geometry.NEW_PAGES - free) <= most

    @contextmanager
    def reserve(
        self, need_bytes: int, log_bytes: int, protect: int | None, *, durable: bool = True
    ) -> Iterator[tuple[Connection, Dropped]]:
        """A write transaction with room for need_bytes, of which it writes log_bytes itself; evicts what it must.

        `protect` is not evicted. Raises OverBudgetError, and evicts nothing, if evicting all others would not be enough.
        """
        give_up = time.monotonic() + self._db.timeout
        while True:
            self.evict_until(need_bytes, log_bytes, protect, give_up)
            fits = False
            with self._core.transaction(durable=durable) as (c, dropped):
                fits = self.fits(c, need_bytes, log_bytes)  # another process may have taken the room
                if fits:
                    yield c, dropped
            if fits:
                return
            if time.monotonic() > give_up:
                read = self._db.wal_bytes()
                raise BusyError(
                    f"no room was found for the entry within {self._db.timeout:g} s: "
                    + (f"another process reads an older state of {self._db.path}" if read else
                       f"other processes fill the room that is made in {self._db.path}"),
                    path=self._db.path,
                    hint="try again when it has finished" if read else "try again",
                )  # fmt: skip

    def evict_until(self, need_bytes: int, log_bytes: int, protect: int | None, give_up: float = math.inf) -> None:
        """Evicts, and shrinks the file, until need_bytes more fit. From `give_up` on, it waits for no reader."""
        if not self.limited:
            return
        with self._db.read() as c:
            if self.fits(c, need_bytes, log_bytes):
                return
        need = self._pages(need_bytes) + geometry.NEW_PAGES
        most = self._most_pages(log_bytes)
        while True:
            self.empty_log(wait=time.monotonic() < give_up)
            with self._db.read() as c:
                _, pages, free = queries_blobs.pages(c)
                if pages + max(0, need - free) <= most:
                    return
                kept = None if protect is None else queries.entry(c, protect, None, bases=True)
            least = geometry.BASE_PAGES + (0 if kept is None else self._pages(kept.stored))
            self._refuse(least + need - most)
            try:
                with self._core.transaction(durable=False) as (c, dropped):
                    self._refuse(self._evict(c, dropped, need, most, protect))
            except DiskFullError:
                if not self._core.relieve():
                    raise

    def _evict(self, c: Connection, dropped: Dropped, need: int, most: int, protect: int | None) -> int:
        """One step of eviction and shrinking; gives the number of pages still missing when nothing is left to evict."""
        _, pages, free = queries_blobs.pages(c)
        evictions = self.max_batch(1 << 30, geometry.PAGES_EVICTED)
        missing = 0
        while pages - free + need > most and evictions:
            victim = queries.least_recently_used(c, protect)
            if victim is None:
                missing = pages - free + need - most
                break
            if protect is not None and protect in queries_chains.needed_by_it_alone(c, victim):
                queries_chains.set_base(c, protect, False)  # a base that a put needs would go with its last entry
            self._core.drop(c, victim, "disk_budget", dropped)
            evictions -= 1
            _, pages, free = queries_blobs.pages(c)
        if (surplus := min(free, pages - most)) > 0:
            queries_blobs.incremental_vacuum(c, self.max_batch(surplus, geometry.PAGES_PER_FREED))
        return missing

    def enforce(self, gone: list[int]) -> None:
        """Brings a file that is larger than the budget inside it, as far as evictions can; `gone` gets the evicted ids.

        Where the budget is too small for a put, the file alone is held to it: the log is empty when this returns.
        """
        if not self.limited:
            return
        most = self._most_pages(0)
        if most < geometry.BASE_PAGES:
            most = self.budget // self.page_size
        while True:
            self.empty_log()
            with self._db.read() as c:
                before = queries_blobs.pages(c)[1]
            if before <= most:
                return
            with self._core.transaction(durable=False) as (c, dropped):
                missing = self._evict(c, dropped, 0, most, None)
                after = queries_blobs.pages(c)[1]
            gone += [entry.id for entry, _ in dropped]
            if after >= before and (missing or not dropped):
                self.empty_log()
                return

    def _refuse(self, missing_pages: int) -> None:
        if missing_pages > 0:
            missing = missing_pages * self.page_size
            raise OverBudgetError(
                f"the entry does not fit into cache_disk_mib = {self.budget / policy.MIB:g}: "
                f"{missing / policy.MIB:.1f} MiB are missing with everything else dropped",
                missing=missing,
                budget=self.budget,
            )

    def check_size(self, max_bytes: int) -> None:
        """Raises InvalidInputError where not even an empty store has room."""
        least = geometry.BASE_PAGES * self.page_size
        if max_bytes < least:
            raise InvalidInputError(
                f"max_size is {max_bytes} bytes, and an empty store can take {least}", hint=f"give at least {least} bytes"
            )

    def prune(self, max_bytes: int) -> list[Entry]:
        """Evicts until file and log have at most max_bytes, whatever the budget is; what was evicted."""
        self.check_size(max_bytes)
        most = max_bytes // self.page_size
        gone: list[Entry] = []
        give_up = time.monotonic() + self._db.timeout
        while self._db.file_bytes() > max_bytes:
            self._db.checkpoint(truncate=True, wait=time.monotonic() < give_up)
            with self._core.transaction(durable=False) as (c, dropped):
                _, pages, free = before = queries_blobs.pages(c)
                evictions = self.max_batch(EVICTED_PER_STEP, geometry.PAGES_EVICTED)
                while pages - free > most and evictions and (victim := queries.least_recently_used(c, None)) is not None:
                    self._core.drop(c, victim, "max_size", dropped)
                    evictions -= 1
                    _, pages, free = queries_blobs.pages(c)
                if (surplus := min(free, pages - most)) > 0:
                    surplus = min(surplus, self._pages(geometry.FREE_BYTES_PER_STEP))
                    queries_blobs.incremental_vacuum(c, self.max_batch(surplus, geometry.PAGES_PER_FREED))
                changed = queries_blobs.pages(c) != before
            gone += [entry for entry, _ in dropped]
            emptied = self._db.checkpoint(truncate=True, wait=time.monotonic() < give_up)
            if not changed and (emptied or time.monotonic() > give_up) and self._db.file_bytes() > max_bytes:
                path, left = self._db.path, self._db.file_bytes()
                raise BusyError(
                    f"{path} still has {left} bytes: another process reads an older state of it, or puts",
                    path=path,
                    hint="try again when it has finished",
                )
        return gone

    def shrink(self, n_bytes: int) -> int:
        """Gives up to n_bytes of free pages back to the file system; how many remain free."""
        self.empty_log(wait=False)
        _, free = self._vacuum(self._pages(n_bytes), wait=False)
        self._db.checkpoint(truncate=True, wait=False)
        return free

    def shrink_all(self, until: int | None = None) -> None:
        """Gives every free page back, in steps, so that other writers get their turn.

        With `until` only as many as the disk needs to have `until` bytes free.
        """
        while until is None or free_bytes(self._db.path) < until:
            self.empty_log()
            before, left = self._vacuum(self._pages(geometry.FREE_BYTES_PER_STEP if until is None else until), wait=True)
            self._db.checkpoint(truncate=True)
            if left == 0 or left >= before:
                return

    def _vacuum(self, n_pages: int, *, wait: bool) -> tuple[int, int]:
        """Frees pages in one step; the free pages before and after. On a full disk the step becomes smaller until it fits."""
        while True:
            try:
                with self._db.write(durable=False, wait=wait) as c:
                    before = queries_blobs.pages(c)[2]
                    queries_blobs.incremental_vacuum(c, self.max_batch(n_pages, geometry.PAGES_PER_FREED))
                    return before, queries_blobs.pages(c)[2]
            except DiskFullError:
                if n_pages <= 1:
                    raise
            n_pages = max(1, n_pages // 8)
            self._db.checkpoint(truncate=True, wait=wait)

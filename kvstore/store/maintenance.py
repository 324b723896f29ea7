"""The store's one background thread: work that no call asks for, in steps short enough for other writers."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from ..errors import KVStoreError
from ..storage import geometry, queries, queries_blobs, queries_maintenance, queries_prefixes
from .core import StoreCore
from .put import LOG_BYTES

log = logging.getLogger("kvstore")
INTERVAL_SECONDS = 1.0
EXPIRED_PER_STEP = 256
EXPIRED_BYTES_PER_STEP = 256 << 20  # SQLite reads each page that it frees
HASHED_PER_STEP = 1000
PRUNE_SECONDS = 60.0
FLUSH_SECONDS = 10.0  # a crash loses what was counted since; each flush writes two pages
# Free pages and the log's file wait this long for a put that can use them: with a new log 256 MiB took 0.05 s longer.
QUIET_SECONDS = 10.0


def expire(core: StoreCore, limit: int = EXPIRED_PER_STEP, *, wait: bool = False) -> list[int]:
    """Takes up to `limit` expired entries out of the list, and their bytes where no live entry needs them; gives their ids."""
    with core.db.read() as c:
        ids = queries.expired(c, core.now(), limit)
    return core.removing(lambda: _expire(core, limit, wait)) if ids else []


def _expire(core: StoreCore, limit: int, wait: bool) -> list[int]:
    core.budget.empty_log(wait=wait)
    with core.transaction(durable=False, wait=wait) as (c, dropped):
        n_bytes = 0
        for id, stored in queries.expired(c, core.now(), core.budget.max_batch(limit, geometry.PAGES_EVICTED)):
            n_bytes += stored
            if dropped and n_bytes > EXPIRED_BYTES_PER_STEP:
                break
            core.expire(c, id, dropped)
    return [entry.id for entry, _ in (*dropped, *dropped.kept)]


def delete_orphans(core: StoreCore) -> int:
    """Deletes rows that refer to nothing, as a shell without foreign keys may leave them; gives their number.

    Looks only where something was changed by hand: the triggers of schema.sql note that.
    """
    with core.db.read() as c:
        seen = queries_maintenance.unswept(c)
        if not seen:
            return 0
        found = queries_maintenance.orphans(c)
    with core.db.write() as c:
        deleted = queries_maintenance.delete_orphans(c) if found else 0
        queries_maintenance.mark_swept(c, queries_maintenance.unswept(c) if found else seen)
    return deleted


def prune_families(core: StoreCore) -> int:
    """Deletes families without entries, the least used first, down to the number that is kept."""
    with core.db.read() as c:
        surplus = queries_maintenance.surplus_families(c)
    if surplus <= 0:
        return 0
    with core.db.write(durable=False) as c:
        # A quarter more than needed, so that the next new family does not cause another prune.
        return queries_maintenance.prune_families(c, surplus + queries_maintenance.FAMILIES_KEPT // 4)


def list_prefixes(core: StoreCore, limit: int = HASHED_PER_STEP) -> bool:
    """Makes rows of `prefixes` that older programs did not; True where some were missing."""
    with core.db.read() as c:
        if queries_prefixes.complete(c):
            return False
    with core.db.write(durable=False) as c:
        return queries_prefixes.continue_list(c, limit)


def hash_prefixes(core: StoreCore, after: int = 0, limit: int = HASHED_PER_STEP) -> int | None:
    """Computes hashes in `prefixes` that other programs did not; the row to go on after, None at the end."""
    with core.db.read() as c:
        entries, last = queries_prefixes.missing_hashes(c, after, limit) if queries_prefixes.has_table(c) else ([], None)
    if entries:
        with core.db.write(durable=False) as c:
            queries_prefixes.set_missing_hashes(c, entries)
    return last


class Maintenance:
    """Does the maintenance of a store every second until it is stopped; holds no strong reference to its core."""

    def __init__(self, core: StoreCore, learn: Callable[[], object] | None) -> None:
        self._core = weakref.ref(core)
        self._learn = learn
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._orphans_deleted = False
        self.failures = 0
        self._reported = ""
        self._unhashed: int | None = 0  # the row after which hashes may be missing
        self._pruned = -PRUNE_SECONDS
        self._flushed = 0.0
        self._thread = threading.Thread(target=self._run, name="kvstore-maintenance", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Asks for a run now."""
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(INTERVAL_SECONDS)
            self._wake.clear()
            core = self._core()
            if core is None or self._stop.is_set():
                return
            self._run_once(core)
            del core

    def _failed(self, path: str, what: str, error: Exception | None) -> None:
        """Counts a failure, and logs it unless the previous run failed in the same way."""
        self.failures += 1
        if what != self._reported:
            log.warning("maintenance of %s failed, and will try again: %s", path, what, exc_info=error)
        self._reported = what

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run_once(self, core: StoreCore) -> None:
        if core.putting and core.db.wal_bytes() < LOG_BYTES:
            return  # let the put finish first: checkpointing during a put is slower than doing them in sequence
        quiet = time.monotonic() - core.last_write > QUIET_SECONDS
        steps: list[Callable[[], object]] = [
            lambda: core.db.wal_bytes() and core.db.checkpoint(truncate=quiet, wait=False),
            lambda: core.delete_abandoned_blobs(wait=False),
            lambda: self._flush(core),
            lambda: self._delete_orphans(core),
            lambda: self._hash_prefixes(core),
            lambda: self._prune(core),
            lambda: self._expire(core),
            self._learn or (lambda: None),
            lambda: self._give_back(core) if quiet else None,
            core.take_spare,
        ]
        for step in steps:
            if self._stop.is_set():
                return
            try:
                step()
            except KVStoreError as error:  # where one cannot be done, on a full disk, another may make room
                if error.retry:
                    log.debug("maintenance put off: %s", error)
                else:
                    self._failed(core.db.path, str(error), None)
            except Exception as error:  # noqa: BLE001  logged and counted: the others may do their work
                self._failed(core.db.path, repr(error), error)

    def _flush(self, core: StoreCore) -> None:
        if core.counters and time.monotonic() - self._flushed > FLUSH_SECONDS:
            with core.transaction(durable=False, wait=False, counts=True):
                pass
            self._flushed = time.monotonic()

    def _delete_orphans(self, core: StoreCore) -> None:
        if not self._orphans_deleted:
            delete_orphans(core)
            self._orphans_deleted = True

    def _hash_prefixes(self, core: StoreCore) -> None:
        while self._unhashed is not None and not self._stop.is_set():
            if not list_prefixes(core):
                self._unhashed = hash_prefixes(core, self._unhashed)

    def _prune(self, core: StoreCore) -> None:
        if time.monotonic() - self._pruned > PRUNE_SECONDS:
            prune_families(core)
            self._pruned = time.monotonic()

    def _expire(self, core: StoreCore) -> None:
        while expire(core) and not self._stop.is_set():
            pass

    def _give_back(self, core: StoreCore) -> None:
        with core.db.read() as c:
            free = queries_blobs.pages(c)[2]
        while free and not self._stop.is_set():
            left = core.budget.shrink(geometry.FREE_BYTES_PER_RUN)
            if left == free:
                break
            free = left

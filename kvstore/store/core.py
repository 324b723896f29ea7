"""The parts of an open store, and what all that is done with them needs: transactions, dropping, room, damage."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..errors import BusyError, CorruptStoreError, DiskFullError, KVStoreError, StoreIOError
from ..storage import geometry, integrity, queries, queries_blobs, queries_chains, schema, usage, writers
from ..storage.db import Connection, Database
from ..storage.disk import SPARE_BYTES, Spare, free_bytes
from ..storage.entry_reader import Damaged, EntryReader
from ..storage.prefix_filter import PrefixFilters
from ..storage.ram_cache import RamCache
from ..storage.sqlite import ConstraintError
from ..storage.usage import PendingCounters
from ..types import Entry, hex_id
from ..util.workers import Workers
from .disk_budget import DiskBudget, Dropped

log = logging.getLogger("kvstore")
log.addHandler(logging.NullHandler())  # silent unless the program that uses us logs: no warnings on its stderr
TRIES = 8  # of a call that damaged rows or other processes keep from succeeding
# Reasons of a drop: a drop that a user asked for is not an eviction; an entry that a newer one serves is not a loss.
USER_REASONS = ("deleted", "taken")
EXPECTED_REASONS = (*USER_REASONS, "contained", "replaced")

T = TypeVar("T")


class StoreCore:
    """The parts of an open store. Safe to use from several threads."""

    def __init__(
        self,
        database: Database,
        *,
        fingerprint: str,
        ram: RamCache,
        disk_budget: int,
        min_saved: int | None,
        verify: bool,
        filters: PrefixFilters | None = None,
    ) -> None:
        self.db = database
        self.fingerprint = fingerprint
        self.ram = ram
        self.min_saved = min_saved  # None: a share of each state, see policy.least_saved
        self.filters = PrefixFilters() if filters is None else filters
        self.counters = PendingCounters()
        self.workers = Workers()
        self.reader = EntryReader(ram, verify, self.counters.spent)
        self.budget = DiskBudget(self, disk_budget)
        self.spare: Spare | None = None
        self._detaching = False
        self.last_write = 0.0
        self.putting = 0  # puts under way
        self._fingerprint_id: int | None = None
        self._families: set[int] = set()
        self._clock = 0
        self._clock_lock = threading.Lock()

    # -- clock, scope, rows

    def now(self) -> int:
        """Unix seconds; never less than before in this process, so that a clock set back resurrects nothing."""
        with self._clock_lock:
            self._clock = max(self._clock, int(time.time()))
            return self._clock

    @contextmanager
    def counted_put(self) -> Iterator[None]:
        """Counts a put as under way: the maintenance leaves the log alone meanwhile."""
        with self._clock_lock:
            self.putting += 1
        try:
            yield
        finally:
            with self._clock_lock:
                self.putting -= 1

    def note_family(self, family: int) -> None:
        """Notes that a family was put to: automatic learning looks at it."""
        with self._clock_lock:
            self._families.add(family)

    def take_families(self) -> set[int]:
        """The families that were put to since the last call."""
        with self._clock_lock:
            taken, self._families = self._families, set()
        return taken

    def fingerprint_id(self, c: Connection) -> int | None:
        if self._fingerprint_id is None:
            self._fingerprint_id = queries.fingerprint_id(c, self.fingerprint)
        return self._fingerprint_id

    def scope(self, c: Connection) -> int | None:
        """The fingerprint that ids are looked up under: none where the store was opened without one."""
        if not self.fingerprint:
            return None
        found = self.fingerprint_id(c)
        return -1 if found is None else found

    def find(self, c: Connection, id: int) -> Entry | None:
        """The live entry of this id, with the uses that are not in the file yet."""
        found = queries.entry(c, id, self.scope(c))
        if found is None or self.is_expired(found):
            return None
        return self.with_uses(found)

    def entry(self, id: int) -> Entry | None:
        with self.db.read() as c:
            return self.find(c, id)

    def with_uses(self, entry: Entry) -> Entry:
        hits, used = self.counters.uses_of(entry.id)
        if not used:
            return entry
        return dataclasses.replace(entry, hits=entry.hits + hits, last_used=max(entry.last_used, used))

    def is_expired(self, entry: Entry) -> bool:
        return entry.expires_at is not None and entry.expires_at <= self.now()

    # -- transactions

    @contextmanager
    def transaction(
        self, *, durable: bool = True, wait: bool = True, counts: bool = False
    ) -> Iterator[tuple[Connection, Dropped]]:
        """A write transaction that takes the pending uses with it, and the list of (entry, why) that it drops.

        counts: it takes all pending counters. A put does not: it would write one more page.

        After the commit, drops are logged and removed from the RAM layer; after a failure nothing is.
        """
        dropped = Dropped()
        taken = None
        try:
            with self.db.write(durable=durable, wait=wait) as c:
                # Not before: another thread that writes first would evict by an order that lacks these uses.
                taken = self.counters.take(counts=counts)
                usage.write(c, taken)
                yield c, dropped
        except BaseException as error:
            if taken is not None:
                self.counters.give_back(taken)
            if isinstance(error, DiskFullError):
                with suppress(KVStoreError):
                    self.db.checkpoint(truncate=True, wait=False)  # the log gives back what it does not need
            raise
        self._report(dropped)

    def _report(self, dropped: Dropped) -> None:
        """Counts, logs and forgets what a committed transaction dropped."""
        for id in dropped.bases:
            self.ram.discard(id)
        for entry, _ in dropped:
            self.ram.discard(entry.id)
        for entry, why in (*dropped, *dropped.kept):
            if why not in USER_REASONS:
                self.counters.count(f"evicted_{why.split(':')[0]}")
            level = logging.INFO if why in EXPECTED_REASONS else logging.WARNING
            log.log(level, "dropped entry %s (%d tokens): %s", entry.hex_id, entry.n_tokens, why)

    def flush(self) -> None:
        """Writes the pending counters to the file."""
        if self.counters:
            with self.transaction(durable=False, counts=True):
                pass

    # -- a full disk

    def freeing(self, step: Callable[[], T]) -> T:
        """Runs a step that frees space. On a full disk it is run again: after emptying the log, then after giving up the spare.

        Freeing space needs some space itself, which is why a spare is held. It is taken again when the disk has room.
        """
        try:
            return step()
        except DiskFullError:
            with suppress(KVStoreError):
                self.db.checkpoint(truncate=True)
        try:
            return step()
        except DiskFullError:
            if not self.relieve():
                raise
        return step()

    def removing(self, step: Callable[[], T]) -> T:
        """`freeing` of entries that are deleted. A large one, whose chunks need more log than there is room for, is deleted
        without them: its chunks are then deleted in steps, as those of a failed put are.
        """
        try:
            return self.freeing(step)
        except DiskFullError:
            self._detaching = True
        try:
            done = step()
        finally:
            self._detaching = False
        with suppress(KVStoreError):
            self.delete_abandoned_blobs()
        return done

    def relieve(self) -> bool:
        """Gives up the spare blocks on a full disk; False where there are none."""
        return self.spare is not None and self.spare.give_up()

    def take_spare(self) -> None:
        """Takes spare blocks again where they were given up, once the disk has room to spare."""
        if self.spare is not None and not self.spare.held and free_bytes(self.db.path) > 8 * SPARE_BYTES:
            self.spare.take()

    # -- dropping, and damage

    def drop(self, c: Connection, id: int, why: str, dropped: Dropped) -> None:
        """Deletes an entry, all that is stored against it, and the bases that nothing needs any more."""
        dropped.bases += queries_chains.needed_by_it_alone(c, id)
        for child, is_base in queries_chains.descendants(c, id):
            entry = None if is_base else self.row_to_drop(c, child)
            if entry is not None:
                dropped.append((entry, why if why in USER_REASONS else "parent_gone"))
            else:
                dropped.bases.append(child)
        entry = None if queries_chains.is_base(c, id) else self.row_to_drop(c, id)
        if entry is not None:
            dropped.append((entry, why))
        else:
            dropped.bases.append(id)
        if self._detaching:
            queries_blobs.detach_blobs(c, id)
        try:
            queries.delete_entry(c, id)
        except ConstraintError:
            integrity.rebuild_totals(c)  # sums that are out of range would keep every entry
            queries.delete_entry(c, id)

    def retire(self, c: Connection, id: int, why: str, dropped: Dropped) -> None:
        """Takes an entry out of the list: it stays as a base where others are stored against it, else it goes."""
        if not queries_chains.has_children(c, id):
            self.drop(c, id, why, dropped)
            return
        entry = self.row_to_drop(c, id)
        queries_chains.set_base(c, id, True)
        if entry is not None:
            dropped.kept.append((entry, why))

    def row_to_drop(self, c: Connection, id: int) -> Entry | None:
        """The entry or base of this id, or what stands for it where its row is damaged."""
        try:
            return queries.entry(c, id, None, bases=True)
        except CorruptStoreError:
            return queries.unreadable(id)

    def drop_damaged(self, damaged: Damaged, id: int) -> bool:
        """Drops what kept entry `id` from being read: itself, or what it is stored against if that is wrong again. False if
        it is not.

        All that is stored against an entry is dropped with it, and what failed twice was `id`: the bytes of the other may have
        been wrong only once.
        """
        if damaged.id != id:
            log.warning("entry %s cannot be served: its base %s, %s", hex_id(id), hex_id(damaged.id), damaged.reason)
            try:
                with self.db.read(fresh=True) as c:
                    self.reader.from_disk().check(c, damaged.id)
                return False
            except Damaged as again:
                damaged = again
        self.drop_quietly(damaged.id, f"damaged: {damaged.reason}", damaged.version)
        return True

    def drop_quietly(self, id: int, why: str, version: tuple[int, ...] | None = None) -> None:
        """Drops an entry that cannot be served, if the file can be written and still has the version that was read.

        What has expired stays as a base for as long as live entries are stored against it.
        """
        if self.db.readonly:
            log.warning("entry %s: %s (the store is read-only, so it stays)", hex_id(id), why)
            return
        try:
            with self.transaction() as (c, dropped):
                if version is not None and queries_blobs.version(c, id) != version:
                    return
                self.expire(c, id, dropped) if why == "expired" else self.drop(c, id, why, dropped)
        except KVStoreError as error:
            log.warning("entry %s: %s; it could not be dropped: %s", hex_id(id), why, error)

    def expire(self, c: Connection, id: int, dropped: Dropped) -> None:
        """Takes an expired entry out of the list, with what is stored against it and has expired too."""
        live = queries_chains.has_live_descendants(c, id, self.now())
        (self.retire if live else self.drop)(c, id, "expired", dropped)

    def past_damage(self, call: Callable[..., T], *args: Any) -> T:
        """Runs `call`; if a damaged row stops it, drops that entry and runs it again.

        Arguments are handed on, not closed over: a frame in the traceback of an error keeps its closure alive.
        """
        for _ in range(TRIES):
            try:
                return call(*args)
            except CorruptStoreError as error:
                id = int(error.facts.get("entry", "0"), 16)
                if not id or self.db.readonly or not self.drop_unreadable(id):
                    raise
        return call(*args)

    def drop_unreadable(self, id: int) -> bool:
        """Drops an entry if its row is damaged on a new connection too; True if it was dropped."""
        try:
            with self.db.read(fresh=True) as c:
                queries.entry(c, id, None, bases=True)
                queries.tokens(c, id)
                queries_blobs.blobs(c, id)
            return False
        except StoreIOError:
            return False
        except CorruptStoreError as error:
            self.drop_quietly(id, f"damaged: {error.message}")
        with self.db.read() as c:
            return self.row_to_drop(c, id) is None

    # -- open

    def prepare(self) -> None:
        """Migrates, deletes blobs staged by dead writers, and evicts down to the disk budget."""
        schema.prepare(self.db)
        if self.db.readonly:
            return
        with suppress(DiskFullError, BusyError):  # what is stored can still be read; the maintenance tries again
            n = self.delete_abandoned_blobs()
            if n:
                log.info("reclaimed the space of %d states that were cut off while being written", n)
        with suppress(DiskFullError, BusyError):
            self.enforce_budget()

    def enforce_budget(self) -> list[int]:
        """Evicts until the file is inside this store's budget (another opener's may be larger); gives the evicted ids."""
        gone: list[int] = []
        self.freeing(lambda: self.budget.enforce(gone))
        return gone

    # -- blobs that puts left staged when they failed, or when their process died

    @property
    def file(self) -> str | None:
        """The path of the file; None for a store in memory."""
        return None if self.db.memory else self.db.path

    def _abandoned_blobs(self, c: Connection) -> list[int]:
        return [blob for blob, writer in queries_blobs.staged(c) if not writers.alive(writer, self.file)]

    def reclaim(self, c: Connection) -> int:
        """Deletes the abandoned blobs; their number."""
        return sum(queries_blobs.delete_staged(c, blob) for blob in self._abandoned_blobs(c))

    def delete_abandoned_blobs(self, *, wait: bool = True) -> int:
        """`reclaim`, in a transaction of its own where there is something to do; gives the space back."""
        with self.db.read() as c:
            found = self._abandoned_blobs(c)
        n = self.freeing(lambda: self._reclaim(wait)) if found else 0
        if self.file is not None:
            writers.sweep(self.file)
        return n

    def _reclaim(self, wait: bool) -> int:
        self.budget.empty_log(wait=wait)
        try:
            with self.db.write(durable=False, wait=wait) as c:
                n = self.reclaim(c)
        except DiskFullError:
            n = self._reclaim_in_steps(wait)
        with suppress(DiskFullError), self.db.write(durable=False, wait=wait) as c:
            free = queries_blobs.pages(c)[2]
            queries_blobs.incremental_vacuum(c, self.budget.max_batch(free, geometry.PAGES_PER_FREED))
        self.db.checkpoint(truncate=True, wait=False)
        return n

    def _reclaim_in_steps(self, wait: bool) -> int:
        """`reclaim`, a few chunks in a transaction, for a disk that has hardly room for a log."""
        with self.db.read() as c:
            dead = self._abandoned_blobs(c)
        for blob in dead:
            more = True
            while more:
                self.db.checkpoint(truncate=True, wait=wait)
                with self.db.write(durable=False, wait=wait) as c:
                    more = queries_blobs.delete_last_chunks(c, blob, geometry.CHUNKS_PER_STEP)
                    if not more:
                        queries_blobs.delete_staged(c, blob)
        return len(dead)

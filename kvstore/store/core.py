"""What `Store` does with a file: puts, gets, drops and rebuilds, each in the right transaction."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..errors import (
    BusyError,
    CorruptStoreError,
    DiskFullError,
    KVStoreError,
    NotFoundError,
    OverBudgetError,
    StoreIOError,
)
from ..storage import (
    blobs,
    geometry,
    policy,
    queries,
    queries_blobs,
    writers,
)
from ..storage import (
    integrity as audit,
)
from ..storage import (
    prefix_index as prefixes,
)
from ..storage import (
    schema as upgrade,
)
from ..storage import (
    usage as tally,
)
from ..storage.db import Connection, Database
from ..storage.disk import SPARE_BYTES, Spare, free_bytes
from ..storage.entry_reader import Damaged, EntryReader
from ..storage.prefix_filter import PrefixFilters
from ..storage.ram_cache import RamCache
from ..storage.sqlite import ConstraintError
from ..storage.usage import Tally
from ..types import Entry, EntryClass, SavedState, Source, hex_id
from ..util.workers import Workers
from .disk_budget import Space
from .entry_codec import Parent, Part, Shelf
from .put_request import Job

log = logging.getLogger("kvstore")
log.addHandler(logging.NullHandler())  # silent unless the program that uses us logs: no warnings on its stderr
# A put larger than this checkpoints each time it has written so much: its log stays smaller than it.
LOG_BYTES = 512 << 20
RESERVE_FROM = 8 << 20
TRIES = 8  # of a put whose parent or staged blob another process removes
# Why an entry may go: what someone asked for is no eviction, and what a newer entry serves is no loss.
ASKED = ("deleted", "taken")
QUIET = (*ASKED, "contained", "replaced")


T = TypeVar("T")


class _Lost(Exception):
    """What a put relied on (its parent, its staged blob) was removed by another process: try again."""


class Engine:
    """The parts of an open store, and what they do together. Safe to use from several threads."""

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
        self.tally = Tally()
        self.workers = Workers()
        self.reader = EntryReader(ram, verify, self.tally.spent)
        self.shelf = Shelf(self.reader, self.tally.spent)
        self.space = Space(database, disk_budget, self.writing, self.evictor, self._relieve)
        self.spare: Spare | None = None
        self._detaching = False
        self.last_write = 0.0
        self.putting = 0  # puts under way
        self._fingerprint_id: int | None = None
        self._families: set[int] = set()
        self._clock = 0
        self._clock_lock = threading.Lock()

    # -- the common ground

    def now(self) -> int:
        """Unix seconds; never less than before in this process, so that a clock set back resurrects nothing."""
        with self._clock_lock:
            self._clock = max(self._clock, int(time.time()))
            return self._clock

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
        hits, used = self.tally.uses_of(entry.id)
        if not used:
            return entry
        return dataclasses.replace(entry, hits=entry.hits + hits, last_used=max(entry.last_used, used))

    def is_expired(self, entry: Entry) -> bool:
        return entry.expires_at is not None and entry.expires_at <= self.now()

    @contextmanager
    def writing(self, *, durable: bool = True, wait: bool = True) -> Iterator[tuple[Connection, list[tuple[Entry, str]]]]:
        """A write transaction that takes the tally with it, and the list of (entry, why) that it drops.

        What was dropped is reported and forgotten by the RAM layer after the commit, and not at all where it fails.
        """
        dropped: list[tuple[Entry, str]] = []
        taken = self.tally.take()
        try:
            with self.db.write(durable=durable, wait=wait) as c:
                tally.write(c, taken)
                yield c, dropped
        except BaseException as error:
            self.tally.give_back(taken)
            if isinstance(error, DiskFullError):
                with suppress(KVStoreError):
                    self.db.checkpoint(truncate=True, wait=False)  # the log gives back what it does not need
            raise
        self._dropped(dropped)

    def _dropped(self, dropped: list[tuple[Entry, str]]) -> None:
        """Counts, logs and forgets what a committed transaction dropped."""
        for entry, why in dropped:
            self.ram.discard(entry.id)
            if why not in ASKED:
                self.tally.count(f"evicted_{why.split(':')[0]}")
            level = logging.INFO if why in QUIET else logging.WARNING
            log.log(level, "dropped entry %s (%d tokens): %s", entry.hex_id, entry.n_tokens, why)

    def freeing(self, step: Callable[[], T]) -> T:
        """Runs what frees space. On a full disk again: with the log emptied, then with the spare blocks given up.

        Who makes room must be able to. The spare is taken again when there is room for it.
        """
        try:
            return step()
        except DiskFullError:
            with suppress(KVStoreError):
                self.db.checkpoint(truncate=True)
        try:
            return step()
        except DiskFullError:
            if not self._relieve():
                raise
        return step()

    def removing(self, step: Callable[[], T]) -> T:
        """`freeing` of entries that go. A large one, whose chunks need more of the log than there is, goes without them.

        They are then deleted in steps, as what a failed put left is.
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
            self.clear_cut_off()
        return done

    def _relieve(self) -> bool:
        """Gives up the spare blocks on a full disk; False where there are none."""
        return self.spare is not None and self.spare.give_up()

    def take_spare(self) -> None:
        """Takes spare blocks again where they were given up, once the disk has room to spare."""
        if self.spare is not None and not self.spare.held and free_bytes(self.db.path) > 8 * SPARE_BYTES:
            self.spare.take()

    def flush(self) -> None:
        """Takes the tally to the file."""
        if self.tally:
            with self.writing(durable=False):
                pass

    def drop(self, c: Connection, id: int, why: str, dropped: list[tuple[Entry, str]]) -> None:
        """Deletes an entry and those stored against it."""
        for child in queries.children(c, id):
            entry = self._to_drop(c, child)
            if entry is not None:
                dropped.append((entry, why if why in ASKED else "parent_gone"))
        entry = self._to_drop(c, id)
        if entry is not None:
            dropped.append((entry, why))
        if self._detaching:
            queries_blobs.detach_blobs(c, id)
        try:
            queries.delete_entry(c, id)
        except ConstraintError:
            audit.rebuild_totals(c)  # sums that are out of range would keep every entry
            queries.delete_entry(c, id)

    def _to_drop(self, c: Connection, id: int) -> Entry | None:
        try:
            return queries.entry(c, id, None)
        except CorruptStoreError:
            return queries.unreadable(id)

    def past_damage(self, call: Callable[..., T], *args: Any) -> T:
        """Calls, and again after dropping an entry whose row is damaged and was in the way.

        Arguments are handed on, not closed over: a frame in the traceback of an error keeps its closure alive.
        """
        for _ in range(TRIES):
            try:
                return call(*args)
            except CorruptStoreError as error:
                id = int(error.facts.get("entry", "0"), 16)
                if not id or self.db.readonly or not self._drop_unreadable(id):
                    raise
        return call(*args)

    def _drop_unreadable(self, id: int) -> bool:
        """Drops an entry whose row is damaged on a new connection too; whether it did."""
        try:
            with self.db.read(fresh=True) as c:
                queries.entry(c, id, None)
                queries.tokens(c, id)
                queries_blobs.blobs(c, id)
            return False
        except StoreIOError:
            return False
        except CorruptStoreError as error:
            self._drop_quietly(id, f"damaged: {error.message}")
        with self.db.read() as c:
            return self._to_drop(c, id) is None

    # -- open

    def prepare(self) -> None:
        """Upgrades, reclaims what cut-off puts left, and brings the file inside its budget."""
        upgrade.prepare(self.db)
        if self.db.readonly:
            return
        with suppress(DiskFullError, BusyError):  # what is stored can still be read; the upkeep tries again
            n = self.clear_cut_off()
            if n:
                log.info("reclaimed the space of %d states that were cut off while being written", n)
        with suppress(DiskFullError, BusyError):
            self.keep_inside()

    def keep_inside(self) -> list[int]:
        """Brings the file, which another budget may have let grow, inside this store's; the ids that went."""
        gone: list[int] = []
        self.freeing(lambda: self.space.shrink(gone))
        return gone

    # -- put

    def put(self, job: Job, *, owned: bool = False, release: Callable[[], None] | None = None) -> Entry:
        """Stores a job. `owned` arrays may be kept; `release` is called just before the RAM layer takes them."""
        with self._clock_lock:
            self.putting += 1
        try:
            with self.workers.lend():
                job.digests.begin(self.workers)
                try:
                    return self.past_damage(self._put, job, owned, release)
                finally:
                    job.digests.cancel()
        finally:
            with self._clock_lock:
                self.putting -= 1

    def _put(self, job: Job, owned: bool, release: Callable[[], None] | None) -> Entry:
        started = time.perf_counter()
        full = False
        for _ in range(TRIES):
            with self.db.read() as c:
                fingerprint = self.fingerprint_id(c)
                parent = prefix = None
                cause = self._cause(c, fingerprint, job)
                if fingerprint is not None:
                    same = self.identical(c, fingerprint, job)
                    if owned and same is not None and same.id != job.id:
                        same = None  # an owned job was promised its id: it replaces what is there
                    if same is None and cause == "no_prefix":
                        prefix = prefixes.learned_prefix(c, self.filters, fingerprint, job.key, self.now())
                        parent = None if prefix is None else self.shelf.parent(c, *prefix)
                else:
                    same = None
            if same is not None:
                refreshed = self._refresh(same, job)
                if refreshed is not None:
                    return refreshed
                continue
            parts, shared = self.shelf.build(job.main, job.draft, job.digests, parent, self.min_saved)
            if not shared:
                if prefix is not None:
                    cause = "damaged_prefix" if parent is None else self.shelf.why_whole(job.main, parent)
                parent = None
            keeping = None if owned else self.shelf.keep(parts, None if parent is None else parent.id, self.workers)
            try:
                entry, version = self._write(job, parts, parent, prefix)
            except BaseException as error:
                if keeping is not None:
                    keeping.cancel()
                if isinstance(error, _Lost):
                    continue
                if isinstance(error, DiskFullError) and not full and self._has_room(parts):
                    full = True
                    continue
                raise
            break
        else:
            path = self.db.path
            raise BusyError(f"{path}: other processes changed what this put relies on, again and again", path=path)
        self.last_write = time.monotonic()
        if release is not None:
            release()
        if owned:
            keeping = self.shelf.keep(parts, entry.parent, None)
        if keeping is not None:
            keeping.commit(job.id, version)
        self.tally.count("puts")
        if job.entry_class == "normal":
            with self._clock_lock:
                self._families.add(job.family)
        if parent is None:
            self.tally.count(f"whole_{cause}")
        else:
            self.tally.count("shared_puts")
            log.info(
                "shared %s: %d tokens, %d of them from learned prefix %s, %.1f MiB instead of %.1f MiB, %.3f s",
                entry.hex_id, entry.n_tokens, parent.n_tokens, hex_id(parent.id), entry.stored / policy.MIB,
                entry.size / policy.MIB, time.perf_counter() - started,
            )  # fmt: skip
        return entry

    def _cause(self, c: Connection, fingerprint: int | None, job: Job) -> str:
        """Why a put is stored whole, as far as the arguments say; "no_prefix" where a prefix may be looked for."""
        if job.entry_class == "learned" or not job.share:
            return "learned" if job.entry_class == "learned" else "not_asked"
        return "no_prefix" if fingerprint is None or self._shares(c, fingerprint, job) else "learned"

    def _shares(self, c: Connection, fingerprint: int, job: Job) -> bool:
        """Whether a put may be stored against a prefix: what is learned, or replaces what is, stays whole."""
        if not job.share or job.entry_class == "learned":
            return False
        old = (queries.entry(c, id, None) for id in queries.same_tokens(c, fingerprint, job.key))
        merged = ((o.entry_class, o.source) for o in old if o is not None and not self.is_expired(o))
        return all(policy.merged_class(o, (job.entry_class, job.source))[0] != "learned" for o in merged)

    def identical(self, c: Connection, fingerprint: int, job: Job) -> Entry | None:
        """The live entry that holds these tokens and these very bytes already; one that a queued put renewed is live."""
        for id in queries.same_tokens(c, fingerprint, job.key):
            entry, rows = queries.entry(c, id, fingerprint), queries_blobs.blobs(c, id)
            if entry is None or (self.is_expired(entry) and id != job.id):
                continue
            if {row.part: row.size for row in rows} != job.digests.sizes:
                continue
            if {row.part: row.digest for row in rows} == job.digests:
                return entry
        return None

    def _refresh(self, same: Entry, job: Job) -> Entry | None:
        """Puts an entry again that is there already: only its meta changes. None where it went meanwhile."""
        now = self.now()
        # A delta that becomes learned becomes whole.
        learned = policy.merged_class((same.entry_class, same.source), (job.entry_class, job.source))[0] == "learned"
        grown = same.size if learned and same.parent is not None else 0
        with self.space.room(grown, grown, same.id) if grown else self.writing() as (c, _):
            found = queries.entry(c, same.id, None)
            if found is None or (found.parent is not None and learned and not grown):
                return None
            entry_class, source = policy.merged_class((found.entry_class, found.source), (job.entry_class, job.source))
            if entry_class == "learned" and found.parent is not None:
                parts, _ = self.shelf.build(job.main, job.draft, job.digests, None, 0)
                found = self.replace_parts(c, found, parts, None)
            entry = dataclasses.replace(
                job.entry(now, found.stored, found.parent),
                id=found.id,
                hits=found.hits,
                entry_class=entry_class,
                source=source,
                created_at=found.created_at,
            )
            queries.update_meta(c, entry)
            queries.touch(c, entry.id, 0, entry.last_used)
            if job.head != queries.head(c, entry.id):
                queries.set_head(c, entry.id, job.head)
        return entry

    def _has_room(self, parts: list[Part]) -> bool:
        """Makes what room there is on a full disk, of the log and of free pages; whether it does for a put.

        A put needs room in the log, and again in the file.
        """
        if self.db.memory:
            return False
        total = sum(part.data.size for part in parts)
        need = 2 * total + (geometry.LOG_PAGES + geometry.NEW_PAGES) * self.space.page_size
        with suppress(KVStoreError):
            self.db.checkpoint(truncate=True)
            self.freeing(lambda: self.space.give_back_all(need))
        return free_bytes(self.db.path) >= need

    def _write(
        self, job: Job, parts: list[Part], parent: Parent | None, prefix: tuple[int, int] | None
    ) -> tuple[Entry, tuple[int, ...]]:
        total = sum(part.data.size for part in parts)
        need = total + 3 * len(job.key)
        batch = self.space.batch_bytes()
        spare = None if parent is None else parent.id
        kicks = blobs.KICKS_USED_LOG if self.db.wal_bytes() >= total else blobs.KICKS_NEW_LOG
        if total >= RESERVE_FROM and not self.space.limited:  # with a budget the log is emptied after each batch
            self.db.reserve_log(min(blobs.log_bytes(total), LOG_BYTES))
        with self.db.sync_ahead() as kick:
            write = functools.partial(blobs.write, kick=kick, kicks=kicks)
            if total <= batch:
                with self.space.room(need, need, spare) as (c, dropped):
                    staged = self._stage(c, parts, writers.process_name())
                    for blob, part in zip(staged, parts, strict=True):
                        write(c, blob, part.data)
                    return self._publish(c, job, parts, staged, parent, prefix, dropped)
            with self._staging() as writer:
                with self.space.room(need, batch, spare, durable=False) as (c, _):
                    staged = self._stage(c, parts, writer)
                self._write_batches(parts, staged, need, batch, spare, writer, write)
                with self.space.room(need - total, need - total, spare) as (c, dropped):
                    for blob, part in zip(staged, parts, strict=True):
                        if queries_blobs.chunk_total(c, blob)[1] != part.data.size:
                            raise _Lost
                    return self._publish(c, job, parts, staged, parent, prefix, dropped)

    def _write_batches(
        self,
        parts: list[Part],
        staged: list[int],
        need: int,
        batch: int,
        spare: int | None,
        writer: str,
        write: Callable[..., int],
    ) -> None:
        count = max(1, batch // geometry.CHUNK_BYTES)
        logged = 0
        for blob, part in zip(staged, parts, strict=True):
            seq = 0
            while seq >= 0:
                left = need - seq * geometry.CHUNK_BYTES
                with self.space.room(left, min(left, batch), spare, durable=False) as (c, _):
                    if queries_blobs.blob_writer(c, blob) != writer:
                        raise _Lost
                    seq = write(c, blob, part.data, seq, count)
                logged += count * geometry.CHUNK_BYTES
                if logged > LOG_BYTES and not self.space.limited:
                    self.db.checkpoint()
                    logged = 0
            need -= part.data.size

    @contextmanager
    def _staging(self) -> Iterator[str]:
        """The name of a writer, for blobs that are committed before they belong to an entry.

        Where the put fails they go: the disk may be full because of them. Where even that fails, the upkeep tries again.
        """
        writer = writers.Writer(None if self.db.memory else self.db.path)
        try:
            yield writer.name
        except BaseException:
            writer.close()
            with suppress(KVStoreError):
                self.clear_cut_off()
            raise
        finally:
            writer.close()

    def reclaim(self, c: Connection) -> int:
        """Deletes what puts that failed, or whose process died, left staged; gives the number of blobs."""
        path = None if self.db.memory else self.db.path
        dead = [blob for blob, writer in queries_blobs.staged(c) if not writers.alive(writer, path)]
        return sum(queries_blobs.delete_staged(c, blob) for blob in dead)

    def clear_cut_off(self, *, wait: bool = True) -> int:
        """`reclaim`, in a transaction of its own where there is something to do; gives the space back."""
        path = None if self.db.memory else self.db.path
        with self.db.read() as c:
            left = queries_blobs.staged(c)
        n = 0
        if any(not writers.alive(writer, path) for _, writer in left):
            n = self.freeing(lambda: self._reclaim(wait))
        if path is not None:
            writers.sweep(path)
        return n

    def _reclaim(self, wait: bool) -> int:
        self.space.empty_log(wait=wait)
        try:
            with self.db.write(durable=False, wait=wait) as c:
                n = self.reclaim(c)
        except DiskFullError:
            n = self._reclaim_in_steps(wait)
        with suppress(DiskFullError), self.db.write(durable=False, wait=wait) as c:
            queries_blobs.incremental_vacuum(c, self.space.bite(queries_blobs.pages(c)[2], geometry.PAGES_PER_FREED))
        self.db.checkpoint(truncate=True, wait=False)
        return n

    def _reclaim_in_steps(self, wait: bool) -> int:
        """`reclaim`, a few chunks in a transaction, for a disk that has hardly room for a log."""
        path = None if self.db.memory else self.db.path
        with self.db.read() as c:
            dead = [blob for blob, writer in queries_blobs.staged(c) if not writers.alive(writer, path)]
        for blob in dead:
            more = True
            while more:
                self.db.checkpoint(truncate=True, wait=wait)
                with self.db.write(durable=False, wait=wait) as c:
                    more = queries_blobs.delete_last_chunks(c, blob, geometry.CHUNKS_PER_STEP)
                    if not more:
                        queries_blobs.delete_staged(c, blob)
        return len(dead)

    def _stage(self, c: Connection, parts: list[Part], writer: str) -> list[int]:
        return [queries_blobs.stage_blob(c, p.name, p.kind, p.size, p.data.size, writer) for p in parts]

    def evictor(self, dropped: list[tuple[Entry, str]]) -> Callable[[Connection, int, str], None]:
        return lambda c, id, why: self.drop(c, id, why, dropped)

    def _publish(
        self,
        c: Connection,
        job: Job,
        parts: list[Part],
        staged: list[int],
        parent: Parent | None,
        prefix: tuple[int, int] | None,
        dropped: list[tuple[Entry, str]],
    ) -> tuple[Entry, tuple[int, ...]]:
        """Makes staged blobs an entry, and removes what it replaces and serves.

        `prefix` is the learned entry that the put was tried against: another may have come, or it may have gone.
        """
        if parent is not None and tuple(row.id for row in queries_blobs.blobs(c, parent.id)) != parent.version:
            raise _Lost
        fingerprint = queries.add_fingerprint(c, self.fingerprint)
        if self._shares(c, fingerprint, job):
            now = self.now()
            if prefixes.learned_prefix(c, self.filters, fingerprint, job.key, now, committed=False) != prefix:
                raise _Lost
        entry = job.entry(self.now(), sum(p.data.size for p in parts), None if parent is None else parent.id)
        for id in queries.same_tokens(c, fingerprint, job.key):
            old = queries.entry(c, id, None)
            if old is not None:
                if not self.is_expired(old):
                    entry_class, source = policy.merged_class(
                        (old.entry_class, old.source), (entry.entry_class, entry.source)
                    )
                    entry = dataclasses.replace(entry, entry_class=entry_class, source=source)
                self._keep_children(c, queries.children(c, id), dropped, sum(p.data.size for p in parts))
            self.drop(c, id, "replaced", dropped)
        self._drop_contained(c, fingerprint, job, dropped)
        queries.insert_entry(c, entry, fingerprint, job.key, job.cuts.any, job.head)
        if not job.cuts.any:
            queries.insert_cuts(c, entry.id, fingerprint, job.key, job.cuts.counts)
        for blob, part in zip(staged, parts, strict=True):
            if not queries_blobs.finish_blob(c, blob, entry.id, part.digest):
                raise _Lost
        if entry.parent is not None:
            queries.touch(c, entry.id, 0, entry.last_used)
        queries.count_family(c, entry.family, 1, 0)
        queries.set_family_flags(c, entry.id, True, False)
        return entry, tuple(row.id for row in queries_blobs.blobs(c, entry.id))

    def _drop_contained(self, c: Connection, fingerprint: int, job: Job, dropped: list[tuple[Entry, str]]) -> None:
        """Drops the normal entries that the entry being put serves: their tokens begin its own."""
        if job.n_images or not (job.cuts.any or job.cuts.counts):
            return
        found = prefixes.whole_prefixes(
            c, self.filters, fingerprint, job.key[:-4], self.now(), "removable", committed=False
        )
        for id, n in found:
            if job.cuts.serves(n) and (job.draft is not None or len(queries_blobs.blobs(c, id)) == 1):
                self.drop(c, id, "contained", dropped)

    # -- get

    def get(self, id: int) -> SavedState | None:
        saved = self.read(id)
        if saved is None:
            self.tally.count("misses")
            return None
        self.tally.use(id, self.now())
        self.tally.count("hits")
        return dataclasses.replace(saved, entry=self.with_uses(saved.entry))

    def read(self, id: int) -> SavedState | None:
        """An entry with its states, not counted as a hit; None where there is none. A damaged one is dropped.

        Raises StoreIOError where the file cannot be read now; nothing is dropped then.
        """
        try:
            return self.read_twice(id)
        except Damaged as error:
            if error.id != id:
                log.warning("entry %s cannot be served: its parent %s, %s", hex_id(id), hex_id(error.id), error.reason)
            self._drop_damaged(error)
        return None

    def read_twice(self, id: int) -> SavedState | None:
        """`read`, which drops nothing. Raises Damaged for an entry that failed twice.

        What fails once is read again from the file alone, on a new connection.
        """
        try:
            return self._read(id, self.reader, fresh=False)
        except CorruptStoreError as error:
            log.debug("entry %s is read again: %s", hex_id(id), error)
        try:
            return self._read(id, self.reader.from_disk(), fresh=True)
        except Damaged:
            raise
        except CorruptStoreError as error:
            raise Damaged(id, error.message) from error

    def _read(self, id: int, reader: EntryReader, *, fresh: bool) -> SavedState | None:
        with self.db.read(fresh=fresh) as c:
            entry = queries.entry(c, id, self.scope(c))
            if entry is not None and not self.is_expired(entry):
                main, draft = reader.read(c, entry)
                tokens = queries.tokens(c, id)
                if tokens is None or tokens.size != entry.n_tokens:
                    raise Damaged(id, "its tokens are damaged")
                return SavedState(entry, tokens, main, draft)
        if entry is not None:
            self._drop_quietly(id, "expired")
        return None

    def _drop_damaged(self, damaged: Damaged) -> None:
        self._drop_quietly(damaged.id, f"damaged: {damaged.reason}", damaged.version)

    def _drop_quietly(self, id: int, why: str, version: tuple[int, ...] | None = None) -> None:
        """Drops what cannot be served, where the file can be written now, and if it still is of the version that was read.

        An expired prefix stays, unserved, for as long as live entries are stored against it.
        """
        if self.db.readonly:
            log.warning("entry %s: %s (the store is read-only, so it stays)", hex_id(id), why)
            return
        try:
            with self.writing() as (c, dropped):
                if version is not None and tuple(row.id for row in queries_blobs.blobs(c, id)) != version:
                    return
                if why != "expired" or not queries.has_live_children(c, id, self.now()):
                    self.drop(c, id, why, dropped)
        except KVStoreError as error:
            log.warning("entry %s: %s; it could not be dropped: %s", hex_id(id), why, error)

    # -- delete

    def delete(self, id: int, children: str, why: str = "deleted") -> list[int]:
        removed = self.removing(lambda: self._delete(id, children, why))
        self.last_write = time.monotonic()  # a put that takes the place may come
        return removed

    def _delete(self, id: int, children: str, why: str) -> list[int]:
        if children != "drop":
            self._make_room_for_children(id, children == "keep")
        with self.writing() as (c, dropped):
            try:
                found = queries.entry(c, id, self.scope(c)) is not None
            except CorruptStoreError:
                found = True  # what cannot be read can be deleted
            if not found:
                return []
            if children != "drop":
                self._keep_children(c, self._to_keep(c, id, children == "keep"), dropped)
            self.drop(c, id, why, dropped)
            return [e.id for e, _ in dropped]

    def _to_keep(self, c: Connection, id: int, all_of_them: bool) -> list[int]:
        """The children that stay when their parent is deleted."""
        held = set() if all_of_them else set(self.ram.ids())
        return [child for child in queries.children(c, id) if all_of_them or child in held]

    def _make_room_for_children(self, id: int, all_of_them: bool) -> None:
        """Room in the budget for children that will be whole; where that is not enough for all, they go as others do."""
        if not self.space.limited:
            return
        with self.db.read() as c:
            found = (self._to_drop(c, child) for child in self._to_keep(c, id, all_of_them))
            entries = sorted((e for e in found if e is not None), key=lambda e: e.last_used)
        if not entries:
            return
        with self.writing(durable=False) as (c, _):
            for entry in entries:
                queries.touch(c, entry.id, 0, entry.last_used)  # they are in use: others go first
        need = min(sum(e.size for e in entries), self.space.most())
        with suppress(OverBudgetError):
            self.space.make(need, need, id)

    def _keep_children(
        self, c: Connection, children: list[int], dropped: list[tuple[Entry, str]], written: int = 0
    ) -> None:
        """Rebuilds children whole, before their parent goes; those that cannot be, or have no room, are dropped."""
        for child in children:
            entry = self._to_drop(c, child)
            if entry is None:
                continue
            written += entry.size
            if not self.space.fits(c, entry.size, written):
                self.drop(c, child, "disk_budget", dropped)
                continue
            try:
                self.make_whole(c, entry)
            except CorruptStoreError as error:
                self.drop(c, child, f"damaged: {getattr(error, 'reason', error.message)}", dropped)

    def make_whole(self, c: Connection, entry: Entry) -> Entry:
        """Stores an entry whole that was a delta, inside a transaction. Raises Damaged."""
        try:
            main, draft = self.reader.read(c, entry)
        except Damaged:
            with self.db.read(fresh=True) as again:
                main, draft = self.reader.from_disk().read(again, entry)
        digests = {row.part: row.digest for row in queries_blobs.blobs(c, entry.id)}
        parts, _ = self.shelf.build(main, draft, digests, None, 0)
        return self.replace_parts(c, entry, parts, None)

    def replace_parts(self, c: Connection, entry: Entry, parts: list[Part], parent: int | None) -> Entry:
        """Stores the same states of an entry in another form, inside a transaction that has made room for them."""
        for row in queries_blobs.blobs(c, entry.id):
            queries_blobs.delete_blob(c, row.id)
        staged = self._stage(c, parts, writers.process_name())
        for blob, part in zip(staged, parts, strict=True):
            blobs.write(c, blob, part.data)
            queries_blobs.finish_blob(c, blob, entry.id, part.digest)
        stored = sum(part.data.size for part in parts)
        queries.set_stored(c, entry.id, stored, parent)
        return dataclasses.replace(entry, stored=stored, parent=parent)

    def set(self, id: int, entry_class: EntryClass | None, source: Source, ttl: int | None) -> Entry:
        try:
            return self._set(id, entry_class, source, ttl)
        except CorruptStoreError as error:
            if isinstance(error, Damaged):
                self._drop_damaged(error)
            elif not self._drop_unreadable(id):
                raise
            raise NotFoundError(f"entry {hex_id(id)} was damaged, and is dropped", id=hex_id(id)) from error

    def _set(self, id: int, entry_class: EntryClass | None, source: Source, ttl: int | None) -> Entry:
        now = self.now()
        with self.db.read() as c:
            before = self.find(c, id)
        grown = before.size if before is not None and before.parent is not None and entry_class == "learned" else 0
        with self.space.room(grown, grown, id) if grown else self.writing() as (c, _):
            entry = self.find(c, id)
            if entry is None:
                raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
            if entry_class is not None:
                if entry_class == "learned" and entry.parent is not None:
                    entry = self.make_whole(c, entry)
                queries.set_class(c, id, entry_class, source)
                entry = dataclasses.replace(entry, entry_class=entry_class, source=source)
            if ttl is not None:
                lasting = ttl if ttl > 0 else None
                expires_at = policy.expires_at(now, lasting)
                queries.set_expiry(c, id, lasting, expires_at)
                entry = dataclasses.replace(entry, ttl=lasting, expires_at=expires_at)
        return entry

"""`Store`: the face of kvstore."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from . import check, db, layout, learning, meta, policy, prefixes, queries, upkeep
from .arguments import as_array, as_tokens, choice, entry_id, is_text, whole
from .behind import Pending, WriteBehind
from .engine import Engine
from .errors import InvalidInputError, KVStoreError, NotFoundError, StoreIOError
from .hashing import Digests, family
from .job import Job, new_id
from .lru import RamCache
from .policy import cuts_of
from .records import (
    CLASSES,
    SOURCES,
    Entry,
    EntryClass,
    FamilyStats,
    Match,
    SavedState,
    Source,
    Stats,
    hex_id,
)

ENTRIES_PER_PAGE = 256
MAX_TIMEOUT = 2_000_000  # seconds; SQLite counts milliseconds in an int


def _close(engine: Engine, behind: WriteBehind, background: upkeep.Upkeep | None) -> None:
    if os.getpid() != engine.db.pid:
        return  # a forked child leaves its parent's files alone
    behind.close()
    if background is not None:
        background.stop()
    if not engine.db.readonly:
        for step in (engine.clear_cut_off, engine.flush, lambda: upkeep.expire(engine), engine.db.truncate_log):
            with suppress(KVStoreError):  # what fails here (a full disk, a writer elsewhere) costs counts, not entries
                step()
    engine.db.close()
    engine.ram.clear()


class Store:
    """LLM sequence states in one SQLite file, shared prefixes as deltas, with a RAM layer before it.

    path: the file, created if it does not exist; ":memory:" for a store without one.
    fingerprint: names model and context settings; put, match, get and the rest see only entries of the same one. A store
        opened without one matches entries that were put without one, and finds entries of any fingerprint by their id.
    cache_ram_mib: bounds the bytes that the RAM layer holds (0: off, -1: no limit).
    cache_disk_mib: bounds the file with its write-ahead log (-1: no limit).
    min_saved_mib: a state is stored as a delta where that saves at least so much.
    write_behind: `put` returns when the entry is in RAM; `flush` waits until all is on disk.
    verify: check the digest of every state that is given back.
    readonly: never writes; the file must exist and be of this version.
    auto_learn: learn the prefixes that three entries of a family have in common.
    timeout: seconds to wait for another process that writes, before BusyError.
    key: opens, or creates, an encrypted file (README, Encryption). Text, at least one character; it is never logged.

    A context manager. Safe to use from several threads, and several processes may open one file; not across a fork.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: str = "",
        cache_ram_mib: float = 8192,
        cache_disk_mib: float = -1,
        min_saved_mib: float = 16.0,
        write_behind: bool = False,
        verify: bool = True,
        readonly: bool = False,
        auto_learn: bool = False,
        timeout: float = 30.0,
        key: str | None = None,
    ) -> None:
        self.path = os.fspath(path)
        if not isinstance(self.path, str) or not self.path:
            raise InvalidInputError(f"path is {path!r}", hint='give the path of a file, or ":memory:"')
        if not isinstance(fingerprint, str):
            raise InvalidInputError(f"fingerprint is {type(fingerprint).__name__}, not str")
        if not is_text(fingerprint):
            raise InvalidInputError(f"fingerprint {fingerprint!r} is no text", hint="it holds lone surrogates")
        sizes = {"cache_ram_mib": cache_ram_mib, "cache_disk_mib": cache_disk_mib, "min_saved_mib": min_saved_mib}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidInputError(f"{name} is {value!r}, not a number of MiB")
        if min_saved_mib < 0:
            raise InvalidInputError(f"min_saved_mib is {min_saved_mib}", hint="give 0 or more")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= MAX_TIMEOUT:
            raise InvalidInputError(f"timeout is {timeout!r}", hint=f"give seconds, from 0 to {MAX_TIMEOUT}")
        created = False
        memory = self.path == db.MEMORY
        if not memory:
            self.path = os.path.abspath(self.path)  # connections are opened later too, in whatever folder we are then
            db.refuse_network_filesystem(self.path)
            if readonly:
                if not os.path.exists(self.path):
                    raise StoreIOError(f"{self.path} does not exist", path=self.path)
            else:
                created = db.reserve_file(self.path)
        try:
            database = db.Database(self.path, readonly=readonly, timeout=timeout, key=key)
            engine = Engine(
                database,
                fingerprint=fingerprint,
                ram=RamCache(policy.budget_bytes(cache_ram_mib)),
                disk_budget=policy.budget_bytes(cache_disk_mib),
                min_saved=int(min_saved_mib * policy.MIB),
                verify=verify,
            )
            try:
                engine.prepare()
            except BaseException:
                database.close()
                raise
        except BaseException:
            if created:
                for suffix in ("", "-wal", "-shm"):
                    with suppress(OSError):
                        os.unlink(self.path + suffix)
            raise
        self._engine = engine
        self._behind = WriteBehind(engine.ram, engine.tally.use)
        self._write_behind = write_behind and not readonly
        self._upkeep: upkeep.Upkeep | None = None
        if not readonly and not memory:
            self._upkeep = upkeep.Upkeep(engine, learning.AutoLearn(engine).run if auto_learn else None)
        # Closes at the latest when the interpreter ends, while threads can still be joined.
        self._finalizer = weakref.finalize(self, _close, engine, self._behind, self._upkeep)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """The fingerprint that this store was opened with."""
        return self._engine.fingerprint

    def __repr__(self) -> str:
        return f"Store({self.path!r}, fingerprint={self._engine.fingerprint!r})"

    # -- entries in and out

    def put(
        self,
        tokens: Any,
        state: Any,
        *,
        draft: Any = None,
        entry_class: EntryClass = "normal",
        source: Source = "default",
        ttl: int | None = None,
        n_system: int = 0,
        user_start: int = 0,
        excerpt: str = "",
        n_input: int | None = None,
        n_images: int = 0,
        share: bool = True,
        head: bytes | None = None,
    ) -> Entry:
        """Stores the state of a token sequence; all of it or nothing.

        tokens: int32, shape (n,), n > 0. state, draft: anything bytes-like, not empty; not changed, and not kept.
        ttl: seconds until the entry expires, None = never. n_system: tokens of the system block; user_start: where the
        first user turn starts; both decide the family. excerpt: the start of the first user message, for people.
        share=False stores it whole. head: of the file that the state comes from (`slotfile.head_of`), to write it again.

        The same tokens again replace the entry. Normal entries whose tokens begin this one's are removed where this
        one's state can serve them. Raises InvalidInputError, OverBudgetError, DiskFullError, BusyError, ReadOnlyError.
        """
        self._ready()
        array = as_tokens(tokens)
        choice(entry_class, CLASSES, "class")
        choice(source, SOURCES, "source")
        n_system = whole(n_system, "n_system", 0, len(array))
        user_start = whole(user_start, "user_start", 0, len(array))
        if not isinstance(excerpt, str | bytes):
            raise InvalidInputError(f"excerpt is {type(excerpt).__name__}, not str")
        ttl = None if ttl is None else whole(ttl, "ttl", 1, 1 << 40)
        n_input = len(array) if n_input is None else whole(n_input, "n_input", 0)
        n_images = whole(n_images, "n_images", 0)
        main = as_array(state, "state")
        second = None if draft is None else as_array(draft, "draft")
        digests = Digests(main=main, draft=second)
        job = Job(
            id=new_id(),
            tokens=array,
            key=prefixes.key_of(array),
            main=main,
            draft=second,
            digests=digests,
            cuts=cuts_of(main, len(array)),
            entry_class=entry_class,
            source=source,
            ttl=ttl,
            family=family(array, n_system, user_start),
            excerpt=meta.clean_excerpt(excerpt),
            n_input=n_input,
            n_images=n_images,
            share=share,
            head=None if head is None else bytes(head),
        )
        if self._write_behind and not self._engine.holds(job):
            if self._behind.reserve(job.size):
                return self._put_behind(job)
            self._behind.drain()
        digests.begin()
        entry = self._engine.put(job)
        self._wake()
        return entry

    def _put_behind(self, job: Job) -> Entry:
        """Queues a put, with copies of the caller's arrays in room that is reserved for them."""
        engine, reserved = self._engine, job.size
        try:
            main, draft = job.main.copy(), None if job.draft is None else job.draft.copy()
        except BaseException:
            engine.ram.cancel(reserved)
            raise
        for array in (job.tokens, main, draft):
            if array is not None:
                array.flags.writeable = False
        digests = Digests(main=main, draft=draft)
        digests.begin()
        job = replace(job, main=main, draft=draft, digests=digests)

        def store() -> None:
            held = [reserved]
            try:
                engine.put(job, owned=True, release=lambda: engine.ram.cancel(held.pop()))
            finally:
                if held:
                    engine.ram.cancel(held.pop())

        entry = job.entry(engine.now(), job.size, None)
        self._behind.add(Pending(entry, job, store))
        return entry

    def get(self, id: int, *, n_tokens: int | None = None) -> SavedState | None:
        """The states of an entry, byte for byte as they were put, or None.

        n_tokens cuts them: to the state of the first n_tokens, where the layout allows it (else LayoutError). The arrays
        are read-only. An entry that cannot be given back right is dropped, with a logged warning, and is a miss.
        """
        self._ready()
        id = entry_id(id)
        pending = self._behind.get(id)
        if pending is not None:
            pending.uses.append(self._engine.now())
            self._engine.tally.count("hits")
            job = pending.job
            saved: SavedState | None = SavedState(pending.entry, job.tokens, job.main, job.draft)
        else:
            saved = self._engine.get(id)
        if saved is None:
            return None
        if n_tokens is not None and n_tokens != saved.entry.n_tokens:
            n = whole(n_tokens, "n_tokens", 1, saved.entry.n_tokens)
            saved = SavedState(
                saved.entry,
                saved.tokens[:n],
                layout.crop(saved.main, n),
                None if saved.draft is None else layout.crop(saved.draft, n),
            )
        self._engine.tally.count("tokens_served", len(saved.tokens))
        return saved

    def take(self, id: int) -> SavedState | None:
        """`get`, and removes the entry; a learned or pinned one stays."""
        self._settle()
        saved = self.get(id)
        if saved is None or saved.entry.entry_class != "normal":
            return saved
        # Of two who take at once, one deletes it: the other has a miss.
        return saved if self._engine.delete(entry_id(id), "resident", "taken") else None

    def match(self, tokens: Any) -> Match | None:
        """The entry that can serve the most leading tokens of a request, and how many; None where none serves any.

        An entry whose state cannot be cut serves only all of its tokens, or as many as one of its checkpoints has.
        """
        self._ready()
        engine = self._engine
        key = prefixes.key_of(as_tokens(tokens))
        best: Match | None = None
        with engine.db.read() as c:
            fingerprint = engine.fingerprint_id(c)
            found = None if fingerprint is None else prefixes.longest(c, fingerprint, key, engine.now())
            if found is not None:
                entry = queries.entry(c, found[0], fingerprint)
                if entry is not None:
                    best = Match(engine.with_uses(entry), found[1])
        for pending in self._behind.all():
            if engine.is_expired(pending.entry):
                continue
            n = policy.common(pending.job.key, key)
            cuts = pending.job.cuts
            if not cuts.any and n < pending.entry.n_tokens:
                n = max((m for m in cuts.counts if m <= n), default=0)
            if n > (0 if best is None else best.n_common):
                best = Match(pending.entry, n)
        if best is None:
            engine.tally.count("unmatched")
        return best

    # -- entries as rows

    def entry(self, id: int) -> Entry | None:
        """What is known of an entry; reads none of its bytes."""
        self._ready()
        pending = self._behind.get(entry_id(id))
        if pending is not None:
            return pending.entry
        with self._engine.db.read() as c:
            return self._engine.find(c, int(id))

    def entries(self, *, family: int | None = None, entry_class: EntryClass | None = None) -> Iterator[Entry]:
        """All live entries, in no particular order, read in pages: a long walk keeps no snapshot of the file open."""
        self._settle()
        if entry_class is not None:
            choice(entry_class, CLASSES, "class")
        if family is not None:
            family = whole(family, "family", 0, (1 << 64) - 1)
        return self._entries(family, entry_class)

    def _entries(self, family: int | None, entry_class: str | None) -> Iterator[Entry]:
        engine = self._engine
        after = -(1 << 63)
        while True:
            with engine.db.read() as c:
                page = queries.entries_page(
                    c, after, ENTRIES_PER_PAGE, engine.scope(c), family, entry_class, engine.now()
                )
            for entry in page:
                yield engine.with_uses(entry)
            if len(page) < ENTRIES_PER_PAGE:
                return
            after = queries.signed(page[-1].id)

    def set(
        self, id: int, *, entry_class: EntryClass | None = None, source: Source = "request", ttl: int | None = None
    ) -> Entry:
        """Changes the class of an entry, or its expiry: ttl seconds from now, 0 = never. Raises NotFoundError."""
        self._settle()
        if entry_class is not None:
            choice(entry_class, CLASSES, "class")
        choice(source, SOURCES, "source")
        return self._engine.set(entry_id(id), entry_class, source, None if ttl is None else whole(ttl, "ttl", 0, 1 << 40))

    def delete(self, id: int, *, children: str = "resident") -> list[int]:
        """Removes an entry; gives the ids of all that went.

        children: what becomes of the entries stored against it: "resident" keeps those that the RAM layer holds, "keep"
        all of them (both rebuilt whole), "drop" none.
        """
        self._settle()
        choice(children, ("resident", "keep", "drop"), "value of children")
        removed = self._engine.delete(entry_id(id), children)
        self._wake()
        return removed

    def learn(self, tokens: Any, n_tokens: int | None = None) -> Entry:
        """Cuts a learned prefix out of a stored state, and stores the entries that continue it against it.

        tokens: the prefix itself, or the id of an entry with n_tokens, how many of its tokens to learn (None: all).
        Raises NotFoundError where no entry holds the prefix, LayoutError where its state cannot be cut there.
        """
        self._settle()
        engine = self._engine
        if isinstance(tokens, int | np.integer):
            id = entry_id(tokens)
            entry = self.entry(id)
            if entry is None:
                raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
            n = entry.n_tokens if n_tokens is None else whole(n_tokens, "n_tokens", 1, entry.n_tokens)
            with engine.db.read() as c:
                theirs = queries.fingerprint_of(c, id)
            if theirs is not None and theirs != engine.fingerprint:
                raise InvalidInputError(
                    f"entry {hex_id(id)} has the fingerprint {theirs!r}", hint="open the store with that fingerprint"
                )
        else:
            array = as_tokens(tokens)
            n = len(array) if n_tokens is None else whole(n_tokens, "n_tokens", 1, len(array))
            with engine.db.read() as c:
                found = learning.source_of(engine, c, array[:n])
            if found is None:
                raise NotFoundError(
                    f"no entry can serve these {n} tokens", hint="put a state that begins with them first", n_tokens=n
                )
            id = found
        return learning.learn(engine, id, n, "learned", "request")

    # -- the store as a whole

    def stats(self) -> Stats:
        """Figures of the file and of this Store's RAM layer."""
        self._settle()
        engine = self._engine
        # No transaction of this process may be on its way: counts that it took would be neither here nor there.
        with engine.db.exclusive(), engine.db.read() as c:
            totals = queries.totals(c)
            counts = queries.counters(c)
            families = queries.family_totals(c)
            page_size, _, free = queries.pages(c)
            for name, by in engine.tally.counts().items():
                counts[name] = counts.get(name, 0) + by
        prefix = "evicted_"
        return Stats(
            entries={name: totals[name].entries for name in CLASSES},
            size=sum(t.size for t in totals.values()),
            stored=sum(t.stored for t in totals.values()),
            file_bytes=engine.db.file_bytes(),
            free_bytes=free * page_size,
            ram_bytes=engine.ram.n_bytes,
            ram_entries=len(engine.ram),
            hits=counts.get("hits", 0),
            misses=counts.get("misses", 0),
            unmatched=counts.get("unmatched", 0),
            tokens_served=counts.get("tokens_served", 0),
            puts=counts.get("puts", 0),
            shared_puts=counts.get("shared_puts", 0),
            evictions={k[len(prefix) :]: v for k, v in sorted(counts.items()) if k.startswith(prefix)}
            | ({"ram_budget": engine.ram.evictions} if engine.ram.evictions else {}),
            encode_seconds=counts.get("encode_us", 0) / 1e6,
            decode_seconds=counts.get("decode_us", 0) / 1e6,
            families=tuple(FamilyStats(*f) for f in families),
        )

    def verify(self) -> list[check.Problem]:
        """Checks the file and every digest; reads only. An empty list is a clean store."""
        self._settle()
        return check.verify(self._engine.db)

    def gc(self) -> list[int]:
        """Removes what expired, and gives all free space back to the file system; the ids that went."""
        self._settle()
        removed: list[int] = []
        while gone := upkeep.expire(self._engine, 1024, wait=True):
            removed += gone
        upkeep.sweep(self._engine)
        self._engine.space.give_back_all()
        return removed

    def flush(self) -> None:
        """Waits until everything that was put is on disk, with the counts of its uses."""
        self._settle()
        if not self._engine.db.readonly:
            with self._engine.writing():  # also waits for counts that another thread is writing
                pass

    def close(self) -> None:
        """Writes what is left and closes the file. Raises WriteBehindError where a put in write-behind mode failed."""
        self._finalizer()
        self._behind.raise_failure()

    def _ready(self) -> None:
        self._engine.db.check()
        self._behind.raise_failure()

    def _settle(self) -> None:
        self._engine.db.check()
        self._behind.drain()
        self._behind.raise_failure()

    def _wake(self) -> None:
        if self._upkeep is not None:
            self._upkeep.wake()

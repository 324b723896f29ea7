"""`Store`, the public class: checks arguments, and hands each call to the module that does it."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .. import layout, meta
from ..errors import InvalidInputError, NotFoundError
from ..storage import db, policy, queries, queries_lists
from ..storage import prefix_index as prefixes
from ..storage.ram_cache import RamCache
from ..types import CLASSES, SOURCES, Entry, EntryClass, Match, RemoteMatch, SavedState, Source, Stats, hex_id
from ..util.hashing import family
from ..util.validate import as_state, as_tokens, check_id, check_int, choice, is_text, lifetime
from . import delete, figures, get, learning, maintenance, put
from . import verify as check
from .core import StoreCore
from .opening import close_core, open_core
from .put_request import new_request
from .update import set_entry
from .write_behind import WriteBehind

if TYPE_CHECKING:
    from ..fleet.remote import Remote

log = logging.getLogger("kvstore")
ENTRIES_PER_PAGE = 256
# An entry, its id, or the 16 hex digits of that.
EntryId: TypeAlias = int | str | Entry
_OF_TOKENS, _OF_ENTRY = "the number of tokens", "the number of tokens of the entry"
# A put of so many bytes, and every so many puts, wake the maintenance, which copies the log into the file: pages that several
# small puts write are then copied once.
WAKE_BYTES, WAKE_PUTS = 1 << 20, 64
MAX_TIMEOUT = 2_000_000  # seconds; SQLite counts milliseconds in an int


def _cut(saved: SavedState, n: int) -> SavedState:
    """The state of the first n tokens. Raises LayoutError."""
    get.refuse_opaque(saved.entry, saved.main, saved.draft)
    draft = None if saved.draft is None else layout.crop(saved.draft, n)
    return SavedState(saved.entry, saved.tokens[:n], layout.crop(saved.main, n), draft)


class Store:
    """LLM sequence states in one SQLite file. States that share a prefix are stored as deltas; a RAM layer caches them.

    path: the file, created if it does not exist; ":memory:" for a store without one. A symbolic link is followed once, here.
    fingerprint: names model and context settings; put, match, get and the other calls see only its own entries. A store
        opened without one matches entries that were put without one, and finds entries of any fingerprint by their id.
    cache_ram_mib: bounds the bytes that the RAM layer holds (0: off, -1: no limit).
    cache_disk_mib: bounds the file with its write-ahead log (-1: no limit).
    min_saved_mib: a state is stored as a delta if that saves at least this many MiB; None: an eighth of the state's size.
    write_behind: `put` returns when the entry is in RAM; `flush` waits until all is on disk. Until then an entry's `parent`
        is None and its `stored` is its size. A put that fails later is reported by the next call other than get, match, entry.
    verify: check the digest of every state that `get` returns.
    readonly: never writes; the file must exist and be of this version.
    auto_learn: learn the prefixes that three entries of a family have in common.
    timeout: seconds to wait for another process that writes, before BusyError.
    key: opens, or creates, an encrypted file (README, Encryption). Text, at least one character; it is never logged.
    remote: the address of an object store that a fleet shares (docs/fleet.md): "s3://BUCKET/PREFIX", "gs://", "az://",
        "file:///FOLDER". remote_key: the fleet's key, bytes or the path of a key file. publish: "learned" entries (and
        pinned ones), "all", or "none". remote_options: settings of the object store, and those of `fleet.options`.

    A context manager. Safe to use from several threads, and several processes may open one file; not across a fork.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: str = "",
        cache_ram_mib: float = 8192,
        cache_disk_mib: float = -1,
        min_saved_mib: float | None = None,
        write_behind: bool = False,
        verify: bool = True,
        readonly: bool = False,
        auto_learn: bool = False,
        timeout: float = 30.0,
        key: str | None = None,
        remote: str | None = None,
        remote_key: Any = None,
        publish: str = "learned",
        remote_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(self.path, str) or not self.path:
            raise InvalidInputError(f"path is {path!r}", hint='give the path of a file, or ":memory:"')
        if not isinstance(fingerprint, str):
            raise InvalidInputError(f"fingerprint is {type(fingerprint).__name__}, not str")
        if not is_text(fingerprint):
            raise InvalidInputError(f"fingerprint {fingerprint!r} is not text", hint="it holds lone surrogates")
        sizes = {"cache_ram_mib": cache_ram_mib, "cache_disk_mib": cache_disk_mib}
        for name, value in (sizes if min_saved_mib is None else sizes | {"min_saved_mib": min_saved_mib}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidInputError(f"{name} is {value!r}, not a number of MiB", hint="8192 is 8 GiB, 0.5 is 512 KiB")
        if min_saved_mib is not None and min_saved_mib < 0:
            raise InvalidInputError(f"min_saved_mib is {min_saved_mib}", hint="give 0 or more")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= MAX_TIMEOUT:
            raise InvalidInputError(f"timeout is {timeout!r}", hint=f"give seconds, from 0 to {MAX_TIMEOUT}")
        connect = None
        if remote is not None:
            from .remote_opening import prepare_remote

            connect = prepare_remote(remote, remote_key, publish, remote_options)
        elif remote_key is not None or remote_options is not None:
            raise InvalidInputError("remote_key and remote_options need a remote", hint="give remote too")
        memory = self.path == db.MEMORY
        if not memory:
            self.path = db.resolve(self.path)  # once: links and folders may change, and connections are opened later too
            db.refuse_network_filesystem(self.path)

        def build() -> StoreCore:
            return StoreCore(
                db.Database(self.path, readonly=readonly, timeout=timeout, key=key),
                fingerprint=fingerprint,
                ram=RamCache(policy.budget_bytes(cache_ram_mib)),
                disk_budget=policy.budget_bytes(cache_disk_mib),
                min_saved=None if min_saved_mib is None else int(min_saved_mib * policy.MIB),
                verify=verify,
            )

        core = open_core(self.path, build, create=not readonly and not memory, key=key, timeout=timeout)
        self._core = core
        self._behind = WriteBehind(core)
        self._puts = 0
        self._write_behind = write_behind and not readonly
        self._maintenance: maintenance.Maintenance | None = None
        self._remote: Remote | None = None
        learn: Callable[[], object] | None = None
        if connect is not None:
            self._remote = connect(core, self._behind, self._write_behind)
        if auto_learn:
            run = learning.AutoLearn(core).run
            learn = run if self._remote is None else self._remote.learner(run)
        if not readonly and not memory:
            self._maintenance = maintenance.Maintenance(core, learn)
        # Closes at the latest when the interpreter ends, while threads can still be joined.
        self._finalizer = weakref.finalize(self, close_core, core, self._behind, self._maintenance, self._remote)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """The fingerprint that this store was opened with."""
        return self._core.fingerprint

    def __repr__(self) -> str:
        return f"Store({self.path!r}, fingerprint={self._core.fingerprint!r})"

    # -- entries in and out

    def put(
        self,
        tokens: Any,
        state: Any,
        *,
        draft: Any = None,
        entry_class: EntryClass = "normal",
        source: Source = "default",
        ttl: int | str | timedelta | None = None,
        n_system: int = 0,
        user_start: int = 0,
        excerpt: str = "",
        n_input: int | None = None,
        n_images: int = 0,
        share: bool = True,
        head: bytes | None = None,
    ) -> Entry:
        """Stores the state of a token sequence, all of it or nothing. Returns the entry.

        tokens: int32, shape (n,), n > 0. state, draft: anything bytes-like, not empty; not changed, and not kept.
        ttl: seconds until the entry expires, a timedelta, or text such as "7d"; None = never. n_system: tokens of the system
        block; user_start: where the first user turn starts; both decide the family. excerpt: the start of the first user
        message, shown in lists.
        share=False stores the state whole. head: the header of the file that the state comes from
        (`slotfile.head_of`), needed to write that file again.

        A second put of the same tokens replaces the entry. Normal entries whose tokens are a prefix of these tokens are
        removed if this state can serve them, that is, if it can be cropped.

        Raises InvalidInputError, OverBudgetError, DiskFullError, BusyError, ReadOnlyError.
        """
        self._ready()
        array = as_tokens(tokens)
        choice(entry_class, CLASSES, "class")
        choice(source, SOURCES, "source")
        n_system = check_int(n_system, "n_system", 0, len(array), why=_OF_TOKENS)
        user_start = check_int(user_start, "user_start", 0, len(array), why=_OF_TOKENS)
        if not isinstance(excerpt, str | bytes):
            raise InvalidInputError(f"excerpt is {type(excerpt).__name__}, not str")
        seconds = None if ttl is None else lifetime(ttl)
        if head is not None and not isinstance(head, bytes | bytearray | memoryview):
            raise InvalidInputError(f"head is {type(head).__name__}, not bytes", hint="give what slotfile.head_of gives")
        n_input = len(array) if n_input is None else check_int(n_input, "n_input", 0)
        n_images = check_int(n_images, "n_images", 0)
        main = as_state(state, "state")
        second = None if draft is None else as_state(draft, "draft")
        request = new_request(
            array,
            main,
            second,
            entry_class=entry_class,
            source=source,
            ttl=seconds,
            family=family(array, n_system, user_start),
            excerpt=meta.clean_excerpt(excerpt),
            n_input=n_input,
            n_images=n_images,
            share=share,
            head=None if head is None else bytes(head),
        )
        entry = self._behind.put(request) if self._write_behind else put.put(self._core, request)
        self._puts += 1
        if entry.size >= WAKE_BYTES or self._puts % WAKE_PUTS == 0:
            self._wake()
        self._offer(entry)
        return entry

    def get(self, id: EntryId, *, n_tokens: int | None = None, count: bool = True) -> SavedState | None:
        """The states of an entry, byte for byte as they were put, or None.

        n_tokens: crop to the state of the first n_tokens; LayoutError if the layout does not allow it. The arrays are
        read-only. An entry that cannot be restored exactly is dropped, with a logged warning, and is a miss. count=False: the
        entry does not count as used, nor as a hit or a miss.
        """
        self._core.db.check()
        id = check_id(id)
        queued, saved = False, None
        if not count:
            self._settle()
            saved = get.read(self._core, id)
        else:
            queued, saved = self._behind.get(id)
        if count and not queued:
            saved = get.get(self._core, id)
        if saved is None:
            return None
        if n_tokens is not None and n_tokens != saved.entry.n_tokens:
            n = check_int(n_tokens, "n_tokens", 1, saved.entry.n_tokens, why=_OF_ENTRY)
            saved = _cut(saved, n)
        if count:
            self._core.counters.count("tokens_served", len(saved.tokens))
        return saved

    def take(self, id: EntryId) -> SavedState | None:
        """`get`, then deletes the entry; a learned or pinned entry stays."""
        with self._settled():
            saved = self.get(id)
            if saved is None or saved.entry.entry_class != "normal":
                return saved
            # Of two callers that take at once, one deletes the entry and the other has a miss.
            return saved if delete.delete(self._core, check_id(id), "resident", "taken") else None

    def match(self, tokens: Any) -> Match | None:
        """The entry that can serve the most leading tokens of a request, and the number of tokens; None if none can.

        An entry whose state cannot be cropped serves only all of its tokens, or the tokens up to one of its checkpoints.
        """
        self._core.db.check()
        key = prefixes.key_of(as_tokens(tokens))
        found = self._core.past_damage(self._behind.match, key)
        if found is None:
            self._core.counters.count("unmatched")
            if log.isEnabledFor(logging.DEBUG):
                self._say_others()
            return None
        return Match(*found)

    def _say_others(self) -> None:
        """A match that finds nothing is most often one under another fingerprint."""
        engine = self._core
        with engine.db.read() as c:
            n = queries.entries_of_others(c, engine.fingerprint)
        if n:
            log.debug("no match: %d entries have another fingerprint than %r", n, engine.fingerprint)

    # -- entries as rows

    def entry(self, id: EntryId) -> Entry | None:
        """The entry of this id without its states, or None if there is none."""
        self._core.db.check()
        id = check_id(id)
        queued, entry = self._behind.lookup(id)
        if queued:
            return entry
        return self._core.past_damage(self._core.entry, id)

    def entries(self, *, family: int | None = None, entry_class: EntryClass | None = None) -> Iterator[Entry]:
        """All live entries, in no particular order, read in pages: a long walk keeps no snapshot of the file open."""
        self._settle()
        if entry_class is not None:
            choice(entry_class, CLASSES, "class")
        if family is not None:
            family = check_int(family, "family", 0, (1 << 64) - 1)
        return self._entries(family, entry_class)

    def _entries(self, family: int | None, entry_class: str | None) -> Iterator[Entry]:
        core = self._core
        after: int | None = queries_lists.FIRST
        while after is not None:
            self._settle()
            with core.db.read() as c:
                wanted = queries_lists.Filter(fingerprint=core.scope(c), family=family, entry_class=entry_class)
                page, after = queries_lists.page(c, wanted, after, ENTRIES_PER_PAGE, core.now())
            for entry in page:
                yield core.with_uses(entry)

    def set(
        self,
        id: EntryId,
        *,
        entry_class: EntryClass | None = None,
        source: Source = "request",
        ttl: int | str | timedelta | None = None,
    ) -> Entry:
        """Changes the class of an entry, or its expiry: ttl from now, as `put` takes it, 0 = never. Raises NotFoundError."""
        if entry_class is not None:
            choice(entry_class, CLASSES, "class")
        choice(source, SOURCES, "source")
        seconds = None if ttl is None else lifetime(ttl, low=0)
        with self._settled():
            entry = set_entry(self._core, check_id(id), entry_class, source, seconds)
        self._offer(entry)
        return entry

    def delete(self, id: EntryId, *, children: str = "resident") -> list[int]:
        """Deletes an entry; returns the ids of all entries that were deleted.

        children: what becomes of the entries stored against it: "resident" keeps those that the RAM layer holds, "keep"
        all of them (both are stored without it first), "drop" none, at any depth.
        """
        choice(children, ("resident", "keep", "drop"), "value of children")
        with self._settled():
            removed = delete.delete(self._core, check_id(id), children)
        self._wake()
        return removed

    def learn(self, tokens: Any, n_tokens: int | None = None) -> Entry:
        """Cuts a learned prefix out of a stored state, and stores the entries that continue it against it.

        tokens: the prefix itself, or an entry, or its id, with n_tokens, how many of its tokens to learn (None: all).
        Raises NotFoundError where no entry holds the prefix, LayoutError where its state cannot be cut there.
        """
        with self._settled():
            entry = self._learn(tokens, n_tokens)
        self._offer(entry)
        return entry

    def _learn(self, tokens: Any, n_tokens: int | None) -> Entry:
        core = self._core
        if isinstance(tokens, int | np.integer | Entry | str):
            id = check_id(tokens)
            entry = self.entry(id)
            if entry is None:
                raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
            n = entry.n_tokens if n_tokens is None else check_int(n_tokens, "n_tokens", 1, entry.n_tokens, why=_OF_ENTRY)
            with core.db.read() as c:
                theirs = queries.fingerprint_of(c, id)
            if theirs is not None and theirs != core.fingerprint:
                raise InvalidInputError(
                    f"entry {hex_id(id)} has the fingerprint {theirs!r}", hint="open the store with that fingerprint"
                )
        else:
            array = as_tokens(tokens)
            n = len(array) if n_tokens is None else check_int(n_tokens, "n_tokens", 1, len(array), why=_OF_TOKENS)
            with core.db.read() as c:
                found = learning.source_of(core, c, array[:n])
            if found is None:
                raise NotFoundError(
                    f"no entry can serve these {n} tokens", hint="put a state that begins with them first", n_tokens=n
                )
            id = found
        return learning.learn(core, id, n, "learned", "request")

    # -- beyond this machine

    @property
    def remote(self) -> Remote | None:
        """The shared tier that this store was opened with: its metrics, `poll`, `push`, `wait`."""
        return self._remote

    def remote_match(self, tokens: Any, n_local: int = 0) -> RemoteMatch | None:
        """The object of the fleet that serves the most leading tokens, where it serves more than n_local; None else.

        Makes no request: it looks into the local copy of the listing.
        """
        self._core.db.check()
        array = as_tokens(tokens)
        n_local = check_int(n_local, "n_local", 0, len(array), why=_OF_TOKENS)
        return None if self._remote is None else self._remote.match(array, n_local)

    def fetch(self, remote_match: RemoteMatch, timeout: float | None = None, *, longest: bool = False) -> SavedState | None:
        """The state of the first n_common tokens of a remote match, checked, or None; then puts it here, behind.

        timeout: seconds after which it ends with None. longest: also serves tokens of the request behind n_common that the
        object has. The id of the entry is 0 until it is put.
        """
        self._core.db.check()
        if not isinstance(remote_match, RemoteMatch):
            raise InvalidInputError(f"remote_match is {type(remote_match).__name__}", hint="give what remote_match gives")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout)):
            raise InvalidInputError(f"timeout is {timeout!r}", hint="give seconds, or None")
        if self._remote is None:
            return None
        from .fleet_link import saved_state

        state = self._remote.fetch(remote_match, timeout, longest=longest)
        return None if state is None else saved_state(state, self._core.now())

    def _offer(self, entry: Entry) -> None:
        if self._remote is not None:
            self._remote.offer(entry)

    # -- the store as a whole

    def stats(self) -> Stats:
        """Figures of the file and of this Store's RAM layer."""
        self._settle()
        return figures.collect(self._core, self._maintenance)

    def verify(self) -> list[check.Problem]:
        """Checks the file and every digest; reads only. An empty list is a clean store."""
        self._settle()
        return check.verify(self._core.db)

    def gc(self, *, max_size: int | None = None) -> list[int]:
        """Removes what expired and what failed puts left, gives free space back to the file system; returns the deleted ids.

        max_size: also evicts, the least recently used first, learned and pinned entries last, until the file and its log
        have at most this many bytes. Raises InvalidInputError where an empty store has more, BusyError where another
        process keeps the log from being emptied.
        """
        self._settle()
        budget = self._core.budget
        if max_size is not None:
            max_size = check_int(max_size, "max_size", 1)
            budget.check_size(max_size)
        removed: list[int] = []
        core = self._core
        while gone := maintenance.expire(core, 1024, wait=True):
            removed += gone
        core.freeing(lambda: maintenance.delete_orphans(core))
        maintenance.prune_families(core)
        core.delete_abandoned_blobs()
        removed += core.enforce_budget()
        if max_size is not None:
            removed += [entry.id for entry in budget.prune(max_size)]
        core.freeing(core.budget.shrink_all)
        return removed

    def flush(self) -> None:
        """Waits until everything that was put is on disk, with the counts of its uses."""
        self._settle()
        if not self._core.db.readonly:
            with self._core.transaction(counts=True):  # also waits for counts that another thread is writing
                pass

    def close(self) -> None:
        """Writes what is left and closes the file. Raises WriteBehindError where a put in write-behind mode failed."""
        self._finalizer()
        if os.getpid() == self._core.db.pid:
            self._behind.raise_failure()

    def _ready(self) -> None:
        """Reads do not come here: the report of a failed put is for those who put and flush."""
        self._core.db.check()
        self._behind.raise_failure()

    def _settle(self) -> None:
        self._core.db.check()
        self._behind.drain()
        self._behind.raise_failure()

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """For a change of what the file has: nothing is queued, and nothing is put meanwhile."""
        self._core.db.check()
        with self._behind.settled() if self._write_behind else nullcontext():
            self._behind.raise_failure()
            yield

    def _wake(self) -> None:
        if self._maintenance is not None:
            self._maintenance.wake()

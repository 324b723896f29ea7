"""Write-behind: a queue of puts in RAM, which one thread writes to the file in order.

Reads see the file with the queue laid over it, as if each queued put were already written: of several puts of the same
tokens the newest wins, and the entries that it replaces or contains are hidden until the file has dropped them.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..errors import ClosedError, KVStoreError, WriteBehindError
from ..storage import policy, queries, queries_blobs
from ..storage import prefix_index as prefixes
from ..storage.db import Connection
from ..types import Entry, EntryClass, SavedState, Source
from ..util.hashing import Digests
from . import put as puts
from .core import StoreCore
from .put_plan import find_identical
from .put_request import ParsedStates, PutRequest, Samples
from .queue_index import Overlaid, QueueIndex

T = TypeVar("T")
LOOKS = 3  # tries to read queue and file while neither changes; after that the queue is locked


@dataclass(slots=True, eq=False)
class QueuedPut:
    """A put that is not on disk yet.

    `entry` was given to the caller, `reserved` bytes of the RAM layer hold its arrays, `hides` are the ids that it
    replaces or contains. `uses` are the times of its hits: the file has no row yet that could count them.
    """

    entry: Entry
    request: PutRequest
    reserved: int
    hides: frozenset[int] = frozenset()
    uses: list[int] = field(default_factory=list)

    def view(self) -> Entry:
        """The entry with its uses."""
        if not self.uses:
            return self.entry
        last_used = max(self.entry.last_used, *self.uses)
        return replace(self.entry, hits=self.entry.hits + len(self.uses), last_used=last_used)


class WriteBehind:
    """A queue bounded by the RAM layer's budget: its entries hold reservations there.

    Thread rules: `order` is held by whoever changes the store, from the look at what is there to the change: it makes the
    order of puts. `_lock` guards the queue, its index and the failures, and is never held while the file is written.
    The writing thread takes `_lock` alone, so that a put may wait for it and hold `order`.
    """

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self.order = threading.RLock()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: OrderedDict[int, QueuedPut] = OrderedDict()
        self._last = 0  # number of the newest put
        self._index: QueueIndex[QueuedPut] = QueueIndex()
        self._by_key: dict[bytes, list[QueuedPut]] = {}
        self._by_id: dict[int, QueuedPut] = {}
        self._hidden: Counter[int] = Counter()
        self._generation = 0  # counts changes of the queue
        self._failures: list[tuple[int, BaseException]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- putting

    def put(self, request: PutRequest) -> Entry:
        """Queues a put. One that is in the file already, or never fits into RAM, waits for the queue and is written here."""
        with self.order:
            same = self._same(request)
            if isinstance(same, QueuedPut):
                return self._again(request, same)
            if same is None and self._reserve(request.size):
                return self._new(request)
            self.drain()
            return puts.put(self._core, request)

    def _same(self, request: PutRequest) -> QueuedPut | Entry | None:
        """The entry that has these tokens and these very bytes, as the caller sees it: queued, or in the file."""
        now = self._core.now()
        with self._lock:
            queued = self._index.get(request.key)
        if queued is not None:
            if _expired(queued.entry, now) or queued.request.digests.sizes != request.digests.sizes:
                return None
            return queued if queued.request.digests == request.digests else None

        def look() -> Entry | None:
            with self._core.db.read() as c:
                fingerprint = self._core.fingerprint_id(c)
                found = None if fingerprint is None else find_identical(self._core, c, fingerprint, request)
            return None if found is None or self._is_hidden(found.id) else found

        return self._steady(look)

    def _again(self, request: PutRequest, queued: QueuedPut) -> Entry:
        """Queues a put of tokens and bytes that are already queued: with the same id and arrays, only the meta differs."""
        with self._lock:
            known = queued.view()
        entry_class, source = policy.merged_class((known.entry_class, known.source), (request.entry_class, request.source))
        entry = replace(
            request.entry(self._core.now(), request.size, None),
            id=known.id, hits=known.hits, created_at=known.created_at, entry_class=entry_class, source=source,
        )  # fmt: skip
        earlier = queued.request
        request = replace(
            request, id=known.id, states=earlier.states, digests=earlier.digests, samples=earlier.samples,
            entry_class=entry_class, source=source, promised=entry,
        )  # fmt: skip
        return self._add(QueuedPut(entry, request, 0))

    def _new(self, request: PutRequest) -> Entry:
        """Queues a put with copies of the caller's arrays, in room that is reserved for them."""
        reserved = request.size
        try:
            main, draft = request.main.copy(), None if request.draft is None else request.draft.copy()
            for array in (request.tokens, main, draft):
                if array is not None:
                    array.flags.writeable = False
            states = ParsedStates(main, draft)
            request = replace(
                request, states=states, digests=Digests(main=main, draft=draft), samples=Samples(states)
            )
            _ = request.cuts  # parsed here, while no lock of the queue is held
            entry_class, source, hides = self._plan(request)
            request = replace(request, entry_class=entry_class, source=source)
            entry = request.entry(self._core.now(), reserved, None)
            return self._add(QueuedPut(entry, replace(request, promised=entry), reserved, hides))
        except BaseException:
            self._core.ram.cancel(reserved)
            raise

    def _plan(self, request: PutRequest) -> tuple[EntryClass, Source, frozenset[int]]:
        """The class of a new entry, and the ids that it replaces or contains, as `put_plan` finds when the put is written."""
        now = self._core.now()
        wanted: tuple[EntryClass, Source] = request.entry_class, request.source
        hides: set[int] = set()
        with self._lock:
            hides.update(queued.entry.id for queued in self._by_key.get(request.key, ()))
            newest = self._index.get(request.key)
            if newest is not None and not _expired(newest.entry, now):
                wanted = policy.merged_class((newest.entry.entry_class, newest.entry.source), wanted)
            for id, _ in list(prefixes.prefixes_in(self._index, request.key[:-4], now)):
                queued = self._by_id[id]
                if request.contains(queued.entry, queued.request.draft is not None):
                    hides.add(id)
        with self._core.db.read() as c:
            fingerprint = self._core.fingerprint_id(c)
            if fingerprint is None:
                return *wanted, frozenset(hides)
            for id in queries.same_tokens(c, fingerprint, request.key):
                hides.add(id)
                old = queries.entry(c, id, fingerprint)
                if newest is None and old is not None and not _expired(old, now) and not self._is_hidden(id):
                    wanted = policy.merged_class((old.entry_class, old.source), wanted)
            walked = prefixes.stored_prefixes(c, self._core.filters, fingerprint, request.key[:-4], now)
            for id, _ in walked.chosen(c, now, "any"):
                old = queries.entry(c, id, fingerprint)
                if old is None or self._is_hidden(id) or self._is_queued(id):
                    continue
                if request.contains(old, len(queries_blobs.blobs(c, id)) > 1):
                    hides.add(id)
        return *wanted, frozenset(hides)

    def _reserve(self, n_bytes: int) -> bool:
        """Reserves RAM for a put's copies, after waiting for earlier puts to be written; False if the copies can never fit."""
        with self._changed:
            while True:
                self._refuse_if_closed()
                if self._core.ram.reserve(n_bytes):
                    return True
                if not self._queue:
                    return False
                self._changed.wait()

    def _add(self, put: QueuedPut) -> Entry:
        with self._changed:
            self._refuse_if_closed()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvstore-write", daemon=True)
                thread.start()
                self._thread = thread
            self._last += 1
            self._queue[self._last] = put
            self._by_key.setdefault(put.request.key, []).append(put)
            for id in put.hides:
                self._hidden[id] += 1
                if id in self._by_id:
                    self._index.discard(self._by_id[id])
            self._by_id[put.entry.id] = put
            self._index.add(put)
            self._generation += 1
        return put.entry

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")

    # -- looking

    def _is_hidden(self, id: int) -> bool:
        with self._lock:
            return id in self._hidden

    def _is_queued(self, id: int) -> bool:
        with self._lock:
            return id in self._by_id

    def _steady(self, look: Callable[[], T]) -> T:
        """Calls `look` until no put moved from the queue to the file during the call; gives its result."""
        for _ in range(LOOKS):
            with self._lock:
                before = self._generation
            found = look()
            with self._lock:
                if self._generation == before:
                    return found
        with self._lock:
            return look()

    def lookup(self, id: int) -> tuple[bool, Entry | None]:
        """(known, entry): whether the queue decides about an id, and the live entry or None. If not known, ask the file."""
        with self._lock:
            queued = self._by_id.get(id)
            if id in self._hidden:
                return True, None
            if queued is None:
                return False, None
            return True, None if _expired(queued.entry, self._core.now()) else queued.view()

    def get(self, id: int) -> tuple[bool, SavedState | None]:
        """`lookup` of an entry with its states; counts a hit or a miss."""
        with self._lock:
            known, entry = self.lookup(id)
            if not known:
                return False, None
            if entry is None:
                self._core.counters.count("misses")
                return True, None
            queued = self._by_id[id]
            queued.uses.append(self._core.now())
            self._core.counters.count("hits")
            return True, SavedState(queued.view(), queued.request.tokens, queued.request.main, queued.request.draft)

    def match(self, key: bytes) -> tuple[Entry, int] | None:
        """The live entry that can serve the most leading tokens of `key`, and how many."""
        core = self._core

        def look() -> tuple[Entry, int] | None:
            with core.db.read() as c:
                fingerprint = core.fingerprint_id(c)
                found = self._longest(c, fingerprint, key)
                if found is None:
                    return None
                known, entry = self.lookup(found[0])
                if not known and (stored := queries.entry(c, found[0], fingerprint)) is not None:
                    entry = core.with_uses(stored)
            return None if entry is None else (entry, found[1])

        return self._steady(look)

    def _longest(self, c: Connection, fingerprint: int | None, key: bytes) -> tuple[int, int] | None:
        """(id, n_common) of the best entry of queue and file."""
        filters, now = self._core.filters, self._core.now()
        if fingerprint is None:
            return prefixes.longest_in(self._index, key, now)
        with self._lock:
            empty = not self._queue
        if empty:
            return prefixes.longest(c, filters, fingerprint, key, now)
        both = Overlaid(self._index, prefixes.FileIndex(c, fingerprint), self._shadows)
        try:
            return prefixes.longest_in(both, key, now, prefixes.WALK_STEPS)
        except prefixes.TooLong:
            stored = prefixes.longest(c, filters, fingerprint, key, now)
        if stored is not None and self._shadows(stored[0]):
            return prefixes.longest_in(both, key, now)
        queued = prefixes.longest_in(self._index, key, now)
        if stored is None or (queued is not None and queued[1] > stored[1]):
            return queued
        return stored

    def _shadows(self, id: int) -> bool:
        """Whether a queued put replaces or hides the file's entry of this id."""
        return id in self._hidden or id in self._by_id

    # -- writing

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                number, put = next(iter(self._queue.items()))
            failure = self._store(put)
            if failure is not None:
                _forget_frames(failure)
            self._done(number, put, failure)
            del put

    def _store(self, put: QueuedPut) -> BaseException | None:
        ram, held = self._core.ram, [put.reserved]
        try:
            puts.put(self._core, put.request, owned=True, release=lambda: ram.cancel(held.pop()))
        except BaseException as error:  # noqa: BLE001  reported at the next call that changes or settles the store
            return error
        finally:
            if held:
                ram.cancel(held.pop())
        return None

    def _done(self, number: int, put: QueuedPut, failure: BaseException | None) -> None:
        """Removes a put from the queue: it is in the file now, or it failed."""
        id, key = put.entry.id, put.request.key
        with self._changed:
            if failure is None:
                for used in put.uses:
                    self._core.counters.use(id, used)
                # An id that failed before and was put again is no longer lost.
                self._failures = [(lost, why) for lost, why in self._failures if lost != id]
            else:
                self._failures.append((id, failure))
            del self._queue[number]
            self._by_key[key].remove(put)
            if not self._by_key[key]:
                del self._by_key[key]
            if self._by_id.get(id) is put:
                del self._by_id[id]
            self._index.discard(put)
            self._hidden.subtract(put.hides)
            for hidden in put.hides:
                if not self._hidden[hidden]:
                    del self._hidden[hidden]
            self._generation += 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until all that was put before is written."""
        with self._changed:
            last = self._last
            while self._queue and next(iter(self._queue)) <= last and not self.is_writer():
                self._changed.wait()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which the queue is empty and no put is queued."""
        with self.order:
            self.drain()
            yield

    def is_writer(self) -> bool:
        """Whether the caller is the writing thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Refuses new puts, writes the queued ones, and joins the thread."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        self.drain()
        if thread is not None:
            thread.join()

    def raise_failure(self) -> None:
        """Raises WriteBehindError once for the puts that failed since the last call."""
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            first: Any = failures[0][1]
            reason = first.message if isinstance(first, KVStoreError) else str(first)
            raise WriteBehindError(
                f"{len(failures)} entries could not be written: {reason}",
                hint=getattr(first, "hint", ""),
                ids=[id for id, _ in failures],
            ) from first


def _expired(entry: Entry, now: int) -> bool:
    return entry.expires_at is not None and entry.expires_at <= now


def _forget_frames(error: BaseException) -> None:
    """Clears the frames of an error's tracebacks, which keep arrays alive; the line numbers stay."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += [one.__cause__, one.__context__]

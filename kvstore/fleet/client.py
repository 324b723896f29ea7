"""What one machine of a fleet does with the object store: poll, publish, fetch, renew. Coroutines, without a thread or a queue.

Clock, random numbers and object store are given, so the same code runs in a simulation of ten thousand machines.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..errors import KVStoreError, RemoteDeniedError
from ..types import Tokens
from . import contents, sealing
from .contents import PublishedState
from .counters import Counters
from .estimate import Breaker, LinkEstimate, renewal_chance
from .index import Indexed, Listed, RemoteIndex
from .names import MIN_TOKENS, Chain, Names, ObjectName, day_of, time_of
from .object_store import GoneError
from .options import DAY, RemoteOptions
from .sealing import RefusedError
from .transfer import Progress, fetch, together

log = logging.getLogger("kvstore.fleet")
OVERLAP = 900.0  # a poll begins so many seconds back: clocks differ, and a name is chosen before its upload
MAX_SKEW = 300.0
COPY_LIMIT = 5 * 10**9  # S3 copies no larger object in one request
LEAST_SAVED = 8  # a delta must save this part of its state, as in the local store
FETCHES_AT_ONCE = 2
PARENTS_TRIED = 2
OWN_REMEMBERED = 64


class LocalStore(Protocol):
    """What a client needs of the store beside it. Blocking calls, made by worker threads."""

    def read(self, id: int) -> PublishedState | None:
        """An entry with its whole states; not a hit."""

    def exists(self, id: int) -> bool: ...


class Face(Protocol):
    """The object store: see `object_store.ObjectStore`."""

    url: str

    def pages(self, prefix: str, offset: str | None = None) -> Any: ...
    async def folders(self, prefix: str) -> list[str]: ...
    async def get_range(self, path: str, start: int, length: int) -> Any: ...
    async def put(self, path: str, size: int, pieces: Any) -> None: ...
    async def copy(self, source: str, target: str) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """A state of the fleet, and its parent where that was fetched too."""

    found: Indexed
    state: PublishedState
    parent: tuple[Indexed, PublishedState] | None


class BadObjectError(RefusedError):
    """Which object was refused: the one that was asked for, or its parent."""

    def __init__(self, found: Indexed, reason: str) -> None:
        super().__init__(reason)
        self.found = found


class MissingObjectError(GoneError):
    """Which object is gone."""

    def __init__(self, found: Indexed) -> None:
        super().__init__(found.path)
        self.found = found


class _Shared:
    """A fetch that several requests wait for; it ends when the last of them leaves."""

    def __init__(self, task: asyncio.Task[Fetched]) -> None:
        self.task = task
        self.waiting = 0


class FleetClient:
    def __init__(
        self,
        store: Face,
        index: RemoteIndex,
        local: LocalStore,
        options: RemoteOptions,
        *,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.store, self.index, self.local, self.options = store, index, local, options
        self.counters = Counters()
        self.link = LinkEstimate()
        self.breaker = Breaker(time.monotonic if clock is time.time else clock, chance)
        self.polled_at = 0.0  # by `clock`; 0 for never
        self.offset = 0.0  # of the object store's clock against ours, where they differ by minutes
        self._clock, self._chance = clock, chance
        self.listings = 0  # full ones
        self._own: dict[str, tuple[float, float]] = {}
        self._listed: dict[str, float] = {}  # by fp: when the last full listing began, and the last poll of any kind
        self._seen: dict[str, float] = {}
        self._running: dict[str, _Shared] = {}
        self._gate = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._polling = asyncio.Lock()
        self._warned: set[str] = set()

    @property
    def names(self) -> Names:
        """Under the current key: what is published has these names."""
        return self.index.names[0]

    def now(self) -> float:
        """Unix seconds by the clock of the object store, as far as we know it."""
        return self._clock() + self.offset

    def age(self, found: Indexed) -> float:
        return max(0.0, self.now() - found.modified)

    # -- poll

    async def poll(self, *, full: bool = False) -> list[Indexed]:
        """Takes in what was published since the last poll; once a day, and with `full`, all names. Raises RemoteError."""
        async with self._polling:
            return await self._poll(full)

    async def _poll(self, full: bool) -> list[Indexed]:
        new: list[Indexed] = []
        for names in self.index.names:
            began = self.now()
            due = full or not 0 <= began - self._listed.get(names.fp, 0.0) < DAY
            new += await (self._list_all(names) if due else self._list_new(names))
            self._seen[names.fp] = began
        self.polled_at = self._clock()
        self.counters.count("polls")
        return new

    async def _list_new(self, names: Names) -> list[Indexed]:
        """What was named since shortly before the last poll, which may be many hours ago."""
        now = self.now()
        start = min(now, self._seen[names.fp]) - OVERLAP
        first, last = day_of(start), day_of(now)
        new = await self._take(names, f"{names.prefix}/{first}", f"{names.prefix}/{first}/{time_of(start)}")
        if first != last:
            new += await self._take(names, f"{names.prefix}/{last}", None)
        return new

    async def _list_all(self, names: Names) -> list[Indexed]:
        began = self.now()
        generation = self.index.begin_listing(names)
        new: list[Indexed] = []
        for day in reversed(await self.store.folders(names.prefix)):
            new += await self._take(names, f"{names.prefix}/{day}", None)
        self.index.end_listing(names, generation, int(began))
        self._listed[names.fp] = began
        self.listings += 1
        return new

    async def _take(self, names: Names, prefix: str, offset: str | None) -> list[Indexed]:
        new: list[Indexed] = []
        async for page in self.store.pages(prefix, offset):
            self._compare_clocks(page)
            found, ignored = self.index.take(names, page)
            self.counters.count("ignored", ignored)
            new += [each for each in found if each.path not in self._own]
        return new

    def _compare_clocks(self, page: Sequence[Listed]) -> None:
        """Corrects our clock by what the object store says of our own objects, and by times that lie in our future."""
        skew = 0.0
        for item in page:
            own = self._own.pop(item.path, None)
            if own is not None:
                early, late = item.modified - own[0] - self.offset, item.modified - own[1] - self.offset
                skew = early if early < -MAX_SKEW else late if late > MAX_SKEW else 0.0
        ahead = max((item.modified for item in page), default=0) - self.now()
        if not skew and ahead > MAX_SKEW:
            skew = ahead
        if skew:
            self.offset += skew
            self._listed.clear()  # what was polled until now may have been another day
            log.warning("the clock of this machine and that of %s differ by %d s: corrected here", self.store.url, self.offset)

    # -- publish

    async def chain(self, tokens: Tokens) -> Chain:
        """The hashes of tokens, made by a worker thread: all of them are read."""
        return await asyncio.get_running_loop().run_in_executor(None, self.names.chain, tokens)

    async def published(self, chain: Chain) -> Indexed | None:
        """The object of exactly the tokens of a chain that the index knows; one past half its lifetime is renewed."""
        same = self.index.same_tokens(self.names, chain)
        if same is not None and self.age(same) > self.options.lifetime / 2:
            return await self.renew(same)
        return same

    async def publish(
        self, state: PublishedState, *, cuttable: bool, id: int = 0, chain: Chain | None = None
    ) -> Indexed | None:
        """Publishes an entry; gives its object, or None where it is not to be published. The caller polled before.

        chain: of its tokens under the current key, where it is known. Raises RemoteError, RemoteDeniedError.
        """
        if len(state.tokens) < MIN_TOKENS or state.facts.n_images:
            return None
        names = self.names
        chain = await self.chain(state.tokens) if chain is None else chain
        same = await self.published(chain)
        if same is not None:
            if same.name.state == names.state(state.digests) and id:
                self.index.set_local_entry(names, same.name.state, id)
            return same
        parts, parent = await self._encode(state, chain)
        facts = state.facts
        name = names.name(
            chain, at=self.now(), entry_class=facts.entry_class, cuttable=cuttable, state=names.state(state.digests),
            parent=None if parent is None else parent.name,
        )  # fmt: skip
        plain = sum(memoryview(part).nbytes for part in parts)
        size = sealing.sealed_size(plain)
        began = self._clock()
        await self.store.put(name.path, size, sealing.seal(parts, names.key, name.sealed_name))
        self._remember_own(name.path, began)
        new = self._index_own(names, name.path, size)
        if id:
            self.index.set_local_entry(names, name.state, id)
        self.counters.count("published")
        self.counters.count("publish_bytes", size)
        return new

    async def _encode(self, state: PublishedState, chain: Chain) -> tuple[list[Any], Indexed | None]:
        """The parts of the object, as a delta where a published whole parent is here in the very bytes.

        Learned prefixes travel whole: only a whole object can be a parent.
        """
        loop = asyncio.get_running_loop()
        if state.facts.entry_class != "learned":
            usable = 0
            for parent in self.index.whole_prefixes(self.names, chain):
                base = await loop.run_in_executor(None, self._local_bytes, self.names, parent.name.state)
                if base is None:
                    continue
                least = state.main.size // LEAST_SAVED
                encode = partial(contents.encode, state, base, parent.name.state, min_saved=least)
                parts, shared = await loop.run_in_executor(None, encode)
                if shared:
                    kept: Indexed | None = parent
                    if self.age(parent) > self.options.lifetime / 2:
                        kept = await self.renew(parent)
                    if kept is not None:
                        return parts, kept
                usable += 1
                if usable == PARENTS_TRIED:
                    break
        parts, _ = await loop.run_in_executor(None, contents.encode, state, None, "")
        return parts, None

    def _local_bytes(self, names: Names, state: str) -> PublishedState | None:
        """The local entry that has these very bytes, read and compared."""
        id = self.index.local_entry(names, state)
        if id is None:
            return None
        found = self.local.read(id)
        if found is None or names.state(found.digests) != state:
            self.index.forget_local_entry(names, state)
            return None
        return found

    def _remember_own(self, path: str, began: float) -> None:
        self._own[path] = (began, self._clock())
        while len(self._own) > OWN_REMEMBERED:
            del self._own[next(iter(self._own))]

    def _index_own(self, names: Names, path: str, size: int) -> Indexed | None:
        new, _ = self.index.take(names, [Listed(path, size, int(self.now()))])
        return new[0] if new else None

    # -- renew

    async def renew(self, found: Indexed) -> Indexed | None:
        """Copies an object into today's folder; None where it is gone, or too large for a copy."""
        if found.size > COPY_LIMIT:
            return None
        name = found.name.renamed(self.now())
        if name.path == found.path:
            return found
        began = self._clock()
        try:
            await self.store.copy(found.path, name.path)
        except GoneError:
            self.index.forget(found)
            return None
        self._remember_own(name.path, began)
        self.counters.count("renewed")
        return self._index_own(self.index.names_of(name), name.path, found.size) or found

    async def used(self, fetched: Fetched) -> None:
        """A use keeps an object, and its parent, from being deleted by its age. Raises RemoteError."""
        found = [fetched.found]
        if fetched.found.name.is_delta:
            parent = self.index.of_state(self.index.names_of(found[0].name), found[0].name.parent, whole=True)
            found += [] if parent is None else [parent]
        lifetime = self.options.lifetime
        due = [each for each in found if self._chance() < renewal_chance(self.age(each), lifetime)]
        if not due:
            return
        await self.poll()
        for each in due:
            latest = self.index.of_state(self.index.names_of(each.name), each.name.state, whole=not each.name.is_delta)
            if latest is not None and self.age(latest) > lifetime / 2:
                await self.renew(latest)

    # -- fetch

    def is_here(self, name: ObjectName, state: str) -> bool:
        """Whether a local entry has the bytes of this state, of the object of a name or of its parent."""
        id = self.index.local_entry(self.index.names_of(name), state)
        return id is not None and self.local.exists(id)

    def n_bytes(self, found: Indexed) -> int:
        """What a fetch moves: the object, and its parent where no local entry has these bytes."""
        if not found.name.is_delta:
            return found.size
        if self.is_here(found.name, found.name.parent):
            return found.size
        parent = self.index.of_state(self.index.names_of(found.name), found.name.parent, whole=True)
        return found.size + (0 if parent is None else parent.size)

    async def fetch(self, found: Indexed, progress: Progress | None = None) -> Fetched:
        """One fetch of an object at a time; others wait for it. Raises RefusedError, GoneError, RemoteError."""
        shared = self._running.get(found.path)
        if shared is None:
            task = asyncio.ensure_future(self._fetch(found, Progress() if progress is None else progress))
            shared = self._running[found.path] = _Shared(task)
            task.add_done_callback(lambda done: self._ended(found.path, done))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.task.done():
                shared.task.cancel()
                self._running.pop(found.path, None)

    def _ended(self, path: str, task: asyncio.Task[Fetched]) -> None:
        shared = self._running.get(path)
        if shared is not None and shared.task is task:
            del self._running[path]
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it any more

    async def _fetch(self, found: Indexed, progress: Progress) -> Fetched:
        names = self.index.names_of(found.name)
        loop = asyncio.get_running_loop()
        async with self._gate:
            began = time.perf_counter()
            parent_state: PublishedState | None = None
            parent: Indexed | None = None
            if found.name.is_delta:
                parent_state = await loop.run_in_executor(None, self._local_bytes, names, found.name.parent)
                if parent_state is None:
                    parent = self.index.of_state(names, found.name.parent, whole=True)
                    if parent is None:
                        raise GoneError(f"the parent of {found.path}")  # without a request
            both = [each for each in (found, parent) if each is not None]
            results = await together([self._one(each, names, progress) for each in both])
            transfer = time.perf_counter() - began
            if parent is not None:
                parent_state = await self._decoded(parent, results[1], None)
            state = await self._decoded(found, results[0], parent_state)
            self.link.fetched(progress.n_bytes, transfer, time.perf_counter() - began - transfer)
        self.counters.count("fetches")
        self.counters.count("fetch_bytes", progress.n_bytes)
        return Fetched(found, state, None if parent is None or parent_state is None else (parent, parent_state))

    async def _one(self, found: Indexed, names: Names, progress: Progress) -> Any:
        try:
            return await fetch(self.store, found, names, progress)
        except RefusedError as error:
            raise BadObjectError(found, str(error)) from error
        except GoneError as error:
            raise MissingObjectError(found) from error

    async def _decoded(self, found: Indexed, result: Any, parent: PublishedState | None) -> PublishedState:
        opened, plain = result
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(None, contents.decode, opened, plain, parent, found.name.parent)
        except RefusedError as error:
            raise BadObjectError(found, str(error)) from error

    # -- failures

    def refused(self, error: BadObjectError) -> None:
        """An object must not be served: never offered again, counted, and reported once."""
        found = error.found
        self.index.refuse(found)
        self.counters.count("refused")
        if found.path not in self._warned:
            self._warned.add(found.path)
            log.warning("%s/%s is refused: %s", self.store.url, found.path, error)

    def failed(self, error: KVStoreError) -> None:
        """Counts a failure of the object store; three in a row leave it alone for a while."""
        opened = self.breaker.failed()
        if isinstance(error, RemoteDeniedError) and "denied" not in self._warned:
            self._warned.add("denied")
            log.warning("%s; the local store goes on without it", error.message)
        elif opened and not isinstance(error, RemoteDeniedError):
            log.warning("%s; the local store goes on without it", error.message)

    def succeeded(self) -> None:
        if not self.breaker.up:
            log.info("%s answers again", self.store.url)
        self._warned.discard("denied")
        self.breaker.succeeded()



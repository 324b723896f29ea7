"""The remote of an open store: one thread with an event loop that polls, uploads, fetches and prefetches behind its calls.

Nothing that the local store does waits for it. `match` asks the local index alone; `fetch` has a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ..errors import ClosedError, KVStoreError, RemoteError
from ..storage.db import MEMORY
from ..storage.remote_file import SUFFIX, RemoteFile
from ..types import Entry, RemoteMatch, Tokens
from .client import BadObjectError, Fetched, FleetClient, MissingObjectError, same_start
from .contents import PublishedState
from .estimate import Decision
from .index import Indexed, RemoteIndex
from .names import BLOCK, MIN_TOKENS, Names
from .object_store import GoneError, ObjectStore
from .options import RemoteOptions
from .sealing import RefusedError
from .transfer import Progress
from .uploads import UploadQueue, Waiting

log = logging.getLogger("kvstore.fleet")
T = TypeVar("T")
OPEN_SECONDS = 1.0  # after an open, a match waits at most until then for the first listing
CANDIDATES_TRIED = 3
TICK_SECONDS = 1.0
PREFETCH_WAIT = 60.0  # at most, so that not all machines fetch at once
CLOSE_SECONDS = 2.0
UPLOAD_TRIES = 3
THREADS = 6


class LocalFace(Protocol):
    """The store beside the remote. All calls block, and are made by threads of the remote."""

    def read(self, id: int) -> PublishedState | None: ...
    def exists(self, id: int) -> bool: ...
    def tokens(self, id: int) -> Tokens | None:
        """The tokens of an entry that is on disk; None where there is none, or it is not yet there."""

    def cuttable(self, state: PublishedState) -> bool:
        """Whether the states can be cut at any token."""

    def cut(self, state: PublishedState, n_tokens: int) -> PublishedState: ...
    def keep(self, state: PublishedState, id: int) -> int | None:
        """Puts a fetched state; its id in the store, or None where it could not be kept."""

    def kept_classes(self) -> list[Entry]:
        """The learned and pinned entries."""


class Remote:
    """The shared tier of one store; `Store.remote`. Safe to use from several threads."""

    def __init__(
        self,
        options: RemoteOptions,
        store: ObjectStore,
        fingerprint: str,
        path: str,
        local: LocalFace,
        *,
        readonly: bool = False,
    ) -> None:
        self.options = options
        self.readonly = readonly
        self._local = local
        names = [Names(key, fingerprint) for key in options.keys]
        self._file = _index_file(MEMORY if path == MEMORY or readonly else path + SUFFIX)
        self.index = RemoteIndex(self._file, names)
        self.client = FleetClient(store, self.index, local, options)
        self.prefill_rate: float | None = None  # tokens a second, where the caller measures it
        self._queue = UploadQueue()
        self._opened = time.monotonic()
        self._first = threading.Event()  # the first listing has ended, well or not
        self._wanted = False
        self._idle = threading.Condition()
        self._busy = 0
        self._prefetched = 0
        self._checked: set[int] = set()
        self._rescan = options.publish != "none"
        self._closing = False
        self._pid = os.getpid()
        self._keeper = ThreadPoolExecutor(1, "kvstore-fleet-keep")
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(THREADS, "kvstore-fleet")
        self._loop.set_default_executor(self._pool)
        self._wake: asyncio.Event | None = None
        self._offered: asyncio.Event | None = None
        self._tried_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="kvstore-fleet", daemon=True)
        self._thread.start()

    # -- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("the remote of this store has stopped")
        finally:
            self._first.set()
            self._loop.run_until_complete(self._cancel_all())

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _main(self) -> None:
        self._wake, self._offered = asyncio.Event(), asyncio.Event()
        await self._poll()
        self._first.set()
        self._start(self._upload_all())
        while not self._closing:
            if self._wanted and self._may_poll():
                self._wanted = False
                await self._poll()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._pause())
            self._wake.clear()

    def _pause(self) -> float:
        if self._wanted and not self.client.breaker.open:
            due = self._tried_at + self.options.poll_seconds - time.monotonic()
            return max(0.01, min(TICK_SECONDS, due))
        return TICK_SECONDS

    def _may_poll(self) -> bool:
        return not self.client.breaker.open and time.monotonic() - self._tried_at >= self.options.poll_seconds

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _poll(self) -> bool:
        """One poll; a failure is counted. Whether it went well."""
        self._tried_at = time.monotonic()
        try:
            new = await self.client.poll()
        except KVStoreError as error:
            self.client.failed(error)
            return False
        self.client.succeeded()
        if self.options.prefetch_bytes and not self.readonly:
            self._start(self._prefetch(new))
        return True

    def _notify(self) -> None:
        def wake() -> None:
            for event in (self._wake, self._offered):
                if event is not None:
                    event.set()

        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(wake)

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine in the loop and waits for it, for so many seconds at most. Raises TimeoutError."""
        if self._closing or os.getpid() != self._pid:
            work.close()
            raise ClosedError("the store was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError from None
        except concurrent.futures.CancelledError:
            raise ClosedError("the store was closed") from None

    # -- lookup

    def match(self, tokens: Tokens, n_local: int = 0) -> RemoteMatch | None:
        """The object that serves the most leading tokens, where it serves more than n_local. Makes no request."""
        if not self._first.is_set():
            self._first.wait(max(0.0, self._opened + OPEN_SECONDS - time.monotonic()))
        chains = [(names, names.chain(tokens)) for names in self.index.names]
        best = next(self._usable(chains, n_local), None)
        served = n_local if best is None else best.n_common
        if len(tokens) - served >= BLOCK:
            self._want_poll()
        if best is None:
            return None
        self.client.counters.count("hits")
        found = best.found
        return RemoteMatch(
            n_common=best.n_common, n_bytes=self.client.n_bytes(found), age=self.client.age(found),
            n_saved=best.n_common - n_local, path=found.path, tokens=tokens,
        )  # fmt: skip

    def _usable(self, chains: Any, n_least: int) -> Any:
        """Candidates whose parent is here, or in the object store."""
        for each in self.index.candidates(chains, n_least):
            name = each.found.name
            names = self.index.names_of(name)
            if name.is_delta and self.index.of_state(names, name.parent, whole=True) is None:
                id = self.index.local_entry(names, name.parent)
                if id is None or not self._local.exists(id):
                    continue
            yield each

    def _want_poll(self) -> None:
        if not self._wanted:
            self._wanted = True
            self._notify()

    def decide(self, match: RemoteMatch, tokens_per_second: float) -> Decision | None:
        """Whether a fetch pays, where computing has this speed, and until when; None where it does not."""
        if match.n_saved < self.options.min_tokens or self.client.breaker.open or tokens_per_second <= 0:
            return None
        decision = self.client.link.decide(match.n_bytes, match.n_saved / tokens_per_second)
        if decision is None:
            self.client.counters.count("skipped_slow")
        return decision

    # -- fetch

    def fetch(self, match: RemoteMatch, timeout: float | None = None, *, longest: bool = False) -> PublishedState | None:
        """The state of the first n_common tokens, or None. A refused object is followed by the next candidate.

        Ends after `timeout` seconds, whatever the object store does. With `longest` also the tokens behind n_common that the
        object shares with the request.
        """
        if self.client.breaker.open or (timeout is not None and timeout <= 0):
            return None
        progress = Progress()
        began = time.monotonic()
        try:
            return self._call(self._fetch(match, progress, longest), timeout)
        except TimeoutError:
            self.client.counters.count("gave_up")
            self.client.link.given_up(progress.n_bytes, time.monotonic() - began)
            if not progress.n_bytes:
                self.client.failed(RemoteError(f"{self.options.url} did not answer within {timeout:.2f} s"))
            return None

    async def _fetch(self, match: RemoteMatch, progress: Progress, longest: bool) -> PublishedState | None:
        n_local = match.n_common - match.n_saved
        loop = asyncio.get_running_loop()
        for _ in range(CANDIDATES_TRIED):
            candidate = await loop.run_in_executor(None, self._candidate, match, n_local)
            if candidate is None:
                return None
            found, n_common = candidate
            try:
                fetched = await self.client.fetch(found, progress)
                n = await loop.run_in_executor(None, self._served, fetched, match.tokens, n_common, longest)
                state = fetched.state
                served = state if n == len(state.tokens) else await loop.run_in_executor(None, self._local.cut, state, n)
            except BadObjectError as error:
                self.client.refused(error)
            except RefusedError as error:
                self.client.refused(BadObjectError(found, str(error)))
            except MissingObjectError as error:
                self.index.forget(error.found)
            except GoneError:
                self.index.forget(found)
            except KVStoreError as error:
                self.client.failed(error)
                if self.client.breaker.open:
                    return None
            else:
                self.client.succeeded()
                self._keep(fetched)
                self._start(self._used(fetched))
                return served
        return None

    def _candidate(self, match: RemoteMatch, n_local: int) -> tuple[Indexed, int] | None:
        """The object of a match where it is still offered, else the next best."""
        chains = [(names, names.chain(match.tokens)) for names in self.index.names]
        offered = list(self._usable(chains, n_local))
        for each in offered:
            if each.found.path == match.path:
                return each.found, each.n_common
        return (offered[0].found, offered[0].n_common) if offered else None

    def _served(self, fetched: Fetched, tokens: Tokens, n_common: int, longest: bool) -> int:
        """How many tokens of the request the state serves. Raises RefusedError where its tokens are others."""
        state = fetched.state
        n = same_start(state.tokens, tokens)
        if n < n_common:
            raise RefusedError("its tokens are not those of the request")
        if n == len(state.tokens) or n == n_common:
            return n
        if not self._local.cuttable(state):
            raise RefusedError("its state cannot be cut")
        return n if longest else n_common

    async def _used(self, fetched: Fetched) -> None:
        try:
            await self.client.used(fetched)
        except KVStoreError as error:
            self.client.failed(error)

    def _keep(self, fetched: Fetched) -> None:
        """Puts what was fetched into the local store, behind."""
        if self.readonly:
            return
        self._work(1)

        def put() -> None:
            try:
                self._put(fetched)
            except Exception:
                log.warning("a fetched state was not kept", exc_info=True)
            finally:
                self._work(-1)

        try:
            self._keeper.submit(put)
        except RuntimeError:  # closing
            self._work(-1)

    def _put(self, fetched: Fetched) -> None:
        for each in (fetched.parent, (fetched.found, fetched.state)):
            if each is None:
                continue
            found, state = each
            id = self._local.keep(state, 0)
            if id is not None:
                self.index.set_local_entry(self.index.names_of(found.name), found.name.state, id)
                self._checked.add(id)

    # -- publish

    def offer(self, entry: Entry) -> None:
        """Queues an entry to be published, where it is of those that are. Never waits."""
        wanted = self.options.publish == "all" or (self.options.publish == "learned" and entry.entry_class != "normal")
        if not wanted or self.readonly or entry.n_tokens < MIN_TOKENS or entry.n_images:
            return
        self._queue.add(Waiting(entry.id, entry.n_tokens, entry.entry_class))
        self._notify()

    def learner(self, learn: Callable[[], Iterable[Entry]]) -> Callable[[], None]:
        """`learn`, whose entries are then offered."""

        def run() -> None:
            for entry in learn():
                self.offer(entry)

        return run

    def push(self, id: int) -> Indexed | None:
        """Publishes an entry now; gives its object, or None where there is none. Raises RemoteError, RemoteDeniedError."""
        return self._call(self._push(id))

    async def _push(self, id: int) -> Indexed | None:
        await self.client.poll()
        return await self._publish(Waiting(id, 0, "pinned"))

    async def _upload_all(self) -> None:
        assert self._offered is not None
        while True:
            self._work(1)
            try:
                await self._upload_next()
            finally:
                self._work(-1)
            if not self._queue or self.client.breaker.open:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._offered.wait(), TICK_SECONDS)
                self._offered.clear()

    async def _upload_next(self) -> None:
        if self.client.breaker.open or self.readonly:
            return
        if self._rescan:
            self._rescan = False
            await self._find_unpublished()
        waiting = self._queue.take()
        if waiting is not None:
            await self._upload(waiting)

    async def _upload(self, waiting: Waiting) -> None:
        try:
            await self.client.poll()
            await self._publish(waiting)
            self.client.succeeded()
        except KVStoreError as error:
            self.client.failed(error)
            if waiting.tries + 1 < UPLOAD_TRIES:
                self._queue.add(waiting.again())
            await asyncio.sleep(0.2 * (1 + random.random()))
        except Exception:
            log.warning("an entry was not published", exc_info=True)

    async def _publish(self, waiting: Waiting) -> Indexed | None:
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(None, self._local.tokens, waiting.id)
        if tokens is None or len(tokens) < MIN_TOKENS:
            return None
        self._checked.add(waiting.id)
        if waiting.entry_class == "normal" and not self._pays(len(tokens)):
            return None
        known = await self.client.published(tokens)
        if known is not None:
            return known
        state = await loop.run_in_executor(None, self._local.read, waiting.id)
        if state is None:
            return None
        cuttable = await loop.run_in_executor(None, self._local.cuttable, state)
        return await self.client.publish(state, cuttable=cuttable, id=waiting.id)

    def _pays(self, n_tokens: int) -> bool:
        """Whether others would compute a chat for longer than they fetch it, where the speed of computing is known."""
        if self.prefill_rate is None or not self.prefill_rate:
            return True
        return n_tokens / self.prefill_rate > self.client.link.latency

    async def _find_unpublished(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.run_in_executor(None, self._local.kept_classes)
        except KVStoreError as error:
            log.info("the learned entries were not read: %s", error.message)
            return
        recent = time.time() - self.options.lifetime / 2
        for entry in sorted(entries, key=lambda e: e.n_tokens):
            if entry.id not in self._checked and entry.last_used >= recent:
                self._queue.add_later(Waiting(entry.id, entry.n_tokens, entry.entry_class))

    # -- prefetch

    async def _prefetch(self, new: list[Indexed]) -> None:
        wanted = [each for each in new if each.name.kind in "lL" and not each.name.is_delta]
        for found in sorted(wanted, key=lambda each: -each.modified):
            if self._prefetched + found.size > self.options.prefetch_bytes:
                return
            await asyncio.sleep(random.random() * min(PREFETCH_WAIT, 2 * self.options.poll_seconds))
            if self.client.breaker.open or self._is_here(found):
                continue
            try:
                self._keep(await self.client.fetch(found))
                self._prefetched += found.size
            except BadObjectError as error:
                self.client.refused(error)
            except GoneError:
                self.index.forget(found)
            except KVStoreError as error:
                self.client.failed(error)

    def _is_here(self, found: Indexed) -> bool:
        id = self.index.local_entry(self.index.names_of(found.name), found.name.state)
        return id is not None and self._local.exists(id)

    # -- the rest

    def poll(self, *, full: bool = False) -> int:
        """Takes in now what was published; how many names are new. Raises RemoteError, RemoteDeniedError."""
        new = self._call(self.client.poll(full=full))
        self.client.succeeded()
        return len(new)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by their names."""
        client = self.client
        age = time.time() - client.polled_at if client.polled_at else time.time() - self._file_age()
        return {
            "remote_up": float(client.breaker.up),
            **client.counters.as_dict(),
            "remote_bandwidth_bytes": client.link.bandwidth,
            "remote_latency_seconds": client.link.latency,
            "remote_index_age_seconds": max(0.0, age),
        }

    def _file_age(self) -> float:
        return float(max((self.index.listed_at(names) for names in self.index.names), default=0))

    def _work(self, by: int) -> None:
        with self._idle:
            self._busy += by
            self._idle.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until what was offered is published, and what was fetched is kept; False after so many seconds, or where the
        object store does not answer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._idle:
            while self._busy or (self._queue and not self._closing):
                if not self._busy and self.client.breaker.failing:
                    return False
                left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def is_thread(self) -> bool:
        """Whether a thread of the remote asks."""
        return threading.current_thread().name.startswith("kvstore-fleet")

    def close(self) -> None:
        """Ends the thread. Uploads to an object store that answers have `close_seconds`; others are cancelled."""
        if self._closing or os.getpid() != self._pid:
            return
        if self.client.polled_at and not self.client.breaker.failing:
            self.wait(self.options.close_seconds)
        self._closing = True
        self._notify()
        self._cancel()
        self._thread.join(CLOSE_SECONDS)
        self._keeper.shutdown(wait=True)
        self._pool.shutdown(wait=False)
        if not self._thread.is_alive():
            self._loop.close()
        self._file.close()

    def _cancel(self) -> None:
        def cancel() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(cancel)


def _index_file(path: str) -> RemoteFile:
    """The index beside the store; in memory where there cannot be a file."""
    try:
        return RemoteFile(path)
    except KVStoreError as error:
        log.warning("the index of remote objects is kept in memory: %s", error.message)
        return RemoteFile(MEMORY)

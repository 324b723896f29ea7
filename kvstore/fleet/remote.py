"""The remote of an open store: one thread with an event loop that polls, uploads, fetches and prefetches behind its calls.

Nothing that the local store does waits for it. `match` asks the local index alone; `fetch` has a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
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
from ..util.buffers import common_prefix_length
from .client import BadObjectError, Fetched, FleetClient, LocalStore, MissingObjectError
from .contents import PublishedState
from .estimate import Decision
from .index import Indexed, RemoteIndex
from .intake import Intake, Keeper
from .names import BLOCK, Names
from .object_store import GoneError, ObjectStore
from .options import RemoteOptions
from .publisher import Published, Publisher
from .sealing import RefusedError
from .transfer import Progress

log = logging.getLogger("kvstore.fleet")
T = TypeVar("T")
OPEN_SECONDS = 1.0  # after an open, a match waits at most until then for the first listing
CANDIDATES_TRIED = 3
TICK_SECONDS = 1.0
CLOSE_SECONDS = 2.0
THREADS = 6


class LocalFace(LocalStore, Published, Keeper, Protocol):
    """The store beside the remote. All calls block, and are made by threads of the remote."""

    def cut(self, state: PublishedState, n_tokens: int) -> PublishedState:
        """The state of the first n_tokens. Raises RefusedError."""


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
        self._opened = time.monotonic()
        self._first = threading.Event()  # the first listing has ended, well or not
        self._wanted = False
        self._idle = threading.Condition()
        self._busy = 0
        self._closing = False
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(THREADS, "kvstore-fleet")
        self._loop.set_default_executor(self._pool)
        self._wake: asyncio.Event | None = None
        self._publisher = Publisher(self.client, local, self._work, active=not readonly)
        self._intake = Intake(self.client, local, self._work, self._publisher.checked.add, active=not readonly)
        self._task: asyncio.Task[None] | None = None
        self._tried_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="kvstore-fleet", daemon=True)
        self._thread.start()

    # -- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._main())
            self._loop.run_until_complete(self._task)
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
        self._wake, self._publisher.offered = asyncio.Event(), asyncio.Event()
        await self._poll()
        self._first.set()
        self._start(self._publisher.run())
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
        listings = self.client.listings
        try:
            new = await self.client.poll()
        except KVStoreError as error:
            self.client.failed(error)
            return False
        self.client.succeeded()
        if listings and self.client.listings > listings:
            self._publisher.look_again()
        if self.options.prefetch_bytes and not self.readonly:
            self._start(self._intake.prefetch(new))
        return True

    def _notify(self) -> None:
        def wake() -> None:
            for event in (self._wake, self._publisher.offered):
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
            listed = not name.is_delta or self.index.of_state(self.index.names_of(name), name.parent, whole=True) is not None
            if listed or self.client.is_here(name, name.parent):
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
            self.client.link.given_up(match.n_bytes, progress.n_bytes, time.monotonic() - began)
            if not progress.n_bytes:
                self.client.failed(RemoteError(f"{self.options.url} did not answer within {timeout:.2f} s"))
            return None

    async def _fetch(self, match: RemoteMatch, progress: Progress, longest: bool) -> PublishedState | None:
        n_local = match.n_common - match.n_saved
        loop = asyncio.get_running_loop()
        tried: set[str] = set()
        for _ in range(CANDIDATES_TRIED):
            candidate = await loop.run_in_executor(None, self._candidate, match, n_local, tried)
            if candidate is None:
                return None
            found, n_common = candidate
            tried.add(found.path)
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
                self._intake.keep(fetched)
                self._start(self._used(fetched))
                return served
        return None

    def _candidate(self, match: RemoteMatch, n_local: int, tried: set[str]) -> tuple[Indexed, int] | None:
        """The object of a match where it is still offered, else the next best; none twice."""
        chains = [(names, names.chain(match.tokens)) for names in self.index.names]
        offered = [each for each in self._usable(chains, n_local) if each.found.path not in tried]
        for each in offered:
            if each.found.path == match.path:
                return each.found, each.n_common
        return (offered[0].found, offered[0].n_common) if offered else None

    def _served(self, fetched: Fetched, tokens: Tokens, n_common: int, longest: bool) -> int:
        """How many tokens of the request the state serves. Raises RefusedError where its tokens are others."""
        state = fetched.state
        n = common_prefix_length(state.tokens, tokens)
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

    # -- publish and pull

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second that this machine computes, where the caller measures it."""
        return self._publisher.prefill_rate

    @prefill_rate.setter
    def prefill_rate(self, rate: float | None) -> None:
        self._publisher.prefill_rate = rate

    def offer(self, entry: Entry) -> None:
        """Queues an entry to be published, where it is of those that are. Never waits."""
        if self._publisher.offer(entry):
            self._notify()

    def learner(self, learn: Callable[[], Iterable[Entry]]) -> Callable[[], None]:
        """`learn`, whose entries are then offered."""

        def run() -> None:
            for entry in learn():
                self.offer(entry)

        return run

    def push(self, id: int) -> Indexed | None:
        """Publishes an entry now; gives its object, or None where there is none. Raises RemoteError, RemoteDeniedError."""
        return self._call(self._publisher.push(id))

    def pull(self, found: Indexed) -> bool:
        """Fetches an object and puts it here; False where its state is here already. Raises RemoteError."""
        if self._intake.is_here(found):
            return False
        fetched = self._call(self._intake.pull(found))
        if fetched is not None:
            self._intake.put(fetched)
        return fetched is not None

    def pull_all(self, *, learned: bool = False) -> list[str]:
        """Fetches all objects, or the learned ones, that are not here; their paths. Parents come before their children.

        Raises RemoteError.
        """
        done: list[str] = []
        for names in self.index.names:
            found = [each for each in self.index.all(names) if not learned or each.name.entry_class == "learned"]
            for each in sorted(found, key=lambda each: (each.name.is_delta, each.name.n_tokens, -each.modified)):
                if self.pull(each):
                    done.append(each.path)
        return done

    # -- the rest

    def poll(self, *, full: bool = False) -> int:
        """Takes in now what was published; how many names are new. Raises RemoteError, RemoteDeniedError."""
        new = self._call(self.client.poll(full=full))
        self.client.succeeded()
        return len(new)

    def saved(self, seconds: float) -> None:
        """Counts the computing that a fetch saved, without the time of the fetch."""
        self.client.counters.saved(seconds)

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
            while self._busy or (self._publisher.queue and not self._closing):
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
        self._intake.close()
        self._pool.shutdown(wait=False)
        if not self._thread.is_alive():
            self._loop.close()
        self._file.close()

    def _cancel(self) -> None:
        def cancel() -> None:
            if self._task is not None:  # the thread then cancels all others
                self._task.cancel()

        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(cancel)


def _index_file(path: str) -> RemoteFile:
    """The index beside the store; in memory where there cannot be a file."""
    try:
        return RemoteFile(path)
    except KVStoreError as error:
        log.warning("the index of remote objects is kept in memory: %s", error.message)
        return RemoteFile(MEMORY)

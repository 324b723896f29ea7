"""Work beside a call: digests and copies, done by threads that live no longer than the calls that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")
THREADS = 4  # a put has a digest for each of its two states and a copy for the RAM layer


class Task(Generic[T]):
    """A call that a worker makes. Whoever waits for a task that no worker has begun makes the call itself."""

    def __init__(self, call: Callable[[], T], future: Future[T] | None) -> None:
        self._call = call
        self._future = future

    def result(self) -> T:
        if self._future is None or self._future.cancel():
            return self._call()
        return self._future.result()

    def cancel(self) -> None:
        """Returns when no worker makes the call, or will make it."""
        if self._future is not None and not self._future.cancel():
            wait([self._future])


class Workers:
    """The executor of one store: created by the first call that needs it, and joined by the last one that leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._executor: ThreadPoolExecutor | None = None

    @contextmanager
    def lend(self) -> Iterator[Workers]:
        """Work begun inside is over at the end: done, or cancelled and joined."""
        with self._lock:
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
                idle, self._executor = (None, self._executor) if self._users else (self._executor, None)
            if idle is not None:
                idle.shutdown(wait=True, cancel_futures=True)

    def begin(self, call: Callable[[], T]) -> Task[T]:
        """Hands a call to a worker; without a thread to be had (the interpreter ends) `result` makes it."""
        with self._lock:
            if not self._users:
                return Task(call, None)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-work")
            try:
                return Task(call, self._executor.submit(call))
            except RuntimeError:
                return Task(call, None)

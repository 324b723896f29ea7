"""Digests, copies and early syncs in threads, which end with the last call that uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")
THREADS = 4  # a put has a digest for each of its two states, a copy for the RAM layer, and an early sync of the log


class Task(Generic[T]):
    """A call for a worker. `result` makes the call itself if no worker has begun it."""

    def __init__(self, call: Callable[[], T], future: Future[T] | None) -> None:
        self._call = call
        self._future = future

    def result(self) -> T:
        if self._future is None or self._future.cancel():
            return self._call()
        return self._future.result()

    def cancel(self) -> None:
        """Cancels the call, or waits for its end. No worker makes it afterwards."""
        if self._future is not None and not self._future.cancel():
            wait([self._future])


class Workers:
    """The executor of one store. The first call that needs it creates it; the last call that ends joins it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._executor: ThreadPoolExecutor | None = None

    @contextmanager
    def lend(self) -> Iterator[Workers]:
        """All work that is begun in this block is done, or cancelled and joined, when the last such block ends."""
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
        """Hands a call to a worker. If no thread can be started (at interpreter shutdown), `result` makes the call."""
        with self._lock:
            if not self._users:
                return Task(call, None)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-work")
            try:
                return Task(call, self._executor.submit(call))
            except RuntimeError:
                return Task(call, None)

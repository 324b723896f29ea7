"""Write-behind: puts that are in RAM and on their way to the disk, in order, by one thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import ClosedError, KVStoreError, WriteBehindError
from .job import Job
from .lru import RamCache
from .records import Entry


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A put that is not on disk yet, and the call that stores it and gives its reservation back.

    `uses` are the times of the hits that it had meanwhile: the file has no row yet that could count them.
    """

    entry: Entry
    job: Job
    store: Callable[[], None]
    uses: list[int] = field(default_factory=list)


class WriteBehind:
    """A queue bounded by the RAM layer's budget: its entries hold reservations there.

    Thread rules: `_lock` guards the queue and the failures; the store call runs without it.
    """

    def __init__(self, ram: RamCache, used: Callable[[int, int], None]) -> None:
        self._ram = ram
        self._used = used
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: OrderedDict[int, Pending] = OrderedDict()
        self._failures: list[tuple[int, Exception]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def close(self) -> None:
        """Takes no more puts, and waits until those it has are written."""
        with self._lock:
            self._closed = True
        self.drain()

    def reserve(self, n_bytes: int) -> bool:
        """Room for a put's copies, waiting for earlier ones to be written; False where they can never fit."""
        with self._changed:
            while not self._closed and not self._ram.reserve(n_bytes):
                if not self._queue:
                    return False
                self._changed.wait()
            self._refuse_if_closed()
        return True

    def add(self, pending: Pending) -> None:
        with self._changed:
            self._refuse_if_closed()
            self._queue[pending.entry.id] = pending
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-write", daemon=True)
                self._thread.start()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")

    def get(self, id: int) -> Pending | None:
        with self._lock:
            return self._queue.get(id)

    def all(self) -> list[Pending]:
        with self._lock:
            return list(self._queue.values())

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                id, pending = next(iter(self._queue.items()))
            failure: Exception | None = None
            try:
                pending.store()
                for used in pending.uses:
                    self._used(id, used)
            except Exception as error:  # noqa: BLE001  reported at the next call of the store
                failure = error
            with self._changed:
                del self._queue[id]
                if failure is not None:
                    self._failures.append((id, failure))
                self._changed.notify_all()

    def drain(self) -> None:
        """Waits until everything is written."""
        with self._changed:
            while self._queue:
                self._changed.wait()

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

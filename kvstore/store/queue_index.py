"""The token-prefix index of queued puts, and of the file's entries with those laid over them."""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from ..storage.prefix_index import Index, Rows
from ..types import Entry
from .put_request import PutRequest


class Put(Protocol):
    """What the index looks at."""

    entry: Entry
    request: PutRequest


P = TypeVar("P", bound=Put)


class QueueIndex(Generic[P]):
    """Queued puts in the order of their tokens, one of the same tokens. Each step of a walk is a search of its own.

    A walk may therefore go on while puts are added and removed; the caller checks that its result still holds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._puts: dict[bytes, P] = {}
        self._keys: tuple[list[bytes], list[bytes]] = ([], [])  # by whether they can be cut anywhere
        self._cuts: list[tuple[bytes, bytes]] = []  # tokens up to a checkpoint, and all of them

    def get(self, key: bytes) -> P | None:
        return self._puts.get(key)

    def add(self, put: P) -> None:
        """Shows a put, in the place of one of the same tokens."""
        request = put.request
        with self._lock:
            if request.key in self._puts:
                self._remove(self._puts[request.key])
            self._puts[request.key] = put
            insort(self._keys[request.cuts.any], request.key)
            for n in request.cuts.counts:
                insort(self._cuts, (request.key[: 4 * n], request.key))

    def discard(self, put: P) -> None:
        """Hides a put, if it is shown."""
        with self._lock:
            if self._puts.get(put.request.key) is put:
                self._remove(put)

    def _remove(self, put: P) -> None:
        key, cuts = put.request.key, put.request.cuts
        del self._puts[key]
        keys = self._keys[cuts.any]
        del keys[bisect_left(keys, key)]
        for n in cuts.counts:
            del self._cuts[bisect_left(self._cuts, (key[: 4 * n], key))]

    def at_or_before(self, cut: bool, key: bytes) -> Rows:
        keys, search = self._keys[cut], bisect_right
        while True:
            with self._lock:
                at = search(keys, key)
                if not at:
                    return
                key = keys[at - 1]
                entry = self._puts[key].entry
            yield entry.id, key, entry.expires_at
            search = bisect_left

    def after(self, key: bytes) -> Rows:
        keys = self._keys[True]
        while True:
            with self._lock:
                at = bisect_right(keys, key)
                if at == len(keys):
                    return
                key = keys[at]
                entry = self._puts[key].entry
            yield entry.id, key, entry.expires_at

    def cut_at_or_before(self, key: bytes) -> Rows:
        bound = (key + b"\0", b"")  # above every cut at just these tokens
        while True:
            with self._lock:
                at = bisect_left(self._cuts, bound)
                if not at:
                    return
                bound = self._cuts[at - 1]
                entry = self._puts[bound[1]].entry
            yield entry.id, bound[0], entry.expires_at


class Overlaid:
    """The index of a file (None: it has no entry) with a queue laid over it, without the file's rows that `shadows` names."""

    def __init__(self, queue: Index, file: Index | None, shadows: Callable[[int], bool]) -> None:
        self._queue = queue
        self._file = file
        self._shadows = shadows

    def _merged(self, queued: Rows, stored: Iterable[tuple[int, bytes, int | None]], *, down: bool) -> Rows:
        kept = (row for row in stored if not self._shadows(row[0]))
        return iter(heapq.merge(kept, queued, key=lambda row: row[1], reverse=down))

    def at_or_before(self, cut: bool, key: bytes) -> Rows:
        stored = () if self._file is None else self._file.at_or_before(cut, key)
        return self._merged(self._queue.at_or_before(cut, key), stored, down=True)

    def after(self, key: bytes) -> Rows:
        stored = () if self._file is None else self._file.after(key)
        return self._merged(self._queue.after(key), stored, down=False)

    def cut_at_or_before(self, key: bytes) -> Rows:
        stored = () if self._file is None else self._file.cut_at_or_before(key)
        return self._merged(self._queue.cut_at_or_before(key), stored, down=True)

"""Entries that wait to be published: a short queue that never makes a put wait."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from ..types import EntryClass

LENGTH = 8


@dataclass(frozen=True, slots=True)
class Waiting:
    id: int
    n_tokens: int
    entry_class: EntryClass
    tries: int = 0

    def again(self) -> Waiting:
        return replace(self, tries=self.tries + 1)


class UploadQueue:
    """First in, first out; when it is full, the entry with the least tokens goes.

    Behind it a list of entries that were found in the store: these are still there when their turn comes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: OrderedDict[int, Waiting] = OrderedDict()
        self._later: OrderedDict[int, Waiting] = OrderedDict()

    def add(self, waiting: Waiting) -> None:
        with self._lock:
            self._queue[waiting.id] = waiting
            if len(self._queue) > LENGTH:
                del self._queue[min(self._queue.values(), key=lambda each: each.n_tokens).id]

    def add_later(self, waiting: Waiting) -> None:
        with self._lock:
            if waiting.id not in self._queue:
                self._later[waiting.id] = waiting

    def take(self) -> Waiting | None:
        with self._lock:
            for queue in (self._queue, self._later):
                if queue:
                    return queue.popitem(last=False)[1]
        return None

    def __len__(self) -> int:
        with self._lock:
            return len(self._queue) + len(self._later)

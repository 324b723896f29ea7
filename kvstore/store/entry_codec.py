"""From the bytes that were put to what is stored of them: whole, or a delta against a parent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import bkvd, layout
from ..errors import LayoutError
from ..storage import policy
from ..storage.db import Connection
from ..storage.entry_reader import PARALLEL_DIGEST_BYTES, Damaged, EntryReader
from ..storage.policy import Cuts as Cuts
from ..storage.policy import cuts_of as cuts_of
from ..storage.ram_cache import Held, RamCache
from ..types import Bytes
from ..util.workers import Task, Workers


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One state on its way in: `data` is what is stored (the state, or a delta against the parent's)."""

    name: str  # 'main' or 'draft'
    kind: str  # 'full' or 'bkvd'
    data: Bytes
    size: int
    digests: Mapping[str, bytes]  # by part; may still be being computed

    @property
    def digest(self) -> bytes:
        return self.digests[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The learned entry that something is stored against, in the version that was read."""

    id: int
    n_tokens: int
    version: tuple[int, ...]
    held: Held


class Keeping:
    """An entry on its way into the RAM layer, copied by a worker while the file is written.

    What is `owned`, and a delta, is taken as it is; a caller's buffer may change after the put.
    """

    def __init__(
        self, ram: RamCache, n_bytes: int, parts: list[Part], parent: int | None, workers: Workers | None
    ) -> None:
        self._ram = ram
        self._n_bytes = n_bytes
        self._parent = parent
        self._arrays = {part.name: part.data for part in parts}
        self._copied = [] if workers is None else [part.name for part in parts if part.kind == "full"]
        self._task: Task[bool] | None = None
        if workers is not None and n_bytes >= PARALLEL_DIGEST_BYTES and self._copied:
            self._task = workers.begin(self._copy)

    def _copy(self) -> bool:
        try:
            for name in self._copied:
                self._arrays[name] = self._arrays[name].copy()
        except MemoryError:
            return False
        return True

    def commit(self, id: int, version: tuple[int, ...]) -> None:
        """Shows the entry, which is on disk now in this version."""
        task, self._task = self._task, None
        if not (self._copy() if task is None else task.result()):
            self._ram.cancel(self._n_bytes)
            return
        for array in self._arrays.values():
            array.flags.writeable = False
        self._ram.commit(id, Held(version, self._arrays["main"], self._arrays.get("draft"), self._parent))

    def cancel(self) -> None:
        """Gives the room back, when no worker copies any more."""
        task, self._task = self._task, None  # it refers to this object: a circle would keep the arrays until a collection
        if task is not None:
            task.cancel()
        self._ram.cancel(self._n_bytes)


class Shelf:
    """Builds what is stored for an entry; holds no lock of its own. Timings go to `spent(name, seconds)`."""

    def __init__(self, reader: EntryReader, spent: Callable[[str, float], None]) -> None:
        self.ram = reader.ram
        self._reader = reader
        self._spent = spent

    def parent(self, c: Connection, id: int, n_tokens: int) -> Parent | None:
        """A learned entry with its bytes; None where it is damaged: the next get of it drops it."""
        try:
            held = self._reader.stored(c, id)
        except Damaged:
            return None
        return Parent(id, n_tokens, held.version, held)

    def build(
        self, main: Bytes, draft: Bytes | None, digests: Mapping[str, bytes], parent: Parent | None, min_saved: int | None
    ) -> tuple[list[Part], int]:
        """What to store for the states, against `parent` where that saves enough; and the bytes shared.

        `main` first; only if it is shared is `draft` tried, against the parent's draft, and it may stay whole.
        """
        parts = []
        shared = 0
        for name, state, of_parent in (
            ("main", main, None if parent is None else parent.held.main),
            ("draft", draft, None if parent is None else parent.held.draft),
        ):
            if state is None:
                continue
            delta = None
            if parent is not None and of_parent is not None and (name == "main" or shared):
                started = time.perf_counter()
                known = self._reader.sample_hash(parent.held, name)
                least = policy.least_saved(min_saved, state.size)
                delta = bkvd.encode(state, of_parent, parent.id, min_saved=least, content=True, parent_hash=known)
                self._spent("encode_us", time.perf_counter() - started)
            if delta is None:
                parts.append(Part(name, "full", state, state.size, digests))
            else:
                shared += delta.shared
                parts.append(Part(name, "bkvd", delta.data, state.size, digests))
        return parts, shared

    @staticmethod
    def why_whole(main: Bytes, parent: Parent) -> str:
        """Why a state was not stored against `parent`."""
        try:
            layout.parse(main)
            layout.parse(parent.held.main)
        except LayoutError:
            return "unknown_layout"
        return "saves_too_little"

    def keep(self, parts: list[Part], parent: int | None, workers: Workers | None) -> Keeping | None:
        """Begins to take what is being stored into the RAM layer; None where it has no room.

        Without workers the arrays are the store's own, and are not copied.
        """
        n_bytes = sum(part.data.size for part in parts)
        return Keeping(self.ram, n_bytes, parts, parent, workers) if self.ram.reserve(n_bytes, parent) else None

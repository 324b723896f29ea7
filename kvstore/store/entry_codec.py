"""Encodes the states of a put for the file, each whole or as a delta against a base; and hands them to the RAM layer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import bkvd
from ..errors import CorruptStoreError
from ..storage import policy, queries_chains
from ..storage.db import Connection
from ..storage.entry_reader import PARALLEL_DIGEST_BYTES, EntryReader
from ..storage.queries_chains import Link
from ..storage.ram_cache import CachedEntry, RamCache
from ..types import Bytes
from ..util.workers import Task, Workers
from .put_request import ParsedStates


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One state to be stored: `data` is what is written (the state, or a delta against the base's).

    `digests` and `samples`, by part, are of the state as it was put; they may still be being computed.
    """

    name: str  # 'main' or 'draft'
    kind: str  # 'full' or 'bkvd'
    data: Bytes
    size: int
    digests: Mapping[str, bytes]
    samples: Mapping[str, int | None]

    @property
    def digest(self) -> bytes:
        return self.digests[self.name]

    @property
    def sample(self) -> int | None:
        return self.samples[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The entry that something is stored against, in the version that was read; `links` is its chain, itself first.

    `states` and `samples` are by part. was_base: whether it was unlisted (base = 1) when it was read.
    """

    id: int
    n_tokens: int
    links: Sequence[Link]
    states: Mapping[str, Bytes]
    samples: Mapping[str, int]
    was_base: bool = False

    @property
    def version(self) -> tuple[int, ...]:
        return self.links[0].version

    def record_samples(self, c: Connection) -> None:
        """Writes the samples that the rows of an older program lack."""
        for part, row in self.links[0].rows.items():
            if row.sample is None and part in self.samples:
                queries_chains.set_sample(c, row.id, self.samples[part])


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The encoded parts of an entry. `shared`: bytes that the base has; `why_whole`: the reason if there are none."""

    parts: list[Part]
    shared: int
    why_whole: str

    @property
    def stored(self) -> int:
        return sum(part.data.size for part in self.parts)


def load_base(reader: EntryReader, c: Connection, id: int, n_tokens: int) -> Base | None:
    """The entry as a base, with its states decoded; None if it is damaged (its next get drops it)."""
    try:
        links = queries_chains.links(c, id)
        if len(links) >= policy.MAX_LINKS:
            return load_base(reader, c, links[len(links) // 2].id, links[len(links) // 2].n_tokens)
        states = reader.states(c, id, links, False)
        samples = {
            part: row.sample if row.sample is not None else bkvd.sample_hash(states[part])
            for part, row in links[0].rows.items()
        }
    except CorruptStoreError:
        return None
    return Base(id, n_tokens, links, states, samples, queries_chains.is_base(c, id))


def encode_entry(
    reader: EntryReader,
    states: ParsedStates,
    digests: Mapping[str, bytes],
    samples: Mapping[str, int | None],
    base: Base | None,
    min_saved: int | None,
) -> Encoded:
    """Encodes the states, as deltas against `base` if that saves enough.

    `main` first; only if it is shared is `draft` tried, against the base's draft, and it may stay whole.
    """
    parts: list[Part] = []
    shared = 0
    why_whole = "saves_too_little"
    for name in ("main", "draft"):
        state = states[name]
        if state is None:
            continue
        delta = None
        if base is not None and (name == "main" or shared):
            of_base = base.states.get(name)
            if of_base is not None:
                started = time.perf_counter()
                ours, theirs = states.layout(name), policy.layout_of(of_base)
                if ours is not None and theirs is not None:
                    delta = bkvd.encode_parsed(
                        state, of_base, base.id, ours, theirs, min_saved=policy.least_saved(min_saved, state.size),
                        content=True, parent_hash=base.samples[name],
                    )  # fmt: skip
                elif name == "main":
                    why_whole = "unknown_layout"
                reader.spent("encode_us", time.perf_counter() - started)
        if delta is None:
            parts.append(Part(name, "full", state, state.size, digests, samples))
        else:
            shared += delta.shared
            parts.append(Part(name, "bkvd", delta.data, state.size, digests, samples))
    return Encoded(parts, shared, why_whole)


def begin_cache_insert(
    ram: RamCache, parts: list[Part], parent: int | None, workers: Workers | None
) -> PendingCacheInsert | None:
    """Begins to copy the parts into the RAM layer; None if it has no room.

    Without workers the arrays are the store's own, and are not copied.
    """
    n_bytes = sum(part.data.size for part in parts)
    return PendingCacheInsert(ram, n_bytes, parts, parent, workers) if ram.reserve(n_bytes) else None


class PendingCacheInsert:
    """An entry on its way into the RAM layer: a worker copies its arrays while the file is written.

    Deltas and `owned` arrays are taken without a copy; a caller's buffer may change after the put, so it is copied.
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
        self._ram.commit(id, CachedEntry(version, self._arrays["main"], self._arrays.get("draft"), self._parent))

    def cancel(self) -> None:
        """Gives the room back, when no worker copies any more."""
        task, self._task = self._task, None  # it refers to this object: a cycle would keep the arrays
        if task is not None:
            task.cancel()
        self._ram.cancel(self._n_bytes)

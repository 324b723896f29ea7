"""The frozen records that pass between the floors of kvstore."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Blob: TypeAlias = Any  # bytes, memoryview, mmap, numpy array: anything with a C-contiguous buffer
Bytes: TypeAlias = npt.NDArray[np.uint8]
Tokens: TypeAlias = npt.NDArray[np.int32]
EntryClass: TypeAlias = Literal["normal", "learned", "pinned"]
Source: TypeAlias = Literal["default", "request", "policy", "admin"]

# The order is the value of the byte in a meta block.
CLASSES: tuple[EntryClass, ...] = ("normal", "learned", "pinned")
SOURCES: tuple[Source, ...] = ("default", "request", "policy", "admin")


def hex_id(id: int) -> str:
    """An id as it is shown everywhere: 16 lower-case hex digits."""
    return f"{id & 0xFFFFFFFFFFFFFFFF:016x}"


@dataclass(frozen=True, slots=True)
class Entry:
    """The meta of one entry, without its bytes.

    `created_at`, `last_used` and `expires_at` are unix seconds; `size` is the number of bytes that were put
    (main and draft), `stored` the number of bytes on disk. `parent` is None if the entry is stored whole.
    """

    id: int
    n_tokens: int
    n_images: int
    entry_class: EntryClass
    source: Source
    created_at: int
    last_used: int
    expires_at: int | None
    ttl: int | None
    hits: int
    family: int
    n_input: int
    excerpt: str
    parent: int | None
    size: int
    stored: int

    @property
    def hex_id(self) -> str:
        return hex_id(self.id)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. `expires_in` is in seconds, None = never; `shared_from` is the parent's hex id, or None."""
        return {
            "id": self.hex_id,
            "n_tokens": self.n_tokens,
            "n_images": self.n_images,
            "bytes": self.size,
            "stored_bytes": self.stored,
            "class": self.entry_class,
            "source": self.source,
            "created_at": self.created_at,
            "last_used": self.last_used,
            "hits": self.hits,
            "expires_in": None if self.expires_at is None else max(0, self.expires_at - int(time.time())),
            "family": hex_id(self.family),
            "excerpt": self.excerpt,
            "shared_from": None if self.parent is None else hex_id(self.parent),
        }


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The result of `get`: the entry, its tokens (int32) and its states (uint8), byte for byte as they were put."""

    entry: Entry
    tokens: Tokens
    main: Bytes
    draft: Bytes | None


@dataclass(frozen=True, slots=True)
class Match:
    """The entry that shares the longest token prefix with a request, and the length of that prefix."""

    entry: Entry
    n_common: int


@dataclass(frozen=True, slots=True, eq=False)
class RemoteMatch:
    """An object of the fleet that serves the first n_common tokens of a request.

    `n_saved` of them the local store does not have. `n_bytes` would be fetched, with the parent where it is not here.
    `age` is in seconds, by the clock of the object store. `tokens` are those of the request.
    """

    n_common: int
    n_bytes: int
    age: float
    n_saved: int
    path: str
    tokens: Tokens = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """One tensor of one stream: `rows` rows, each `width` bytes a cell, from byte `start` of the state.

    `rows` is 1, or the number of embedding elements where V is transposed; a row has width x n_cells bytes.
    """

    start: int
    width: int
    rows: int
    type: int
    is_v: bool


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One stream of an attention cache: cells in cache order and its tensors, K of every layer, then V of every layer.

    `pos` is int32 of shape (n_cells,), `ext` uint8 of shape (n_cells, cell_ext); a stream without cells has no sections.
    """

    start: int
    stop: int
    pos: npt.NDArray[np.int32]
    ext: Bytes
    v_transposed: bool
    sections: tuple[Section, ...]

    @property
    def n_cells(self) -> int:
        return int(self.pos.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A BKVD delta: its bytes (uint8), how many bytes it shares with its parent, and its number of ops."""

    data: Bytes
    shared: int
    n_ops: int


@dataclass(frozen=True, slots=True)
class FamilyStats:
    """The entries that share a system block: their number, how many were stored, and how many were restored."""

    family: int
    entries: int
    saved: int
    reused: int


# Reasons why a put stores a state whole.
WHOLE: dict[str, str] = {
    "no_prefix": "no stored entry is a prefix",
    "saves_too_little": "a delta saves too little",
    "unknown_layout": "its layout, or the layout of its prefix, is not understood",
    "not_asked": "sharing was turned off, or the imported entry was whole",
    "learned": "learned, and no stored entry is a prefix",
    "damaged_prefix": "its prefix is damaged",
}


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a store. Counters run over the life of the file. Sizes are bytes, times are seconds."""

    entries: dict[str, int]  # by class
    size: int  # bytes as put
    stored: int  # bytes in chunks
    size_by_class: dict[str, int]
    stored_by_class: dict[str, int]
    file_bytes: int  # file and write-ahead log
    free_bytes: int  # inside the file, for the next put
    ram_bytes: int  # held by the RAM layer of this Store
    ram_entries: int
    hits: int  # counters from here
    misses: int
    unmatched: int  # calls of `match` that found nothing
    tokens_served: int
    puts: int
    shared_puts: int
    whole_puts: dict[str, int]  # by cause, see WHOLE
    evictions: dict[str, int]  # by cause
    encode_seconds: float
    decode_seconds: float
    upkeep_alive: bool | None  # whether the background thread runs; None if this Store does not have one
    upkeep_failures: int  # of that thread since the Store was opened; each was logged
    n_families: int
    families: tuple[FamilyStats, ...]  # the most used ones, 100 at most; operate.families gives all
    bases: int  # kept only because entries are stored against them; not among `entries`, nor their bytes as put in `size`
    base_bytes: int  # bytes of bases in chunks, which are part of `stored`

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        families = [
            {"family": hex_id(f.family), "entries": f.entries, "saved": f.saved, "reused": f.reused} for f in self.families
        ]
        own = {name: getattr(self, name) for name in self.__slots__ if name != "families"}
        return {**own, "families": families}

"""Chains of deltas: a state decoded from the links of its chain, and two links made one. The format is in `bkvd`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ._native import ffi, lib
from .bkvd_format import HEADER, Header, check, header, wrong_parent
from .errors import InvalidInputError
from .types import Bytes, Delta
from .util.buffers import as_u8
from .util.growing import Growing
from .util.validate import U64, check_int, choice

_FIRST_ROOM = 1 << 16
_EVIDENCE = 64
_FIRST_RANGES = 256
_SAMPLE = 1 << 20


class ChainDecoder:
    """Decodes a state of `size` bytes from the links of its chain, fed one after the other from the leaf to the root.

    Each stored byte is read once, and no state in between is built: the time grows with the stored bytes and the pieces that
    they fill. Beside the output the memory is 24 bytes for each range that the output lacks, twice, and for each repeat (bytes
    that a link copies twice). A chain whose links have n ops so far never has more than n ranges, and a link adds no more
    repeats than it leaves ranges. An op has at least 9 bytes.

    `size` is a claim: the output is allocated once the ops of the leaf are known to add up to it, or a 64th of it has been
    read. Until then the bytes of the leaf are held. After an error the decoder is of no further use. One thread at a time
    may use it.
    """

    def __init__(self, size: int) -> None:
        self._size = check_int(size, "size", 0, U64)
        self._chain = ffi.new("kv_chain *")
        self._chain.size = self._size
        self._grow_ranges(_FIRST_RANGES)
        self._repeats: Any = None
        self._out: Bytes | None = None
        self._expected: Header | None = None  # of the link before: what it says of the next one
        self._done = self._failed = False

    def feed(
        self, kind: str, stored_size: int, blocks: Iterable[Any], *, id: int | None = None, sample: int | None = None
    ) -> None:
        """Reads one link: a delta ("bkvd"), or the whole state that ends the chain ("full").

        `blocks` are the link's `stored_size` bytes in order, as buffers of any sizes; each is used before the next one is asked
        for, and not kept. `id` is the id of the link's entry and `sample` the `sample_hash` of its state, compared with the
        header of the link before if they are given. The sample of a whole state is computed if it is not given.

        Raises DeltaError with the messages of `decode` (a link that the one before was not encoded against: "its prefix is not
        in the cache"), InvalidInputError for wrong arguments or a link behind the last, and MemoryError.
        """
        full = choice(kind, ("bkvd", "full"), "kind of link") == "full"
        stored = check_int(stored_size, "stored_size", 0, U64)
        if self._done or self._failed:
            raise InvalidInputError("the chain has ended", hint="make a new ChainDecoder for each chain")
        self._failed = True
        before = self._expected
        if before is not None and (
            (id is not None and id != before.parent_id)
            or (sample is not None and sample != before.parent_hash)
            or (full and stored != before.parent_size)
        ):
            raise wrong_parent()
        sampler = _Sampler(stored) if full and before is not None and sample is None else None
        rest = iter(blocks)
        lib.kv_chain_begin(self._chain, full, stored)
        if self._out is None:
            for data in self._allocate(full, stored, rest):
                self._read(data)
        for block in rest:
            data = as_u8(block, "a block")
            if sampler is not None:
                sampler.update(data)
            self._read(data)
        self._end()
        if sampler is not None and before is not None and sampler.hash() != before.parent_hash:
            raise wrong_parent()
        c = self._chain
        self._expected = None if full else Header(int(c.parent_id), int(c.parent_size), int(c.parent_hash), int(c.link_size), 0)
        self._done, self._failed = full, False

    @property
    def parent_id(self) -> int:
        """The id of the entry that the next link must belong to; 0 if no link is needed."""
        return 0 if self._expected is None else self._expected.parent_id

    def finish(self) -> Bytes:
        """The state, as uint8, shape (size,). Raises DeltaError if the chain has no end yet."""
        if not self._done or self._out is None:
            raise wrong_parent()
        self._done, self._failed = False, True
        return self._out

    def _allocate(self, full: bool, stored: int, blocks: Iterator[Any]) -> list[Bytes]:
        """Allocates the output, when enough of the leaf has come. Returns the bytes that have."""
        held = bytearray()
        come: list[Bytes] = []
        for block in blocks:
            data = as_u8(block, "a block")
            if len(held) + data.size > self._size // _EVIDENCE:
                come = [data]
                break
            held += data.data
        else:
            _check_leaf(held, full, stored, self._size)
        try:
            self._out = np.empty(self._size, np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:
            raise MemoryError(f"no room for a state of {self._size} bytes") from error
        self._chain.out = ffi.from_buffer("uint8_t[]", self._out)
        return [as_u8(held), *come]

    def _read(self, data: Bytes) -> None:
        used, at = ffi.new("uint64_t *"), 0
        with ffi.from_buffer("uint8_t[]", data) as p:
            while (code := lib.kv_chain_read(self._chain, p + at, data.size - at, used)) == lib.KV_MORE:
                at += int(used[0])
                self._grow_ranges(2 * int(self._chain.room))
        check(code)

    def _end(self) -> None:
        c = self._chain
        while (code := lib.kv_chain_end(c)) == lib.KV_MORE:
            room = int(c.need_repeats) + int(c.repeats_room)
            repeats = ffi.new("kv_range[]", room)
            if c.n_repeats:
                ffi.memmove(repeats, c.repeats, ffi.sizeof("kv_range") * c.n_repeats)
            c.repeats, c.repeats_room, self._repeats = repeats, room, repeats
        check(code)
        if c.full:
            lib.kv_chain_finish(c)

    def _grow_ranges(self, room: int) -> None:
        c, size = self._chain, ffi.sizeof("kv_range")
        ranges, made = ffi.new("kv_range[]", room), ffi.new("kv_range[]", room)
        if c.n_ranges:
            ffi.memmove(ranges, c.ranges, size * c.n_ranges)
        if c.n_made:
            ffi.memmove(made, c.made, size * c.n_made)
        c.ranges, c.made, c.room, self._arrays = ranges, made, room, (ranges, made)


def _check_leaf(leaf: bytearray, full: bool, stored: int, size: int) -> None:
    """Raises DeltaError unless the bytes of a leaf give a state of `size` bytes."""
    if full:
        if len(leaf) < stored:
            check(lib.KV_TRUNCATED)
        if not len(leaf) == stored == size:
            check(lib.KV_SIZE_MISMATCH)
        return
    top, total = header(leaf), ffi.new("uint64_t *")
    with ffi.from_buffer("uint8_t[]", leaf) as p:
        check(lib.kv_check(p, len(leaf), top.parent_size, total))
    if total[0] != size:
        check(lib.KV_SIZE_MISMATCH)


class _Sampler:
    """The sample hash of a state that comes in blocks: keeps the bytes that it needs, 2 MiB at most."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0
        self._kept: list[Bytes] = []

    def update(self, data: Bytes) -> None:
        n, at = self._size, self._at
        self._at += data.size
        spans = [(0, n)] if n <= 2 * _SAMPLE else [(0, _SAMPLE), (n - _SAMPLE, n)]
        for start, stop in spans:
            part = data[max(start - at, 0) : max(stop - at, 0)]
            if part.size:
                self._kept.append(part.copy())

    def hash(self) -> int:
        data = np.concatenate([np.empty(0, np.uint8), *self._kept])
        with ffi.from_buffer("uint8_t[]", data) as p:
            return int(lib.kv_sample_hash(p, data.size)) ^ data.size ^ self._size


def compose(child: Any, parent: Any, *, limit: int | None = None) -> Delta | None:
    """The delta of the child's state against the parent's parent, from two deltas: no state is needed.

    The parent's id, size and hash in its header are those of `parent`. None if the result would have more than `limit` bytes,
    or 2^32 ops. The caller answers for `parent` being the delta of the entry that `child` was encoded against; only the
    sizes are compared. Raises DeltaError with the messages of `decode`.
    """
    ours, theirs = as_u8(child, "child"), as_u8(parent, "parent")
    top, base = header(ours), header(theirs)
    most = U64 if limit is None else check_int(limit, "limit", 0, U64)
    if top.parent_size != base.size:
        raise wrong_parent()
    total = ffi.new("uint64_t *")
    c = ffi.new("kv_composer *")
    with ffi.from_buffer("uint8_t[]", ours) as p, ffi.from_buffer("uint8_t[]", theirs) as q:
        check(lib.kv_check(p, ours.size, top.parent_size, total))
        check(lib.kv_check(q, theirs.size, base.parent_size, total))
        pieces = np.empty((base.n_ops + 1, 3), np.uint64)
        with ffi.from_buffer("kv_piece[]", pieces) as table:
            c.child, c.child_bytes, c.parent, c.parent_bytes = p, ours.size, q, theirs.size
            c.base_size, c.pieces, c.pieces_room, c.limit = base.parent_size, table, base.n_ops + 1, most
            out, code = _composed(c, ours.size + _FIRST_ROOM)
    if code == lib.KV_REFUSED:
        return None
    check(code)
    data = out.finish(int(c.out_size))
    made = Header(base.parent_id, base.parent_size, base.parent_hash, top.size, int(c.n_ops))
    data[: HEADER.size] = np.frombuffer(made.pack(), np.uint8)
    return Delta(data, int(c.shared), made.n_ops)


def _composed(c: Any, room: int) -> tuple[Growing, int]:
    out = Growing(room, mapped=sys.platform == "linux")
    while True:
        with ffi.from_buffer("uint8_t[]", out.buffer(), require_writable=True) as o:
            c.out, c.out_room = o, room
            code = int(lib.kv_compose(c))
        if code != lib.KV_MORE:
            return out, code
        room = max(int(c.need), room + room // 4) + _FIRST_ROOM - 1 & -_FIRST_ROOM
        out.grow(room)

"""BKVD, the delta format: a state written as copies of bytes of its parent's state, and literals.

Version 1, little-endian, packed:

    u32 magic (the bytes BKVD) · u32 version = 1 · u64 parent id · u64 parent size · u64 parent hash · u64 size
    u32 op count · ops:  COPY     u8 0, u64 source offset in the parent, u64 length
                         LITERAL  u8 1, u64 length, the bytes

The ops rebuild the state in order. The parent hash is FNV-1a (64 bit, start 1469598103934665603) over the first, then
the last min(size, 1 MiB) bytes, XOR size: enough to recognise a parent that was replaced, and cheap compared with the copying.

What becomes a COPY (fixed, so that two encoders give the same bytes): cells of parent and child are paired by position
and extra position bytes, stream by stream; section by section, row by row, cell by cell in the child's order, a cell
whose bytes equal those of its pair is shared; spans that follow each other on both sides are one COPY; the rest is
LITERAL, one op a run. With `content=True` literal runs of 4 KiB and more are also searched for equal runs of 4 KiB and
more anywhere in the parent.

`encode` returns None if the state is better stored whole:
    a state is empty, or its layout is not understood
    the child is a delta already
    the numbers of streams differ, since the states are then of different contexts
    less than min_saved is shared, or the delta is not smaller by min_saved: reading two entries would not pay
`decode` refuses (DeltaError), in this order:
    not a shared state               no full header, other magic or version
    its prefix is not in the cache   no parent, or its id, size or hash differs: copies would copy wrong bytes
    truncated                        an op or its first argument is missing
    truncated literal                fewer bytes follow than the literal has
    copy out of range                its length is missing, or not all bytes are in the parent
    unknown op                       neither 0 nor 1
    size mismatch                    the ops give more or fewer bytes than the header says, or bytes follow the last op
All ops are checked before anything is allocated: the size in a header is a claim, the sum of the ops is not.

Arguments are anything bytes-like and C-contiguous; they are not copied. The calls into C release the GIL.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import layout
from ._native import ffi, lib
from .bkvd_chain import ChainDecoder, compose
from .bkvd_format import (
    HEADER,
    MAGIC,
    VERSION,
    Header,
    check,
    header,
    is_delta,
    parent_id,
    sample_hash,
    size,
    wrong_parent,
)
from .errors import InvalidInputError, LayoutError
from .types import Bytes, Delta, Section, Stream
from .util.buffers import as_u8
from .util.growing import Growing
from .util.validate import U64, check_int

__all__ = [
    "MAGIC",
    "MIN_SAVED",
    "SAMPLE_BYTES",
    "VERSION",
    "ChainDecoder",
    "Header",
    "compose",
    "decode",
    "encode",
    "encode_parsed",
    "header",
    "is_delta",
    "parent_id",
    "sample_hash",
    "size",
]

MIN_SAVED = 16 << 20
SAMPLE_BYTES = 1 << 20  # hashed from each end of a state

_PAGE = 1 << 16  # a multiple of every system's page size

Run: TypeAlias = npt.NDArray[np.uint64]


def encode(
    child: Any,
    parent: Any,
    parent_id: int,
    *,
    cell_ext: int | None = None,
    min_saved: int = MIN_SAVED,
    content: bool = False,
    parent_hash: int | None = None,
) -> Delta | None:
    """The delta of `child` against `parent`, or None if the child is better stored whole (see the text of the module).

    `cell_ext` is the number of extra position bytes per cell; None: detect it. `content`: also search by content.
    `parent_hash` is `sample_hash(parent)` if the caller has it. Raises InvalidInputError if an input is not bytes-like
    and contiguous, or a number is out of range.
    """
    child, parent = as_u8(child, "child"), as_u8(parent, "parent")
    id_, saved = check_int(parent_id, "parent_id", 0, U64), check_int(min_saved, "min_saved", 0)
    if _hopeless(child, parent, saved):
        return None
    try:
        ours, theirs = layout.parse(child, cell_ext), layout.parse(parent, cell_ext)
    except LayoutError:
        return None
    return encode_parsed(child, parent, id_, ours, theirs, min_saved=saved, content=content, parent_hash=parent_hash)


def _hopeless(child: Bytes, parent: Bytes, saved: int) -> bool:
    """Whether no delta can come of these states, whatever their layout is."""
    return not child.size or not parent.size or child.size - saved < HEADER.size or child[:4].tobytes() == b"BKVD"


def encode_parsed(
    child: Bytes,
    parent: Bytes,
    parent_id: int,
    ours: layout.Layout,
    theirs: layout.Layout,
    *,
    min_saved: int,
    content: bool,
    parent_hash: int | None,
) -> Delta | None:
    """`encode` of checked arguments and states whose layouts, `ours` and `theirs`, were parsed before."""
    if _hopeless(child, parent, min_saved) or ours.stream_counts != theirs.stream_counts:
        return None
    saved, limit = min_saved, child.size - min_saved
    sections, runs = _pairs(ours.streams, theirs.streams)
    if not content and _shareable(sections, runs) < max(saved, 1):
        return None
    ahead = _HashAhead(parent) if parent_hash is None and child.size >= _HASH_AHEAD else None
    try:
        encoded = _encode(child, parent, sections, runs, limit, content)
    finally:
        hash_ = ahead.result() if ahead is not None else parent_hash
    if encoded is None or encoded.shared < saved:
        return None
    hash_ = sample_hash(parent) if hash_ is None else check_int(hash_, "parent_hash", 0, U64)
    made = Header(parent_id, parent.size, hash_, child.size, encoded.n_ops)
    encoded.data[: HEADER.size] = np.frombuffer(made.pack(), np.uint8)
    return encoded


def decode(delta: Any, parent: Any, parent_id: int, out: Any = None, *, parent_hash: int | None = None) -> Bytes:
    """The state that `delta` encodes, as uint8, shape (size,): a new array, or `out` (writable, of exactly that size).

    `parent` may be None; `parent_hash` is `sample_hash(parent)` if the caller has it. Raises DeltaError if the delta is
    damaged or belongs to another parent, InvalidInputError if `out` has another size or shares memory with an input, and
    MemoryError if there is no room for the state.
    """
    data = as_u8(delta, "delta")
    found = header(data)
    base = np.empty(0, np.uint8) if parent is None else as_u8(parent, "parent")
    if (
        parent is None
        or found.parent_id != parent_id
        or found.parent_size != base.size
        or found.parent_hash != (sample_hash(base) if parent_hash is None else parent_hash)
    ):
        raise wrong_parent()
    total = ffi.new("uint64_t *")
    with ffi.from_buffer("uint8_t[]", data) as p, ffi.from_buffer("uint8_t[]", base) as q:
        check(lib.kv_check(p, data.size, base.size, total))
        target = _output(out, int(total[0]), (data, base))
        with ffi.from_buffer("uint8_t[]", target, require_writable=True) as o:
            check(lib.kv_apply(p, data.size, q, base.size, o, target.size))
    return target


def _output(out: Any, n: int, inputs: tuple[Bytes, ...]) -> Bytes:
    if out is None:
        try:
            return np.empty(n, np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:
            raise MemoryError(f"no room for a state of {n} bytes") from error
    target = as_u8(out, "out")
    if target.size != n:
        raise InvalidInputError(f"out has {target.size} bytes, but the state has {n}", given=target.size, needed=n)
    if not target.flags.writeable:
        raise InvalidInputError("out is read-only")
    if any(np.may_share_memory(target, data) for data in inputs):
        raise InvalidInputError("out shares memory with the delta or its parent")
    return target


def _pairs(ours: Sequence[Stream], theirs: Sequence[Stream]) -> tuple[list[tuple[int, ...]], Run]:
    """The sections that both sides have, as kv_section's fields, and the runs of cells they refer to, shape (n, 3)."""
    sections: list[tuple[int, ...]] = []
    runs = [np.empty((0, 3), np.uint64)]
    n_runs = 0
    for child, parent in zip(ours, theirs, strict=True):
        if len(child.sections) != len(parent.sections):
            continue
        found = _runs(child, parent)
        if len(found) == 0:
            continue
        for a, b in zip(child.sections, parent.sections, strict=True):
            if (a.width, a.rows) == (b.width, b.rows) and a.width:
                sections.append(_section(a, b, child.n_cells, parent.n_cells, n_runs, len(found)))
        runs.append(found)
        n_runs += len(found)
    return sections, np.concatenate(runs)


def _section(a: Section, b: Section, n_child: int, n_parent: int, first_run: int, n_runs: int) -> tuple[int, ...]:
    return (a.start, b.start, a.width * n_child, b.width * n_parent, a.rows, a.width, first_run, n_runs)


def _runs(child: Stream, parent: Stream) -> Run:
    """Cells of equal key, as runs consecutive on both sides: child cell, parent cell, number of cells. uint64 (n, 3)."""
    none = np.empty((0, 3), np.uint64)
    n, ext = child.n_cells, child.ext.shape[1]
    if n == 0 or parent.n_cells == 0 or ext != parent.ext.shape[1]:
        return none
    keys = np.zeros((n + parent.n_cells, 1 + -(-ext // 4)), np.uint32)
    keys[:, 0] = np.concatenate([child.pos, parent.pos]).view(np.uint32)
    keys.view(np.uint8)[:, 4 : 4 + ext] = np.concatenate([child.ext, parent.ext])
    order = np.lexsort(keys.T) if ext else np.argsort(keys[:, 0], kind="stable")
    new = np.ones(len(order), np.bool_)
    new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
    key = np.empty(len(order), np.int64)
    key[order] = np.cumsum(new) - 1
    ours, theirs = key[:n], key[n:]
    place = np.full(int(new.sum()), -1, np.int64)
    place[theirs] = np.arange(len(theirs))
    if (place[theirs] != np.arange(len(theirs))).any():
        return none  # a key occurs twice: it is unknown which of the two cells the child continues
    at = place[ours]
    paired = at >= 0
    first = paired.copy()
    first[1:] &= ~(paired[:-1] & (at[1:] == at[:-1] + 1))
    starts = np.flatnonzero(first)
    # A run ends where the next one starts, or where cells without a pair do.
    count = np.add.reduceat(paired, starts, dtype=np.int64) if len(starts) else starts
    return np.stack([starts, at[starts], count], axis=1).astype(np.uint64)


def _shareable(sections: list[tuple[int, ...]], runs: Run) -> int:
    """The bytes of all paired cells: an upper bound of what the rule can share."""
    ends = np.concatenate([[0], np.cumsum(runs[:, 2], dtype=np.int64)])
    return sum(rows * width * int(ends[first + n] - ends[first]) for *_, rows, width, first, n in sections)


# FNV-1a works byte by byte: 2.4 ms for a large parent, a tenth of the encoding of 256 MiB. From this size of the child
# on a thread of its own costs less.
_HASH_AHEAD = 32 << 20


class _HashAhead:
    """The parent's hash, computed by another thread while the states are compared."""

    def __init__(self, parent: Bytes) -> None:
        self._hash = 0
        self._thread = threading.Thread(target=self._run, args=(parent,), name="kvstore-hash", daemon=True)
        self._thread.start()

    def _run(self, parent: Bytes) -> None:
        self._hash = sample_hash(parent)

    def result(self) -> int:
        self._thread.join()
        return self._hash


def _encode(child: Bytes, parent: Bytes, sections: list[tuple[int, ...]], runs: Run, limit: int, content: bool) -> Delta | None:
    step = max(child.size // 512, 64 << 10) + _PAGE - 1 & -_PAGE
    room = step
    out = Growing(room, mapped=sys.platform == "linux")
    e = ffi.new("kv_encoder *")
    with (
        ffi.from_buffer("uint8_t[]", child) as c,
        ffi.from_buffer("uint8_t[]", parent) as p,
        ffi.from_buffer("kv_run[]", runs) as r,
    ):
        table = ffi.new("kv_section[]", sections)
        e.child, e.child_size, e.parent, e.parent_size = c, child.size, p, parent.size
        e.sections, e.n_sections, e.runs, e.n_runs, e.limit = table, len(sections), r, len(runs), limit
        index = ffi.new("kv_index *")
        if content and (n := int(lib.kv_plan(index, parent.size, child.size - _shareable(sections, runs)))):
            slots = np.empty(n // 4 + 15, np.uint32)
            slots = slots[-slots.ctypes.data % 64 // 4 :]  # a bucket is one line of the cache
            index.slots = ffi.from_buffer("uint32_t[]", slots)
            e.index = index
        while True:
            with ffi.from_buffer("uint8_t[]", out.buffer(), require_writable=True) as o:
                e.out, e.out_room = o, room
                code = lib.kv_encode(e)
            if code != lib.KV_MORE:
                break
            room = max(int(e.need) + _PAGE - 1 & -_PAGE, room + step)
            out.grow(room)
    if code == lib.KV_BAD_SECTIONS:
        raise LayoutError("a parsed section lies outside of its state, or before the one in front of it")
    return Delta(out.finish(int(e.out_size)), int(e.shared), int(e.n_ops)) if code == lib.KV_OK else None

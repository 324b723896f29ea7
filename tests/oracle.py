"""The slow BKVD codec, in plain Python, what the fast one is compared with: the format's text, cell by cell."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from kvstore import layout
from kvstore.errors import LayoutError

MAGIC, COPY, LITERAL = 0x44564B42, 0, 1
HEADER = struct.Struct("<IIQQQQI")
U64 = 0xFFFFFFFFFFFFFFFF


def sample_hash(data: bytes) -> int:
    part = min(len(data), 1 << 20)
    h = 1469598103934665603
    for byte in data[:part] + data[len(data) - part :]:
        h = (h ^ byte) * 1099511628211 & U64
    return h ^ len(data)


def spans(child: bytes, parent: bytes, ours: Any, theirs: Any) -> Iterator[tuple[int, int, int]]:
    """(child offset, parent offset, length) of every shared cell, in the child's order, not merged."""
    for a, b in zip(ours.streams, theirs.streams, strict=True):
        theirs_keys = [(int(p), bytes(x)) for p, x in zip(b.pos, b.ext, strict=True)]
        place = {key: i for i, key in enumerate(theirs_keys)}
        if len(place) != len(theirs_keys) or not a.n_cells or not b.n_cells or len(a.sections) != len(b.sections):
            continue
        ours_keys = [(int(p), bytes(x)) for p, x in zip(a.pos, a.ext, strict=True)]
        for s, t in zip(a.sections, b.sections, strict=True):
            if (s.width, s.rows) != (t.width, t.rows):
                continue
            for row in range(s.rows):
                for i, key in enumerate(ours_keys):
                    if key in place:
                        c = s.start + (row * a.n_cells + i) * s.width
                        p = t.start + (row * b.n_cells + place[key]) * s.width
                        if child[c : c + s.width] == parent[p : p + s.width]:
                            yield c, p, s.width


def encode(
    child: bytes, parent: bytes, parent_id: int, *, cell_ext: int | None = None, min_saved: int = 16 << 20
) -> tuple[bytes, int, int] | None:
    """(delta, shared bytes, number of ops), or None where it is refused."""
    if not child or not parent or child[:4] == b"BKVD":
        return None
    try:
        ours, theirs = layout.parse(child, cell_ext), layout.parse(parent, cell_ext)
    except LayoutError:
        return None
    if ours.stream_counts != theirs.stream_counts:
        return None
    merged: list[list[int]] = []
    for c, p, n in spans(child, parent, ours, theirs):
        if merged and merged[-1][0] + merged[-1][2] == c and merged[-1][1] + merged[-1][2] == p:
            merged[-1][2] += n
        else:
            merged.append([c, p, n])
    ops: list[bytes] = []
    at = 0
    for c, p, n in [*merged, [len(child), 0, 0]]:
        if c > at:
            ops.append(struct.pack("<BQ", LITERAL, c - at) + child[at:c])
        if n:
            ops.append(struct.pack("<BQQ", COPY, p, n))
        at = c + n
    shared = sum(n for _, _, n in merged)
    header = HEADER.pack(MAGIC, 1, parent_id, len(parent), sample_hash(parent), len(child), len(ops))
    delta = header + b"".join(ops)
    if shared < min_saved or len(delta) + min_saved > len(child):
        return None
    return delta, shared, len(ops)


def ops(delta: bytes) -> Iterator[tuple[int, int, int]]:
    """(code, where, length) of each op of a valid delta; `where` is in the parent for COPY, else in the delta."""
    at = HEADER.size
    for _ in range(HEADER.unpack_from(delta)[6]):
        code, arg = struct.unpack_from("<BQ", delta, at)
        at += 9
        if code == COPY:
            yield code, arg, struct.unpack_from("<Q", delta, at)[0]
            at += 8
        else:
            yield code, at, arg
            at += arg


def decode(delta: bytes, parent: bytes | None, parent_id: int, *, most: int = 1 << 26) -> bytes | str:
    """The state, or the message of the format that says why not. A size above `most` is not tried: 'too large'."""
    if len(delta) < HEADER.size:
        return "not a shared state"
    magic, version, id_, parent_size, hash_, size, n_ops = HEADER.unpack_from(delta)
    if (magic, version) != (MAGIC, 1):
        return "not a shared state"
    if parent is None or (id_, parent_size, hash_) != (parent_id, len(parent), sample_hash(parent)):
        return "its prefix is not in the cache"
    pieces: list[tuple[bytes, int, int]] = []
    at = HEADER.size
    for _ in range(n_ops):
        if len(delta) - at < 9:
            return "truncated"
        code, arg = struct.unpack_from("<BQ", delta, at)
        at += 9
        if code == LITERAL:
            if arg > len(delta) - at:
                return "truncated literal"
            pieces.append((delta, at, arg))
            at += arg
        elif code == COPY:
            if len(delta) - at < 8:
                return "copy out of range"
            (n,) = struct.unpack_from("<Q", delta, at)
            at += 8
            if arg + n > len(parent):
                return "copy out of range"
            pieces.append((parent, arg, n))
        else:
            return "unknown op"
    total = sum(n for _, _, n in pieces)
    if at != len(delta) or total != size:
        return "size mismatch"
    return "too large" if total > most else b"".join(source[p : p + n] for source, p, n in pieces)

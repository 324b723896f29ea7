"""A slow stand-in for the chain kernel: decodes link by link, through every state in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ._native import ffi, lib
from .errors import DeltaError
from .types import Bytes, Delta


def header(delta: Any) -> tuple[int, int, int, int] | None:
    from . import bkvd

    return bkvd._header(np.frombuffer(delta, np.uint8))


def _apply(delta: Bytes, parent: Bytes) -> Bytes:
    from . import bkvd

    if bkvd._header(delta) is None:
        raise DeltaError("not a shared state")
    total = ffi.new("uint64_t *")
    with ffi.from_buffer("uint8_t[]", delta) as p, ffi.from_buffer("uint8_t[]", parent) as q:
        bkvd._check(lib.kv_check(p, delta.size, parent.size, total))
        target = np.empty(int(total[0]), np.uint8)
        with ffi.from_buffer("uint8_t[]", target, require_writable=True) as o:
            bkvd._check(lib.kv_apply(p, delta.size, q, parent.size, o, target.size))
    return target


class ChainDecoder:
    """The state of a chain whose links are fed from the leaf to the root."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._links: list[Bytes] = []

    def feed(self, link_kind: str, stored_size: int, blocks: Iterable[Any]) -> None:
        data = np.frombuffer(b"".join(bytes(block) for block in blocks), np.uint8)
        if data.size != stored_size:
            raise DeltaError("truncated")
        self._links.append(data)

    def finish(self) -> Bytes:
        state = self._links[-1]
        for delta in reversed(self._links[:-1]):
            state = _apply(delta, state)
        if state.size != self._size:
            raise DeltaError("size mismatch")
        return state.copy()


def _ops(delta: Bytes) -> list[tuple[int, int, int]]:
    """(1, offset of the bytes, length) of literals and (0, source, length) of copies."""
    data = delta.tobytes()
    at, out = 44, []
    for _ in range(int.from_bytes(data[40:44], "little")):
        code, arg = data[at], int.from_bytes(data[at + 1 : at + 9], "little")
        if code == 1:
            out.append((1, at + 9, arg))
            at += 9 + arg
        else:
            out.append((0, arg, int.from_bytes(data[at + 9 : at + 17], "little")))
            at += 17
    return out


def compose(child: Any, parent: Any) -> Delta:
    """A delta of the child against the grandparent."""
    import bisect

    from . import bkvd

    child, parent = np.frombuffer(child, np.uint8), np.frombuffer(parent, np.uint8)
    above, ours = bkvd._header(parent), bkvd._header(child)
    if above is None or ours is None:
        raise DeltaError("not a shared state")
    if ours[1] != above[3]:
        raise DeltaError("its prefix is not in the cache", wrong_parent=True)
    pops = _ops(parent)
    starts = [0]
    for _, _, n in pops:
        starts.append(starts[-1] + n)
    pieces: list[tuple[int, Any, int]] = []

    def add(kind: int, what: Any, n: int) -> None:
        if pieces and n:
            k, w, m = pieces[-1]
            if k == kind == 1:
                pieces[-1] = (1, w + what, m + n)
                return
            if k == kind == 0 and w + m == what:
                pieces[-1] = (0, w, m + n)
                return
        if n:
            pieces.append((kind, what, n))

    raw, praw = child.tobytes(), parent.tobytes()
    for kind, at, n in _ops(child):
        if kind == 1:
            add(1, raw[at : at + n], n)
            continue
        i = bisect.bisect_right(starts, at) - 1
        while n:
            k, src, m = pops[i]
            skip = at - starts[i]
            take = min(n, m - skip)
            if k == 1:
                add(1, praw[src + skip : src + skip + take], take)
            else:
                add(0, src + skip, take)
            at, n, i = at + take, n - take, i + 1
    out = [bkvd._HEADER.pack(bkvd.MAGIC, bkvd.VERSION, above[0], above[1], above[2], ours[3], len(pieces))]
    for kind, what, n in pieces:
        out.append(b"\x01" + n.to_bytes(8, "little") + what if kind else b"\x00" + what.to_bytes(8, "little") + n.to_bytes(8, "little"))
    data = np.frombuffer(b"".join(out), np.uint8).copy()
    return Delta(data, sum(n for k, _, n in pieces if not k), len(pieces))

"""Reads and writes the bytes of a state: one row of `blobs`, and its bytes in rows of `chunks`. The caller checks digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..types import Bytes
from ..util.hashing import Hasher
from . import queries_blobs
from .db import Connection
from .queries_blobs import BlobRow

# An early fsync of the log begins each time that so many bytes were written, so that the last one is short. In a log whose
# file grows each fsync also writes the file system's journal, so there are fewer: 256 MiB took 0.21 s with few and 0.23 s with
# many into a new log, 0.18 s and 0.15 s into one of full size.
SYNC_NEW_LOG = 64 << 20
SYNC_USED_LOG = 16 << 20


class UnreadableBlob(Exception):
    """The chunks of a blob do not add up."""


def log_bytes(n: int) -> int:
    """About how many bytes of log n bytes of states need: pages with their frame headers, and leaves that are rewritten."""
    return n + n // 64 + (1 << 20)


def _checked(
    c: Connection, blob: BlobRow, chunks: list[tuple[int, int, int]] | None = None
) -> list[tuple[int, int, int]]:
    """The (rowid, seq, bytes) of a blob's chunks, in order. Raises UnreadableBlob where they do not add up."""
    if chunks is None:
        chunks = queries_blobs.chunk_sizes(c, blob.id)
    if [seq for _, seq, _ in chunks] != list(range(len(chunks))) or sum(n for _, _, n in chunks) != blob.stored:
        raise UnreadableBlob(f"has {sum(n for _, _, n in chunks)} of {blob.stored} bytes in {len(chunks)} chunks")
    return chunks


PIECE_BYTES = 1 << 20  # of a blob that is read piece by piece: about a chunk, so that the buffer stays in the cache


def pieces(
    c: Connection, blob: BlobRow, room: Callable[[], Bytes], chunks: list[tuple[int, int, int]] | None = None
) -> Iterator[Bytes]:
    """The stored bytes of a blob, piece by piece, each in a buffer of PIECE_BYTES that `room` gives; `chunks` as in `read`.

    No piece but the last is smaller than a delta's header. Raises UnreadableBlob as `read` does.
    """
    chunks = _checked(c, blob, chunks)
    buffer = room()
    filled, left = 0, blob.stored
    handle = None
    try:
        for rowid, _, n in chunks:
            at = 0
            while at < n:
                if handle is None:
                    handle = c.blob_open("main", "chunks", "data", rowid, False)
                elif at == 0:
                    handle.reopen(rowid)
                take = min(n - at, buffer.size - filled)
                handle.read_into(buffer.data, filled, take)
                at, filled = at + take, filled + take
                left -= take
                if filled == buffer.size:
                    yield buffer
                    filled = 0
                    if left:
                        buffer = room()
        if filled:
            yield buffer[:filled]
    finally:
        if handle is not None:
            handle.close(True)


def ends(c: Connection, blob: BlobRow, n: int) -> Bytes:
    """The first n bytes of a blob and its last n, of at least 2 * n. Raises UnreadableBlob as `read` does."""
    chunks = _checked(c, blob)
    out = np.empty(2 * n, np.uint8)
    start = 0
    for rowid, _, size in chunks:
        for low, to in ((0, 0), (blob.stored - n, n)):
            first, last = max(start, low), min(start + size, low + n)
            if first < last:
                with c.blob_open("main", "chunks", "data", rowid, False) as handle:
                    handle.seek(first - start)
                    handle.read_into(out.data, to + first - low, last - first)
        start += size
    return out


def read(
    c: Connection,
    blob: BlobRow,
    out: Bytes | None = None,
    hasher: Hasher | None = None,
    chunks: list[tuple[int, int, int]] | None = None,
) -> Bytes:
    """The stored bytes of a blob, read straight into `out` (uint8, blob.stored bytes) or a new array.

    `chunks` are its (rowid, seq, bytes), in order, where they cannot be looked up.

    Raises UnreadableBlob where chunks are missing or their sizes do not add up; nothing is allocated before that is known.
    """
    chunks = _checked(c, blob, chunks)
    if out is None:
        out = np.empty(blob.stored, np.uint8)
    at = 0
    handle = None
    try:
        for rowid, _, n in chunks:
            if n == 0:
                continue
            if handle is None:
                handle = c.blob_open("main", "chunks", "data", rowid, False)
            else:
                handle.reopen(rowid)
            handle.read_into(out.data, at, n)
            if hasher is not None:
                hasher.update(out[at : at + n])
            at += n
    finally:
        if handle is not None:
            handle.close(True)
    return out


def write(c: Connection, blob: int, data: Bytes, chunk: int, first: int = 0, count: int | None = None) -> int:
    """Writes up to `count` chunks of `chunk` bytes from chunk `first` on; gives the next one to write, or -1 at the end."""
    seq = first
    for at in range(first * chunk, data.size, chunk):
        if count is not None and seq - first >= count:
            return seq
        queries_blobs.insert_chunk(c, blob, seq, data[at : at + chunk])
        seq += 1
    return -1

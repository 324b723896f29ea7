"""Reads and writes the bytes of a state: one row of `blobs`, and its bytes in rows of `chunks`. The caller checks digests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..types import Bytes
from ..util.hashing import Hasher
from . import geometry, queries_blobs
from .db import Connection
from .queries_blobs import BlobRow

# Start an early WAL fsync every N chunks and once M chunks before the end, so the final fsync is short. In a log whose file
# grows each fsync also writes the file system's journal, so there are fewer: 256 MiB took 0.21 s with few and 0.23 s with
# many into a new log, 0.18 s and 0.15 s into one of full size.
KICKS_NEW_LOG = (geometry.BATCH_CHUNKS, 12)
KICKS_USED_LOG = (16, 4)


class UnreadableBlob(Exception):
    """The chunks of a blob do not add up."""


def log_bytes(n: int) -> int:
    """About how many bytes of log n bytes of states need: pages with their frame headers, and leaves that are rewritten."""
    return n + n // 64 + (1 << 20)


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
    if chunks is None:
        chunks = queries_blobs.chunk_sizes(c, blob.id)
    if [seq for _, seq, _ in chunks] != list(range(len(chunks))) or sum(n for _, _, n in chunks) != blob.stored:
        raise UnreadableBlob(f"has {sum(n for _, _, n in chunks)} of {blob.stored} bytes in {len(chunks)} chunks")
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


def write(
    c: Connection,
    blob: int,
    data: Bytes,
    first: int = 0,
    count: int | None = None,
    kick: Callable[[], None] | None = None,
    kicks: tuple[int, int] = KICKS_NEW_LOG,
) -> int:
    """Writes up to `count` chunks of a state from chunk `first` on; gives the next chunk to write, or -1 at the end."""
    every, before_end = kicks
    seq, last = first, -(-data.size // geometry.CHUNK_BYTES)
    for at in range(first * geometry.CHUNK_BYTES, data.size, geometry.CHUNK_BYTES):
        if count is not None and seq - first >= count:
            return seq
        queries_blobs.insert_chunk(c, blob, seq, data[at : at + geometry.CHUNK_BYTES])
        seq += 1
        if kick is not None and (seq % every == 0 or last - seq == before_end):
            kick()
    return -1

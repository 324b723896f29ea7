"""Reads and writes the bytes of a state: one row of `blobs`, and its bytes in rows of `chunks`. The caller checks digests."""

from __future__ import annotations

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


def write(c: Connection, blob: int, data: Bytes, chunk: int, first: int = 0, count: int | None = None) -> int:
    """Writes up to `count` chunks of `chunk` bytes from chunk `first` on; gives the next one to write, or -1 at the end."""
    seq = first
    for at in range(first * chunk, data.size, chunk):
        if count is not None and seq - first >= count:
            return seq
        queries_blobs.insert_chunk(c, blob, seq, data[at : at + chunk])
        seq += 1
    return -1

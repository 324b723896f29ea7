"""Sizes that follow from the page of a file: of chunks, batches and steps, and the pages that a transaction writes beside its
chunks. A file keeps the page size that it was created with: each of these is derived from the file's own.
"""

from __future__ import annotations

# Of new files. A put writes to about 15 b-trees, one page each, to the log and again to the file: with pages of 64 KiB
# that was 2.5 MiB, whatever was put; with 8 KiB it is a tenth. Smaller pages cost large puts more calls: the processor time of
# a put of 256 MiB was 0.20 s with pages of 64 KiB, 0.22 with 8, 0.25 with 4.
PAGE_SIZE = 8192
LARGEST_PAGE = 65536

# Of a row too large for a leaf, SQLite keeps a part in the leaf, and fills overflow pages, each of which begins with the number
# of the next (SQLite, file format, 1.6).
ROW_HEADER_BYTES = 17
# The size of a chunk, to whole pages. With pages of 8 KiB chunks of 1.5 to 5 MiB were the fastest of 0.1 to 5 MiB.
CHUNK_BYTES = 3 << 19
# A larger put is committed in batches, each smaller than SQLite's page cache: what spills into the log within a transaction,
# and is then changed again, makes SQLite read and sum the whole log of the transaction once more at the commit (256 MiB in
# pages of 8 KiB: 0.47 s in batches of 64 MiB, 0.27 s in batches of 6).
BATCH_CHUNKS = 4
SMALLEST_BATCH_BYTES = 1 << 18
# Chunks that one step deletes on a full disk: one more than share a leaf.
CHUNKS_PER_STEP = 9
# From this size a chunk is inserted as zeros and then written in place (`queries_blobs.insert_chunk`).
IN_PLACE_BYTES = 65536

# Counted in stores with pages of 8 and of 64 KiB. WAL pages per put besides its chunks and tokens: the b-trees of entries,
# meta, blobs and totals, and the free list.
LOG_PAGES = 28
# Pages one entry can add to the b-trees.
NEW_PAGES = 10
# Pages of an empty store.
BASE_PAGES = 35
# One eviction was seen to write up to 15 pages, most of them the same ones again for the next.
PAGES_EVICTED = 15
# A freed page writes itself and two that refer to it.
PAGES_PER_FREED = 3
# Kept free on the disk for a delete: twice what an eviction writes, with the shared memory beside it.
SPARE_BYTES = 2 * (PAGES_EVICTED + 1) * LARGEST_PAGE

# Free space given back to the file system by one step of the background thread, and by one of `gc` or `prune`.
FREE_BYTES_PER_RUN = 16 << 20
FREE_BYTES_PER_STEP = 64 << 20
# What a backup copies between two calls of its progress.
BACKUP_BYTES = 16 << 20


def pages_of(n_bytes: int, page_size: int) -> int:
    """Whole pages in n_bytes, at least one."""
    return max(1, n_bytes // page_size)


def leaf_bytes(page_size: int) -> int:
    """How much of a row too large for a leaf SQLite keeps there."""
    return (page_size - 12) * 32 // 255 - 23


def chunk_bytes(page_size: int, most: int | None = None) -> int:
    """The size of a chunk that fills whole pages: about CHUNK_BYTES, or `most` if that is less."""
    wanted = CHUNK_BYTES if most is None else min(CHUNK_BYTES, most)
    return leaf_bytes(page_size) - ROW_HEADER_BYTES + pages_of(wanted, page_size) * (page_size - 4)

"""Sizes that follow from the page: of chunks, batches and steps, and the pages that a transaction writes beside its chunks."""

from __future__ import annotations

# The largest page: put of 256 MiB took 0.35 s with pages of 64 KiB, 0.43 with 32, 0.47 with 16 and 0.85 with 4 (plain
# file with fsync beside it: 0.15 to 0.17 s). It also keeps the token keys of the prefix index (up to 16 KiB) inside a
# page, so a comparison reads one.
PAGE_SIZE = 65536


def pages_of(n_bytes: int) -> int:
    """Whole pages in n_bytes, at least one."""
    return max(1, n_bytes // PAGE_SIZE)


# Of a row too large for a leaf, SQLite keeps this many bytes in the leaf, and fills overflow pages, each of which begins with
# the number of the next (SQLite, file format, 1.6).
LEAF_BYTES = (PAGE_SIZE - 12) * 32 // 255 - 23
OVERFLOW_BYTES = PAGE_SIZE - 4
ROW_HEADER_BYTES = 17
# A chunk fills whole pages. Chunks of 1 MiB were the fastest to write of 0.1 to 16 MiB (0.30 s for 256 MiB, 0.41 s with
# 16 MiB): SQLite copies a bound value, and a copy of this size stays in the cache.
CHUNK_BYTES = LEAF_BYTES - ROW_HEADER_BYTES + pages_of(1 << 20) * OVERFLOW_BYTES
# A larger put is committed in batches of chunks, so that other writers get their turn and the log stays small.
BATCH_CHUNKS = 64
SMALLEST_BATCH_BYTES = pages_of(1 << 20) * PAGE_SIZE
# Chunks that one step deletes on a full disk: one more than share a leaf.
CHUNKS_PER_STEP = PAGE_SIZE // LEAF_BYTES + 1
# From this size a chunk is inserted as zeros and then written in place (`queries_blobs.insert_chunk`).
IN_PLACE_BYTES = PAGE_SIZE

# Counted in stores with pages of this size. WAL pages per put besides its chunks: the b-trees of entries, meta, blobs and
# totals, and the free list.
LOG_PAGES = 28
# Pages one entry can add to the b-trees.
NEW_PAGES = 10
# Pages of an empty store.
BASE_PAGES = 34
# One eviction was seen to write up to 15 pages, most of them the same ones again for the next.
PAGES_EVICTED = 15
# A freed page writes itself and two that refer to it.
PAGES_PER_FREED = 3
# Kept free on the disk for a delete: twice what an eviction writes, with the shared memory beside it.
SPARE_BYTES = 2 * (PAGES_EVICTED + 1) * PAGE_SIZE

# Free pages given back to the file system by one step of the background thread, and by one of `gc` or `prune`.
FREE_PAGES_PER_RUN = pages_of(16 << 20)
FREE_PAGES_PER_STEP = pages_of(64 << 20)
# Pages that a backup copies between two calls of its progress.
BACKUP_PAGES = pages_of(16 << 20)

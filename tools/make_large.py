"""Makes a store of very many entries with small states, by SQL, to measure what must not grow with their number.

    python tools/make_large.py FILE [--entries 1000000] [--kind cut|whole|staircase|nested] [--families 1000]

The entries are listed, matched and removed as any others; their states are a few bytes that nobody understands.
"""

from __future__ import annotations

import argparse
import os
import random
import time

import apsw
import numpy as np

from kvstore import Store
from kvstore.util.hashing import digest

PER_TRANSACTION = 20_000


def tokens_of(kind: str, i: int, document: np.ndarray) -> np.ndarray:
    """The tokens of entry i: about 40, or part of the document with one or no token of its own."""
    if kind == "staircase":
        return np.append(document[: 1 + i % len(document)], np.int32(1_000_000 + i))
    if kind == "nested":
        return np.append(document[: 1 + i % len(document)], np.full(i // len(document), 7, np.int32))
    return np.append(document[:20], np.array([i >> 10, i & 1023, i], np.int32))


def fill(path: str, n: int, kind: str, families: int, n_document: int, expired: bool) -> None:
    with Store(path, cache_ram_mib=0) as store:
        store.put([1], b"x", share=False)
    rng = random.Random(1)
    document = np.random.default_rng(1).integers(0, 100_000, n_document).astype(np.int32)
    state = b"a state of a few bytes"
    check = digest(state)
    c = apsw.Connection(path)
    c.execute("PRAGMA synchronous = off")
    now = int(time.time())
    seen = 0
    while seen < n:
        c.execute("BEGIN IMMEDIATE")
        rows = range(seen, min(n, seen + PER_TRANSACTION))
        ids = [rng.getrandbits(63) - (1 << 62) or 1 for _ in rows]
        keys = [tokens_of(kind, i, document) for i in rows]
        c.executemany(
            "INSERT INTO entries(id, fingerprint, cut_any, n_tokens, tokens) VALUES(?, 1, ?, ?, ?)",
            [(id, int(kind == "cut"), len(key), key.tobytes()) for id, key in zip(ids, keys, strict=True)],
        )
        c.executemany(
            """INSERT INTO meta(entry, class, source, created_at, last_used, use_order, family, n_input, size, stored, hits,
 expires_at, excerpt) VALUES(?, 'normal', 'default', ?, ?, ?, ?, 1, ?, ?, ?, ?, 'how do I ...')""",
            [
                (id, now, now - rng.randrange(10**6), i, i % families, len(state), len(state), i % 7, 1 if expired else None)
                for i, id in zip(rows, ids, strict=True)
            ],
        )
        blobs = range(seen + 100, seen + 100 + len(ids))
        c.executemany(
            "INSERT INTO blobs(id, entry, part, kind, size, stored, digest) VALUES(?, ?, 'main', 'full', ?, ?, ?)",
            [(b, id, len(state), len(state), check) for b, id in zip(blobs, ids, strict=True)],
        )
        c.executemany("INSERT INTO chunks(blob, seq, data) VALUES(?, 0, ?)", [(b, state) for b in blobs])
        c.execute("COMMIT")
        seen += len(ids)
    c.execute("INSERT OR REPLACE INTO families SELECT family, count(*), 0 FROM meta GROUP BY family")
    c.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    c.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=["cut", "whole", "staircase", "nested"], default="cut")
    parser.add_argument("--families", type=int, default=1000)
    parser.add_argument("--document", type=int, default=4000, help="tokens that staircases and nested entries begin with")
    parser.add_argument("--expired", action="store_true")
    args = parser.parse_args()
    if os.path.exists(args.file):
        raise SystemExit(f"{args.file} is there already")
    fill(args.file, args.entries, args.kind, args.families, args.document, args.expired)


if __name__ == "__main__":
    main()

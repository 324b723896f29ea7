"""Stores of version 1 for the tests: the ones with every odd case, and ones made row by row."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore import Store, bkvd
from kvstore.meta import MetaBlock
from kvstore.storage.queries import signed

MAKE = Path(__file__).parent / "data" / "legacy" / "make_v1.py"
_spec = importlib.util.spec_from_file_location("make_v1", MAKE)
assert _spec is not None
assert _spec.loader is not None
make_v1 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_v1)

# Fails the moment it is asked to: the n-th call of a function that changes names or syncs, or the n-th report of progress.
KILLED = """
import os, signal, sys
path, at, key = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or [None])[0]
seen = 0
def count(*_):
    global seen
    seen += 1
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)
def counted(real):
    def call(*args, **kwargs):
        count()
        result = real(*args, **kwargs)
        count()
        return result
    return call
from kvstore.storage import schema as upgrade
for name in ("link", "chmod", "replace", "fsync", "chown"):
    setattr(os, name, counted(getattr(os, name)))
upgrade.upgrade(path, count, key=key)
"""


def odd(path: Path, seed: int) -> dict[str, dict[str, Any]]:
    """A store with every odd case; what each entry must become, by name."""
    expected = path.with_suffix(".json")
    subprocess.run([sys.executable, str(MAKE), str(path), str(expected), str(seed)], check=True)
    found: dict[str, dict[str, Any]] = json.loads(expected.read_text())
    expected.unlink()
    return found


def check(path: Path, expected: dict[str, dict[str, Any]], key: str | None = None) -> None:
    """Every entry is what it must be, and there are no others."""
    with Store(path, cache_ram_mib=0, key=key) as store:
        assert store.verify() == []
        entries = {entry.hex_id: entry for entry in store.entries()}
        for name, case in expected.items():
            entry, want = entries.pop(case["id"], None), case["entry"]
            if want is None:
                assert entry is None, name
                continue
            assert entry is not None, name
            saved = store.get(entry.id)
            assert saved is not None, name
            states = {"main": saved.main, "draft": saved.draft}
            have = entry.as_dict() | {
                "tokens": saved.tokens.tolist(),
                "fingerprint": "model-a",
                "parent": None if entry.parent is None else f"{entry.parent:016x}",
                "expires_at": entry.expires_at,
                "ttl": entry.ttl,
                "n_input": entry.n_input,
                "sha256": {part: hashlib.sha256(s).hexdigest() for part, s in states.items() if s is not None},
            }
            for key in want.keys() - {"reported"}:
                assert have[key] == want[key], (name, key)
        assert not entries


class Legacy:
    """A store of version 1 that a test fills row by row. Use it as a context manager: the end commits."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path)
        self.db.executescript(make_v1.SCHEMA)

    def __enter__(self) -> Legacy:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.commit()
        self.db.close()

    def add(self, id: int, states: dict[str, Any], *, tokens: Sequence[int] = (1, 2, 3), n_tokens: Any = None,
            token_bytes: Any = None, fingerprint: Any = "", block: Any = None, **meta: Any) -> None:  # fmt: skip
        packed = struct.pack(f"<{len(tokens)}i", *tokens) if token_bytes is None else token_bytes
        n = len(tokens) if n_tokens is None else n_tokens
        self.db.execute("INSERT INTO entries VALUES(?,?,?,?)", (signed(id), fingerprint, n, packed))
        meta = {"created_at": 1_750_000_000, "last_used": 1_750_000_000, **meta}
        data = MetaBlock(id, **meta).pack() if block is None else block
        self.db.execute("INSERT INTO meta VALUES(?,?)", (signed(id), data))
        for part, state in states.items():
            self.db.execute("INSERT INTO blobs VALUES(?,?,?)", (signed(id), part, state))


def delta(child: bytes, parent: bytes, parent_id: int) -> bytes:
    """A delta of two states that begin alike, as the format allows it whatever their layout."""
    n = next((i for i, (a, b) in enumerate(zip(child, parent, strict=False)) if a != b), min(len(child), len(parent)))
    ops = struct.pack("<BQQ", 0, 0, n) + struct.pack("<BQ", 1, len(child) - n) + child[n:]
    hashed = bkvd.sample_hash(parent)
    return struct.pack("<IIQQQQI", 0x44564B42, 1, parent_id, len(parent), hashed, len(child), 2) + ops


def plain(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A schema without comments and white space: a column that was added later stands in the same place."""
    return sorted((*row[:3], re.sub(r"\s+", "", re.sub(r"--.*", "", row[3]))) for row in rows)

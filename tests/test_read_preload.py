"""Reads that fail in the kernel, as SQLite's own VFS sees them: it calls a part of them damage."""

from __future__ import annotations

import json
from pathlib import Path

import legacykit
import preloadkit
import pytest
from storekit import noise

UPGRADE = """
import kvstore
from kvstore.storage import schema
source, path = sys.argv[1:]
def once(at):
    shutil.copy(source, path)
    fail_reads(at, 1)
    try:
        schema.upgrade(path, backup=False)
        said = "done"
    except kvstore.KVStoreError as error:
        said = type(error).__name__
    n = reads()
    fail_reads(-1, 1)
    with kvstore.Store(path) as store:
        return n, said, sum(store.stats().entries.values())
total, *first = once(-1)
print(json.dumps([first] + [once(at)[1:] for at in [*range(1, 12, 3), *range(total // 2, total, total // 12)]]))
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    found = preloadkit.library(tmp_path)
    if found is None:
        pytest.skip("needs Linux and a C compiler")
    return found


@pytest.mark.slow
def test_an_upgrade_leaves_out_nothing_for_a_refused_read(made: Path, tmp_path: Path) -> None:
    """A row to a page, and more pages than SQLite keeps: each is read twice."""
    source = tmp_path / "old"
    with legacykit.Legacy(source) as old:
        for id in range(1, 3001):
            old.add(id, {"main": noise(id, 3500)}, tokens=[id, 2, 3])
    found = json.loads(preloadkit.run(made, UPGRADE, source, tmp_path / "refused.store"))
    assert found[0] == ["done", 3000]
    assert {entries for _, entries in found} == {3000}, found
    assert {said for said, _ in found} == {"done", "StoreIOError"}, found

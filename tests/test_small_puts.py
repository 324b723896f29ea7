"""What a put writes beside its bytes, and what a store that is closed leaves free."""

from __future__ import annotations

import sys
from pathlib import Path

import apsw
import numpy as np
import pytest
from storekit import noise

import kvstore
from kvstore import Store
from kvstore.storage import geometry
from kvstore.store.store import WAKE_PUTS

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts what the kernel was handed")


def handed_to_the_kernel() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


@linux
@pytest.mark.parametrize("size", [1024, 512 << 10])
def test_a_put_writes_less_than_300_kib_beside_its_bytes(size: int, path: Path) -> None:
    """Log and file both, of as many puts as are copied into the file together: the bytes themselves are written to each."""
    rng = np.random.default_rng(1)
    with Store(path, cache_ram_mib=0) as store:
        assert store._maintenance is not None
        store._maintenance.stop()
        for n in range(200):
            store.put([n, *range(500)], noise(n, 1000))
        store._core.db.checkpoint()
        before = handed_to_the_kernel()
        for n in range(WAKE_PUTS):
            store.put(rng.integers(0, 50_000, 1000, dtype=np.int32), noise(n, size))
        store._core.db.checkpoint()
        beside = (handed_to_the_kernel() - before) / WAKE_PUTS - 2 * size
    assert beside < 300 << 10


def test_a_small_put_copies_no_log_by_itself(path: Path) -> None:
    """Its pages, and those of the puts after it, are copied into the file once."""
    with Store(path, cache_ram_mib=0) as store:
        store._core.db.checkpoint(truncate=True)
        store._maintenance.stop()
        before = path.stat().st_size
        for n in range(10):
            store.put([n, 1], b"x" * 1000)
        assert store._core.db.wal_bytes() > 0
        assert path.stat().st_size == before


def test_close_gives_free_space_back(path: Path) -> None:
    with Store(path, cache_ram_mib=0) as store:
        kept = store.put([1], noise(1, 2_000_000))
        for n in range(10):
            store.put([2, n], noise(n, 3_000_000))
        for entry in list(store.entries()):
            if entry.id != kept.id:
                store.delete(entry.id)
    assert path.stat().st_size < 3_000_000
    with Store(path, readonly=True) as store:
        saved = store.get(kept.id)
        assert saved is not None
        assert saved.main.tobytes() == noise(1, 2_000_000)
        assert store.verify() == []


@pytest.mark.parametrize("page_size", [4096, 65536])
def test_a_file_of_another_page_size_is_used_as_it_is(page_size: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.db.PAGE_SIZE", page_size)
    Store(path).close()
    monkeypatch.undo()
    with Store(path, cache_ram_mib=0, cache_disk_mib=32) as store:
        entries = [store.put([n], noise(n, 9_000_000)) for n in range(4)]
        saved = store.get(entries[-1].id)
        assert saved is not None
        assert saved.main.tobytes() == noise(3, 9_000_000)
        assert store.stats().file_bytes <= 32 << 20
        store.delete(entries[-1].id)
        store.gc()
        assert store.verify() == []
    c = apsw.Connection(str(path))
    assert c.pragma("page_size") == page_size
    c.close()


def test_an_empty_store_is_small(path: Path) -> None:
    Store(path).close()
    assert path.stat().st_size <= geometry.BASE_PAGES * geometry.PAGE_SIZE <= 320 << 10
    with Store(path, cache_disk_mib=2) as store:
        store.put([1], noise(1, 400_000))
        assert store.stats().entries["normal"] == 1
        with pytest.raises(kvstore.OverBudgetError):
            store.put([2], noise(2, 3_000_000))

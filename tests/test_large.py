"""A state larger than SQLite's largest BLOB (10^9 bytes)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore

SIZE = 2_200_000_000


@pytest.mark.slow
def test_2_2_gb_go_in_and_come_back(tmp_path: Path) -> None:
    state = np.random.default_rng(1).integers(0, 1 << 63, SIZE // 8, dtype=np.int64).view(np.uint8)
    with kvstore.Store(tmp_path / "cache.db", cache_ram_mib=0) as store:
        entry = store.put([1, 2, 3], state)
        assert entry.size == entry.stored == SIZE
    with kvstore.Store(tmp_path / "cache.db", cache_ram_mib=0, readonly=True) as store:
        saved = store.get(entry.id)
        assert saved is not None
        assert np.array_equal(saved.main, state)

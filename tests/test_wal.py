"""Room for the log ahead of a put: what stands behind its frames is never read as one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore import Store
from kvstore.storage import wal

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="fallocate is Linux's")


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


@linux
def test_reserve_keeps_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"frames")
    assert wal.reserve(str(path), MIB)
    assert path.stat().st_size == MIB
    assert path.read_bytes() == b"frames" + bytes(MIB - 6)
    assert wal.reserve(str(path), 10)
    assert path.stat().st_size == MIB  # never smaller


def test_reserve_makes_no_file(tmp_path: Path) -> None:
    assert not wal.reserve(str(tmp_path / "log"), MIB)
    assert list(tmp_path.iterdir()) == []


@linux
def test_no_room_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"frames")
    assert not wal.reserve(str(path), 1 << 60)
    assert path.read_bytes().rstrip(b"\0") == b"frames"


@linux
def test_recovery_stops_at_the_last_frame(tmp_path: Path) -> None:
    """The files as a crash leaves them: a log with zeros behind the frames, then one with frames of earlier use."""
    rng = np.random.default_rng(1)
    path, states = tmp_path / "s.db", [rng.integers(0, 256, n, np.uint8) for n in (9 * MIB, 20 * MIB, 10 * MIB)]
    with Store(path, cache_ram_mib=0) as store:
        store._maintenance.stop()
        for i, state in enumerate(states):
            store.put([i, 1, 2], state)
            assert log_of(path).stat().st_size > state.nbytes * 65 // 64
            crashed = tmp_path / f"crashed{i}.db"
            shutil.copy(path, crashed)
            shutil.copy(log_of(path), log_of(crashed))
            with Store(crashed, cache_ram_mib=0) as again:
                assert again.verify() == []
                for k in range(i + 1):
                    match = again.match([k, 1, 2])
                    assert match is not None
                    saved = again.get(match.entry.id)
                    assert saved is not None
                    assert np.array_equal(saved.main, states[k])
            if i == 1:
                store._core.db.checkpoint()  # the next put uses the log again, from its start


def test_a_budget_reserves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with Store(path, cache_ram_mib=0, cache_disk_mib=64) as store:
        store._maintenance.stop()
        store.put([1, 2], np.ones(20 * MIB, np.uint8))
        assert path.stat().st_size + log_of(path).stat().st_size <= 64 * MIB

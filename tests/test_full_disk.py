"""A disk without a free byte: every way to delete works; a call that needs room fails and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from diskkit import small_disk
from storekit import MIB, dump, file_bytes, noise, state

import kvstore
from kvstore import Store, cli
from kvstore.storage import disk, geometry

LEVELS = [0, 4096, 65_536, 300_000, 1_000_000, 1_500_000, 3_000_000, 6_000_000]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 48 MiB."""
    with small_disk(tmp_path / "disk", 48) as point:
        yield point


def fill(folder: Path, left: int) -> Path:
    """A file that leaves so many bytes of the disk free."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        try:
            while (n := disk.free_bytes(str(folder)) - left) > 0:
                file.write(bytes(min(n, 65_536)))
        except OSError:
            pass
    return filler


def open_here(folder: Path, **options: Any) -> Store:
    return Store(folder / "kv.store", **{"cache_ram_mib": 0, "min_saved_mib": 0.001, "timeout": 10.0, **options})


def assert_sound(store: Store, entries: int) -> None:
    assert store.verify() == []
    assert len(dump(store)) == entries


@pytest.mark.parametrize("left", LEVELS)
@pytest.mark.parametrize(("size", "budget"), [(40_000, -1), (300_000, 30), (3_000_000, -1), (3_000_000, 40)])
@pytest.mark.parametrize("opened", ["before", "after"])
def test_deletes_and_gc(left: int, size: int, budget: int, opened: str, full: Path) -> None:
    n = 8
    store = open_here(full, cache_disk_mib=budget)
    ids = [store.put([k, 1], noise(k, size)).id for k in range(n)]
    if opened == "after":
        store.close()
    fill(full, left)
    if opened == "after":
        store = open_here(full, cache_disk_mib=budget)
    with store:
        for gone, id in enumerate(ids[1:], 1):
            assert store.delete(id) == [id]
            assert len(list(store.entries())) == n - gone
        assert store.gc() == []
        assert_sound(store, 1)
        assert store.stats().free_bytes == 0
        assert store.stats().file_bytes < 4 * MIB + size
    with open_here(full) as store:
        assert_sound(store, 1)
    assert sorted(p.name for p in full.iterdir()) == ["filler", "kv.store"]


@pytest.mark.parametrize("opened", ["before", "after"])
def test_an_entry_of_many_chunks(opened: str, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes more of the log to delete than is kept aside."""
    monkeypatch.setattr(geometry, "CHUNK_BYTES", 9_000)
    store = open_here(full)
    large = store.put([1], noise(1, 15_000_000))
    store.put([2], b"stays")
    store.gc()
    if opened == "after":
        store.close()
    fill(full, 0)
    if opened == "after":
        store = open_here(full)
    with store:
        assert store.delete(large.id) == [large.id]
        store.gc()
        assert_sound(store, 1)
        assert store.stats().file_bytes < 4 * MIB


@pytest.mark.parametrize("left", [0, 100_000])
@pytest.mark.parametrize("quiet", [False, True])
def test_the_command_deletes(left: int, quiet: bool, full: Path) -> None:
    with open_here(full) as store:
        ids = [store.put([k, 1], noise(k, 500_000)).hex_id for k in range(5)]
        if quiet:
            store.gc()
    fill(full, left)
    for id in ids[:3]:
        done = CliRunner().invoke(cli.main, ["rm", str(full / "kv.store"), id])
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli.main, ["gc", str(full / "kv.store")])
    assert done.exit_code == 0, done.output
    with open_here(full) as store:
        assert_sound(store, 2)


@pytest.mark.parametrize("left", [0, 500_000])
def test_take_expiry_and_a_smaller_budget(left: int, full: Path) -> None:
    with open_here(full) as store:
        store.put([1], noise(1, 400_000), ttl=1)
        taken = store.put([2], noise(2, 400_000))
        for k in range(3, 40):
            store.put([k], noise(k, 400_000))
        store.gc()
        fill(full, left)
        time.sleep(1.1)
        saved = store.take(taken.id)
        assert saved is not None
        assert saved.main.tobytes() == noise(2, 400_000)
        store.gc()
        assert store.verify() == []
        assert len(list(store.entries())) == 37
    fill(full, left)
    with open_here(full, cache_disk_mib=10) as store:
        assert file_bytes(full / "kv.store") <= 10 * MIB
        assert store.match([39]) is not None
        assert store.match([3]) is None


@pytest.mark.parametrize("children", ["keep", "resident", "drop"])
@pytest.mark.parametrize("left", [0, 200_000])
def test_a_parent_with_children(children: str, left: int, full: Path) -> None:
    prefix = list(range(2_000))
    with open_here(full) as store:
        parent = store.put(prefix, state(prefix, row=512), entry_class="learned")
        kids = [store.put([*prefix, k], state([*prefix, k], row=512)) for k in range(3)]
        assert all(kid.parent == parent.id for kid in kids)
        assert parent.size > 3 * MIB
        store.gc()
        before = dump(store)
        fill(full, left)
        if children == "keep":
            with pytest.raises(kvstore.DiskFullError):
                store.delete(parent.id, children=children)
            assert dump(store) == before
            assert store.verify() == []
        gone = store.delete(parent.id, children="drop" if children == "keep" else children)
        assert sorted(gone) == sorted([parent.id, *(kid.id for kid in kids)])
        store.gc()
        assert_sound(store, 0)


@pytest.mark.parametrize("left", LEVELS)
def test_what_needs_room_fails_and_changes_nothing(left: int, full: Path) -> None:
    with open_here(full) as store:
        store.put([1], noise(1, 2_000_000))
        before = dump(store)
        filler = fill(full, left)
        for _ in range(2):
            with pytest.raises(kvstore.DiskFullError):
                store.put([2], noise(2, 12_000_000))
            assert dump(store) == before
        filler.unlink()
        store.put([2], noise(2, 12_000_000))
        assert_sound(store, 2)


@pytest.mark.parametrize("size", [300_000, 3_000_000])
@pytest.mark.parametrize("reopen", [False, True])
def test_a_disk_that_the_store_itself_filled(size: int, reopen: bool, full: Path) -> None:
    """No log is committed that the file has no room for: it could never be emptied."""
    store = open_here(full)
    ids: list[int] = []
    with pytest.raises(kvstore.DiskFullError):  # noqa: PT012
        for k in range(1_000):
            ids.append(store.put([k, 1], noise(k, size)).id)
    assert len(ids) > 4
    if reopen:
        store.close()
        store = open_here(full)
    with store:
        assert_sound(store, len(ids))
        store._core.db.truncate_log()
        assert Path(full / "kv.store-wal").stat().st_size == 0
        for id in ids[::2]:
            store.delete(id)
        store.put([9_999], noise(9, size))
        store.gc()
        assert_sound(store, len(ids) // 2 + 1)


def test_a_store_opens_on_a_full_disk_again_and_again(full: Path) -> None:
    with open_here(full) as store:
        store.put([1], noise(1, 100_000))
    fill(full, 0)
    for _ in range(5):
        with open_here(full, readonly=True) as store:
            assert_sound(store, 1)
        with open_here(full) as store:
            assert_sound(store, 1)
        fill(full, 0)
    assert sorted(p.name for p in full.iterdir()) == ["filler", "kv.store"]


def test_the_blocks_that_are_kept_do_not_add_up(full: Path) -> None:
    path = full / "kv.store"
    kept = set()
    for n in range(6):
        with open_here(full) as store:
            store.put([n], noise(n, 50_000))
        assert not Path(f"{path}-wal").exists()
        found = path.stat()
        assert found.st_size % 8192 == 0
        kept.add(found.st_blocks * 512 - found.st_size)
    assert kept <= {0, disk.SPARE_BYTES}  # beside SQLite's own pages
    open_here(full, readonly=True).close()
    before = path.stat().st_blocks
    open_here(full, readonly=True).close()
    assert path.stat().st_blocks == before


# -- a budget that the file exceeds


def filled(path: Path, n: int = 40) -> list[int]:
    with Store(path, cache_ram_mib=0) as store:
        return [store.put([k], noise(k, 500_000)).id for k in range(n)]


@pytest.mark.parametrize("budget", [2, 3, 4, 5, 6, 8, 12, 20])
def test_open_brings_a_file_inside_its_budget(budget: int, path: Path) -> None:
    ids = filled(path)
    with Store(path, cache_ram_mib=0, cache_disk_mib=budget) as store:
        assert file_bytes(path) <= budget * MIB
        left = [e.id for e in store.entries()]
        assert set(left) == set(ids[len(ids) - len(left) :])  # the least recently used went
        assert len(left) >= (budget - 6) * 1.5
        assert store.verify() == []


@pytest.mark.parametrize("budget", [2, 4, 6, 12])
def test_gc_brings_a_file_inside_its_budget(budget: int, path: Path) -> None:
    with Store(path, cache_ram_mib=0, cache_disk_mib=budget) as store:
        with Store(path, cache_ram_mib=0) as other:
            ids = [other.put([k], noise(k, 500_000)).id for k in range(40)]
        assert file_bytes(path) > budget * MIB
        gone = store.gc()
        assert file_bytes(path) <= budget * MIB
        left = {e.id for e in store.entries()}
        assert set(gone) == set(ids) - left
        assert left <= set(ids[40 - len(left) :])
        assert store.verify() == []


def test_a_budget_of_nothing_leaves_an_empty_store(path: Path) -> None:
    filled(path, 3)
    with Store(path, cache_disk_mib=0) as store:
        assert list(store.entries()) == []
        assert store.gc() == []
        assert file_bytes(path) < 2 * MIB
        with pytest.raises(kvstore.OverBudgetError):
            store.put([1], b"x")

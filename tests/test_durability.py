"""What put returned for survives a kill, a power loss, an I/O error and a full disk; what was cut off leaves nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import diskkit
import pytest
from storekit import dump, noise, state

import kvstore
from kvstore import KVStoreError, Store
from kvstore.storage import geometry

if not hasattr(os, "fork"):
    pytest.skip("needs fork", allow_module_level=True)

import faultkit

PREFIX = list(range(100, 160))
# Tokens -> state. Chunks of 10 kB in batches of two (see `small_batches`) make some of these larger than one batch.
Model = dict[tuple[int, ...], bytes]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(geometry, "BATCH_CHUNKS", 2)


def by_tokens(store: Store) -> Model:
    import numpy as np

    return {tuple(np.frombuffer(v[0], np.int32).tolist()): v[1] for v in dump(store).values()}


def id_of(store: Store, tokens: list[int]) -> int:
    found = store.match(tokens)
    assert found is not None
    assert found.n_common == len(tokens) == found.entry.n_tokens
    return found.entry.id


def put(tokens: list[int], data: bytes, **options: Any) -> tuple[Callable[[Store], Any], Callable[[Model], None]]:
    def after(model: Model) -> None:
        model[tuple(tokens)] = data

    return lambda store: store.put(tokens, data, **options), after


def forget(tokens: list[int], *others: list[int], children: str) -> tuple[Callable[[Store], Any], Callable[[Model], None]]:
    def after(model: Model) -> None:
        for gone in (tokens, *others):
            model.pop(tuple(gone), None)

    def call(store: Store) -> Any:
        if tuple(tokens) in by_tokens(store):
            store.delete(id_of(store, tokens), children=children)

    return call, after


def children(n: int) -> list[int]:
    return [*PREFIX, n, n, n]


def steps() -> list[tuple[Callable[[Store], Any], Callable[[Model], None]]]:
    """One after another: the call, and what it does to the model."""
    return [
        put([1, 2], noise(1, 5_000)),
        put(PREFIX, state(PREFIX), entry_class="learned"),
        put(children(1), state(children(1))),
        put([3, 4], noise(2, 150_000)),  # staged, in eight batches
        put(children(2), state(children(2), row=512)),  # staged and whole: other rows
        put([1, 2], noise(3, 45_000)),  # replaces, staged
        put(children(3), state(children(3))),
        forget(PREFIX, children="keep"),
        put([5], noise(4, 25_000)),
        forget([3, 4], children="resident"),
    ]


def models() -> list[Model]:
    """The model after 0, 1, ... steps."""
    out: list[Model] = [{(9, 9): noise(9, 3_000)}]
    for _, after in steps():
        model = dict(out[-1])
        after(model)
        out.append(model)
    return out


def open_here(path: Path, **options: Any) -> Store:
    return Store(path, **{"min_saved_mib": 0.001, "timeout": 10.0, **options})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    with open_here(path) as store:
        store.put([9, 9], noise(9, 3_000))
    return path


def fresh(base: Path) -> Path:
    path = base.with_name("kv.store")
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copyfile(base, path)
    return path


def assert_clean(path: Path, allowed: list[Model]) -> None:
    """The file holds one of these models, nothing half, nothing left over."""
    with open_here(path) as store:
        found = by_tokens(store)
        assert found in allowed, (sorted(found), [sorted(m) for m in allowed])
        assert store.verify() == []
        connection = apsw.Connection(str(path))
        try:
            assert connection.execute("SELECT count(*) FROM blobs WHERE entry IS NULL").get == 0
            assert connection.execute("SELECT count(*) FROM chunks WHERE blob NOT IN (SELECT id FROM blobs)").get == 0
        finally:
            connection.close()
        store.put([123], b"goes on")
        assert store.match([123]) is not None


def run_until(path: Path, kinds: set[str], act: Callable[[faultkit.Faults, str], None], **options: Any) -> tuple[int, int]:
    """Runs the steps in a child under a VFS; how many returned, and how the child ended."""

    def child(say: Callable[[bytes], None]) -> None:
        vfs = faultkit.Faults(kinds, act)
        store = open_here(path, **options)
        for call, _ in steps():
            call(store)
            if options.get("write_behind"):
                store.flush()
            with vfs.lock:
                say(b".")
        store.close()
        say(b"|%d" % vfs.n)

    said, code = faultkit.in_child(child)
    done, _, count = said.partition(b"|")
    return (int(count) if count else len(done)), code


def kill_points(n: int, wanted: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(1, n + 1), min(wanted, n)))


def killed_at_write_points(base: Path, wanted: int, **options: Any) -> None:
    total, code = run_until(fresh(base), {"write", "sync", "truncate"}, lambda vfs, call: None, **options)
    assert code == 0
    assert total > 50
    after = models()
    ends = set()
    for at in kill_points(total, wanted, 1):
        path = fresh(base)

        def act(vfs: faultkit.Faults, call: str, at: int = at) -> None:
            if vfs.n == at:
                faultkit.die()

        done, code = run_until(path, {"write", "sync", "truncate"}, act, **options)
        if code == 0:
            continue  # background work writes more in one run than in another
        assert code == -signal.SIGKILL
        ends.add(done)
        assert_clean(path, after[done : done + 2])
    assert len(ends) > min(4, wanted - 3)


def test_killed_at_write_points(base: Path) -> None:
    killed_at_write_points(base, 14)


def test_killed_at_write_points_with_write_behind(base: Path) -> None:
    killed_at_write_points(base, 5, write_behind=True)


@pytest.mark.slow
def test_killed_at_every_write_point(base: Path) -> None:
    killed_at_write_points(base, 10_000)


def power_lost(base: Path, wanted: int) -> None:
    kinds = {"write", "sync", "truncate", "power"}
    total, code = run_until(fresh(base), kinds, lambda vfs, call: None)
    assert code == 0
    after = models()
    for at in kill_points(total, wanted, 2):
        path = fresh(base)
        keep = random.Random(at).choice([0, 0, 1, 3])

        def act(vfs: faultkit.Faults, call: str, at: int = at, keep: int = keep) -> None:
            if vfs.n == at:
                vfs.lose_power(keep)
                faultkit.die()

        done, code = run_until(path, kinds, act)
        if code == 0:
            continue
        assert code == -signal.SIGKILL
        assert_clean(path, after[done : done + 2])


def test_power_lost_at_write_points(base: Path) -> None:
    power_lost(base, 12)


@pytest.mark.slow
def test_power_lost_at_every_write_point(base: Path) -> None:
    power_lost(base, 10_000)


def test_killed_at_any_time_by_another_process(path: Path) -> None:
    """A child puts and says so; it is killed at a random moment, round after round, on one file."""
    code = (
        "import sys, os, random\n"
        "sys.path.insert(0, sys.argv[3])\n"
        "from storekit import noise\nfrom kvstore import Store\nfrom kvstore.storage import geometry\n"
        "geometry.CHUNK_BYTES, geometry.BATCH_CHUNKS = 50_000, 3\n"
        "first, r = int(sys.argv[2]), random.Random(int(sys.argv[2]))\n"
        "with Store(sys.argv[1]) as s:\n"
        "    print('open', flush=True)\n"
        "    for n in range(first, first + 10_000):\n"
        "        s.put([n, 1], noise(n, r.choice([1_000, 60_000, 900_000])))\n"
        "        print(n, flush=True)\n"
    )
    known: set[int] = set()
    chance = random.Random(5)
    for round_ in range(4):
        first = 100_000 * (round_ + 1)
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(first), str(Path(__file__).parent)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        time.sleep(chance.uniform(0.01, 0.4))
        child.kill()
        said, errors = child.communicate(timeout=240)
        assert child.returncode == -signal.SIGKILL, errors
        known |= {int(line) for line in said.splitlines() if line.endswith(tuple("0123456789"))}
        with Store(path) as store:
            found = by_tokens(store)
            sizes = (1_000, 60_000, 900_000)
            for n in known:
                assert found[n, 1] in (noise(n, size) for size in sizes)
            assert len(found) - len(known) <= round_ + 1  # one may have been on its way in each round
            known |= {tokens[0] for tokens in found}
            assert store.verify() == []
            connection = apsw.Connection(str(path))
            assert connection.execute("SELECT count(*) FROM blobs WHERE entry IS NULL").get == 0
            connection.close()
    assert len(known) > 10


def test_the_space_of_a_put_that_was_cut_off_is_used_again(path: Path) -> None:
    big = noise(1, 6_000_000)

    def child(say: Callable[[bytes], None]) -> None:
        def act(vfs: faultkit.Faults, call: str) -> None:
            if vfs.n == 60:
                faultkit.die()

        store = open_here(path)
        store.put([1], b"first")
        vfs = faultkit.Faults({"write"}, act)
        geometry.CHUNK_BYTES, geometry.BATCH_CHUNKS = 500_000, 2
        connection = store._core.db
        connection.reopen()
        store.put([2], big)
        vfs.unregister()

    for _ in range(4):
        _, code = faultkit.in_child(child)
        assert code == -signal.SIGKILL
    with open_here(path) as store:
        assert set(by_tokens(store)) == {(1,)}
        store.gc()
        assert store.stats().file_bytes < 2_500_000
        store.put([2], big)
        assert by_tokens(store)[(2,)] == big


# -- I/O errors


def run_with_failure(path: Path, kind: str, at: int, times: int) -> int:
    """The steps, while some call fails; then everything that returned is there. Gives the number of calls of the kind."""
    possible: list[Model] = [models()[0]]
    errors: list[KVStoreError] = []
    with faultkit.failing(kind, at, times) as vfs:
        opened = None
        for _ in range(3):  # the failure may hit the open itself; it is an error of ours then, too
            try:
                opened = open_here(path)
                break
            except KVStoreError:
                continue
        if opened is not None:
            for call, after in steps():
                changed = []
                for model in possible:
                    new = dict(model)
                    after(new)
                    changed.append(new)
                try:
                    call(opened)
                    possible = changed
                except KVStoreError as error:
                    errors.append(error)
                    possible = [*possible, *(m for m in changed if m not in possible)]
            with suppress(KVStoreError):
                opened.close()
        n = vfs.n
    assert all(isinstance(error, kvstore.StoreIOError | kvstore.DiskFullError) for error in errors), errors
    assert_clean(path, possible)
    return n


@pytest.mark.parametrize("kind", ["write", "sync", "full", "read"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_io_error_is_an_error_of_ours_and_loses_nothing(kind: str, base: Path) -> None:
    total = run_with_failure(fresh(base), kind, 1 << 40, 1)
    for at in kill_points(total, 5, 3):
        run_with_failure(fresh(base), kind, at, random.Random(at).choice([1, 1, 4]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["write", "sync", "full", "read", "truncate"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_io_call_fails_once(kind: str, base: Path) -> None:
    total = run_with_failure(fresh(base), kind, 1 << 40, 1)
    for at in kill_points(total, 400, 4):
        run_with_failure(fresh(base), kind, at, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_read_error_drops_no_entry(base: Path) -> None:
    path = fresh(base)
    with open_here(path) as store:
        ids = [store.put([n, n], noise(n, 40_000)).id for n in range(3)]
    for at in range(1, 25):
        with faultkit.failing("read", at):
            try:
                with open_here(path, cache_ram_mib=0) as store:
                    for id in ids:
                        try:
                            assert store.get(id) is not None
                        except KVStoreError:
                            continue
            except KVStoreError:
                continue
    with open_here(path) as store:
        assert all(store.get(id) is not None for id in ids)
        assert len(list(store.entries())) == 4


# -- full disks and folders that cannot be written


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on a file system of 40 MiB, and batches of a size that suits it."""
    monkeypatch.setattr(geometry, "CHUNK_BYTES", 1_000_000)
    monkeypatch.setattr(geometry, "BATCH_CHUNKS", 2)
    with diskkit.small_disk(tmp_path / "disk", 40) as point:
        yield point


@pytest.mark.parametrize("size", [300_000, 3_000_000])
def test_a_full_disk_is_an_error_and_nothing_is_lost(size: int, small_disk: Path) -> None:
    stored: Model = {}
    # The log may hold what the file has no room for, and a delete needs room in it too.
    reserve = small_disk / "reserve"
    reserve.write_bytes(bytes(16_000_000))
    with open_here(small_disk / "kv.store", cache_ram_mib=0) as store:
        with pytest.raises(kvstore.DiskFullError) as caught:  # noqa: PT012
            for n in range(200):
                store.put([n, 1], noise(n, size))
                stored[n, 1] = noise(n, size)
        assert caught.value.retry
        assert len(stored) >= 3
        assert by_tokens(store) == stored
        for _ in range(3):
            with pytest.raises(kvstore.DiskFullError):
                store.put([777], noise(1, 40_000_000))
        assert by_tokens(store) == stored
    with open_here(small_disk / "kv.store", cache_ram_mib=0) as store:
        assert by_tokens(store) == stored
        assert store.verify() == []
        reserve.unlink()
        for tokens in list(stored)[: len(stored) // 2 + 1]:
            store.delete(id_of(store, list(tokens)))
            del stored[tokens]
        store.put([888], noise(8, size))
        stored[(888,)] = noise(8, size)
        assert by_tokens(store) == stored
        assert store.verify() == []


def test_a_full_disk_ends_when_others_free_space(small_disk: Path) -> None:
    with open_here(small_disk / "kv.store") as store:
        store.put([1], noise(1, 100_000))
        filler = small_disk / "filler"
        with filler.open("wb") as file, pytest.raises(OSError, match="No space"):  # noqa: PT012
            while True:
                file.write(bytes(65_536))
                file.flush()
        with pytest.raises(kvstore.DiskFullError):
            store.put([2], noise(2, 3_000_000))
        assert set(by_tokens(store)) == {(1,)}
        filler.unlink()
        store.put([2], noise(2, 3_000_000))
        assert by_tokens(store)[(2,)] == noise(2, 3_000_000)
        assert store.verify() == []


def test_a_store_on_a_full_disk_can_not_be_created_and_leaves_no_file(small_disk: Path) -> None:
    with (small_disk / "filler").open("wb") as file, pytest.raises(OSError, match="No space"):  # noqa: PT012
        while True:
            file.write(bytes(65_536))
            file.flush()
    with pytest.raises(kvstore.DiskFullError):
        Store(small_disk / "kv.store")
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


def test_write_behind_reports_a_full_disk_at_the_next_call(small_disk: Path) -> None:
    store = open_here(small_disk / "kv.store", write_behind=True)
    kept = store.put([1], noise(1, 100_000))
    store.flush()
    reserve = small_disk / "reserve"
    reserve.write_bytes(bytes(4_000_000))
    lost = store.put([2], noise(2, 50_000_000))
    with pytest.raises(kvstore.WriteBehindError) as caught:
        store.flush()
    assert caught.value.facts["ids"] == [lost.id]
    assert isinstance(caught.value.__cause__, kvstore.DiskFullError)
    assert store.get(lost.id) is None
    assert store.match([2]) is None
    assert [e.id for e in store.entries()] == [kept.id]
    reserve.unlink()
    store.put([3], noise(3, 1000))
    store.close()
    with open_here(small_disk / "kv.store") as store:
        assert set(by_tokens(store)) == {(1,), (3,)}


@pytest.mark.parametrize("left", [1.0, 1.5, 2.0])
def test_what_a_flush_acknowledged_on_a_nearly_full_disk_is_served(left: float, small_disk: Path) -> None:
    """Reads between a put and its flush must not take the report that the put failed."""
    acknowledged: Model = {}
    with open_here(small_disk / "kv.store", write_behind=True) as store:
        store.put([0], noise(0, 100_000))
        store.flush()
        filler = small_disk / "filler"
        usage = os.statvfs(small_disk)
        with suppress(OSError):  # the checkpoint may take some of it meanwhile
            filler.write_bytes(bytes(int(usage.f_bavail * usage.f_frsize - left * (1 << 20))))
        failed: list[int] = []
        for n in range(1, 90):
            try:
                entry = store.put([n, 1], noise(n, 60_000))
            except kvstore.WriteBehindError as error:
                failed += error.facts["ids"]
                continue
            store._behind.drain()
            store.match([n, 1])
            store.get(entry.id)
            store.entry(entry.id)
            try:
                store.flush()
                acknowledged[n, 1] = noise(n, 60_000)
            except kvstore.WriteBehindError as error:
                failed += error.facts["ids"]
            except kvstore.DiskFullError:
                pass  # the flush itself had no room for the counts
        assert failed
        served = by_tokens(store)
        assert {tokens: served.get(tokens) for tokens in acknowledged} == acknowledged
        filler.unlink()
        served = by_tokens(store)
        assert {tokens: served.get(tokens) for tokens in acknowledged} == acknowledged
        store.put([99], noise(99, 3_000_000))
        store.flush()
        assert by_tokens(store)[(99,)] == noise(99, 3_000_000)
        assert store.verify() == []


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root may write everywhere: give that up for the test."""
    if os.geteuid() != 0:
        yield
        return
    if not hasattr(os, "setresuid"):
        pytest.skip("root cannot become another user and come back here")
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def readable_by_all(path: Path) -> None:
    for folder in path.parents:
        if folder.stat().st_uid == os.getuid() and "pytest-" in str(folder):
            folder.chmod(folder.stat().st_mode | 0o055)


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    readable_by_all(folder / "x")
    request.getfixturevalue("unprivileged")
    with pytest.raises(kvstore.ReadOnlyError, match="cannot create") as caught:
        Store(folder / "kv.store")
    assert "folder that you can write" in caught.value.hint
    assert list(folder.iterdir()) == []


def test_a_store_in_a_folder_that_can_not_be_written_opens_readonly(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    with open_here(folder / "kv.store") as store:
        entry = store.put([1, 2], noise(1, 50_000))
    (folder / "kv.store").chmod(0o444)
    readable_by_all(folder / "x")
    request.getfixturevalue("unprivileged")
    with open_here(folder / "kv.store", readonly=True) as store:
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == noise(1, 50_000)
        assert store.verify() == []
    with pytest.raises(kvstore.ReadOnlyError, match=r"cannot be written|permission"):
        open_here(folder / "kv.store").put([3], b"x")
    assert [p.name for p in folder.iterdir()] == ["kv.store"]

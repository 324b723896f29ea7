"""Who writes a staged blob, and whether it still does: across processes, forks, pid namespaces, and with false texts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from storekit import noise

from kvstore import KVStoreError, Store
from kvstore.storage import geometry, writers
from kvstore.store import disk_budget as budget

if not hasattr(os, "fork"):
    pytest.skip("needs fork", allow_module_level=True)

import faultkit

BIG = 3_000_000
locks = pytest.mark.skipif(sys.platform != "linux", reason="open file description locks are Linux's")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(geometry, "BATCH_CHUNKS", 2)


def side(path: Path) -> Path:
    return Path(f"{path}-writers")


def staged(path: Path) -> list[str]:
    c = apsw.Connection(str(path))
    try:
        c.set_busy_timeout(10_000)
        return [r[0] for r in c.execute("SELECT CAST(writer AS BLOB) FROM blobs WHERE entry IS NULL")]
    finally:
        c.close()


def stage(path: Path, writer: str | bytes) -> None:
    c = apsw.Connection(str(path))
    c.set_busy_timeout(10_000)
    sql = "INSERT INTO blobs(part, kind, size, stored, writer) VALUES('main', 'full', 9, 9, CAST(? AS TEXT))"
    c.execute(sql, (writer,))
    c.execute("INSERT INTO chunks(blob, seq, data) VALUES(?, 0, zeroblob(9))", (c.last_insert_rowid(),))
    c.close()


class Paused:
    """A put that waits in the middle, its first batches committed, until it is told to go on."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
        self.half, self.go, self.error = threading.Event(), threading.Event(), None
        self.thread = threading.Thread(target=self._run, args=(store, tokens))
        real = budget.DiskBudget.evict_until
        calls: list[int] = []

        def evict_until(self_: budget.DiskBudget, *args: Any) -> None:
            if threading.current_thread() is self.thread:
                calls.append(1)
                if len(calls) == 8:
                    self.half.set()
                    self.go.wait(60)
            real(self_, *args)

        monkeypatch.setattr(budget.DiskBudget, "evict_until", evict_until)

    def _run(self, store: Store, tokens: list[int]) -> None:
        try:
            store.put(tokens, noise(1, BIG))
        except BaseException as error:  # noqa: BLE001  looked at by `end`
            self.error = error

    def __enter__(self) -> Paused:
        self.thread.start()
        assert self.half.wait(60)
        return self

    def __exit__(self, *args: object) -> None:
        self.go.set()
        self.thread.join()
        assert self.error is None, self.error


# -- a put under way is left alone


OPENER = (
    "import sys\nfrom kvstore import Store\n"
    "for n in range(int(sys.argv[2])):\n"
    "    with Store(sys.argv[1]) as s: s.gc()\n"
    "    print(n, flush=True)\n"
)


@pytest.mark.parametrize("how", ["process", "pid namespace"])
def test_other_processes_leave_a_put_alone(how: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", OPENER, str(path), "3"]
    if how == "pid namespace":
        command = ["unshare", "--pid", "--fork", "--mount-proc", *command]
        with suppress(OSError):
            if subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode == 0:
                how = ""
        if how:
            pytest.skip("no pid namespace can be made here")
    with Store(path) as store:
        with Paused(store, monkeypatch, [1]):
            before = staged(path)
            assert len(before) == 1
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            assert staged(path) == before
        found = store.match([1])
        assert found is not None
        saved = store.get(found.entry.id)
        assert saved is not None
        assert saved.main.tobytes() == noise(1, BIG)


@locks
def test_a_put_is_not_lost_between_containers(path: Path) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", OPENER, str(path), "1000000"]
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        pytest.skip("no pid namespace can be made here")
    try:
        assert child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("no pid namespace can be made here")
        with Store(path, cache_ram_mib=0) as store:
            for n in range(3):
                entry = store.put([n, 7], noise(n, 4 * BIG))
                saved = store.get(entry.id)
                assert saved is not None
                assert saved.main.tobytes() == noise(n, 4 * BIG)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("close", [False, True])
def test_two_stores_of_one_process(close: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store, Store(path) as other:
        with Paused(store, monkeypatch, [1]):
            other.put([2], b"x")
            other.put([3], noise(3, BIG))
            other.gc()
            with Store(path) as third:
                third.gc()
            if close:
                other.close()
            store.gc()
            assert len(staged(path)) == 1
        assert store.match([1]) is not None


def test_a_child_that_was_forked_off_does_not_end_or_prolong_a_put(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        with Paused(store, monkeypatch, [1]):
            pid = os.fork()
            if pid == 0:
                with suppress(BaseException):
                    store.close()
                os._exit(0)
            os.waitpid(pid, 0)
            with Store(path) as other:
                other.gc()
            assert len(staged(path)) == 1
        assert store.match([1]) is not None


def test_a_child_that_outlives_its_parent_keeps_nothing_staged(path: Path) -> None:
    Store(path).close()
    reader, writer = os.pipe()

    def child(say: Callable[[bytes], None]) -> None:
        sign = writers.Writer(str(path))
        stage(path, sign.name)
        grandchild = os.fork()
        if grandchild == 0:
            os.close(reader)
            os.write(writer, b"alive")
            time.sleep(60)
            os._exit(0)
        say(b"%d" % grandchild)
        os.read(reader, 5)
        faultkit.die()

    # The grandchild holds the pipe that `in_child` reads, so it is done by hand.
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said)
        child(lambda text: [os.write(say, text), None][1])
        os._exit(1)
    os.close(say)
    grandchild = int(os.read(said, 20))
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        with Store(path) as store:
            assert staged(path) == []
            store.put([1], noise(1, BIG))
    finally:
        os.kill(grandchild, signal.SIGKILL)
        for fd in (reader, writer, said):
            os.close(fd)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


# -- what is nobody's goes


@pytest.mark.parametrize(
    "writer",
    ["", "x", ":", "0:", "0:1", "-1:1", "+1:1", " 1:1", "1:", "1:x", "1", "\u0661:1", "99999999999:1", "9" * 400 + ":1",
     "4194399:1",
     "2147483648:1", "lock:", "lock:zz:1", "lock:ffffffffffffffff:1", "lock:0000000000000001:1", "lock:" + "0" * 16 + ":",
     f"{os.getpid()}:1", f"{os.getpid()}:12:ab", "\0", "1:1\n", b"\xff\xfe:1", "a" * 100_000],
    ids=range(27),
)  # fmt: skip
def test_a_file_that_lies_about_a_writer_opens_and_is_cleared(writer: str | bytes, path: Path) -> None:
    with Store(path) as store:
        store.put([1], b"x")
    stage(path, writer)
    with Store(path) as store:
        assert store.match([1]) is not None
        assert staged(path) == []
        assert store.verify() == []


def test_writers_of_the_form_before_are_judged_by_their_process(path: Path) -> None:
    Store(path).close()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        old = f"{child.pid}:{writers._started(child.pid)}"
        stage(path, old)
        with Store(path) as store:
            store.gc()
            assert staged(path) == [old.encode()]
            child.kill()
            child.wait()
            store.gc()
            assert staged(path) == []
    finally:
        child.kill()
        child.communicate()


def test_what_a_killed_writer_left_goes_without_an_open(path: Path) -> None:
    with Store(path) as store:
        store.put([1], b"x")

        def child(say: Callable[[bytes], None]) -> None:
            stage(path, writers.Writer(str(path)).name)
            faultkit.die()

        for use in (store.gc, None):
            _, code = faultkit.in_child(child)
            assert code == -signal.SIGKILL
            if use is not None:
                use()
            for _ in range(600):
                if not staged(path) and not side(path).exists():
                    break
                time.sleep(0.05)  # the maintenance comes by
            assert staged(path) == []
            assert not side(path).exists()


@pytest.mark.parametrize("kind", ["write", "full", "sync"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_failed_put_left_goes_without_an_open(kind: str, path: Path) -> None:
    Store(path).close()
    for at in range(3, 120, 9):
        store = None
        with faultkit.failing(kind, at, 12) as vfs, suppress(KVStoreError):
            store = Store(path, cache_ram_mib=0)
            store.put([at], noise(at, 600_000))
        vfs.act = lambda vfs, call: None  # the connections stay with it
        if store is None:
            continue
        store.gc()
        assert staged(path) == []
        store.close()


def test_a_budget_that_the_staged_data_of_others_exceeds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        with Paused(store, monkeypatch, [1]), Store(path, cache_disk_mib=4) as small:
            assert len(staged(path)) == 1
            small.gc()
        assert store.match([1]) is not None


# -- the file beside the store


@locks
def test_the_file_of_locks_is_private_and_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        store.put([2], b"small")
        assert not side(path).exists()
        old = os.umask(0)
        try:
            with Paused(store, monkeypatch, [1]):
                assert side(path).stat().st_mode & 0o777 == 0o600
                assert side(path).stat().st_size == 0
        finally:
            os.umask(old)
        assert not side(path).exists()
        with Store(path, readonly=True) as reader:
            assert reader.match([1]) is not None
        assert not side(path).exists()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@locks
def test_the_last_of_several_writers_removes_the_file_and_no_sooner(path: Path) -> None:
    store = str(path)
    path.touch(0o600)
    first, second = writers.Writer(store), writers.Writer(store)
    assert first.name != second.name
    for name in (first.name, second.name):
        assert writers.alive(name, store)
    writers.sweep(store)
    assert side(path).exists()
    first.close()
    assert not writers.alive(first.name, store)
    assert writers.alive(second.name, store)
    second.close()
    assert not side(path).exists()
    assert not writers.alive(second.name, store)


@locks
def test_many_writers_come_and_go_at_once(path: Path, crash_free: Callable[[Callable[[], Any]], threading.Thread]) -> None:
    store = str(path)
    path.touch(0o600)

    def run() -> None:
        for _ in range(300):
            writer = writers.Writer(store)
            assert writer.name.startswith("lock:")
            assert writers.alive(writer.name, store)
            writer.close()
            assert not writers.alive(writer.name, store)

    for thread in [crash_free(run) for _ in range(6)]:
        thread.join()
    assert not side(path).exists()


@pytest.fixture
def blocked(path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    how: str = request.param
    other = path.with_name("other")
    if how == "link":
        other.write_text("not mine")
        side(path).symlink_to(other)
    elif how == "folder":
        side(path).mkdir()
    else:
        os.mkfifo(side(path))
    yield how
    if how == "link":
        assert other.read_text() == "not mine"


@pytest.mark.parametrize("blocked", ["link", "folder", "pipe"], indirect=True)
def test_where_the_file_cannot_be_made_the_process_is_the_sign(
    blocked: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(path) as store:
        with Paused(store, monkeypatch, [1]):
            (name,) = staged(path)
            assert blocked == "pipe" or name.decode().startswith(f"{os.getpid()}:")
            with Store(path) as other:
                other.gc()
            assert staged(path) == [name]
        assert store.match([1]) is not None
        monkeypatch.setattr(geometry, "BATCH_CHUNKS", 1 << 20)
        stage(path, name.decode())
        store.gc()
        assert staged(path) == []

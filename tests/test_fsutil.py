"""Files are written whole or not at all, and through what is no regular file; what has no size is read to its end."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storekit import STATES, state

from kvstore import DiskFullError, KVStoreError, ReadOnlyError, SlotFileError, Store, StoreIOError, operate, slotfile
from kvstore.storage import geometry
from kvstore.util import fsutil

pytestmark = pytest.mark.skipif(os.name == "nt", reason="devices, FIFOs and symbolic links of POSIX")
COMMAND = [sys.executable, "-m", "kvstore.cli"]
BASE = list(range(1, 101))
FILE = slotfile.SlotFile(np.array(BASE, np.int32), np.frombuffer(state(BASE), np.uint8))
BYTES = slotfile.to_bytes(FILE)
root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")


def run(*words: Any, code: int = 0, **more: Any) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, timeout=120, check=False, **more)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    return done


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, str]:
    """A store, and the id of the entry of FILE."""
    path = tmp_path / "kv.db"
    with Store(path) as store:
        return path, store.put(FILE.tokens, FILE.state).hex_id


def reader(path: Path) -> tuple[threading.Thread, list[bytes]]:
    """A thread that reads a FIFO to its end."""
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(path.read_bytes()))
    thread.start()
    return thread, got


# -- writing


def device(folder: Path, name: str, minor: int) -> Path:
    """/dev/null or /dev/full; for root, who could replace the machine's own, a device of the test's."""
    if os.geteuid() != 0:
        if not os.path.exists(f"/dev/{name}"):
            pytest.skip(f"there is no /dev/{name}")
        return Path("/dev") / name
    node = folder / name
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        os.close(os.open(node, os.O_WRONLY))
    except OSError:
        pytest.skip("devices cannot be made here")
    return node


def test_a_device_stays_a_device(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    null = device(tmp_path, "null", 3)
    before = null.stat()
    link = tmp_path / "link"
    link.symlink_to(null)
    for path in (null, link):
        slotfile.write(path, FILE)
        run("get", db, id, path)
        run("export", db, "--to", path)
        after = null.stat()
        assert (after.st_ino, after.st_mode, after.st_rdev) == (before.st_ino, before.st_mode, before.st_rdev)
    assert link.is_symlink()


def test_a_full_device(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    full = device(tmp_path, "full", 7)
    with pytest.raises(DiskFullError):
        slotfile.write(full, FILE)
    run("get", db, id, full, code=DiskFullError.exit_code)
    run("export", db, "--to", full, code=DiskFullError.exit_code)
    assert stat.S_ISCHR(full.stat().st_mode)


def test_a_fifo_is_written_to(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    calls: list[Callable[[], Any]] = [
        lambda: slotfile.write(fifo, FILE),
        lambda: run("get", db, id, fifo, "--format", "slot"),
    ]
    for call in calls:
        thread, got = reader(fifo)
        call()
        thread.join(60)
        assert got == [BYTES]
        assert stat.S_ISFIFO(fifo.stat().st_mode)
    thread, got = reader(fifo)
    run("export", db, "--to", fifo)
    thread.join(60)
    assert run("import", tmp_path / "new.db", "-", input=got[0]).stdout.count(id.encode()) == 2  # id, file
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")) == []


@pytest.mark.parametrize("out", ["-", "/dev/stdout", "/dev/fd/1"])
def test_stdout_by_any_name(tmp_path: Path, stored: tuple[Path, str], out: str) -> None:
    db, id = stored
    assert run("get", db, id, out, "--format", "slot").stdout == BYTES
    run("get", db, id, out, "--json", code=2)
    # A file behind it is not replaced: what the shell has written stays, and what comes later follows.
    into = tmp_path / "into"
    with into.open("wb") as f:
        f.write(b"before")
        f.flush()
        subprocess.run([*COMMAND, "get", str(db), id, out, "--format", "slot"], stdout=f, check=True, timeout=120)
        f.seek(0, os.SEEK_END)
        f.write(b"after")
    assert into.read_bytes() == b"before" + BYTES + b"after"


def test_another_descriptor(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    process = subprocess.Popen([*COMMAND, "get", str(db), id, f"/dev/fd/{theirs}", "--format", "slot"], pass_fds=[theirs])
    os.close(theirs)
    with open(ours, "rb") as f:
        assert f.read() == BYTES
    assert process.wait(60) == 0
    run("get", db, id, "/dev/fd/200", code=SlotFileError.exit_code)


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_stays(tmp_path: Path, stored: tuple[Path, str], there: bool) -> None:
    db, id = stored
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "slot.bin"
    if there:
        target.write_bytes(b"old")
    first, second = tmp_path / "first", tmp_path / "second"
    second.symlink_to("real/slot.bin")
    first.symlink_to("second")
    slotfile.write(first, FILE)
    assert target.read_bytes() == BYTES
    target.write_bytes(b"old")
    run("get", db, id, first, "--format", "slot")
    assert (first.is_symlink(), second.is_symlink(), target.is_symlink()) == (True, True, False)
    assert target.read_bytes() == BYTES
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "real") == ["slot.bin"]
    archive = tmp_path / "all.tar"
    archive.symlink_to("real/all.tar")
    run("export", db, "--to", archive, "--force")
    assert archive.is_symlink()
    run("import", tmp_path / "new.db", tmp_path / "real" / "all.tar")


def test_links_that_go_nowhere(tmp_path: Path) -> None:
    loop, far = tmp_path / "loop", tmp_path / "far"
    loop.symlink_to("loop")
    far.symlink_to("none/slot.bin")
    for link in (loop, far):
        with pytest.raises(SlotFileError):
            slotfile.write(link, FILE)
        assert link.is_symlink()
    with pytest.raises(SlotFileError, match=r"the folder .*none does not exist"):
        slotfile.write(far, FILE)
    assert sorted(os.listdir(tmp_path)) == ["far", "loop"]


def test_what_cannot_be_written_stays(tmp_path: Path, stored: tuple[Path, str]) -> None:
    import socket

    db, id = stored
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(str(place))
        except OSError:
            pytest.skip("the path is too long for a socket")
        with pytest.raises(SlotFileError, match="it is a socket"):
            slotfile.write(place, FILE)
        run("get", db, id, place, code=SlotFileError.exit_code)
        assert stat.S_ISSOCK(place.stat().st_mode)
    with pytest.raises(SlotFileError, match="it is a directory"):
        slotfile.write(tmp_path, FILE)


def test_a_long_name(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120 + ".bin")
    slotfile.write(path, FILE)
    assert path.read_bytes() == BYTES
    with Store(":memory:") as store:
        operate.backup(store, tmp_path / ("ß" * 127))


@root
def test_root_leaves_a_file_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "slot.bin"
    path.write_bytes(b"old")
    os.chown(path, 1234, 1235)
    slotfile.write(path, FILE)
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 1235, 0o600)


def test_as_another_user(tmp_path: Path) -> None:
    """Who may not write to the folder of a file can still write to a device, and to what is open."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    for parent in folder.parents:
        if parent.stat().st_uid == os.getuid() and "pytest-" in str(parent):
            parent.chmod(parent.stat().st_mode | 0o055)
    root = os.geteuid() == 0
    null = device(folder, "null", 3)
    link = folder / "link"
    link.symlink_to(null)
    (folder / "slot.bin").write_bytes(b"old")
    folder.chmod(0o555)
    if root:
        null.chmod(0o666)
        os.setresuid(65534, 65534, 0)
    try:
        slotfile.write(null, FILE)
        slotfile.write(link, FILE)
        for name in ("slot.bin", "new.bin"):
            with pytest.raises(SlotFileError, match="Permission denied"):
                slotfile.write(folder / name, FILE)
        with pytest.raises(ReadOnlyError, match="cannot create"):
            Store(folder / "new.db")
    finally:
        if root:
            os.setresuid(0, 0, 0)
        folder.chmod(0o755)
    assert stat.S_ISCHR(null.stat().st_mode)
    assert (folder / "slot.bin").read_bytes() == b"old"
    assert set(os.listdir(folder)) <= {"link", "null", "slot.bin"}


# -- reading


def feed(fifo: Path, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=lambda: fifo.write_bytes(data))
    thread.start()
    return thread


def test_reading_a_fifo(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    big = np.frombuffer(os.urandom(3 << 20), np.uint8)
    data = slotfile.to_bytes(slotfile.SlotFile(FILE.tokens, big))
    thread = feed(fifo, data)
    got = slotfile.read(fifo)
    thread.join(60)
    assert got.state.tobytes() == big.tobytes()
    assert got.tokens.tolist() == BASE


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/0"])
@pytest.mark.parametrize("command", ["put", "import"])
@pytest.mark.slow
def test_stdin_by_any_name(tmp_path: Path, name: str, command: str) -> None:
    source = next(p for p in sorted(STATES.glob("*.bin")) if p.read_bytes()[:4] == b"qsgg")
    data = source.read_bytes()
    db = tmp_path / "kv.db"
    run(command, db, name, input=data)  # a pipe
    with source.open("rb") as f:
        run(command, tmp_path / "again.db", name, stdin=f)
    for path in (db, tmp_path / "again.db"):
        with Store(path) as store:
            (entry,) = store.entries()
        assert run("get", path, entry.hex_id, "-").stdout == data


def test_a_raw_state_and_its_tokens_from_pipes(tmp_path: Path) -> None:
    db, fifo, tokens = tmp_path / "kv.db", tmp_path / "fifo", tmp_path / "tokens"
    os.mkfifo(fifo)
    os.mkfifo(tokens)
    threads = [feed(fifo, state(BASE)), feed(tokens, str(BASE).encode())]
    run("put", db, "/dev/stdin", "--tokens", tokens, "--draft", fifo, input=state(BASE))
    for thread in threads:
        thread.join(60)
    with Store(db) as store:
        (entry,) = store.entries()
        saved = store.get(entry.id)
    assert saved is not None
    assert saved.draft is not None
    assert saved.main.tobytes() == saved.draft.tobytes() == state(BASE)


def test_an_archive_from_a_fifo(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    data = run("export", db, "--to", "-").stdout
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    thread = feed(fifo, data)
    run("import", tmp_path / "new.db", fifo)
    thread.join(60)
    with Store(tmp_path / "new.db") as store:
        assert [e.hex_id for e in store.entries()] == [id]


def test_nothing_in_a_device(tmp_path: Path) -> None:
    with pytest.raises(SlotFileError):
        slotfile.read("/dev/null")
    run("put", tmp_path / "kv.db", "/dev/null", code=SlotFileError.exit_code)
    assert b"is empty" in run("import", tmp_path / "kv.db", "/dev/null", code=SlotFileError.exit_code).stderr


# -- errors


def test_a_missing_file_is_no_malformed_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot read") as caught:
        slotfile.read(tmp_path / "none")
    assert isinstance(caught.value, SlotFileError)
    assert caught.value.exit_code == StoreIOError.exit_code
    for words in (("put", "kv.db", "none"), ("import", "kv.db", "none")):
        assert b"none does not exist" in run(*words, code=StoreIOError.exit_code, cwd=tmp_path).stderr
    (tmp_path / "raw").write_bytes(state(BASE))
    run("put", "kv.db", "raw", "--tokens", str(BASE), "--draft", "none", code=StoreIOError.exit_code, cwd=tmp_path)


def test_a_folder_that_is_missing_is_named(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    (tmp_path / "a.bin").write_bytes(BYTES)
    wanted = f"the folder {tmp_path / 'new'} does not exist".encode()
    for words in (
        ("put", tmp_path / "new" / "kv.db", tmp_path / "a.bin"),
        ("get", db, id, tmp_path / "new" / "out"),
        ("export", db, "--to", tmp_path / "new" / "all.tar"),
        ("backup", db, tmp_path / "new" / "copy.db"),
    ):
        code = StoreIOError.exit_code if words[0] in ("put", "backup") else SlotFileError.exit_code
        assert wanted in run(*words, code=code).stderr, words
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["ls", "stats", "verify", "gc", "migrate"])
def test_a_store_that_is_no_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, what in ((tmp_path, "a directory"), (tmp_path / "fifo", "a FIFO"), (Path("/dev/null"), "a device")):
        done = run(name, path, code=StoreIOError.exit_code)
        assert f"{path} is {what}".encode() in done.stderr
    with pytest.raises(KVStoreError, match="is a directory"):
        Store(tmp_path)


def test_a_file_that_is_not_a_store_yet(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    said = run("ls", path, code=ReadOnlyError.exit_code).stderr
    assert b"is empty: the store has to be created first\nhint: `kvstore put` makes it a store" in said
    assert path.read_bytes() == b""


def test_what_is_neither_an_export_nor_a_slot_file(tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.tar"
    text.write_text("hello\n" * 2000)
    with tarfile.open(other, "w") as archive:
        archive.add(text, "text.txt")
    for path, what in ((text, "is neither an export nor a slot file"), (other, "holds no export")):
        assert what.encode() in run("import", tmp_path / "kv.db", path, code=SlotFileError.exit_code).stderr


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz", "x.TGZ", "x.db", "x.7z"])
def test_an_ending_that_is_not_written_is_refused(tmp_path: Path, stored: tuple[Path, str], name: str) -> None:
    before = sorted(os.listdir(tmp_path))
    assert b"*.tar" in run("export", stored[0], "--to", tmp_path / name, code=2).stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_endings_that_are_written(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    for name in ("a.TAR", "folder", "dated-2026.12.03", "named.zip/"):
        run("export", db, "--to", f"{tmp_path}/{name}")
    assert tarfile.is_tarfile(tmp_path / "a.TAR")
    for name in ("folder", "dated-2026.12.03", "named.zip"):
        assert (tmp_path / name / f"{id}.bin").exists()
    run("export", db, "--to", tmp_path / "folder")  # one that is there
    (tmp_path / "plain").write_bytes(b"a file")
    run("export", db, "--to", tmp_path / "plain", code=2)
    assert (tmp_path / "plain").read_bytes() == b"a file"


def test_the_helper_alone(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with fsutil.atomic_write(path) as out:
        out.write(b"")
        out.write(memoryview(np.empty(0, np.uint8)))
        out.write(np.arange(3, dtype=np.uint8).data)
        assert not path.exists()
    assert path.read_bytes() == b"\0\1\2"

    def fail() -> None:
        with fsutil.atomic_write(path) as out:
            out.write(b"half")
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert path.read_bytes() == b"\0\1\2"
    assert os.listdir(tmp_path) == ["x"]
    assert fsutil.descriptor_of("/dev/null") is None
    assert fsutil.descriptor_of("/dev/stdout") == 1
    assert fsutil.descriptor_of("/proc/self/fd/7") in (7, None)
    assert isinstance(fsutil.open_source(path), io.FileIO)


def test_salvage_touches_no_other_file(tmp_path: Path, stored: tuple[Path, str]) -> None:
    db, id = stored
    (tmp_path / "new.db.copy").write_bytes(b"somebody's")
    with db.open("r+b") as f:
        f.write(b"\0" * geometry.PAGE_SIZE)  # the first page is lost
    found = operate.salvage(db, tmp_path / "new.db")
    assert [f"{entry:016x}" for entry in found.entries] == [id]
    assert (tmp_path / "new.db.copy").read_bytes() == b"somebody's"
    assert {p.name for p in tmp_path.iterdir()} <= {"kv.db", "kv.db-shm", "kv.db-wal", "new.db", "new.db.copy"}

"""Symbolic and hard links, paths that become another file, and opens, backups and exports that race with another's file."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner
from storekit import MIB, file_bytes, noise
from test_durability import readable_by_all, unprivileged  # noqa: F401  the latter is a fixture

import kvstore
from kvstore import Store, cli, operate
from kvstore.storage import schema as upgrade
from kvstore.storage import sniff as header

if not hasattr(os, "symlink") or sys.platform == "win32":
    pytest.skip("needs symbolic links", allow_module_level=True)


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """A link in one folder, and the file it names in another."""
    (tmp_path / "links").mkdir()
    (tmp_path / "big").mkdir()
    link, real = tmp_path / "links" / "cache.db", tmp_path / "big" / "real.db"
    link.symlink_to(real)
    return link, real


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# -- links


def test_a_dangling_link_makes_the_file_it_names(linked: tuple[Path, Path]) -> None:
    link, real = linked
    with Store(link) as store:
        assert store.path == str(real)
        store.put([1, 2], noise(1, 5_000))
        assert names(link.parent) == ["cache.db"]
    assert names(real.parent) == ["real.db"]
    assert real.stat().st_mode & 0o777 == 0o600
    with Store(real, readonly=True) as store:
        assert store.match([1, 2]) is not None


def test_a_budget_holds_behind_a_link(linked: tuple[Path, Path]) -> None:
    link, real = linked
    with Store(link, cache_disk_mib=16, cache_ram_mib=0) as store:
        for n in range(40):
            store.put([n, 1], noise(n, 1 * MIB))
            assert file_bytes(real) <= 16 * MIB
        assert store.stats().file_bytes == file_bytes(real)
        assert len(list(store.entries())) > 3


def test_the_log_is_copied_behind_a_link(linked: tuple[Path, Path]) -> None:
    link, real = linked
    with Store(link, cache_ram_mib=0) as store:
        store.put([1], noise(1, 3 * MIB))
        store.gc()
        assert real.stat().st_size > 3 * MIB


def test_links_in_parent_folders_and_relative_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "folder").symlink_to("real/deep", target_is_directory=True)
    (tmp_path / "real" / "deep" / "link").symlink_to("../kv.db")
    monkeypatch.chdir(tmp_path)
    with Store("folder/../via_dots.db") as store:  # as the system reads it: the parent of the link's target
        store.put([1], b"x")
        assert store.path == str(tmp_path / "real" / "via_dots.db")
    with Store(Path("folder") / "link") as store:
        store.put([1], b"x")
        monkeypatch.chdir("/")
        store.put([2], b"y")
        assert store.path == str(tmp_path / "real" / "kv.db")
    assert names(tmp_path / "real") == ["deep", "kv.db", "via_dots.db"]


@pytest.mark.parametrize("readonly", [False, True])
def test_a_loop_of_links_is_an_error_that_says_it(readonly: bool, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for use in (
        lambda: Store(tmp_path / "a", readonly=readonly),
        lambda: Store(tmp_path / "a" / "x.db", readonly=readonly),
        lambda: operate.verify(tmp_path / "a"),
        lambda: upgrade.dry_run(tmp_path / "a"),
    ):
        with pytest.raises(kvstore.StoreIOError, match=r"lead back|does not exist"):
            use()
    assert names(tmp_path) == ["a", "b"]


def test_a_path_with_a_nul_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(kvstore.InvalidInputError, match="NUL"):
        Store(str(tmp_path / "a\0b"))


def test_a_link_that_is_changed_later_changes_nothing_for_an_open_store(linked: tuple[Path, Path]) -> None:
    link, real = linked
    other = real.with_name("other.db")
    with Store(link) as store:
        store.put([1], b"first")
        link.unlink()
        link.symlink_to(other)
        store.put([2], b"second")
        assert store.match([2]) is not None
    assert not other.exists()
    with Store(real) as store:
        assert len(list(store.entries())) == 2


def test_a_file_that_was_replaced_is_an_error_and_the_new_one_is_left_alone(tmp_path: Path) -> None:
    path, new = tmp_path / "kv.db", tmp_path / "new.db"
    with Store(new) as store:
        store.put([7], b"of the new file")
    store = Store(path, cache_ram_mib=0)
    store.put([1], b"x")
    os.replace(new, path)
    with pytest.raises(kvstore.StoreIOError, match="replaced, moved or deleted"):
        store.put([2], b"y")
    with pytest.raises(kvstore.StoreIOError, match="replaced"):
        store.gc()
    store.close()
    with Store(path) as store:
        assert [e.n_tokens for e in store.entries()] == [1]
        assert store.match([7]) is not None
        assert store.verify() == []


def test_closing_a_store_whose_file_was_replaced_leaves_the_log_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "kv.db"
    old = Store(path)
    old.put([1], b"x")
    for suffix in ("", "-wal", "-shm"):
        os.rename(f"{path}{suffix}", f"{tmp_path}/away{suffix}")
    new = Store(path)
    new.put([2], b"of the new file")
    old.close()
    assert Path(f"{path}-wal").exists()
    new.close()
    with Store(path) as store:
        assert store.match([2]) is not None
        assert store.match([1]) is None


def test_a_hard_link_beside_a_file_that_is_in_use_is_refused(tmp_path: Path) -> None:
    path, second = tmp_path / "kv.db", tmp_path / "second.db"
    with Store(path) as store:
        store.put([1], noise(1, 50_000))
        os.link(path, second)
        for readonly in (False, True):
            with pytest.raises(kvstore.StoreIOError, match="hard link") as caught:
                Store(second, readonly=readonly)
            assert str(path) in caught.value.hint
    with Store(second) as store:  # nobody has it open by the other name: no log is missed
        assert store.match([1]) is not None


def leave_a_log(path: Path) -> None:
    """Puts an entry that stays in the log, as a process that was killed leaves it."""
    code = (
        "import sys, os\nfrom kvstore import Store\ns = Store(sys.argv[1])\n"
        "s.gc()\ns._maintenance.stop()\ns.put([5, 5], b'in the log')\nos._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    assert Path(f"{path}-wal").stat().st_size > 0


def test_a_log_beside_the_real_file_is_never_overlooked(
    linked: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    link, real = linked
    with Store(link) as store:
        store.put([1, 1], b"in the file")
    leave_a_log(real)
    Path(f"{real}-shm").unlink()
    readable_by_all(link)
    readable_by_all(real)
    for path in (real, Path(f"{real}-wal")):
        path.chmod(0o644)
    for folder in (link.parent, real.parent):
        folder.chmod(0o555)
    request.getfixturevalue("unprivileged")
    with pytest.raises(kvstore.KVStoreError):
        Store(link, readonly=True).match([5, 5])
    shown = CliRunner().invoke(cli.main, ["ls", str(link)])
    assert shown.exit_code != 0


def test_a_reader_in_a_folder_that_cannot_be_written_notices_who_writes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "folder" / "kv.db"
    path.parent.mkdir()
    with Store(path) as store:
        store.put([1], b"x")
    path.chmod(0o644)
    readable_by_all(path)
    path.parent.chmod(0o555)
    request.getfixturevalue("unprivileged")
    with Store(path, readonly=True) as reader:
        assert len(list(reader.entries())) == 1
        if os.geteuid() == 65534 and os.getresuid()[2] == 0:
            os.setresuid(0, 0, 0)
            try:
                with Store(path) as writer:
                    writer.put([2], b"y")
            finally:
                os.setresuid(65534, 65534, 0)
            assert len(list(reader.entries())) == 2
            assert reader.verify() == []


# -- a backup, a salvage and an export take no name that another gave meanwhile


def test_a_backup_goes_where_a_linked_folder_leads(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "folder").symlink_to("real/deep", target_is_directory=True)
    with Store(tmp_path / "kv.db") as store:
        store.put([1], b"x")
        operate.backup(store, tmp_path / "folder" / ".." / "copy.db")
        assert names(tmp_path / "real") == ["copy.db", "deep"]
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        with pytest.raises(kvstore.InvalidInputError, match="there already"):
            operate.backup(store, tmp_path / "dangling")
        assert not (tmp_path / "nowhere").exists()


def test_a_backup_replaces_no_file_that_came_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    with Store(tmp_path / "kv.db") as store:
        store.put([1], b"x")

        def progress(done: int, total: int) -> None:
            target.write_text("somebody else's")

        with pytest.raises(kvstore.InvalidInputError, match="there already"):
            operate.backup(store, target, progress=progress)
    assert target.read_text() == "somebody else's"
    assert names(tmp_path) == ["copy.db", "kv.db"]


def test_a_salvage_leaves_a_file_that_is_not_its_own(tmp_path: Path) -> None:
    broken, new = tmp_path / "broken.db", tmp_path / "new.db"
    broken.write_bytes(b"no database at all" * 5_000)
    beside = tmp_path / "new.db.copy"
    beside.write_text("mine")
    with pytest.raises(kvstore.NotAStoreError):
        operate.salvage(broken, new)
    assert names(tmp_path) == ["broken.db", "new.db.copy"]
    assert beside.read_text() == "mine"


# -- opens that fail


def test_an_open_that_fails_leaves_a_file_that_another_process_has_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.db"
    real = upgrade.prepare
    code = "import sys\nfrom kvstore import Store\nwith Store(sys.argv[1]) as s: s.put([1], b'theirs')"

    def fill_then_fail(*args: Any, **options: Any) -> Any:
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
        raise kvstore.BusyError("locked")

    monkeypatch.setattr(upgrade, "prepare", fill_then_fail)
    with pytest.raises(kvstore.BusyError):
        Store(path)
    monkeypatch.setattr(upgrade, "prepare", real)
    with Store(path) as store:
        assert store.match([1]) is not None


def test_an_open_whose_new_file_another_removes_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv.db"
    real = upgrade.prepare
    calls: list[int] = []

    def removed_first(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            path.unlink()
        return real(*args, **options)

    monkeypatch.setattr(upgrade, "prepare", removed_first)
    with Store(path) as store:
        store.put([1], b"x")
    assert len(calls) == 2
    with Store(path) as store:
        assert store.match([1]) is not None


def test_an_open_that_fails_alone_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv.db"
    real = upgrade.prepare

    def late(*args: Any, **options: Any) -> Any:
        real(*args, **options)
        raise kvstore.StoreIOError("the disk fails")

    def early(*args: Any, **options: Any) -> Any:
        raise kvstore.StoreIOError("the disk fails")

    monkeypatch.setattr(upgrade, "prepare", early)
    with pytest.raises(kvstore.StoreIOError):
        Store(path)
    assert names(tmp_path) == []
    monkeypatch.setattr(upgrade, "prepare", late)
    with pytest.raises(kvstore.StoreIOError):
        Store(path)
    assert names(tmp_path) == ["kv.db"]  # a whole store that holds nothing: somebody may have it open
    monkeypatch.setattr(upgrade, "prepare", real)
    with Store(path) as store:
        store.put([1], b"x")


# -- a log that another process changes while it is read


def log_of(path: Path, tmp_path: Path) -> bytes:
    c = apsw.Connection(str(path))
    c.pragma("journal_mode", "wal")
    c.execute("CREATE TABLE t(x); PRAGMA user_version = 7; INSERT INTO t VALUES(1); PRAGMA user_version = 9")
    data = Path(f"{path}-wal").read_bytes()
    c.close()
    return data


def test_a_log_cut_short_at_any_byte_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    data = log_of(tmp_path / "other", tmp_path)
    assert len(data) > 2 * (24 + 4096)
    copy = tmp_path / "log"
    for n in [*range(200), *range(4000, 4300), *range(len(data) - 150, len(data) + 1)]:
        copy.write_bytes(data[:n])
        found = header.in_log(str(copy))
        assert found is None or found.user_version in (7, 9)
    assert found is not None


class Shrinking:
    """A log whose size was asked before another process emptied it."""

    def __init__(self, data: bytes, left: int) -> None:
        self.data, self.left, self.at = data, left, 0

    def seek(self, at: int) -> None:
        self.at = at

    def read(self, n: int) -> bytes:
        part = self.data[: self.left][self.at : self.at + n]
        self.at += len(part)
        return part


def test_a_log_that_is_emptied_while_it_is_read_is_no_error(tmp_path: Path) -> None:
    data = log_of(tmp_path / "other", tmp_path)
    for left in [*range(400), *range(4050, 4300)]:
        found = header._in_log(Shrinking(data, left), len(data))  # type: ignore[arg-type]
        assert found is None or found.user_version in (7, 9)


def test_opens_beside_a_process_that_empties_its_log(
    tmp_path: Path, crash_free: Callable[[Callable[[], Any]], threading.Thread]
) -> None:
    path = tmp_path / "kv.db"
    Store(path).close()
    code = (
        "import sys\nfrom kvstore import Store\n"
        "with Store(sys.argv[1], cache_disk_mib=16, cache_ram_mib=0) as s:\n"
        "    print('open', flush=True)\n    n = 0\n"
        "    while not sys.stdin.closed and n < 4000:\n"
        "        s.put([n % 50, 1], bytes([n % 251]) * 200_000); n += 1\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        for _ in range(150):
            with Store(path, readonly=True) as store:
                assert len(list(store.entries())) <= 60
    finally:
        child.kill()
        child.communicate()


def test_a_page_that_is_half_written_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv.db"
    with Store(path) as store:
        store.put([1], b"x")
        real, seen = header.in_log, []

        def torn(name: str) -> header.Header | None:
            seen.append(name)
            return header.Header(struct.unpack("<I", b"torn")[0], 3, False) if len(seen) == 1 else real(name)

        monkeypatch.setattr(header, "in_log", torn)
        with Store(path, readonly=True) as reader:
            assert reader.match([1]) is not None
    assert len(seen) > 1

"""The command as a process: signals, pipes, a store that others write to, modes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from storekit import noise, state

from kvstore import Store, errors

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")
COMMAND = [sys.executable, "-m", "kvstore.cli"]


def start(*words: Any, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


def run(*words: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=240, **more)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "kv.db"
    with Store(path) as store:
        for i in range(400):
            store.put([i, 1], b"state", excerpt=f"entry {i} " + "x" * 400)
    return path


def test_exit_codes(db: Path) -> None:
    assert run("verify", db).returncode == 0
    assert run("show", db, "0").returncode in (errors.NotFoundError.exit_code, errors.InvalidInputError.exit_code)
    assert run("ls", db.parent / "none").returncode == errors.StoreIOError.exit_code
    assert run("nothing").returncode == 2
    assert run("ls", db, "--nothing").returncode == 2
    done = run("ls", db, "--json")
    assert done.stderr == ""
    assert len(json.loads(done.stdout)) == 400


def test_broken_pipe(db: Path) -> None:
    with Store(db) as store:
        id = store.put([8, 8], noise(4, 20 << 20)).hex_id
    for words in (["get", db, id, "-"], ["export", db, "--to", "-"], ["ls", db, "--watch", "--every", "0.05"]):
        process = start(*words)
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.wait(240) == 141
        assert process.stderr.read() == ""


def test_read_while_another_writes(db: Path) -> None:
    """The writer is not done before the readers are: one that waited for it would end with a BusyError."""
    with Store(db) as store, store._core.db.write():
        assert len(json.loads(run("ls", db, "--json").stdout)) == 400
        assert run("stats", db).returncode == 0


def test_watch(db: Path) -> None:
    process = start("ls", db, "--watch", "--every", "0.1", "--json")
    assert process.stdout is not None
    assert process.stdout.readline() == "[\n"
    with Store(db) as store:
        added = store.put([77, 77, 77], b"state").hex_id
    deadline = time.monotonic() + 240
    while f'"id": "{added}"' not in process.stdout.readline():
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")


FINALIZER = """
import sys, time
import kvstore.cli.inspect as inspect
from kvstore.cli import main

class Slow:
    def __del__(self):
        sys.stderr.write("in a finalizer\\n")
        sys.stderr.flush()
        time.sleep(60)

look = inspect._facts
def facts(*args):
    Slow()
    return look(*args)
inspect._facts = facts
main(sys.argv[1:])
"""


def test_a_watch_ends_though_the_signal_comes_in_a_finalizer(db: Path) -> None:
    words = [sys.executable, "-c", FINALIZER, "ls", db, "--watch", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "in a finalizer\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "KeyboardInterrupt" in err  # Python's note of what it dropped
    assert "in a finalizer" not in err


def interrupt(process: subprocess.Popen[str], when: Any) -> tuple[int, str]:
    deadline = time.monotonic() + 240
    while not when() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    return process.returncode, err


@pytest.mark.parametrize("target", ["folder", "all.tar"])
def test_interrupted_export(db: Path, target: str) -> None:
    with Store(db) as store:
        store.put([5, 5, 5, 5], noise(1, 40 << 20))
    out = db.parent / target

    def begun() -> bool:
        return any(".tmp" in p.name for p in db.parent.rglob("*"))

    code, err = interrupt(start("export", db, "--to", out), begun)
    assert code in (0, 130)
    assert "Traceback" not in err
    assert not [p for p in db.parent.rglob("*") if ".tmp" in p.name]
    if code == 0:
        return
    assert "interrupted" in err
    if target == "all.tar":
        assert not out.exists()
        return
    done = [p for p in out.iterdir() if p.suffix == ".bin"]
    assert {p.stem for p in out.iterdir()} == {p.stem for p in done}
    assert run("import", db.parent / "new.db", out, "--json").returncode == 0


def test_interrupted_put(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(noise(2, 60 << 20))
    db = tmp_path / "kv.db"
    with Store(db) as store:
        store.put([1], b"there before")

    def begun() -> bool:
        log = tmp_path / "kv.db-wal"
        return log.exists() and log.stat().st_size > 4 << 20

    code, err = interrupt(start("put", db, tmp_path / "raw", "--tokens", "[7, 8, 9]"), begun)
    assert code in (0, 130)
    assert "Traceback" not in err
    assert run("verify", db).stdout == "no problems\n"
    rows = json.loads(run("ls", db, "--json").stdout)
    assert len(rows) == (1 if code else 2)


def test_interrupted_backup(tmp_path: Path) -> None:
    db = tmp_path / "kv.db"
    with Store(db) as store:
        store.put([1, 2], noise(3, 60 << 20))

    def begun() -> bool:
        return any(".tmp" in p.name for p in tmp_path.iterdir())

    code, err = interrupt(start("backup", db, tmp_path / "copy"), begun)
    assert code in (0, 130)
    assert "Traceback" not in err
    assert (tmp_path / "copy").exists() == (code == 0)
    assert not [p for p in tmp_path.iterdir() if ".tmp" in p.name]
    assert run("verify", db).returncode == 0


def test_modes_under_a_lax_umask(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(state(range(50)))
    db = tmp_path / "kv.db"
    lax = ["sh", "-c", 'umask 0; exec "$@"', "sh", *COMMAND]
    for words in (
        ["put", db, tmp_path / "raw", "--tokens", str(list(range(50)))],
        ["backup", db, tmp_path / "copy.db"],
        ["export", db, "--to", tmp_path / "all.tar"],
        ["export", db, "--to", tmp_path / "folder"],
        ["repair", db, "--salvage", tmp_path / "new.db"],
        ["gc", db, "--secure"],
    ):
        done = subprocess.run([*lax, *map(str, words)], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, (words, done.stderr)
    files = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "raw"]
    assert {"kv.db", "copy.db", "all.tar", "new.db"} <= {p.name for p in files}
    assert {oct(p.stat().st_mode & 0o777) for p in files} == {"0o600"}
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_output_of_a_terminal_without_unicode(db: Path) -> None:
    with Store(db) as store:
        store.put([3, 3, 3], b"state", excerpt="grüße 你好")
    done = run("ls", db, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "Traceback" not in done.stderr

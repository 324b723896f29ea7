"""Keys: what can be one, and what is said where it does not fit. `make test-encryption` runs what needs a cipher."""

from __future__ import annotations

import logging
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import legacykit
import pytest
from storekit import file_bytes, noise, state
from test_budget import sizes, watched
from test_cli import run  # noqa: F401  a fixture

from kvstore import (
    InvalidInputError,
    KVStoreError,
    NewerStoreError,
    NotAStoreError,
    Store,
    WrongKeyError,
    errors,
    operate,
)
from kvstore.storage import geometry, keys, sqlite
from kvstore.storage import schema as upgrade
from kvstore.storage import sniff as header
from kvstore.store import verify

ROOT = Path(__file__).resolve().parent.parent
KEY = "correct horse"
TOKENS = list(range(50))
needs_cipher = pytest.mark.skipif(not sqlite.HAS_CIPHER, reason="needs apsw-sqlite3mc (make test-encryption)")
without_cipher = pytest.mark.skipif(sqlite.HAS_CIPHER, reason="this SQLite has a cipher")


def openers(path: Path, key: Any) -> dict[str, Callable[[], object]]:
    """Everything that takes a key."""
    return {
        "Store": lambda: Store(path, key=key),
        "readonly": lambda: Store(path, key=key, readonly=True),
        "verify": lambda: operate.verify(path, key=key),
        "salvage": lambda: operate.salvage(path, path.with_name("new"), key=key),
        "upgrade": lambda: upgrade.upgrade(path, key=key),
        "dry_run": lambda: upgrade.dry_run(path, key=key),
    }


def chain(error: BaseException | None) -> str:
    """All that a traceback would show of an error and its causes."""
    text = ""
    while error is not None:
        facts = error.as_dict() if isinstance(error, KVStoreError) else ""
        text += f"{error!r} {error} {facts}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text


# -- what can be a key


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "empty"),
        ("sesame\0open", "NUL"),
        ("sesame\ud800", "not valid text"),
        (b"sesame", "must be a str, not bytes"),
        (bytearray(b"sesame"), "must be a str, not bytearray"),
        (4711, "must be a str, not int"),
        (True, "must be a str, not bool"),
        (["sesame"], "must be a str, not list"),
    ],
)
def test_what_cannot_be_a_key(path: Path, key: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        Store(path, key=key)
    assert list(path.parent.iterdir()) == []
    Store(path).close()
    before = path.read_bytes()
    for name, call in openers(path, key).items():
        with pytest.raises(InvalidInputError, match=why) as caught:
            call()
        shown = chain(caught.value)
        assert "sesame" not in shown, name
        assert "736573616d65" not in shown, name
        assert "4711" not in shown, name
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_store_in_memory_cannot_be_encrypted() -> None:
    with pytest.raises(InvalidInputError, match="in memory cannot be encrypted"):
        Store(":memory:", key=KEY)


# -- a key for a file that is not encrypted


@pytest.mark.parametrize("kind", ["closed", "in use", "version 1"])
def test_a_key_for_a_plain_store(path: Path, kind: str) -> None:
    store = None
    if kind == "version 1":
        legacykit.odd(path, 1)
    else:
        store = Store(path)
        store.put(TOKENS, state(TOKENS))
    if kind == "closed" and store is not None:
        store.close()
    before = path.read_bytes()
    for name, call in openers(path, KEY).items():
        with pytest.raises(WrongKeyError, match="is not encrypted, but a key was given") as caught:
            call()
        assert "without key=" in caught.value.hint, name
        assert caught.value.facts == {"path": str(path)}
    assert not path.with_name("new").exists()
    if kind == "in use" and store is not None:
        store.close()
    else:
        assert path.read_bytes() == before
    Store(path).close()


def test_a_key_for_another_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as c:
        c.execute("CREATE TABLE other(a)")
    for call in openers(path, KEY).values():
        with pytest.raises(NotAStoreError, match="another program"):
            call()


def test_a_key_for_a_newer_store(path: Path) -> None:
    Store(path).close()
    with closing(sqlite3.connect(path)) as c:
        c.execute("PRAGMA user_version=99")
    for call in openers(path, KEY).values():
        with pytest.raises(NewerStoreError):
            call()


def test_the_log_of_an_encrypted_file_tells_nothing(path: Path) -> None:
    """What stands in its pages where the version would be is noise, not a version."""
    store = Store(path)
    store.put(TOKENS, state(TOKENS))
    log = Path(f"{path}-wal")
    plain = log.read_bytes()
    assert header.in_log(str(log)) is not None
    scrambled = path.with_name("scrambled")
    scrambled.write_bytes(plain.replace(b"SQLite format 3\0", noise(1, 16)))
    assert header.in_log(str(scrambled)) is None
    store.close()


# -- no cipher


@without_cipher
def test_without_a_cipher(path: Path) -> None:
    path.write_bytes(noise(1, 1 << 17))
    for name, call in openers(path, KEY).items():
        with pytest.raises(WrongKeyError, match="has no cipher") as caught:
            call()
        assert f'pip install --force-reinstall --no-deps "{keys.CIPHERS}"' in caught.value.hint, name
        assert f'uv pip install --reinstall --no-deps "{keys.CIPHERS}"' in caught.value.hint, name
        assert KEY not in chain(caught.value)
    with pytest.raises(NotAStoreError, match="or it is encrypted") as refused:
        Store(path)
    assert "needs its key" in refused.value.hint


def test_the_commands_install_what_the_package_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{keys.CIPHERS}"' in text
    assert f'"{keys.PLAIN}"' in text
    assert f'pip install --force-reinstall --no-deps "{keys.CIPHERS}"' in (ROOT / "README.md").read_text(encoding="utf-8")


def test_an_apsw_without_its_files(tmp_path: Path) -> None:
    (tmp_path / "apsw").mkdir()
    (tmp_path / "apsw" / "__init__.py").write_text("")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvstore"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the package apsw is incomplete")
    assert f'pip install --force-reinstall --no-deps "{keys.PLAIN}"' in last
    assert f'pip install --force-reinstall --no-deps "{keys.CIPHERS}"' in last


# -- the command


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\r\n\n", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (b"ses\0ame", "contains a NUL character"),
        ("sesame".encode("utf-16"), "is not UTF-8 text"),
        (b"sesame\xff\xfe", "is not UTF-8 text"),
        (b"sesame" * 20_000, "is larger than 64 KiB"),
    ],
)
def test_a_bad_key_file(run: Callable[..., Any], tmp_path: Path, content: bytes, why: str) -> None:  # noqa: F811
    Store(tmp_path / "kv.db").close()
    (tmp_path / "key").write_bytes(content)
    for words in (["ls", "kv.db"], ["verify", "kv.db"], ["migrate", "kv.db"], ["repair", "kv.db"]):
        shown = run(*words, "--key-file", "key", code=2).stderr
        assert f"the key file key {why}" in shown
        assert "ses" not in shown
        assert "0xff" not in shown


def test_no_key_file(run: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    Store(tmp_path / "kv.db").close()
    assert "the key file none cannot be read: No such file" in run("ls", "kv.db", "--key-file", "none", code=2).stderr


def test_a_key_file_for_a_plain_store(run: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    Store(tmp_path / "kv.db").close()
    (tmp_path / "key").write_text("sesame\n")
    for words in (["ls", "kv.db"], ["verify", "kv.db"], ["migrate", "kv.db"], ["backup", "kv.db", "copy"]):
        shown = run(*words, "--key-file", "key", code=errors.WrongKeyError.exit_code).stderr
        assert "kv.db is not encrypted, but a key was given" in shown
        assert "--key-file" in shown
        assert "sesame" not in shown


# -- with a cipher


@needs_cipher
@pytest.mark.parametrize("key", ["k", KEY, "x'00'", "it's \"quoted\"; --", "\u00fc\u4e2d\U0001f511", "two\nlines", "k" * 5000])
def test_any_text_is_a_key(path: Path, key: str) -> None:
    with Store(path, key=key) as store:
        entry = store.put(TOKENS, b"a state " * 10)
    assert not path.read_bytes().startswith(b"SQLite format 3")
    with Store(path, key=key) as store:
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == b"a state " * 10
    for wrong in (key + "!", key + key[-1], key[:-1] or "other"):
        with pytest.raises(WrongKeyError, match="the key does not open"):
            Store(path, key=wrong)


@needs_cipher
def test_what_others_see_of_an_encrypted_store_in_use(path: Path) -> None:
    """Also where its log has transactions that the file has not."""
    script = """
import sys
from kvstore import Store, operate
path, key = sys.argv[1], (sys.argv[2:] or [None])[0]
for call in (lambda: Store(path, key=key), lambda: Store(path, key=key, readonly=True), lambda: operate.verify(path, key=key)):
    try:
        print(call())
    except Exception as error:
        print(type(error).__name__, error)
"""

    def other(*words: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", script, str(path), *words], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    with Store(path, key=KEY) as store:
        for i in range(3):
            store.put([i, 2, 3], noise(i, 100_000))
            assert all(line.startswith("NotAStoreError") and "encrypted" in line for line in other())
            assert all(line.startswith("WrongKeyError the key does not open") for line in other("wrong"))
        assert other(KEY)[2] == "[]"


@needs_cipher
@pytest.mark.parametrize("size", [2, 100, 1300, 70_001])
def test_a_file_that_no_key_opens(path: Path, size: int) -> None:
    path.write_bytes(noise(1, size))
    for call in openers(path, KEY).values():
        with pytest.raises(NotAStoreError, match="encrypted or not"):
            call()
    assert path.read_bytes() == noise(1, size)


@needs_cipher
def test_the_key_is_nowhere_to_be_seen(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with Store(path, key=KEY) as store:
        store.put(TOKENS, state(TOKENS))
        operate.backup(store, path.with_name("copy"))
        shown += [repr(store), repr(store._core), repr(store._core.db), repr(store.stats())]
    damaged = bytearray(path.read_bytes())
    damaged[200_000:] = noise(7, len(damaged) - 200_000)
    path.with_name("damaged").write_bytes(damaged)
    shown += [str(operate.verify(path.with_name("damaged"), key=KEY))]
    for call in (lambda: Store(path), lambda: Store(path, key=KEY + KEY), lambda: Store(path, key=KEY, timeout=-1)):
        with pytest.raises(KVStoreError) as caught:
            call()
        shown.append(chain(caught.value))
    assert KEY not in "\n".join([*shown, caplog.text])


@needs_cipher
def test_a_check_of_a_file_keeps_nobody_from_opening_it(path: Path) -> None:
    with Store(path, key=KEY) as store:
        store.put(TOKENS, noise(1, 100_000))
    checked = verify.Lenient(str(path), key=KEY)
    try:
        opened: list[int] = []

        def count() -> None:
            with Store(path, key=KEY, timeout=1) as store:
                opened.append(len(list(store.entries())))

        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
        assert opened == [1]
    finally:
        checked.close()


@needs_cipher
def test_a_store_is_not_larger_for_being_encrypted(path: Path) -> None:
    """Beyond the 32 bytes that the cipher takes of each page: the chunks still fill whole pages."""
    sizes = []
    for key in (None, KEY):
        with Store(path.with_name(f"{key}"), key=key, cache_ram_mib=0) as store:
            store.put(TOKENS, noise(1, 32 << 20))
        sizes.append(path.with_name(f"{key}").stat().st_size)
    assert sizes[0] <= sizes[1] <= sizes[0] * (1 + 1.5 * 32 / geometry.PAGE_SIZE)


@needs_cipher
@pytest.mark.parametrize("key", [None, KEY])
def test_the_disk_budget_holds_with_a_cipher_build(path: Path, key: str | None) -> None:
    """Its SQLite overwrites what it deletes, unless told otherwise: evictions would fill the log."""
    with Store(path, key=key, cache_ram_mib=0, cache_disk_mib=24) as store, watched(lambda: file_bytes(path)) as largest:
        for n, size in enumerate(sizes(1, 120, 6 << 20)):
            store.put([n, 1], noise(n, size))
        assert store.stats().evictions["disk_budget"] > 0
        assert store.verify() == []
    assert largest[0] <= 24 << 20


@needs_cipher
def test_the_command_with_a_key(tmp_path: Path) -> None:
    """Also where the key file is a pipe, which can be read once."""
    (tmp_path / "key").write_bytes(b"\xef\xbb\xbf" + KEY.encode() + b"\r\n")
    with Store(tmp_path / "kv.db", key=KEY) as store:
        entry = store.put(TOKENS, state(TOKENS))

    def command(words: str) -> str:
        line = f'"{sys.executable}" -m kvstore.cli {words}'
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for key in ("key", "<(cat key)"):
        assert entry.hex_id in command(f"ls kv.db --json --key-file {key}")
        assert "no problems" in command(f"verify kv.db --key-file {key}")
        assert "no problems" in command(f"repair kv.db --yes --key-file {key}")
        command(f"backup kv.db {'copy' if key == 'key' else 'other'} --key-file {key}")
    for name in ("copy", "other"):
        assert operate.verify(tmp_path / name, key=KEY) == []
        assert not re.search(rb"SQLite format 3", (tmp_path / name).read_bytes())

"""The commands of the shared tier, over a folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import storekit
from click.testing import CliRunner, Result
from fleetkit import CHAT, PREFIX, listed, tokens

from kvstore import RemoteDeniedError, RemoteKeyError, Store
from kvstore.cli import main
from kvstore.errors import InvalidInputError, NotFoundError
from kvstore.fleet.names import parse_path

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    for name in ("KVSTORE_REMOTE", "KVSTORE_REMOTE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)

    def runner(*words: Any, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(word) for word in words])
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
        assert "Traceback" not in result.stderr
        return result

    return runner


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def filled(run: Run, url: str, tmp_path: Path) -> str:
    """A bucket with a learned prefix and a chat; the key is in `fleet.key`, and both are in a.db."""
    run("remote", "init", url, "--remote-key", "fleet.key")
    with Store(tmp_path / "a.db", fingerprint="m", min_saved_mib=0) as store:
        store.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned", excerpt="be kind")
        chat = store.put(tokens(CHAT), storekit.state(CHAT))
    run("push", "a.db", "--remote", url, "--remote-key", "fleet.key")
    run("push", "a.db", chat.hex_id, "--remote", url, "--remote-key", "fleet.key")
    assert len(listed(url)) == 2
    return url


def test_init_makes_a_key_that_only_its_owner_reads_and_keeps_one_that_exists(run: Run, url: str, tmp_path: Path) -> None:
    first = json.loads(run("remote", "init", url, "--remote-key", "fleet.key", "--json").stdout)
    key = (tmp_path / "fleet.key").read_bytes()
    assert first["key_made"]
    assert len(bytes.fromhex(key.decode().strip())) == 32
    assert (tmp_path / "fleet.key").stat().st_mode & 0o777 == 0o600
    again = json.loads(run("remote", "init", url, "--remote-key", "fleet.key", "--json").stdout)
    assert not again["key_made"]
    assert (tmp_path / "fleet.key").read_bytes() == key
    assert listed(url) == {}, "the probe is gone"
    run("remote", "init", url, code=RemoteKeyError.exit_code)
    (tmp_path / "fleet.key").write_bytes(b"short")
    run("remote", "init", url, "--remote-key", "fleet.key", code=RemoteKeyError.exit_code)
    assert key.decode().strip() not in run("remote", "init", url, "--remote-key", "new.key").stderr


def test_push_publishes_each_entry_once(run: Run, filled: str) -> None:
    rows = json.loads(run("push", "a.db", "--remote", filled, "--remote-key", "fleet.key", "--json").stdout)
    assert [row["result"] for row in rows] == ["there already"]
    assert rows[0]["path"] in listed(filled)


def test_pull_brings_what_was_pushed(run: Run, filled: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSTORE_REMOTE", filled)
    monkeypatch.setenv("KVSTORE_REMOTE_KEY_FILE", "fleet.key")
    for learned, n in ((["--learned"], 1), ([], 1), ([], 0)):
        pulled = json.loads(run("pull", "b.db", *learned, "--json").stdout)
        assert (len(pulled["fetched"]), pulled["refused"]) == (n, 0)
    with Store(tmp_path / "b.db", fingerprint="m") as store:
        entries = {entry.n_tokens: entry for entry in store.entries()}
        assert sorted(entries) == [300, 500]
        assert (entries[300].entry_class, entries[300].excerpt) == ("learned", "be kind")
        saved = store.get(entries[500].id)
        assert saved is not None
        assert saved.main.tobytes() == storekit.state(CHAT)
    assert json.loads(run("pull", "c.db", "--fingerprint", "another", "--json").stdout)["fetched"] == []


def test_ls_and_status_need_no_key_and_say_no_more_than_the_names(run: Run, filled: str) -> None:
    rows = json.loads(run("remote", "ls", filled, "--json").stdout)
    assert {row["n_tokens"]: row["class"] for row in rows} == {300: "learned", 500: "normal"}
    child = next(row for row in rows if row["parent"])
    assert child["parent"] in {row["id"] for row in rows}
    assert "be kind" not in json.dumps(rows)
    facts = json.loads(run("remote", "status", filled, "--json").stdout)
    assert (facts["objects"], facts["deltas"], facts["learned"], facts["ignored"]) == (2, 1, 1, 0)
    assert facts["bytes"] == sum(listed(filled).values())
    assert "2 objects" in run("remote", "status", filled).stdout
    assert "learned" in run("remote", "ls", filled).stdout


def test_verify_lists_what_must_not_be_served(run: Run, filled: str, tmp_path: Path) -> None:
    assert run("remote", "verify", filled, "--remote-key", "fleet.key").stdout == ""
    parent = min(listed(filled), key=lambda path: parse_path(path).n_tokens)  # type: ignore[union-attr]
    file = tmp_path / "bucket" / parent
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    bad = json.loads(run("remote", "verify", filled, "--remote-key", "fleet.key", "--json", code=1).stdout)
    assert parent in {each["path"] for each in bad}
    assert len(bad) == 2, "its child cannot be served either"
    assert len(listed(filled)) == 2, "nothing is deleted"
    run("remote", "verify", filled, code=RemoteKeyError.exit_code)
    (tmp_path / "other.key").write_bytes(bytes(32))
    assert len(json.loads(run("remote", "verify", filled, "--remote-key", "other.key", "--json", code=1).stdout)) == 2


def _age(tmp_path: Path, path: str, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(tmp_path / "bucket" / path, (then, then))


def test_gc_deletes_by_age_and_by_size_and_never_what_is_not_ours(run: Run, filled: str, tmp_path: Path) -> None:
    child = max(listed(filled), key=lambda path: parse_path(path).n_tokens)  # type: ignore[union-attr]
    stranger = tmp_path / "bucket" / "1" / "notes.txt"
    stranger.write_text("not ours")
    left = stranger.with_name("upload#7")
    left.write_text("of an upload that was cut off")
    for path in (stranger, left):
        os.utime(path, (0, 0))
    _age(tmp_path, child, 29)
    said = json.loads(run("remote", "gc", filled, "--dry-run", "--json").stdout)
    assert (said["deleted"], said["abandoned_uploads"]) == ([], 1)
    assert left.exists()
    _age(tmp_path, child, 31)
    said = json.loads(run("remote", "gc", filled, "--json").stdout)
    assert (said["deleted"], said["expired"]) == ([child], 1)
    assert not left.exists()
    for _ in range(2):  # twice harms nothing
        said = json.loads(run("remote", "gc", filled, "--max-gib", "0", "--json").stdout)
    assert said["deleted"] == []
    assert set(listed(filled)) == {"1/notes.txt"}
    assert stranger.exists()


def test_gc_for_a_size_deletes_the_oldest_and_what_needs_it(run: Run, filled: str, tmp_path: Path) -> None:
    parent, child = sorted(listed(filled), key=lambda path: parse_path(path).n_tokens)  # type: ignore[union-attr]
    _age(tmp_path, parent, 2)
    _age(tmp_path, child, 1)
    size = listed(filled)[child] / (1 << 30)
    said = json.loads(run("remote", "gc", filled, "--max-gib", size, "--json").stdout)
    assert (said["for_size"], said["orphans"]) == (1, 1)
    assert listed(filled) == {}


def test_rm_deletes_an_object_and_the_deltas_against_it(run: Run, filled: str) -> None:
    rows = json.loads(run("remote", "ls", filled, "--json").stdout)
    parent = next(row["id"] for row in rows if not row["parent"])
    run("remote", "rm", filled, parent, code=2)  # asks first
    assert len(listed(filled)) == 2
    said = run("remote", "rm", filled, parent[:8], "--yes")
    assert "keep their copies" in said.stderr
    assert listed(filled) == {}
    run("remote", "rm", filled, parent, "--yes", code=NotFoundError.exit_code)
    run("remote", "rm", filled, "no id!", "--yes", code=InvalidInputError.exit_code)


def test_rm_of_a_child_leaves_its_parent(run: Run, filled: str) -> None:
    rows = json.loads(run("remote", "ls", filled, "--json").stdout)
    child = next(row for row in rows if row["parent"])
    run("remote", "rm", filled, child["id"], "--yes")
    assert len(listed(filled)) == 1


@pytest.mark.parametrize("option", ["secret_access_key=x", "aws_session_token=x", "password=x", "novalue"])
def test_credentials_are_refused_on_the_command_line(run: Run, url: str, option: str) -> None:
    result = run("remote", "ls", url, "-o", option, code=InvalidInputError.exit_code)
    assert "=x" not in result.stderr


def test_what_is_missing_is_named(run: Run, filled: str, tmp_path: Path) -> None:
    assert "KVSTORE_REMOTE" in run("push", "a.db", code=InvalidInputError.exit_code).stderr
    assert "--remote-key" in run("push", "a.db", "--remote", filled, code=RemoteKeyError.exit_code).stderr
    result = run("remote", "ls", f"file://{tmp_path}/nowhere", code=InvalidInputError.exit_code)
    assert "not a folder" in result.stderr
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_denied(run: Run, filled: str, tmp_path: Path) -> None:
    (tmp_path / "bucket" / "1").chmod(0o500)
    try:
        run("remote", "gc", filled, code=RemoteDeniedError.exit_code)
    finally:
        (tmp_path / "bucket" / "1").chmod(0o700)

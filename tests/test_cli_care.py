"""The command asks before it removes much, takes durations and sizes with their units, and prints what others wrote safely."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import unicodedata
import urllib.request
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import legacykit
import pytest
from click.testing import CliRunner, Result

from kvstore import InvalidInputError, Store, errors
from kvstore.cli import main
from kvstore.util import units
from kvstore.util.printable import Formatter, json_text, printable

Run = Callable[..., Result]
COMMAND = [sys.executable, "-m", "kvstore.cli"]
# Escape, C1 control, bidirectional override and isolate, zero width, byte order mark, separators, a lone surrogate, a tag.
NASTY = ["\x1b", "\x9b", "\x85", "\x7f", "\u202e", "\u2066", "\u200b", "\ufeff", "\u2028", "\u2029", "\U000e0041"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def runner(*words: Any, code: int | None = 0, stdin: Any = None) -> Result:
        result = CliRunner().invoke(main, [str(w) for w in words], input=stdin)
        assert code is None or result.exit_code == code, (words, result.exit_code, result.output, result.exception)
        return result

    return runner


@pytest.fixture
def ids(tmp_path: Path) -> list[str]:
    with Store(tmp_path / "kv.db") as store:
        return [store.put([i, 1], b"state", excerpt=f"entry {i}").hex_id for i in range(4)]


def left(tmp_path: Path) -> set[str]:
    with Store(tmp_path / "kv.db") as store:
        return {e.hex_id for e in store.entries()}


def update(path: Path, sql: str, *values: Any) -> None:
    """Writes to a store that nobody has open."""
    code = "import json, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute(sys.argv[2], json.loads(sys.argv[3]))"
    code += "; c.commit(); c.close()"
    subprocess.run([sys.executable, "-c", code, str(path), sql, json.dumps(values)], check=True, timeout=60)


# -- asking first


@pytest.mark.parametrize("number", ["30", "1", "0", "2592000"])
def test_a_number_without_a_unit_removes_nothing(run: Run, ids: list[str], tmp_path: Path, number: str) -> None:
    for more in ([], ["--yes"]):
        said = run("rm", "kv.db", "--older", number, *more, code=2).stderr
        assert all(re.search(rf"\b{unit}\b", said) for unit in ("s", "min", "h", "d", "w")), said
    run("set", "kv.db", ids[0], "--ttl", number, code=2)
    assert left(tmp_path) == set(ids)


@pytest.mark.parametrize("words", [["--unused"], ["--older", "1s"], ["--class", "normal"], ["FAMILY"], ["IDS"]])
def test_more_than_one_needs_yes(run: Run, ids: list[str], tmp_path: Path, words: list[str]) -> None:
    update(tmp_path / "kv.db", "UPDATE meta SET last_used = last_used - 100")
    with Store(tmp_path / "kv.db") as store:
        family = next(iter(store.entries())).family
    update(tmp_path / "kv.db", "UPDATE meta SET family = ?", family if family < 1 << 63 else family - (1 << 64))
    chosen = {"FAMILY": ["--family", f"{family:016x}"], "IDS": ids[:4]}.get(words[0], words)
    said = run("rm", "kv.db", *chosen, code=2).stderr
    assert "4 entries" in said
    assert "--yes" in said
    assert json.loads(run("rm", "kv.db", *chosen, "--json", code=2).stderr)["error"]["code"] == "usage"
    run("rm", "kv.db", *chosen, code=2, stdin="y\n")  # not a terminal
    assert left(tmp_path) == set(ids)
    assert set(run("rm", "kv.db", *chosen, "--dry-run").stdout.split()) == set(ids)
    assert left(tmp_path) == set(ids)
    assert set(run("rm", "kv.db", *chosen, "--yes").stdout.split()) == set(ids)
    assert left(tmp_path) == set()


def test_one_entry_needs_no_yes(run: Run, ids: list[str], tmp_path: Path) -> None:
    run("rm", "kv.db", ids[0])
    update(tmp_path / "kv.db", "UPDATE meta SET hits = 1 WHERE entry <> ?", int(ids[1], 16) - (int(ids[1], 16) >> 63 << 64))
    assert run("rm", "kv.db", "--unused").stdout.split() == [ids[1]]
    assert left(tmp_path) == set(ids[2:])


@pytest.mark.skipif(os.name == "nt", reason="pseudo terminals")
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_a_terminal_is_asked(ids: list[str], tmp_path: Path, answer: str, code: int) -> None:
    import pty

    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "rm", str(tmp_path / "kv.db"), "--unused"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            os.write(ours, answer.encode())
            out, err = process.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == code, err
    assert b"4 entries" in err
    assert len(out.split()) == (4 if code == 0 else 0)
    assert left(tmp_path) == (set() if code == 0 else set(ids))


def test_an_upgrade_without_a_backup_needs_yes(run: Run, tmp_path: Path) -> None:
    legacykit.odd(tmp_path / "old.db", 3)
    before = (tmp_path / "old.db").read_bytes()
    assert "--yes" in run("migrate", "old.db", "--no-backup", code=2).stderr
    assert (tmp_path / "old.db").read_bytes() == before
    run("migrate", "old.db", "--no-backup", "--yes")
    assert not list(tmp_path.glob("*backup*"))
    run("migrate", "old.db", "--no-backup")  # nothing to do, nothing to ask


# -- units


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("90s", 90), ("15min", 900), ("15m", 900), ("12h", 43200), ("7d", 604800), ("2w", 1209600), ("1 d", 86400)],
)
def test_durations(run: Run, ids: list[str], text: str, wanted: int) -> None:
    (row,) = json.loads(run("set", "kv.db", ids[0], "--ttl", text, "--json").stdout)
    assert wanted - 30 <= row["expires_in"] <= wanted
    assert units.seconds(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("16", 16), ("0.5", 0.5), ("512K", 0.5), ("8G", 8192), ("8gib", 8192), ("1.5 GiB", 1536), ("1T", 1 << 20),
     ("1048576B", 1), ("1000000KB", 1e9 / (1 << 20)), ("-1", -1)],
)  # fmt: skip
def test_sizes(text: str, wanted: float) -> None:
    assert units.mib(text) == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["", "x", "8X", "8 G G", "nan", "inf", "1e999", "-8G", "GiB", "8iB", "8GiBs", "0x10"])
def test_what_is_not_a_size(run: Run, text: str) -> None:
    with pytest.raises(InvalidInputError):
        units.mib(text)
    run("put", "kv.db", "x", f"--min-saved={text}", code=2)


@pytest.mark.parametrize("text", ["", "x", "3y", "3 months", "nan", "1d2h", "-1d", "1.5h", "500ms", "never"])
def test_what_is_not_a_duration(run: Run, ids: list[str], tmp_path: Path, text: str) -> None:
    run("rm", "kv.db", f"--older={text}", "--yes", code=2)
    assert left(tmp_path) == set(ids)


def test_sizes_of_the_command(run: Run, ids: list[str], tmp_path: Path) -> None:
    assert "at least 1 MiB" in run("gc", "kv.db", "--max-size", "1K", code=2).stderr
    (tmp_path / "raw").write_bytes(b"raw")
    run("put", "kv.db", "raw", "--tokens", "[1]", "--min-saved", "512K")
    run("ls", "kv.db", "--every", "1ms", code=2)
    run("ls", "kv.db", "--every", "500ms")


def test_sizes_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvstore.engines.proxy import runner as proxy

    words = ["--upstream", "http://127.0.0.1:1", "--slot-dir", str(tmp_path), "--store", "x.db"]
    got: dict[str, Any] = {}
    monkeypatch.setattr(proxy, "serve", lambda **options: got.update(options))
    sizes = ["--cache-disk-mib", "8G", "--cache-ram-mib", "512", "--min-saved-mib", "512K", "--idle-seconds", "200ms"]
    assert proxy.main([*words, *sizes]) == 0
    assert (got["cache_disk_mib"], got["cache_ram_mib"], got["min_saved_mib"]) == (8192, 512, 0.5)
    assert got["idle_seconds"] == pytest.approx(0.2)
    assert proxy.main([*words, "--cache-disk-mib", "-1"]) == 0
    assert got["cache_disk_mib"] == -1
    assert proxy.main([*words, "--cache-disk-mib", "8X"]) == 2
    assert "'8X' is not a size" in capsys.readouterr().err


def test_serve_has_the_options_of_the_proxy(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    from kvstore.engines.proxy import ProxyOptions
    from kvstore.engines.proxy import runner as proxy

    own = {field.name for field in fields(ProxyOptions)}
    of_command = {param.name for param in main.commands["serve"].params}
    of_remote = {"url": "remote", "settings": "remote_options"}
    assert {of_remote.get(n, n) for n in of_command} - {"as_json", "verbose", "key_file"} == own - {"key"}
    got: dict[str, Any] = {}
    monkeypatch.setattr(proxy, "serve", lambda **options: got.update(options))
    monkeypatch.setenv("KVSTORE_API_KEY", "of the clients")
    monkeypatch.setenv("KVSTORE_UPSTREAM_API_KEY", "of the server")
    words = ["serve", "--upstream", "http://127.0.0.1:1", "--slot-dir", tmp_path, "--store", "x.db"]
    (tmp_path / "key").write_text("secret\n")
    run(*words, "--key-file", "key", "--upstream-api-key", "another")
    assert ProxyOptions(**got) == ProxyOptions(
        "http://127.0.0.1:1", str(tmp_path), "x.db", api_key="of the clients", upstream_api_key="another", key="secret"
    )
    # No other key than the one of the file: no key is a plain store.
    got.clear()
    run(*words)
    assert ProxyOptions(**got).key is None


def test_errors_of_serve_are_json_too(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    words = ["serve", "--json", "--upstream", "http://127.0.0.1:1", "--slot-dir", "nowhere", "--store", "x.db"]
    error = json.loads(run(*words, code=2).stderr)["error"]
    assert "nowhere is not a directory" in error["message"]
    assert json.loads(run("serve", "--json", code=2).stderr)["error"]["code"] == "usage"
    with Store(tmp_path / "x.db") as store:
        store.put([1], b"state")
    (tmp_path / "key").write_text("secret")
    words[words.index("nowhere")] = str(tmp_path)
    code = run("ls", "x.db", "--key-file", "key", code=None).exit_code
    assert code
    assert run(*words, "--key-file", "key", code=code).stderr


def test_serve_prints_its_address_as_json(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    words = ["--json", "--upstream", "http://127.0.0.1:1", "--slot-dir", str(tmp_path), "--store", str(tmp_path / "x.db")]
    argv = [sys.executable, "-m", "kvstore.engines.proxy", *words, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            with urllib.request.urlopen(told["url"] + "/kvstore/stats", timeout=60) as answer:
                assert json.load(answer)["upstream"] == told["upstream"] == "http://127.0.0.1:1"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)
        finally:
            process.kill()


# -- what others wrote


def is_plain(text: str) -> bool:
    return all(c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


@pytest.mark.parametrize("bad", NASTY, ids=ascii)
def test_nothing_unsafe_reaches_a_terminal(run: Run, tmp_path: Path, bad: str) -> None:
    text = f"one{bad}two"
    name = f"na{bad}me.bin"
    with Store(tmp_path / "kv.db", fingerprint=text, min_saved_mib=0) as store:
        entry = store.put([1, 2], b"state", excerpt=text)
    update(tmp_path / "kv.db", "UPDATE meta SET excerpt = ?", text)
    (tmp_path / name).write_bytes(b"not a slot file")
    outputs = [
        run("ls", "kv.db"), run("tree", "kv.db"), run("show", "kv.db", entry.hex_id), run("stats", "kv.db"),
        run("ls", "kv.db", "--json"), run("tree", "kv.db", "--json"), run("show", "kv.db", entry.hex_id, "--json"),
        run("ls", name, code=errors.NotAStoreError.exit_code), run("ls", f"no{bad}ne", code=errors.StoreIOError.exit_code),
        run("ls", name, "--json", code=errors.NotAStoreError.exit_code),
        run("put", "kv.db", name, code=errors.SlotFileError.exit_code), run("ls", "kv.db", "--family", text, code=2),
        run("import", "kv.db", name, code=errors.SlotFileError.exit_code), run("show", "kv.db", text, code=2),
        run("put", "kv.db", name, "--tokens", "[7]"), run("put", "kv.db", name, "--tokens", "[7]", "--json"),
        run("export", "kv.db", "--to", f"fol{bad}der"), run("backup", "kv.db", f"co{bad}py"), run(f"com{bad}mand", code=2),
        run("ls", "kv.db", f"--op{bad}tion", code=2),
    ]  # fmt: skip
    for result in outputs:
        assert is_plain(result.stdout), result.stdout
        assert is_plain(result.stderr), result.stderr
    (row,) = (r for r in json.loads(outputs[4].stdout) if r["id"] == entry.hex_id)
    assert row["excerpt"] == text  # JSON says the same in other letters
    assert json.loads(outputs[6].stdout)["fingerprint"] == text
    assert json.loads(outputs[9].stderr)["error"]["path"].endswith(name)


def test_a_line_is_not_forged(run: Run, tmp_path: Path) -> None:
    said = run("ls", "no\nkvstore: all is well", code=errors.StoreIOError.exit_code).stderr
    assert "\nkvstore: all" not in said


@pytest.mark.skipif(os.name == "nt", reason="names that are not UTF-8")
def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/raw\x9b31m"
    try:
        with open(name, "wb") as f:
            f.write(b"not a slot file")
    except OSError:
        pytest.skip("the file system knows UTF-8 alone")
    for words in ([b"put", b"kv.db", name], [b"ls", name], [b"put", b"kv.db", name, b"--tokens", b"[1]"]):
        for more in ([], [b"--json"]):
            done = subprocess.run([*COMMAND, *words, *more], cwd=tmp_path, capture_output=True, check=False, timeout=60)
            assert b"\x9b" not in done.stdout + done.stderr
            assert is_plain((done.stdout + done.stderr).decode())


def test_printable_and_json() -> None:
    assert printable("plain, ünïcode, 漢字, 🙂") == "plain, ünïcode, 漢字, 🙂"
    assert printable("\x1b[31m\x9b\u202e\udc9b\ud800\n\t") == r"\x1b[31m\x9b\u202e\x9b\ud800\n\t"
    value = {"".join(NASTY): ["\ud800", "\U000e0041", "漢字", 'quo"te\\ \n']}
    assert json.loads(json_text(value)) == value
    assert is_plain(json_text(value))
    assert "漢字" in json_text(value)


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("kvstore", logging.WARNING, "", 0, "entry of %s", ("\x1b[2J\u202e\nWARNING forged",), None)
    text = Formatter("%(levelname)s %(message)s").format(record)
    assert text == r"WARNING entry of \x1b[2J\u202e\nWARNING forged"
    try:
        raise ValueError("\x9b")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = Formatter("%(message)s").format(record)
    assert is_plain(text)
    assert "Traceback" in text


def test_the_page_and_its_figures() -> None:
    pytest.importorskip("starlette")
    from kvstore.engines.proxy.metrics import Metrics, Recent
    from kvstore.engines.proxy.pages import PAGE, tree

    metrics = Metrics()
    metrics.done(Recent(0.0, "/v1/\x9bx", 0, "one\u202etwo\ud800"))
    (recent,) = metrics.as_dict(private=True)["recent"]
    assert is_plain(recent["excerpt"])
    assert is_plain(recent["path"])
    json.dumps(recent, ensure_ascii=False).encode()
    with Store(":memory:") as store:
        store.put([1], b"state", excerpt="one\u202etwo")
        (node,) = tree(store.entries(), private=True)
        assert is_plain(node["excerpt"])
        (node,) = tree(store.entries(), private=False)
        assert node["excerpt"] is None
    assert r"\p{Cf}" in PAGE
    assert not re.search(r"textContent = (?!clean|\")", PAGE)


# -- clocks


def test_a_clock_that_was_ahead(run: Run, tmp_path: Path) -> None:
    with Store(tmp_path / "kv.db") as store:
        id = store.put([1], b"state", ttl=3600).hex_id
    ahead = 14 * 366 * 86400
    update(tmp_path / "kv.db", f"UPDATE meta SET created_at = created_at + {ahead}, last_used = last_used + {ahead}, "
           f"expires_at = expires_at + {ahead}, hits = 1")  # fmt: skip
    shown = run("show", "kv.db", id).stdout
    assert shown.count("in the future") == 2
    assert "in the future" in run("ls", "kv.db").stdout
    assert "the clock was ahead" in shown
    c = sqlite3.connect(tmp_path / "kv.db")
    (row,) = c.execute("SELECT age, used, expires_in FROM ls").fetchall()
    c.close()
    assert row[:2] == ("in the future", "in the future")
    assert "the clock was ahead" in row[2]


def test_a_clock_that_differs_by_seconds(run: Run, tmp_path: Path) -> None:
    with Store(tmp_path / "kv.db") as store:
        id = store.put([1], b"state", ttl=3600).hex_id
    update(tmp_path / "kv.db", "UPDATE meta SET created_at = created_at + 20, last_used = last_used + 20, hits = 1")
    shown = run("show", "kv.db", id).stdout
    assert shown.count("just now") == 2
    assert "ahead" not in shown
    c = sqlite3.connect(tmp_path / "kv.db")
    assert c.execute("SELECT age, used FROM ls").fetchall() == [("0 s", "0 s")]
    c.close()


@pytest.mark.parametrize("then", [1 << 40, 1 << 62, -(1 << 62), 0])
def test_times_of_any_size(run: Run, tmp_path: Path, then: int) -> None:
    with Store(tmp_path / "kv.db") as store:
        id = store.put([1], b"state").hex_id
    update(tmp_path / "kv.db", "UPDATE meta SET created_at = ?, last_used = ?", then, then)
    for words in (("show", "kv.db", id), ("ls", "kv.db"), ("ls", "kv.db", "--json")):
        run(*words)
    assert time.time() < 1 << 40

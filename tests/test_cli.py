"""The command: its data, its exit codes, its refusals."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from storekit import STATES, noise, state

from kvstore import KVStoreError, Store, errors, slotfile
from kvstore.cli import main
from kvstore.meta import MetaBlock

FILES = sorted(p for p in STATES.glob("*.bin") if p.read_bytes()[:4] in (b"qsgg", b"nsgg"))
BASE = list(range(1, 101))
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command in the test's folder; fails where the exit code is another than `code`."""
    monkeypatch.chdir(tmp_path)

    def runner(*words: Any, code: int = 0, stdin: Any = None) -> Result:
        result = CliRunner().invoke(main, [str(w) for w in words], input=stdin)
        text = f"{words}: {result.exit_code}\n{result.stdout[:2000]}\n{result.stderr}\n{result.exception!r}"
        assert result.exit_code == code, text
        assert "Traceback" not in result.stderr, text
        assert result.exception is None or isinstance(result.exception, SystemExit), text
        return result

    return runner


def data(result: Result) -> Any:
    return json.loads(result.stdout)


@pytest.fixture
def filled(tmp_path: Path) -> list[str]:
    """kv.db: a prefix, two entries stored against it, and one alone; their ids."""
    with Store(tmp_path / "kv.db", fingerprint="model A", min_saved_mib=0.001) as store:
        entries = [store.put(BASE, state(BASE, row=512), entry_class="learned", source="admin", excerpt="the prefix")]
        for i in range(2):
            tokens = [*BASE, 500 + i]
            draft = state(tokens) if i else None
            entries.append(store.put(tokens, state(tokens, row=512), draft=draft, excerpt=f"chat {i}"))
        entries.append(store.put([9, 8, 7], b"not understood", ttl=5000, excerpt="alone \x1b[31m"))
    assert [e.parent for e in entries] == [None, entries[0].id, entries[0].id, None]
    return [e.hex_id for e in entries]


def commands() -> list[str]:
    return list(main.commands)


# -- every command


@pytest.mark.parametrize("name", commands())
def test_help(run: Run, name: str) -> None:
    text = run(name, "-h").stdout
    assert "usage: " in text.lower()
    assert "Example" in text
    assert "--json" in text
    assert run(name, "--help").stdout == text


def test_help_of_all(run: Run) -> None:
    text = run("-h").stdout
    assert all(name in text for name in commands())
    assert run("--version").stdout.startswith("kvstore")
    wanted = """ls show tree stats put get rm set learn gc verify repair migrate export import backup bench demo serve"""
    assert set(wanted.split()) <= set(commands())


WITHOUT_A_STORE = ("put", "import", "bench", "demo", "serve", "completion", "remote")


@pytest.mark.parametrize("name", [n for n in commands() if n not in WITHOUT_A_STORE])
def test_no_store(run: Run, tmp_path: Path, name: str) -> None:
    """A file that is not there is an error, and is not made."""
    more = {"show": ["1"], "get": ["1", "out"], "rm": ["1"], "set": ["1", "--ttl", "1h"], "learn": ["1"],
            "export": ["--to", "x"], "backup": ["y"]}.get(name, [])  # fmt: skip
    result = run(name, "none.db", *more, code=errors.StoreIOError.exit_code)
    assert "none.db does not exist" in result.stderr
    assert result.stdout == ""
    result = run(name, "none.db", *more, "--json", code=errors.StoreIOError.exit_code)
    assert json.loads(result.stderr)["error"]["code"] == "io"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ls", "verify", "gc", "stats"])
def test_foreign_file(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_bytes(b"hello" * 10000)
    result = run(name, "x", code=errors.NotAStoreError.exit_code)
    assert "hint:" in result.stderr
    assert (tmp_path / "x").read_bytes() == b"hello" * 10000


def test_exit_codes_are_distinct() -> None:
    table = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, KVStoreError)]
    assert len({c.exit_code for c in table}) == len(table)


# -- looking


def test_ls(run: Run, filled: list[str]) -> None:
    lines = run("ls", "kv.db").stdout.splitlines()
    assert lines[0].split() == ["id", "tokens", "MiB", "stored", "class", "used", "hits", "expires", "parent", "excerpt"]
    assert {line[:16] for line in lines[1:]} == set(filled)
    assert "\x1b" not in "".join(lines)
    rows = data(run("ls", "kv.db", "--json"))
    assert {r["id"] for r in rows} == set(filled)
    assert {r["shared_from"] for r in rows} == {None, filled[0]}
    assert [r["id"] for r in data(run("ls", "kv.db", "--json", "--class", "learned"))] == [filled[0]]
    sizes = [r["bytes"] for r in data(run("ls", "kv.db", "--json", "--sort", "size"))]
    assert sizes == sorted(sizes, reverse=True)
    assert len(data(run("ls", "kv.db", "--json", "-n", "2"))) == 2
    family = rows[0]["family"]
    assert all(r["family"] == family for r in data(run("ls", "kv.db", "--json", "--family", family)))
    run("ls", "kv.db", "--family", "xyz", code=2)


def test_show(run: Run, filled: list[str]) -> None:
    text = run("show", "kv.db", filled[0]).stdout
    assert "model A" in text
    assert "the prefix" in text
    facts = data(run("show", "kv.db", filled[1], "--json", "--tokens", "--layout"))
    assert facts["tokens"] == [*BASE, 500]
    assert facts["shared_from"] == filled[0]
    assert facts["layout"]["can_crop"] is True
    assert facts["file"] is None
    assert sorted(data(run("show", "kv.db", filled[0], "--json"))["children"]) == sorted(filled[1:3])
    assert "not understood" in run("show", "kv.db", filled[3], "--layout").stderr


def test_short_ids(run: Run, tmp_path: Path) -> None:
    with Store(tmp_path / "kv.db") as store:
        ids = [store.put([i], b"x").hex_id for i in range(40)]
    first = max({i[0] for i in ids}, key=[i[0] for i in ids].count)
    same = [i for i in ids if i[0] == first]
    assert len(same) > 1
    result = run("show", "kv.db", first, code=errors.InvalidInputError.exit_code)
    assert all(i in result.stderr for i in same[:10])
    assert set(json.loads(run("show", "kv.db", first, "--json", code=2).stderr)["error"]["candidates"]) == set(same)
    width = next(n for n in range(1, 17) if sum(i.startswith(ids[0][:n]) for i in ids) == 1)
    assert ids[0] in run("show", "kv.db", ids[0][:width].upper()).stdout
    unused = next(f"{n:02x}" for n in range(256) if not any(i.startswith(f"{n:02x}") for i in ids))
    run("show", "kv.db", unused, code=errors.NotFoundError.exit_code)
    for bad in ("xyz", "0" * 17, ""):
        run("show", "kv.db", bad, code=2)
    run("show", "kv.db", "0" * 16, code=errors.NotFoundError.exit_code)


def test_tree_and_stats(run: Run, filled: list[str]) -> None:
    lines = run("tree", "kv.db").stdout.splitlines()
    assert lines[0].startswith(filled[0])
    assert "saves" in lines[0]
    assert {line[4:20] for line in lines[1:3]} == set(filled[1:3])
    assert lines[-1].startswith("4 entries: ")
    nested = data(run("tree", "kv.db", "--json"))
    assert {c["id"] for c in nested[0]["children"]} == set(filled[1:3])
    assert "sharing saves" in run("stats", "kv.db").stdout
    assert data(run("stats", "kv.db", "--json"))["entries"] == {"normal": 3, "learned": 1, "pinned": 0}


# -- in and out


@pytest.mark.parametrize("path", FILES, ids=[p.name for p in FILES])
def test_slot_files_come_back_byte_for_byte(run: Run, tmp_path: Path, path: Path) -> None:
    (row,) = data(run("put", "kv.db", path, "--json"))
    run("get", "kv.db", row["id"], "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == path.read_bytes()
    assert run("get", "kv.db", row["id"], "-").stdout_bytes == path.read_bytes()
    assert stat.S_IMODE((tmp_path / "out.bin").stat().st_mode) == 0o600
    run("export", "kv.db", "--to", "folder")
    run("export", "kv.db", "--to", "all.tar")
    for source in ("folder", "all.tar"):
        (again,) = data(run("import", f"{source}.db", source, "--json"))
        assert again["id"] == row["id"]
        run("get", f"{source}.db", row["id"], "again.bin")
        assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()


def test_packed_list_with_media(run: Run, tmp_path: Path) -> None:
    media = (slotfile.Media(2, b"an image"), slotfile.Media(50, b"another"))
    file = slotfile.SlotFile(np.array(BASE, np.int32), np.frombuffer(state(BASE)[8:], np.uint8), 4, True, media)
    slotfile.write(tmp_path / "a.bin", file)
    (row,) = data(run("put", "kv.db", "a.bin", "--json"))
    run("get", "kv.db", row["id"], "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()
    run("get", "kv.db", row["id"], "cut.bin", "--n-tokens", "20")
    cut = slotfile.read(tmp_path / "cut.bin")
    assert cut.tokens.tolist() == BASE[:20]
    assert cut.media == media[:1]
    learned = run("learn", "kv.db", row["id"], "--n-tokens", "30").stdout.strip()
    run("get", "kv.db", learned, "prefix.bin")
    prefix = slotfile.read(tmp_path / "prefix.bin")
    assert (prefix.version, prefix.packed, prefix.media, len(prefix.tokens)) == (4, True, media[:1], 30)


def test_folder_of_slots(run: Run, tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    for i, n in enumerate((40, 100, 70)):
        tokens = [i, *BASE[: n - 1]]
        file = slotfile.SlotFile(np.array(tokens, np.int32), np.frombuffer(state(tokens), np.uint8))
        slotfile.write(slots / f"{i}.bin", file)
    (slots / "notes.txt").write_text("hello")
    result = run("put", "kv.db", "slots", "--json")
    assert "skipped slots/notes.txt" in result.stderr
    assert {Path(r["file"]).name for r in data(result)} == {"0.bin", "1.bin", "2.bin"}
    for row in data(result):
        run("get", "kv.db", row["id"], "out")
        assert (tmp_path / "out").read_bytes() == (tmp_path / row["file"]).read_bytes()
    assert len(data(run("import", "other.db", "slots", "--json"))) == 3


def test_raw_states(run: Run, tmp_path: Path) -> None:
    raw = state(BASE)
    (tmp_path / "raw").write_bytes(raw)
    (tmp_path / "draft").write_bytes(b"a draft")
    (tmp_path / "tokens.json").write_text(json.dumps(BASE))
    run("put", "kv.db", "raw", code=errors.SlotFileError.exit_code)
    (row,) = data(run("put", "kv.db", "raw", "--tokens", "tokens.json", "--draft", "draft", "--ttl", "1h", "--json"))
    assert 3000 < row["expires_in"] <= 3600
    (same,) = data(run("put", "kv.db", "-", "--tokens", json.dumps(BASE), "--draft", "draft", "--json", stdin=raw))
    assert same["id"] == row["id"]
    run("get", "kv.db", row["id"], "out")
    assert (tmp_path / "out").read_bytes() == raw
    run("get", "kv.db", row["id"], "out", "--draft")
    assert (tmp_path / "out").read_bytes() == b"a draft"
    run("get", "kv.db", row["id"], "out", "--format", "slot")
    assert slotfile.read(tmp_path / "out").tokens.tolist() == BASE
    for bad in ("[]", "[1.5]", '["a"]', "[[1]]", f"[{1 << 40}]"):
        run("put", "kv.db", "raw", "--tokens", bad, code=errors.InvalidInputError.exit_code)
    run("put", "kv.db", "raw", "--tokens", "none.json", code=errors.StoreIOError.exit_code)
    run("put", "kv.db", "none", code=errors.StoreIOError.exit_code)


def test_cut_short_file_is_remarked(run: Run, tmp_path: Path) -> None:
    whole = FILES[0].read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:-100])
    assert "cut short" in run("put", "kv.db", "cut.bin").stderr
    (tmp_path / "head.bin").write_bytes(whole[:20])
    run("put", "kv.db", "head.bin", code=errors.SlotFileError.exit_code)


def test_get_refuses(run: Run, filled: list[str], tmp_path: Path) -> None:
    run("get", "kv.db", filled[0], "-", "--json", code=2)
    run("get", "kv.db", filled[3], "out", "--n-tokens", "2", code=errors.LayoutError.exit_code)
    run("get", "kv.db", filled[0], "out", "--draft", code=errors.NotFoundError.exit_code)
    run("get", "kv.db", filled[0], "no/such/folder/out", code=errors.SlotFileError.exit_code)
    assert {p.name for p in tmp_path.iterdir()} <= {"kv.db", "kv.db-shm", "kv.db-wal"}


def test_damaged_entry(run: Run, filled: list[str], tmp_path: Path) -> None:
    blob = (tmp_path / "kv.db").read_bytes()
    at = blob.find(b"not understood")
    (tmp_path / "kv.db").write_bytes(blob[:at] + b"X" + blob[at + 1 :])
    result = run("get", "kv.db", filled[3], "out", code=errors.CorruptStoreError.exit_code)
    assert filled[3] in result.stderr
    assert not (tmp_path / "out").exists()
    found = data(run("verify", "kv.db", "--json", code=16))
    assert [p["entry"] for p in found["problems"]] == [filled[3]]
    assert filled[3] in run("verify", "kv.db", code=16).stdout
    found = data(run("export", "kv.db", "--to", "folder", "--json", code=16))
    assert (found["exported"], found["skipped"][0]["id"]) == (3, filled[3])
    dry = data(run("repair", "kv.db", "--json", code=16))
    assert (dry["removed"], dry["dry_run"]) == ([], True)
    assert filled[3] in run("ls", "kv.db").stdout
    assert data(run("repair", "kv.db", "--yes", "--json"))["removed"] == [filled[3]]
    assert "no problems" in run("verify", "kv.db").stdout
    assert len(data(run("ls", "kv.db", "--json"))) == 3


def test_salvage(run: Run, filled: list[str], tmp_path: Path) -> None:
    os.truncate(tmp_path / "kv.db", (tmp_path / "kv.db").stat().st_size - 1)
    run("verify", "kv.db", code=16)
    found = data(run("repair", "kv.db", "--salvage", "new.db", "--json"))
    assert len(found["salvaged"]) + len(found["lost"]) >= 3
    run("verify", "new.db")
    run("repair", "kv.db", "--salvage", "new.db", code=2)


def test_export_carries_everything(run: Run, filled: list[str], tmp_path: Path) -> None:
    run("set", "kv.db", filled[1], "--class", "pinned")
    run("export", "kv.db", "--to", "folder")
    block = MetaBlock.unpack((tmp_path / "folder" / f"{filled[1]}.meta").read_bytes())
    assert (f"{block.id:016x}", block.entry_class, block.excerpt) == (filled[1], "pinned", "chat 0")
    run("import", "new.db", "folder")
    piped = run("export", "kv.db", "--to", "-").stdout_bytes
    run("import", "piped.db", "-", stdin=piped)
    wanted = {r["id"]: r for r in data(run("ls", "kv.db", "--json"))}
    for other in ("new.db", "piped.db"):
        got = {r["id"]: r for r in data(run("ls", other, "--json"))}
        for id, row in wanted.items():
            for name in row.keys() - {"expires_in", "stored_bytes"}:
                assert got[id][name] == row[name], (other, name)
            assert data(run("show", other, id, "--json"))["fingerprint"] == "model A"
            for more in ([], ["--draft"] if id == filled[2] else []):
                run("get", "kv.db", id, "a", *more)
                run("get", other, id, "b", *more)
                assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        run("verify", other)
    assert 0 < got[filled[3]]["expires_in"] <= 5000


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.99])
def test_cut_archive(run: Run, filled: list[str], tmp_path: Path, keep: float) -> None:
    run("export", "kv.db", "--to", "all.tar")
    whole = (tmp_path / "all.tar").read_bytes()
    end = len(whole.rstrip(b"\0"))
    (tmp_path / "cut.tar").write_bytes(whole[: int(end * keep)])
    run("import", "new.db", "cut.tar", code=errors.SlotFileError.exit_code)
    if (tmp_path / "new.db").exists():
        run("verify", "new.db")
    run("export", "kv.db", "--to", "all.tar", code=2)
    run("export", "kv.db", "--to", "all.tar", "--force")


def test_damaged_export(run: Run, filled: list[str], tmp_path: Path) -> None:
    run("export", "kv.db", "--to", "folder")
    (tmp_path / "folder" / f"{filled[0]}.meta").write_bytes(b"short")
    (tmp_path / "folder" / f"{filled[3]}.json").write_text("{")
    result = run("import", "new.db", "folder", "--json", code=2)
    assert len(data(result)) == 2
    assert result.stderr.count("skipped") == 2
    (tmp_path / "folder" / f"{filled[2]}.draft").unlink()
    run("import", "third.db", "folder", code=2)


# -- changing


def test_rm(run: Run, filled: list[str]) -> None:
    assert "--children" in run("rm", "kv.db", filled[0], code=2).stderr
    assert set(run("rm", "kv.db", filled[0], "--children", "drop", "--dry-run").stdout.split()) == set(filled[:3])
    assert len(data(run("ls", "kv.db", "--json"))) == 4
    assert data(run("rm", "kv.db", filled[0][:14], "--children", "keep", "--json"))["removed"] == [filled[0]]
    assert {r["shared_from"] for r in data(run("ls", "kv.db", "--json"))} == {None}
    run("rm", "kv.db", filled[0], code=3)
    run("rm", "kv.db", code=2)
    run("rm", "kv.db", filled[1], "--unused", code=2)
    assert run("rm", "kv.db", "--older", "1h").stdout == ""
    assert set(run("rm", "kv.db", "--unused", "--yes").stdout.split()) == set(filled[1:])
    assert data(run("ls", "kv.db", "--json")) == []


def test_rm_secure(run: Run, filled: list[str], tmp_path: Path) -> None:
    run("rm", "kv.db", filled[3], "--secure")
    files = [p.read_bytes() for p in tmp_path.iterdir()]
    assert not any(b"not understood" in blob or b"alone" in blob for blob in files)
    run("verify", "kv.db")
    run("rm", "kv.db", filled[0], "--children", "drop", "--yes")
    assert data(run("gc", "kv.db", "--secure", "--json"))["wiped"] is True
    files = [p.read_bytes() for p in tmp_path.iterdir()]
    assert not any(b"the prefix" in blob or b"chat 0" in blob for blob in files)


def test_set(run: Run, filled: list[str]) -> None:
    rows = data(run("set", "kv.db", *filled[1:3], "--class", "pinned", "--ttl", "7d", "--json"))
    assert [(r["class"], r["source"]) for r in rows] == [("pinned", "admin")] * 2
    assert all(7 * 86400 - 600 < r["expires_in"] <= 7 * 86400 for r in rows)
    assert "never" in run("set", "kv.db", filled[3], "--ttl", "never").stdout
    run("set", "kv.db", filled[3], code=2)
    for bad in ("0", "x", "-1", "1y", "1.5h"):
        run("set", "kv.db", filled[3], f"--ttl={bad}", code=2)
    run("set", "kv.db", filled[3], "--class", "odd", code=2)


def test_learn(run: Run, tmp_path: Path) -> None:
    with Store(tmp_path / "kv.db", fingerprint="model A") as store:
        ids = [store.put(t, state(t, row=512)).hex_id for t in ([*BASE, 500, 501], [*BASE, 600, 601])]
    row = data(run("learn", "kv.db", ids[0], "--n-tokens", "100", "--min-saved", "0.01", "--json"))
    assert sorted(row["shared"]) == sorted(ids)
    assert row["saved_bytes"] > 0
    assert data(run("show", "kv.db", row["id"], "--json"))["fingerprint"] == "model A"
    tokens = json.dumps(BASE[:50])
    assert run("learn", "kv.db", "--tokens", tokens, "--fingerprint", "model A").stdout.strip() != row["id"]
    run("learn", "kv.db", "--tokens", tokens, "--fingerprint", "other", code=3)
    run("learn", "kv.db", code=2)
    run("learn", "kv.db", ids[0], "--n-tokens", "1000", code=2)


def test_backup_and_migrate(run: Run, filled: list[str], tmp_path: Path) -> None:
    assert data(run("backup", "kv.db", "copy.db", "--json"))["bytes"] == (tmp_path / "copy.db").stat().st_size
    run("backup", "kv.db", "copy.db", code=2)
    assert data(run("ls", "copy.db", "--json"))[0]["id"] in filled
    assert data(run("migrate", "kv.db", "--json")) == {"upgraded": False}
    assert "nothing" in run("migrate", "kv.db", "--dry-run").stdout


def test_key_file(run: Run, filled: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    run("ls", "kv.db", "--key-file", "empty", code=2)
    run("ls", "kv.db", "--key-file", "none", code=2)
    (tmp_path / "key").write_text("secret\n")
    run("ls", "kv.db", "--key-file", "key", code=errors.WrongKeyError.exit_code)


# -- running


@pytest.mark.slow
def test_bench_runs_the_tool_where_it_is_found(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("bench", "store", "--mib", "1", "--runs", "1", "--entries", "0", "--dir", str(tmp_path))
    run(*words)
    assert "1 MiB, cache_ram_mib 0" in capfd.readouterr().out
    assert data(run(*words, "--json"))["ok"] is True
    assert "1 MiB, cache_ram_mib 0" not in capfd.readouterr().out
    assert not list(tmp_path.iterdir())
    run("bench", "store", "--no-such-option", code=2)
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert "make bench" in run("bench", code=2).stderr


def test_demo_and_serve_name_their_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "llama-kvstore[demo]" in run("demo", code=2).stderr

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", lambda path: False)
        assert "make demo" in run("demo", code=2).stderr

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "llama-kvstore[proxy]" in run("serve", code=2).stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run: Run, shell: str) -> None:
    assert "_KVSTORE_COMPLETE" in run("completion", shell).stdout


def test_completion_of_ids(filled: list[str], tmp_path: Path) -> None:
    from click.shell_completion import ShellComplete

    complete = ShellComplete(main, {}, "kvstore", "_KVSTORE_COMPLETE")
    found = complete.get_completions(["show", str(tmp_path / "kv.db")], "")
    assert {c.value for c in found} >= set(filled)
    assert complete.get_completions(["show", str(tmp_path / "none.db")], "") == []
    assert isinstance(main, click.Group)


def test_noise_is_stored_whole(run: Run, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(noise(1, 5000))
    assert "not understood" in run("put", "kv.db", "raw", "--tokens", "[1, 2, 3]").stderr

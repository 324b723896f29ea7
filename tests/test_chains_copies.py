"""Exports, backups and salvage of chains, and what the command shows of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chainkit import START, Opener, clean_but_swept, held, in_program, listed, parents, rows, shape, talk, tree, turns

from kvstore import operate
from kvstore.engines.proxy import pages
from kvstore.storage.queries import signed


def test_exports_take_the_bases_with_them(path: Path, open_store: Opener) -> None:
    store = open_store()
    tree(store)
    talk(store, turns(6, start=[4000, *START]))
    new = path.with_name("new")
    with open_store(new) as copy:
        for entry in sorted(operate.listing(store, bases=None), key=lambda e: e.n_tokens):
            item = operate.export(store, entry.id)
            assert item is not None
            operate.restore(copy, item)
        assert listed(copy) == listed(store)
        assert shape(new) == shape(path)
        assert copy.verify() == []
        assert copy.gc() == []
        assert shape(new) == shape(path)


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "kvstore.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("to", ["folder/", "archive.tar"])
def test_export_and_import_by_the_command(path: Path, open_store: Opener, tmp_path: Path, to: str) -> None:
    with open_store() as store:
        names = tree(store)
        before = listed(store)
    one, new = tmp_path / "one", tmp_path / "new"
    assert "4 entries exported" in command("export", str(path), "--to", str(tmp_path / to))
    command("import", str(new), str(tmp_path / to))
    assert shape(new) == shape(path)
    command("export", str(path), f"{names['leaf'][0]:016x}", "--to", str(tmp_path / f"one-{to}"))
    command("import", str(one), str(tmp_path / f"one-{to}"))
    assert {row[0] for row in shape(one)} == {80, 90}  # the base, which is whole there, and the leaf
    for at, ids in ((new, set(before)), (one, {names["leaf"][0]})):
        with open_store(at) as store:
            assert listed(store) == {id: before[id] for id in ids}
            clean_but_swept(store)


def test_a_base_that_nothing_needs_goes_after_an_import(path: Path, open_store: Opener) -> None:
    store = open_store()
    names = tree(store)
    new = path.with_name("new")
    with open_store(new) as copy:
        item = operate.export(store, names["base"][0])
        assert item is not None
        assert item.base
        operate.restore(copy, item)
        assert list(copy.entries()) == []
        copy.gc()
        assert shape(new) == set()
        assert copy.verify() == []


def test_salvage_and_backup_keep_chains(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        names = tree(store)
        talk(store, turns(20, start=[4000, *START]))
        before, was = listed(store), shape(path)
        operate.backup(store, path.with_name("backup"))
    found = operate.salvage(path, path.with_name("salvaged"))
    assert (set(found.entries), found.lost) == (set(before), ())
    for name in ("backup", "salvaged"):
        with open_store(path.with_name(name)) as store:
            assert listed(store) == before
            assert shape(path.with_name(name)) == was
            clean_but_swept(store)
    assert names["base"][0] not in before


def test_the_command_shows_bases_as_such(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        names = {name: f"{id:016x}" for name, (id, _) in tree(store).items()}
        stats = store.stats()
    assert (stats.bases, sum(stats.entries.values())) == (1, 4)
    assert 0 < stats.base_bytes < stats.stored
    plain, everything = command("ls", str(path)), command("ls", str(path), "--all")
    assert names["base"] not in plain.replace(f"  {names['base']}  ", "") or plain.count(names["base"]) == 2  # as a parent
    assert f"{names['base']}" in everything
    facts = {e["id"]: e for e in json.loads(command("ls", str(path), "--all", "--json"))}
    assert {id for id, e in facts.items() if e["base"]} == {names["base"]}
    assert {e["id"] for e in json.loads(command("ls", str(path), "--json"))} == set(names.values()) - {names["base"]}
    (root,) = json.loads(command("tree", str(path), "--json"))
    assert root["id"] == names["root"]
    assert {(e["id"], e["base"]) for e in root["children"]} == {
        (id, name == "base") for name, id in names.items() if name != "root"
    }
    drawn = command("tree", str(path))
    assert re.search(rf"{names['base']}.* base", drawn)
    assert "1 base" in drawn
    views = {r[0]: r[1:] for r in rows(path, "SELECT trim(entry), class FROM tree")}
    assert views[names["base"]] == ("base",)
    for view in ("ls", "biggest", "unused"):
        assert {r[0] for r in rows(path, f"SELECT id FROM {view}")} == set(names.values()) - {names["base"]}
    frees = dict(rows(path, "SELECT id, children FROM biggest"))
    assert frees == {names["root"]: 3, names["middle"]: 2, names["leaf"]: 0, names["branch"]: 0}


def test_rm_sees_what_is_stored_against_an_entry_at_any_depth(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        names = tree(store)
    ids = {name: f"{id:016x}" for name, (id, _) in names.items()}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "rm", str(path), ids["middle"]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "2 entries are stored against" in done.stderr
    command("rm", str(path), ids["middle"], ids["leaf"], "--children", "keep", "--yes")
    with open_store() as store:
        assert held(store, path, names) == {"root", "base", "branch"}
    command("rm", str(path), ids["root"], "--children", "drop", "--yes")
    assert parents(path) == {}


def test_show_and_the_page_of_the_proxy_know_bases(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        names = {name: f"{id:016x}" for name, (id, _) in tree(store).items()}
        found = pages.tree(
            entries := list(operate.listing(store)), private=False, parents=operate.listed_parents(store, entries)
        )
    facts = json.loads(command("show", str(path), names["base"], "--json"))
    assert (facts["base"], set(facts["children"])) == (True, {names["leaf"], names["branch"]})
    assert "base, kept for its children" in command("show", str(path), names["base"])
    assert "base" not in json.loads(command("show", str(path), names["leaf"], "--json"))
    (root,) = found
    (middle,) = root["children"]
    assert (root["id"], middle["id"]) == (names["root"], names["middle"])
    assert {child["id"] for child in middle["children"]} == {names["leaf"], names["branch"]}


def test_the_page_of_the_proxy_nests_only_so_deep(open_store: Opener) -> None:
    store = open_store()
    talk(store, turns(100), entry_class="pinned")
    (node,) = pages.tree(operate.listing(store), private=False)
    depth = n = 1
    while node["children"]:
        n += len(node["children"])
        node = max(node["children"], key=lambda child: len(child["children"]))
        depth += 1
    assert (depth, n) == (pages.LEVELS + 1, 100)


def test_salvage_leaves_no_base_whose_entries_are_lost(path: Path, open_store: Opener) -> None:
    with open_store() as store:
        ids = talk(store, turns(6))
        other = talk(store, turns(4, start=[4000, *START]))
    sql = "UPDATE chunks SET data = zeroblob(length(data)) WHERE blob = (SELECT id FROM blobs WHERE entry = {})"
    in_program(path, sql.format(signed(ids[-1])))
    new = path.with_name("salvaged")
    found = operate.salvage(path, new)
    assert found.entries == (other[-1],)
    assert {p.entry for p in found.lost} == {ids[-1]}
    assert set(parents(new)) == set(other)
    with open_store(new) as store:
        assert store.verify() == []

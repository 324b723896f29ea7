"""What must not grow with the number of entries: lists, short ids, stats, sweeps, families; and gc to a size."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
import storekit
from storekit import MIB, file_bytes, noise, recurrent_state, state

from kvstore import InvalidInputError, OverBudgetError, Store, operate
from kvstore.errors import KVStoreError
from kvstore.storage import queries_maintenance
from kvstore.store import figures, maintenance, store

Opener = Callable[..., Store]
ORDERS: dict[str, Callable[[Any], Any]] = {
    "used": lambda e: e.last_used, "created": lambda e: e.created_at, "size": lambda e: e.size, "stored": lambda e: e.stored,
    "tokens": lambda e: e.n_tokens, "hits": lambda e: e.hits,
}  # fmt: skip


def filled(opened: Store, n: int = 40) -> list[int]:
    """Entries that differ in all that they can be listed by; the last four are stored against the first."""
    ids = [opened.put(range(50), state(range(50)), entry_class="learned").id]
    for i in range(1, n - 4):
        tokens = [1000 + i, *range(i % 7)]
        options: dict[str, Any] = {"ttl": 5000} if i % 5 == 0 else {}
        put = opened.put(
            tokens, noise(i, 100 + 10 * (i * 7 % 31)), entry_class="pinned" if i % 9 == 0 else "normal",
            excerpt=f"Entry {i}", n_system=1, **options,
        )  # fmt: skip
        ids.append(put.id)
        for _ in range(i % 4):
            opened.get(put.id)
    for i in range(4):
        ids.append(opened.put([*range(50), 2000 + i], state([*range(50), 2000 + i])).id)
    opened.flush()
    return ids


def spread(path: Path) -> None:
    """Gives entries different times."""
    with closing(storekit.connect(path)) as c:
        c.execute("UPDATE meta SET last_used = last_used - abs(entry % 977) * 10, created_at = created_at - abs(entry % 911)")


# -- lists


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page", [3, 256])
def test_lists_have_what_a_look_at_every_entry_finds(
    order: str, page: int, open_store: Opener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "ENTRIES_PER_PAGE", page)
    monkeypatch.setattr(store, "ENTRIES_PER_PAGE", page)
    opened = open_store()
    ids = filled(opened)
    spread(path)
    entries = list(opened.entries())
    assert sorted(e.id for e in entries) == sorted(ids)
    now = int(time.time())
    family = entries[0].family
    filters: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
        ({}, lambda e: True),
        ({"entry_class": "pinned"}, lambda e: e.entry_class == "pinned"),
        ({"entry_class": "normal", "unused": True}, lambda e: e.entry_class == "normal" and not e.hits),
        ({"family": family}, lambda e: e.family == family),
        ({"parent": ids[0]}, lambda e: e.parent == ids[0]),
        ({"shared": False}, lambda e: e.parent is None),
        ({"shared": True}, lambda e: e.parent is not None),
        ({"idle": 3005}, lambda e: e.last_used <= now - 3005),
        ({"text": "eNTRY 1"}, lambda e: "entry 1" in e.excerpt.lower()),
    ]
    key = ORDERS[order]
    for options, chosen in filters:
        wanted = sorted((e for e in entries if chosen(e)), key=key, reverse=True)
        assert {e.id for e in operate.listing(opened, **options)} == {e.id for e in wanted}, options
        for limit in (1, 5, 100):
            found = list(operate.listing(opened, order=order, limit=limit, **options))
            assert [key(e) for e in found] == [key(e) for e in wanted[:limit]], options
            assert all(chosen(e) for e in found)
            assert len(list(operate.listing(opened, limit=limit, **options))) == min(limit, len(wanted))
    for entry_class in ("normal", "learned", "pinned"):
        found = list(opened.entries(entry_class=entry_class))  # type: ignore[arg-type]
        assert {e.id for e in found} == {e.id for e in entries if e.entry_class == entry_class}
    assert {e.id for e in operate.parents(opened)} == {ids[0]}


def test_a_list_in_order_reads_no_more_than_it_shows(open_store: Opener, path: Path) -> None:
    """By the plan of the statement: no step sorts, and none reads a whole table."""
    from kvstore.storage import queries_lists

    opened = open_store()
    filled(opened)
    wanted = queries_lists.Filter()
    plans: list[str] = []
    with opened._core.db.read() as c:

        def traced(cursor: Any, sql: str, bindings: Any) -> bool:
            if not sql.startswith("EXPLAIN"):
                with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as other:
                    plans.extend(row[3] for row in other.execute("EXPLAIN QUERY PLAN " + sql, bindings))
            return True

        c.exec_trace = traced
        queries_lists.first(c, wanted, "used", 3, 0)
        queries_lists.page(c, queries_lists.Filter(family=5), queries_lists.FIRST, 3, 0)
        queries_lists.page(c, queries_lists.Filter(entry_class="learned"), queries_lists.FIRST, 3, 0)
        queries_lists.page(c, queries_lists.Filter(parent=5), queries_lists.FIRST, 3, 0)
        queries_lists.page(c, queries_lists.Filter(ids=(16, 31)), queries_lists.FIRST, 3, 0)
        c.exec_trace = None
    assert any("meta_by_last_used" in p for p in plans)
    sorts = [p for p in plans if "TEMP B-TREE FOR ORDER BY" in p]
    assert len(sorts) <= 1  # of the three rows that were found
    scans = [p for p in plans if p.startswith("SCAN") and "USING INDEX meta_by_last_used" not in p and "(subquery" not in p]
    assert [p for p in scans if p != "SCAN s"] == []


def test_ids_are_found_by_their_start(open_store: Opener) -> None:
    opened = open_store()
    ids = [f"{i:016x}" for i in filled(opened, 60)]
    for id in ids:
        for n in (1, 2, 7, 15, 16):
            assert {e.hex_id for e in operate.find(opened, id[:n].upper())} == {i for i in ids if i.startswith(id[:n])}
    assert operate.find(opened, "0" * 16) == []
    assert len(operate.find(opened, ids[0][:1], 1)) == 1
    for wrong in ("", "xyz", "1" * 17):
        with pytest.raises(InvalidInputError):
            operate.find(opened, wrong)
    for options in ({"order": "name"}, {"limit": 0}, {"entry_class": "odd"}, {"family": -1}):
        with pytest.raises(InvalidInputError):
            operate.listing(opened, **options)


# -- families


def test_families_without_entries_go_the_least_used_first(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries_maintenance, "FAMILIES_KEPT", 8)
    monkeypatch.setattr(figures, "FAMILIES_SHOWN", 5)
    opened = open_store()
    used = set()
    for i in range(60):
        entry = opened.put([i, 1, 2], noise(i, 50), n_system=1)
        if i % 10 == 0:
            opened.get(entry.id)
            used.add(entry.family)
        if i > 2:
            opened.delete(entry.id)
    live = {e.family for e in opened.entries()}
    assert len(live) == 3
    opened.gc()
    left = {f.family: f for f in operate.families(opened)}
    assert len(left) <= 3 + 8
    assert live <= left.keys()
    assert used <= left.keys()
    stats = opened.stats()
    assert stats.n_families == len(left)
    assert len(stats.families) == 5
    assert all(f == left[f.family] for f in stats.families)
    assert min(f.reused for f in stats.families) == 1
    opened.gc()
    assert {f.family for f in operate.families(opened)} == left.keys()


# -- sweeps


def test_no_operation_asks_for_a_sweep(open_store: Opener, path: Path) -> None:
    """A sweep reads every row: it is for what was changed by hand."""
    opened = open_store(cache_ram_mib=0)
    ids = filled(opened)
    opened.put(range(300, 350), recurrent_state(50, (10, 30)))
    opened.put(range(300, 350), recurrent_state(50, (20,)))
    opened.put([9, 9], noise(1, 3 * MIB), draft=b"draft")
    opened.set(ids[-1], entry_class="pinned", ttl=50)
    opened.learn(ids[-2], 30)
    opened.delete(ids[1])
    opened.take(ids[2])
    again = opened.put([*range(50), 2001], state([*range(50), 2001], model=1))
    opened.set(again.id, entry_class="learned")
    opened.delete(ids[0], children="keep")
    opened.put([*range(30), 7777], state([*range(30), 7777]))
    opened.delete(next(iter(operate.parents(opened))).id, children="drop")
    item = operate.export(opened, next(opened.entries()).id)
    assert item is not None
    operate.restore(opened, item)
    opened.gc(max_size=4 * MIB)
    assert opened.verify() == []
    opened.close()
    with closing(storekit.connect(path)) as c:
        assert queries_maintenance.unswept(c) == 0


@pytest.mark.parametrize("sql", [
    "UPDATE chunks SET blob = 77 WHERE id = 1", "UPDATE blobs SET entry = 77 WHERE id = 1", "UPDATE meta SET parent = 77",
    "DELETE FROM chunks", "DELETE FROM meta", "UPDATE entries SET fingerprint = 77",
    "INSERT INTO chunks(blob, seq, data) VALUES(77, 0, x'00')", "DELETE FROM fingerprints", "UPDATE chunks SET seq = seq + 5",
    "INSERT INTO cuts(entry, fingerprint, n_tokens, tokens) VALUES(77, 1, 1, x'00000000')",
    "DROP TRIGGER entry_gone; DELETE FROM entries WHERE id IN (SELECT entry FROM cuts)",
    "DROP TABLE prefixes; DELETE FROM chunks",
])  # fmt: skip
def test_what_is_changed_by_hand_is_swept(sql: str, path: Path, open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "INTERVAL_SECONDS", 1000)
    with Store(path) as opened:
        opened.put([1, 2], b"not understood")
        opened.put(range(300, 350), recurrent_state(50, (10, 30)))
    with closing(storekit.connect(path)) as c:
        c.execute("PRAGMA foreign_keys = off")
        c.execute(sql)
    again = open_store()
    again.gc()
    assert again.verify() == []
    with again._core.db.read() as c:
        assert queries_maintenance.unswept(c) == 0


# -- why whole


def test_stats_say_why_states_are_whole(path: Path) -> None:
    prefix = list(range(300))
    with Store(path) as opened:
        opened.put([7], state([7]))
        opened.put(prefix, state(prefix), entry_class="learned")
        child = opened.put([*prefix, 1000], state([*prefix, 1000]))
        assert child.parent is not None  # 77 KB, and all but one cell is the parent's
        opened.put([*prefix, 1001], state([*prefix, 1001]), share=False)
        opened.put([*prefix, 1002], b"not understood")
        long = [*prefix, *range(5000, 9000)]
        opened.put(long, state(long))
        stats = opened.stats()
    assert stats.whole_puts == {"no_prefix": 1, "learned": 1, "not_asked": 1, "unknown_layout": 1, "saves_too_little": 1}
    assert stats.puts == stats.shared_puts + sum(stats.whole_puts.values())
    assert stats.as_dict()["whole_puts"] == stats.whole_puts
    told = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "stats", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "sharing was turned off" in told
    data = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "stats", str(path), "--json"], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(data)["whole_puts"] == stats.whole_puts


def test_a_damaged_prefix_is_a_cause(path: Path) -> None:
    prefix = list(range(300))
    with Store(path, cache_ram_mib=0) as opened:
        parent = opened.put(prefix, state(prefix), entry_class="learned")
        assert opened._maintenance is not None
        opened._maintenance.stop()  # it would sweep the entry away
        with closing(storekit.connect(path)) as c:
            c.execute("DELETE FROM chunks WHERE blob = (SELECT id FROM blobs)")
        entry = opened.put([*prefix, 1], state([*prefix, 1]))
        assert (entry.parent, parent.parent) == (None, None)
        assert opened.stats().whole_puts == {"learned": 1, "damaged_prefix": 1}


@pytest.mark.parametrize(("own", "shares"), [(20, True), (900, True), (1800, True), (3500, False)])
def test_the_default_shares_where_an_eighth_is_saved(path: Path, own: int, shares: bool) -> None:
    prefix = list(range(300))
    tokens = [*prefix, *range(5000, 5000 + own)]
    with Store(path) as opened:
        opened.put(prefix, state(prefix), entry_class="learned")
        assert (opened.put(tokens, state(tokens)).parent is not None) == shares
    with Store(path.with_suffix(".explicit"), min_saved_mib=16) as opened:
        opened.put(prefix, state(prefix), entry_class="learned")
        assert opened.put(tokens, state(tokens)).parent is None


def test_small_conversations_are_learned_by_default(path: Path) -> None:
    prefix = list(range(300))
    with Store(path, auto_learn=True) as opened:
        for i in range(4):
            tokens = [*prefix, *range(1000 * (i + 1), 1000 * (i + 1) + 60)]
            opened.put(tokens, state(tokens), n_system=300)
        ends = time.monotonic() + 20
        while len(list(operate.listing(opened, shared=True))) < 4 and time.monotonic() < ends:
            time.sleep(0.05)
        (learned,) = opened.entries(entry_class="learned")
        assert learned.n_tokens == 300
        assert len(list(operate.listing(opened, parent=learned.id))) == 4


# -- gc to a size


@pytest.mark.parametrize("budget", [-1, 64])
def test_gc_prunes_to_a_size_by_the_order_of_use(budget: float, open_store: Opener, path: Path) -> None:
    opened = open_store(cache_disk_mib=budget)
    pinned = opened.put([1], noise(1, MIB), entry_class="pinned").id
    ids = [opened.put([2, n], noise(n, MIB)).id for n in range(20)]
    assert opened.get(ids[0]) is not None
    removed = opened.gc(max_size=10 * MIB)
    assert file_bytes(path) <= 10 * MIB
    left = {e.id for e in opened.entries()}
    assert pinned in left
    assert ids[0] in left
    assert len(left) >= 6
    assert removed == [id for id in ids[1:] if id not in left]
    assert removed == ids[1 : 1 + len(removed)]
    assert opened.stats().evictions == {"max_size": len(removed)}
    assert opened.gc(max_size=10 * MIB) == []
    assert opened.verify() == []
    opened.gc(max_size=3 * MIB)
    assert file_bytes(path) <= 3 * MIB


def test_a_use_counts_for_the_writer_that_comes_first(
    open_store: Opener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes the counters waits for its turn, and an eviction has it before."""
    opened = open_store()
    ids = [opened.put([2, n], noise(n, MIB)).id for n in range(4)]
    assert opened.get(ids[0]) is not None
    db = opened._core.db
    write, removed = db.write, []

    def write_after_gc(**kwargs: Any) -> Any:
        monkeypatch.setattr(db, "write", write)
        removed.extend(opened.gc(max_size=3 * MIB))
        return write(**kwargs)

    monkeypatch.setattr(db, "write", write_after_gc)
    opened._core.flush()
    assert removed == ids[1:3]
    left = opened.entry(ids[0])
    assert left is not None
    assert left.hits == 1


@pytest.mark.parametrize("size", [0, -1, 1000, 1.5, "2G", True])
def test_a_size_that_cannot_be_is_refused_and_nothing_goes(size: Any, open_store: Opener) -> None:
    opened = open_store()
    opened.put([1], noise(1, MIB))
    with pytest.raises(InvalidInputError) as caught:
        opened.gc(max_size=size)
    assert "max_size" in str(caught.value)
    assert not isinstance(caught.value, OverBudgetError)
    assert issubclass(InvalidInputError, KVStoreError)
    assert len(list(opened.entries())) == 1


@pytest.mark.slow
def test_the_command_takes_sizes_with_units(path: Path) -> None:
    with Store(path) as opened:
        for n in range(12):
            opened.put([n], noise(n, MIB))

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstore.cli", "gc", str(path), *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for wrong in ("8", "1e9", "-1G", "0G", "lots", "8Q", "0.5"):
        done = run("--max-size", wrong)
        assert done.returncode == 2, wrong
        assert repr(wrong) in done.stderr or "No such option" in done.stderr
    assert "no unit" in run("--max-size", "8").stderr
    assert run("--max-size", "1K").returncode != 0
    assert file_bytes(path) > 12 * MIB
    for size, most in (("8M", 8), ("7.5MiB", 7.5), ("7mb", 7), ("6291456B", 6), ("1G", 6)):
        done = run("--max-size", size, "--json")
        assert done.returncode == 0, done.stderr
        assert file_bytes(path) <= most * MIB
    with Store(path, readonly=True) as opened:
        assert opened.stats().entries["normal"] >= 3


def test_rm_by_filter_reads_pages_and_keeps_what_others_need(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path, min_saved_mib=0.001) as opened:
        ids = filled(opened)
        spread(path)
        chosen = {e.hex_id for e in opened.entries() if e.entry_class == "normal" and not e.hits}

    def run(*more: str, code: int = 0) -> list[str]:
        command = [sys.executable, "-m", "kvstore.cli", "rm", str(path), "--yes", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout.split()

    assert set(run("--unused", "--dry-run")) == chosen
    run("--class", "learned", code=2)  # others are stored against it
    everything = set(run("--class", "learned", "--children", "drop", "--dry-run"))
    assert everything == {f"{id:016x}" for id in (ids[0], *ids[-4:])}
    # The parent and one of its children by id: the others are rebuilt.
    removed = run(f"{ids[0]:016x}", f"{ids[-1]:016x}"[:9], "--children", "keep")
    assert set(removed) == {f"{ids[0]:016x}", f"{ids[-1]:016x}"}
    assert set(run("--unused")) == chosen - {f"{ids[-1]:016x}"}
    with Store(path, readonly=True) as opened:
        assert opened.verify() == []
        assert {e.hex_id for e in opened.entries()} == {f"{i:016x}" for i in ids} - chosen - {f"{ids[0]:016x}"}

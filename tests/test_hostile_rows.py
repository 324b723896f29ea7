"""Rows that anything may have written: every call gives an error of kvstore or an answer, and what is sound is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from storekit import noise, state

import kvstore
from kvstore import KVStoreError, Store, operate

Opener = Callable[..., Store]
PREFIX = list(range(500, 560))
MAX = (1 << 63) - 1
MIN = -(1 << 63)


def signed(id: int) -> int:
    return id - (1 << 64) if id >> 63 else id


class File:
    """A store with a learned prefix, two entries stored against it, and two others; `good` are those not damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with Store(path, min_saved_mib=0.001) as store:
            self.prefix = store.put(PREFIX, state(PREFIX), entry_class="learned").id
            self.child = store.put([*PREFIX, 1], state([*PREFIX, 1])).id
            self.sibling = store.put([*PREFIX, 2], state([*PREFIX, 2])).id
            self.bad = store.put([7, 7, 7], noise(1, 3000), ttl=86400).id
            self.good = store.put([8, 8], noise(2, 3000)).id

    def run(self, sql: str) -> None:
        """Runs SQL as a hostile program would: without CHECKs, foreign keys, triggers or STRICT tables."""
        c = apsw.Connection(str(self.path))
        c.pragma("foreign_keys", 0)
        c.pragma("ignore_check_constraints", 1)
        c.pragma("writable_schema", 1)
        for name, text in list(c.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql LIKE '%STRICT%'")):
            loose = text.replace(") STRICT, WITHOUT ROWID", ") WITHOUT ROWID").replace(") STRICT", ")")
            # Without a type a column takes what it is given.
            loose = loose.replace(" INTEGER NOT NULL", " NOT NULL")
            c.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (loose, name))
        c.close()
        c = apsw.Connection(str(self.path))
        c.pragma("ignore_check_constraints", 1)
        schema = list(c.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'"))
        for name, _ in schema:
            c.execute(f"DROP TRIGGER {name}")
        for name in ("bad", "child", "sibling", "prefix", "good"):
            sql = sql.replace(f":{name}", str(signed(getattr(self, name))))
        c.execute(sql)
        for _, text in schema:
            c.execute(text)
        c.close()


@pytest.fixture
def file(path: Path) -> File:
    return File(path)


OF_BAD = "blob = (SELECT id FROM blobs WHERE entry = :bad)"
STAGE = "INSERT INTO blobs(part, kind, size, stored, writer) VALUES('main', 'full', 5, 5, "
CUT = "INSERT INTO cuts(entry, fingerprint, n_tokens, tokens) SELECT id, fingerprint, 1, "
DAMAGE = {
    "use_order at its maximum": f"UPDATE meta SET use_order = {MAX}",
    "use_order at its minimum": f"UPDATE meta SET use_order = {MIN}",
    "use_order is text": "UPDATE meta SET use_order = 'x' WHERE entry = :bad",
    "ttl at its maximum": f"UPDATE meta SET ttl = {MAX} WHERE entry = :bad",
    "ttl is negative": "UPDATE meta SET ttl = -5 WHERE entry = :bad",
    "expires_at at its maximum": f"UPDATE meta SET expires_at = {MAX} WHERE entry = :bad",
    "expires_at is text": "UPDATE meta SET expires_at = 'soon' WHERE entry = :bad",
    "created_at at its maximum": f"UPDATE meta SET created_at = {MAX}, last_used = {MAX}",
    "created_at at its minimum": f"UPDATE meta SET created_at = {MIN}, last_used = {MIN}",
    "created_at is a blob": "UPDATE meta SET created_at = x'00' WHERE entry = :bad",
    "hits at their minimum": f"UPDATE meta SET hits = {MIN} WHERE entry = :bad",
    "hits are text": "UPDATE meta SET hits = 'many' WHERE entry = :bad",
    "hits are a real number": "UPDATE meta SET hits = 1.5 WHERE entry = :bad",
    "an unknown class": "UPDATE meta SET class = 'royal' WHERE entry = :bad",
    "an unknown source": "UPDATE meta SET source = x'ff' WHERE entry = :bad",
    "n_images is negative": "UPDATE meta SET n_images = -1 WHERE entry = :bad",
    "n_input is text": "UPDATE meta SET n_input = 'x' WHERE entry = :bad",
    "family is text": "UPDATE meta SET family = 'x' WHERE entry = :bad",
    "parent is text": "UPDATE meta SET parent = 'x' WHERE entry = :bad",
    "parent is itself": "UPDATE meta SET parent = entry WHERE entry = :bad",
    "parent is not there": "UPDATE meta SET parent = 12345 WHERE entry = :bad",
    "a circle of parents": "UPDATE meta SET parent = iif(entry = :child, :sibling, :child) WHERE entry IN (:child, :sibling)",
    "a long circle": "UPDATE meta SET parent = CASE entry WHEN :child THEN :sibling WHEN :sibling THEN :prefix ELSE :child END"
    " WHERE entry IN (:child, :sibling, :prefix)",
    "size is zero": "UPDATE meta SET size = 0, stored = 0 WHERE entry = :bad",
    "size at its maximum": f"UPDATE meta SET size = {MAX}, stored = {MAX} WHERE entry = :bad",
    "size is text": "UPDATE meta SET size = 'big' WHERE entry = :bad",
    "excerpt is a blob": "UPDATE meta SET excerpt = x'ff00fe' WHERE entry = :bad",
    "excerpt is a number": "UPDATE meta SET excerpt = 5 WHERE entry = :bad",
    "n_tokens is text": "UPDATE entries SET n_tokens = 'x' WHERE id = :bad",
    "n_tokens is wrong": "UPDATE entries SET n_tokens = 1000 WHERE id = :bad",
    "tokens are cut": "UPDATE entries SET tokens = substr(tokens, 1, 7) WHERE id = :bad",
    "tokens are empty": "UPDATE entries SET tokens = x'' WHERE id = :bad",
    "tokens are text": "UPDATE entries SET tokens = 'words' WHERE id = :bad",
    "cut_any is two": "UPDATE entries SET cut_any = 2 WHERE id = :bad",
    "head is text": "UPDATE entries SET head = 'x' WHERE id = :bad",
    "no totals": "DELETE FROM totals",
    "one total": "DELETE FROM totals WHERE class = 'normal'",
    "totals are text": "UPDATE totals SET entries = 'x', size = 'x'",
    "totals at their minimum": f"UPDATE totals SET size = {MIN}, stored = {MIN}, entries = {MIN}",
    "totals at their maximum": f"UPDATE totals SET size = {MAX}, stored = {MAX}, entries = {MAX}",
    "counters at their maximum": f"INSERT OR REPLACE INTO counters VALUES('hits', {MAX}), ('puts', {MAX}), ('misses', {MAX})",
    "counters are text": "INSERT OR REPLACE INTO counters VALUES('hits', 'x'), ('puts', 'x'), ('misses', x'00')",
    "the mark of unswept rows is text": "INSERT OR REPLACE INTO counters VALUES('unswept', 'x')",
    "the mark of unswept rows is a blob": "INSERT OR REPLACE INTO counters VALUES('unswept', x'00')",
    "the count of later expiries is text": "INSERT OR REPLACE INTO counters VALUES('put_off', 'x')",
    "the count of later expiries is a blob": "INSERT OR REPLACE INTO counters VALUES('put_off', x'ff')",
    "families at their maximum": f"UPDATE families SET saved = {MAX}, reused = {MAX}",
    "families are text": "UPDATE families SET saved = 'x', reused = 'x'",
    "an unknown part": "UPDATE blobs SET part = 'side' WHERE entry = :bad",
    "only a draft": "UPDATE blobs SET part = 'draft' WHERE entry = :bad",
    "an unknown kind": "UPDATE blobs SET kind = 'zip' WHERE entry = :bad",
    "a whole state said to be a delta": "UPDATE blobs SET kind = 'bkvd' WHERE entry = :bad",
    "a delta said to be whole": "UPDATE blobs SET kind = 'full' WHERE entry = :child",
    "a digest of five bytes": "UPDATE blobs SET digest = x'0102030405' WHERE entry = :bad",
    "a digest that is text": "UPDATE blobs SET digest = 'x' WHERE entry = :bad",
    "a blob of no size": "UPDATE blobs SET size = 0, stored = 0 WHERE entry = :bad",
    "a blob of a huge size": f"UPDATE blobs SET size = {MAX}, stored = {MAX} WHERE entry = :bad",
    "a size that is text": "UPDATE blobs SET stored = 'x' WHERE entry = :bad",
    "a writer that is no process": STAGE + "'me')",
    "a writer of a huge number": STAGE + "'99999999999999999999999999:1')",
    "a negative writer": STAGE + "'-1:1')",
    "a writer that is a blob": STAGE + "x'ff')",
    "a chunk of text": f"UPDATE chunks SET data = 'x' WHERE {OF_BAD}",
    "a chunk at the end of the numbers": f"UPDATE chunks SET seq = {MAX} WHERE {OF_BAD}",
    "a chunk that is null": f"UPDATE chunks SET data = zeroblob(0) WHERE {OF_BAD}",
    "a cut of text": CUT + "'x' FROM entries",
    "a cut of three bytes": CUT + "x'070000' FROM entries",
    "a fingerprint that is a blob": "INSERT INTO fingerprints(id, text) VALUES(99, x'ff')",
}


def use(store: Store, file: File) -> None:
    """Every call; each gives an answer, or an error of kvstore."""
    calls: list[Callable[[], Any]] = [
        lambda: store.match([7, 7, 7, 1]), lambda: store.match([*PREFIX, 1, 2]), lambda: store.match([8, 8]),
        lambda: store.entry(file.bad), lambda: [e.as_dict() for e in store.entries()], lambda: store.stats().as_dict(),
        lambda: store.get(file.bad), lambda: store.get(file.child), lambda: store.get(file.prefix),
        lambda: store.put([7, 7, 7, 9], noise(3, 100)), lambda: store.put([7, 7, 7], noise(4, 100)),
        lambda: store.put([*PREFIX, 3], state([*PREFIX, 3])), lambda: store.set(file.child, entry_class="pinned"),
        lambda: store.set(file.bad, ttl=50), lambda: store.learn(file.sibling, 30), lambda: store.take(file.bad),
        lambda: store.delete(file.bad), lambda: store.flush(), lambda: store.gc(), lambda: store.verify(),
    ]  # fmt: skip
    for call in calls:
        try:
            call()
        except KVStoreError:
            continue


@pytest.mark.parametrize("name", DAMAGE)
def test_every_call_answers_and_the_others_are_served(name: str, file: File, open_store: Opener) -> None:
    file.run(DAMAGE[name])
    with open_store() as store:
        saved = store.get(file.good)
        assert saved is not None
        assert saved.main.tobytes() == noise(2, 3000)
        use(store, file)
        assert store.get(file.good) is not None
        assert store.stats().upkeep_alive
    with open_store(readonly=True) as store:
        use(store, file)


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.slow
def test_repair_ends_with_a_clean_file(name: str, file: File, open_store: Opener) -> None:
    file.run(DAMAGE[name])
    with open_store() as store:
        for _ in range(3):
            problems = store.verify()
            if not problems:
                break
            operate.repair(store, problems)
        assert store.verify() == []
        assert store.get(file.good) is not None
    assert operate.verify(file.path) == []


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.slow
def test_a_disk_budget_is_kept_on_a_damaged_file(name: str, file: File, open_store: Opener) -> None:
    file.run(DAMAGE[name])
    with open_store(cache_disk_mib=8) as store:
        for n in range(12):
            store.put([100 + n], noise(n, 1_000_000))
        assert store.stats().file_bytes <= 8 << 20


def test_the_background_thread_survives_and_says_so(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvstore.store import maintenance

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by a test")

    caplog.set_level(logging.WARNING)
    with open_store() as store:
        monkeypatch.setattr(maintenance, "expire", fail)
        deadline = time.monotonic() + 60
        while store.stats().upkeep_failures < 2 and time.monotonic() < deadline:
            store._wake()
            time.sleep(0.01)
        stats = store.stats()
        assert stats.upkeep_failures >= 2
        assert stats.upkeep_alive
        assert len([r for r in caplog.records if "by a test" in r.getMessage()]) == 1  # not again and again
        monkeypatch.undo()
    with open_store(readonly=True) as store:
        assert store.stats().upkeep_alive is None


def test_damaged_is_an_error_of_kvstore_that_names_the_entry(file: File, open_store: Opener) -> None:
    file.run("UPDATE chunks SET data = zeroblob(length(data)) WHERE blob = (SELECT id FROM blobs WHERE entry = :child)")
    with open_store() as store:
        with pytest.raises(kvstore.NotFoundError, match="damaged"):
            store.set(file.child, entry_class="learned")
        assert store.entry(file.child) is None
        assert store.entry(file.sibling) is not None
        assert store.entry(file.prefix) is not None


def test_the_same_bytes_put_again_as_learned_mend_a_damaged_delta(file: File, open_store: Opener) -> None:
    file.run("UPDATE chunks SET data = zeroblob(length(data)) WHERE blob = (SELECT id FROM blobs WHERE entry = :child)")
    with open_store() as store:
        entry = store.put([*PREFIX, 1], state([*PREFIX, 1]), entry_class="learned")
        saved = store.get(entry.id)
        assert saved is not None
        assert saved.main.tobytes() == state([*PREFIX, 1])


def test_learn_counts_no_hit(file: File, open_store: Opener) -> None:
    with open_store() as store:
        store.learn(file.sibling, 30)
        assert store.stats().hits == 0
        entry = store.entry(file.sibling)
        assert entry is not None
        assert entry.hits == 0

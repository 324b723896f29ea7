"""A read that the system refuses now: an error to the caller, and nothing is dropped for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import apsw
import faultkit
import pytest
from storekit import dump, noise, state

import kvstore
from kvstore import Store, operate
from kvstore.store import repair as repairs
from kvstore.store.verify import Lenient

PREFIX = list(range(100, 220))
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Original:
    """A store of seven entries, three of them stored against a learned one, and a copy for each run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "original.store"
        self.copy = folder / "copy.store"
        with Store(self.path, min_saved_mib=0.001) as store:
            self.prefix = store.put(PREFIX, state(PREFIX), entry_class="learned").id
            self.children = [store.put([*PREFIX, 7, n], state([*PREFIX, 7, n])).id for n in range(3)]
            self.others = [store.put([5, n], noise(n, 40_000)).id for n in range(2)]
            fork = [*PREFIX[:60], *range(40)]
            self.fork = store.put(fork, state(fork)).id
            self.model = dump(store)

    def fresh(self) -> Path:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                Path(f"{self.copy}{suffix}").unlink()
        shutil.copy(self.path, self.copy)
        return self.copy

    def damage(self, id: int) -> None:
        connection = apsw.Connection(str(self.copy))
        connection.execute(
            "UPDATE chunks SET data = zeroblob(length(data)) WHERE blob = (SELECT id FROM blobs WHERE entry = ?)",
            (id - (1 << 64) if id >> 63 else id,),
        )
        connection.close()


@pytest.fixture
def original(tmp_path: Path) -> Original:
    return Original(tmp_path)


def get_all(store: Store, original: Original) -> set[int]:
    for id in original.model:
        store.get(id)
    return set()


def learn(store: Store, original: Original) -> set[int]:
    store.learn(original.fork, 60)
    return set()


def take(store: Store, original: Original) -> set[int]:
    store.take(original.others[0])
    return {original.others[0]}


def make_learned(store: Store, original: Original) -> set[int]:
    store.set(original.children[0], entry_class="learned")
    return set()


def delete_parent(store: Store, original: Original) -> set[int]:
    store.delete(original.prefix, children="keep")
    return {original.prefix}


def put_another(store: Store, original: Original) -> set[int]:
    store.put([*PREFIX, 9], state([*PREFIX, 9]))
    return set()


def repair(store: Store, original: Original) -> set[int]:
    operate.repair(store, store.verify())
    return {original.others[1]}


def export_all(store: Store, original: Original) -> set[int]:
    for id in original.model:
        operate.export(store, id)
    return set()


CALLS = [get_all, learn, take, make_learned, delete_parent, put_another, repair, export_all]


def run(call: Callable[[Store, Original], set[int]], original: Original, at: int, times: int) -> int:
    """The call while `times` reads from number `at` on are refused; then nothing else is gone. Gives the number of reads."""
    path = original.fresh()
    if call is repair:
        original.damage(original.others[1])
    may_go = {original.others[0]} if call is take else {original.prefix} if call is delete_parent else set()
    with faultkit.failing("eio", at, times) as vfs:
        try:
            with Store(path, min_saved_mib=0.001, cache_ram_mib=0) as store:
                may_go = call(store, original)
        except kvstore.StoreIOError:
            pass  # any other error fails the test
        n = vfs.n
    with Store(path, min_saved_mib=0.001) as store:
        for id, (tokens, main, *_) in original.model.items():
            saved = store.get(id)
            if saved is None:
                assert id in may_go or (call is repair and id == original.others[1]), (at, times)
            else:
                assert (saved.tokens.tobytes(), saved.main.tobytes()) == (tokens, main)
    return n


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("times", [1, 2, 1 << 30])
def test_a_refused_read_drops_nothing(call: Callable[[Store, Original], set[int]], times: int, original: Original) -> None:
    total = run(call, original, 1 << 40, 1)
    assert total > 10
    for at in range(1 + times % 3, total + 1, max(1, total // 9)):
        run(call, original, at, times)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_each_read_refused_once_drops_nothing(call: Callable[[Store, Original], set[int]], original: Original) -> None:
    at, total = 1, 1
    while at <= total:
        total = max(total, run(call, original, at, 1))
        at += 1


def test_verify_says_what_it_could_not_read_and_repair_keeps_it(original: Original) -> None:
    path = original.fresh()
    with faultkit.failing("eio", 1 << 40) as vfs, Store(path, min_saved_mib=0.001, cache_ram_mib=0) as store:
        start = vfs.n
        assert store.verify() == []
        reads = vfs.n - start
    for at in range(3, reads, max(1, reads // 10)):
        with faultkit.failing("eio", 1 << 40) as vfs, Store(path, min_saved_mib=0.001, cache_ram_mib=0) as store:
            first = vfs.n + at
            broken = True

            def act(vfs: faultkit.Faults, call: str, first: int = first) -> None:
                if broken and vfs.n >= first:  # noqa: B023  read while the loop is at this round
                    error = apsw.IOError("by a test")
                    error.extendedresult = apsw.SQLITE_IOERR_CORRUPTFS
                    raise error

            vfs.act = act
            problems = store.verify()
            assert problems
            assert {p.remedy for p in problems} == {"retry"}, problems
            assert {p.invariant for p in problems} == {"read"}
            broken = False
            assert operate.repair(store, problems) == []
            assert dump(store) == original.model


def test_a_parent_goes_only_after_its_own_bytes_were_wrong_twice(original: Original) -> None:
    """A child is damaged in the file, and one of the reads of its parent's bytes gives a wrong byte."""
    at, seen = 0, 1
    while at < seen:
        at, seen = at + 1, 0
        path = original.fresh()
        original.damage(original.children[0])
        raw, part = path.read_bytes(), state(PREFIX)[7000:7100]  # also where the page has an old copy
        places = [n for n in range(len(raw)) if raw.startswith(part, n)]
        with faultkit.failing("eio", 1 << 40) as vfs, Store(path, min_saved_mib=0.001, cache_ram_mib=0) as store:

            def alter(data: bytes, offset: int, at: int = at, places: list[int] = places) -> bytes:
                nonlocal seen
                covered = [place - offset for place in places if offset <= place < offset + len(data)]
                seen += bool(covered)
                wrong = bytearray(data)
                for n in covered:
                    wrong[n] ^= seen == at
                return bytes(wrong)

            vfs.alter = alter
            gone = store.get(original.children[0])
            assert gone is None
            vfs.alter = None
            for id in {*original.model} - {original.children[0]}:
                assert store.get(id) is not None, (at, seen)
    assert at > 2


def test_a_salvage_keeps_class_and_expiry_though_a_read_is_refused(original: Original, tmp_path: Path) -> None:
    with Store(original.path) as store:
        before = {e.id: (e.entry_class, e.created_at, e.n_input) for e in store.entries()}

    def salvage(at: int) -> int:
        """Gives the number of reads."""
        source = Lenient(str(original.fresh()))
        try:
            with Store(tmp_path / f"new-{at}", cache_ram_mib=0) as store, faultkit.failing("eio", at) as vfs:
                found = repairs.salvage(source, store._core)
                assert not found.lost
            with Store(tmp_path / f"new-{at}") as store:
                assert {e.id: (e.entry_class, e.created_at, e.n_input) for e in store.entries()} == before, at
        except kvstore.StoreIOError:
            pass  # of the new file
        finally:
            with suppress(kvstore.StoreIOError):
                source.close()
        return vfs.n

    total = salvage(1 << 40)
    assert total > 10
    for at in range(1, total + 1):
        salvage(at)

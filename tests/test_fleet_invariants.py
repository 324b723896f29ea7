"""What must hold of the shared tier, each a test of the name that the design gives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storekit
from fleetkit import (
    CHAT,
    FINGERPRINT,
    KEY,
    PREFIX,
    Harm,
    delete_object,
    listed,
    machine,
    publish,
    read_object,
    run,
    settle,
    tokens,
    wait_for,
    write_object,
)

from kvstore import Store
from kvstore.fleet import contents, sealing
from kvstore.fleet.index import Indexed, row_id
from kvstore.fleet.names import Names, ObjectName, parse_path

URL = "s3://kvstore/fleet"
NAMES = Names(KEY, FINGERPRINT)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


def only(url: str) -> ObjectName:
    (path,) = listed(url)
    name = parse_path(path)
    assert name is not None
    return name


def resealed(data: bytes, name: ObjectName, change: Any) -> bytes:
    """The object that a machine with the key, but with other intentions, would publish under this name."""
    opener = sealing.Opener(data[: sealing.HEADER.size], len(data), KEY, name.sealed_name)
    opener.open(data[sealing.HEADER.size :], 0)
    plain = opener.plain
    opened = contents.read_head(plain, name, NAMES)
    parts = change(plain, opened)
    return b"".join(sealing.seal(parts, KEY, name.sealed_name))


def test_sealed_or_refused(tmp_path: Path, url: str) -> None:
    """No byte of an object is served before its tag was checked: whatever bit is changed, nothing is served."""
    with machine(tmp_path, "a", url) as a:
        publish(a, PREFIX, entry_class="learned")
    name = only(url)
    good = read_object(url, name.path)
    for n, at in enumerate([*range(0, 80, 7), *range(80, len(good), len(good) // 12), len(good) - 1]):
        bad = bytearray(good)
        bad[at] ^= 0x10
        write_object(url, name.path, bytes(bad))
        with machine(tmp_path, f"b{n}", url) as b:
            match = b.remote_match(tokens(PREFIX))
            assert match is not None
            assert b.fetch(match, 60) is None, at


def test_same_tokens(tmp_path: Path, url: str) -> None:
    """Served tokens equal the request's, and an object whose tokens are not those of its name is refused."""
    with machine(tmp_path, "a", url) as a:
        publish(a, CHAT)
    name = only(url)
    with machine(tmp_path, "b", url, publish="none") as b:
        for n in (64, 100, 256, 300, 384, 411, 448, 499, 500):
            request = tokens([*CHAT[:n], 7, 8, 9])
            match = b.remote_match(request)
            if match is None:
                assert n < 256
                continue
            for longest in (False, True):
                saved = b.fetch(match, 60, longest=longest)
                assert saved is not None
                assert match.n_common <= len(saved.tokens) <= n
                assert np.array_equal(saved.tokens, request[: len(saved.tokens)])
    good = read_object(url, name.path)

    def other_tokens(plain: Any, opened: contents.Opened) -> list[Any]:
        start = opened.body_at - 4 * name.n_tokens
        return [plain[:start], np.arange(name.n_tokens, dtype="<i4").view(np.uint8), plain[opened.body_at :]]

    write_object(url, name.path, resealed(good, name, other_tokens))
    with machine(tmp_path, "c", url) as c:
        match = c.remote_match(tokens(CHAT))
        assert match is not None
        assert c.fetch(match, 60) is None


def test_same_fingerprint(tmp_path: Path, url: str) -> None:
    """A state crosses no fingerprint, not even where an object of another is put under a name of this one."""
    with machine(tmp_path, "a", url, fingerprint="another model") as a:
        publish(a, PREFIX, entry_class="learned")
    name = only(url)
    with machine(tmp_path, "b", url) as b:
        assert b.remote_match(tokens(PREFIX)) is None
    ours = Names(KEY, FINGERPRINT)
    chain = ours.chain(tokens(PREFIX))
    fake = ours.name(chain, at=time.time(), entry_class="learned", cuttable=True, state=name.state, parent=None)
    data = read_object(url, name.path)
    opener = sealing.Opener(data[: sealing.HEADER.size], len(data), KEY, name.sealed_name)
    opener.open(data[sealing.HEADER.size :], 0)
    write_object(url, fake.path, b"".join(sealing.seal([opener.plain], KEY, fake.sealed_name)))
    with machine(tmp_path, "c", url) as c:
        match = c.remote_match(tokens(PREFIX))
        assert match is not None
        assert c.fetch(match, 60) is None


def _every_call(store: Store) -> list[Any]:
    """What every local call gives."""
    first = store.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned")
    second = store.put(tokens(CHAT), storekit.state(CHAT))
    match = store.match(tokens([*CHAT, 1, 2]))
    got = store.get(second.id)
    cut = store.get(second.id, n_tokens=400)
    learned = store.learn(second.id, 200)
    store.set(first.id, entry_class="pinned")
    store.flush()
    assert match is not None
    assert got is not None
    assert cut is not None
    classes = sorted((entry.n_tokens, entry.entry_class, entry.parent is None) for entry in store.entries())
    taken = store.take(second.id)
    assert taken is not None
    removed = store.delete(learned.id)
    return [match.n_common, got.main.tobytes(), cut.main.tobytes(), classes, taken.tokens.tobytes(), len(removed),
            store.verify(), len(store.gc()), sum(store.stats().entries.values())]  # fmt: skip


@pytest.mark.parametrize("mode", ["refuse", "503", "403", "hang", "slow 1000"])
def test_local_first(tmp_path: Path, harm: Harm, mode: str) -> None:
    """With the store down, denied, hanging or slow every local call gives what it gives without a remote."""
    with Store(tmp_path / "alone.kvstore", fingerprint=FINGERPRINT, min_saved_mib=0) as alone:
        want = _every_call(alone)
    harm.mode = mode
    with machine(tmp_path, "a", URL, remote_options={"close_seconds": 0.1}) as a:
        assert _every_call(a) == want
        assert a.remote_match(tokens(CHAT)) is None
    harm.mode = "ok"


def test_miss_is_free(tmp_path: Path, harm: Harm, bucket: str) -> None:
    """A match makes no request, whether it finds something or nothing."""
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", bucket, remote_options={"poll_seconds": 3600}) as b:
        assert b.remote_match(tokens(PREFIX)) is not None
        before = len(harm.requests)
        for n in range(50):
            assert b.remote_match(tokens(range(n, n + 3000))) is None
            assert b.remote_match(tokens([*PREFIX, n])) is not None
        time.sleep(0.2)
        assert len(harm.requests) == before


def test_put_never_waits(tmp_path: Path, harm: Harm) -> None:
    """A put returns while the upload of the one before hangs: it would never end otherwise."""
    harm.mode = "hang"
    with machine(tmp_path, "a", URL) as a:
        for n in range(12):
            a.put(tokens(range(n, n + 100)), storekit.state(range(n, n + 100)), entry_class="learned")
            assert a.match(tokens(range(n, n + 100))) is not None
        assert a.remote is not None
        assert a.remote.metrics()["remote_published_total"] == 0
    harm.mode = "ok"


def test_atomic(tmp_path: Path, harm: Harm, bucket: str) -> None:
    """No listing shows part of an object: neither while it is uploaded, nor after its machine was killed."""
    values = list(range(3000))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np, storekit, fleetkit, pathlib\n"
        "store = fleetkit.machine(pathlib.Path(sys.argv[2]), 'killed', sys.argv[3])\n"
        "store.put(np.arange(3000, dtype=np.int32), storekit.state(range(3000), row=4096), entry_class='learned')\n"
        "print('put', flush=True)\n"
        "store.remote.wait()\n"
    )
    harm.mode = "delay 0.02"
    folder = str(Path(__file__).parent)
    words = [sys.executable, "-c", script, folder, str(tmp_path), bucket]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ.copy())
    assert process.stdout is not None
    assert process.stdout.readline() == b"put\n"
    begun = len(harm.requests)
    wait_for(lambda: any(line.startswith(("PUT", "POST")) for line in harm.requests[begun - 1 :]) or process.poll() is not None)
    assert process.poll() is None, "it is still uploading"
    harm_listing = dict(listed(bucket))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    harm.mode = "ok"
    assert harm_listing == {}
    assert listed(bucket) == {}
    with machine(tmp_path, "killed", bucket) as a:  # the next open publishes what is learned
        assert a.match(tokens(values)) is not None
        wait_for(lambda: a.remote is not None and a.remote.metrics()["remote_published_total"] == 1)
    (size,) = listed(bucket).values()
    assert size > 16 << 20


def test_atomic_in_a_folder(tmp_path: Path, url: str) -> None:
    """What an upload into a folder has written so far is not listed."""
    seen: list[dict[str, int]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(listed(url))

    with machine(tmp_path, "a", url) as a:
        thread = threading.Thread(target=look)
        thread.start()
        try:
            a.put(tokens(range(3000)), storekit.state(range(3000), row=4096), entry_class="learned")
            settle(a)
        finally:
            stop.set()
            thread.join()
    final = listed(url)
    assert final
    assert all(each in ({}, final) for each in seen)


def test_parent_outlives(tmp_path: Path, url: str) -> None:
    """At publish a parent has half a lifetime left: an older one is renewed first."""
    with machine(tmp_path, "a", url) as a:
        publish(a, PREFIX, entry_class="learned")
    parent = _set_age(tmp_path / "bucket", only(url), 20)
    with machine(tmp_path, "a", url, publish="none", remote_options={"lifetime_days": 30}) as a:
        assert a.remote is not None
        a.remote.poll(full=True)
        chat = a.put(tokens(CHAT), storekit.state(CHAT))
        assert a.remote.push(chat.id) is not None
        found = [name for path in listed(url) if (name := parse_path(path)) is not None]
        child = next(name for name in found if name.is_delta)
        copies = [name for name in found if name.state == child.parent]
        assert len(copies) == 2
        youngest = max((tmp_path / "bucket" / name.path).stat().st_mtime for name in copies)
        assert time.time() - youngest < 15 * 86400
        assert a.remote.metrics()["remote_renewed_total"] == 1
        delete_object(url, parent.path)  # the old copy ages out
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        saved = b.fetch(match, 60)
        assert saved is not None
        assert saved.main.tobytes() == storekit.state(CHAT)


def _set_age(folder: Path, name: ObjectName, days: float) -> ObjectName:
    """The object as it would be if it had been published so many days ago."""
    then = time.time() - days * 86400
    old = name.renamed(then)
    (folder / old.path).parent.mkdir(parents=True, exist_ok=True)
    os.rename(folder / name.path, folder / old.path)
    os.utime(folder / old.path, (then, then))
    return old


@pytest.mark.parametrize(("days", "renewed"), [(1, 0), (14, 0), (23, 1), (29, 1)])
def test_idempotent_renewal(tmp_path: Path, url: str, days: float, renewed: int) -> None:
    """Who uses an object past three quarters of its lifetime copies it into today's folder; twice makes no more."""
    with machine(tmp_path, "a", url) as a:
        publish(a, PREFIX, entry_class="learned")
    _set_age(tmp_path / "bucket", only(url), days)
    for each in ("b", "c"):
        with machine(tmp_path, each, url) as b:
            assert b.remote is not None
            match = b.remote_match(tokens(PREFIX))
            assert match is not None
            assert b.fetch(match, 60) is not None
            if each == "b" and renewed:
                wait_for(lambda: len(listed(url)) == 2)
            settle(b)
    assert len(listed(url)) == 1 + renewed


def test_idempotent(tmp_path: Path, url: str) -> None:
    """Any operation twice, or by two at once, harms nothing."""
    stores = [machine(tmp_path, name, url) for name in "ab"]
    try:
        threads = [threading.Thread(target=publish, args=(s, PREFIX), kwargs={"entry_class": "learned"}) for s in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 <= len(listed(url)) <= 2
        before = listed(url)
        for store in stores:
            assert store.remote is not None
            store.remote.poll(full=True)
            store.remote.poll()
            publish(store, PREFIX, entry_class="learned")
        assert listed(url) == before
    finally:
        for store in stores:
            store.close()
            store.close()
    with machine(tmp_path, "c", url) as c:
        match = c.remote_match(tokens(PREFIX))
        assert match is not None
        results: list[Any] = []
        fetchers = [threading.Thread(target=lambda: results.append(c.fetch(match, 60))) for _ in range(6)]
        for thread in fetchers:
            thread.start()
        for thread in fetchers:
            thread.join()
        assert all(saved is not None and saved.main.tobytes() == storekit.state(PREFIX) for saved in results)
        settle(c)
        assert len(list(c.entries())) == 1


def test_no_conditional(tmp_path: Path, harm: Harm, bucket: str) -> None:
    """No request carries If-Match or If-None-Match, whatever is done."""
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
        publish(a, CHAT)
        assert a.remote is not None
        index = a.remote.index
        found = index.of_state(index.names[0], index.all(index.names[0])[0].name.state)
        assert found is not None
        wait_for(lambda: time.strftime("%H%M%S", time.gmtime()) > found.name.time)  # a copy has another name
        run(_renew(a, found))
    with machine(tmp_path, "b", bucket) as b:
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        assert b.fetch(match, 60) is not None
    for path in listed(bucket):
        delete_object(bucket, path)
    methods = {line.split()[0] for line in harm.requests}
    assert {"GET", "PUT"} <= methods
    assert not [line for line in harm.requests if "if-match" in line.lower() or "if-none-match" in line.lower()]


async def _renew(store: Store, found: Indexed) -> None:
    assert store.remote is not None
    assert await store.remote.client.renew(found) is not None


@pytest.mark.parametrize("mode", ["hang", "slow 20000", "delay 30"])
def test_bounded(tmp_path: Path, harm: Harm, bucket: str, mode: str) -> None:
    """A fetch ends at its deadline, by the clock that it is given, and takes no connection with it."""
    with machine(tmp_path, "a", bucket) as a:
        publish(a, range(1000), entry_class="learned")
    with machine(tmp_path, "b", bucket) as b:
        assert b.remote is not None
        match = b.remote_match(tokens(range(1000)))
        assert match is not None
        harm.mode = mode
        before = b.remote.client.link.seconds(1 << 20)
        assert b.fetch(match, 0.3) is None
        assert b.remote.metrics()["remote_gave_up_total"] == 1
        wait_for(lambda: b.remote is not None and not b.remote.client._running)  # the request was cancelled
        assert b.remote.client.link.seconds(1 << 20) >= before
        harm.mode = "ok"
        saved = b.fetch(match, 60)
        assert saved is not None


def test_bounded_when_there_is_no_time(tmp_path: Path, url: str) -> None:
    with machine(tmp_path, "a", url) as a:
        publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        for timeout in (0, -1, 0.0):
            assert b.fetch(match, timeout) is None


def test_names_are_blind(tmp_path: Path) -> None:
    """Two fleets publish the same states: without their keys the names share nothing but numbers and times."""
    words: list[set[str]] = []
    for n, key in enumerate((KEY, bytes(range(1, 33)))):
        url = f"file://{tmp_path}/bucket{n}"
        with machine(tmp_path, f"m{n}", url, remote_key=key) as store:
            publish(store, PREFIX, entry_class="learned")
            publish(store, CHAT)
        hashes = set()
        for path in listed(url):
            name = parse_path(path)
            assert name is not None
            hashes |= {name.fp, name.whole, name.state, *name.marks} | ({name.parent} if name.is_delta else set())
        words.append(hashes)
    assert not words[0] & words[1]


def test_an_object_says_nothing_in_clear(tmp_path: Path, url: str) -> None:
    with machine(tmp_path, "a", url, fingerprint="a very secret model") as a:
        a.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned", excerpt="a very private prompt")
        settle(a)
    name = only(url)
    data = read_object(url, name.path)
    for text in (b"secret model", b"private prompt", tokens(PREFIX).tobytes()[:64], storekit.state(PREFIX)[1000:1064]):
        assert text not in data
    assert row_id(name.path) == row_id(name.path)

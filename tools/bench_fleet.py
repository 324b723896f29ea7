"""`bench.py fleet`: the shared tier beside plain puts and gets, its index with a million names, and puts with a remote."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore.fleet import sealing
from kvstore.fleet.client import FleetClient
from kvstore.fleet.contents import FULL, PartFacts, PublishedState, StateFacts
from kvstore.fleet.index import Listed, RemoteIndex
from kvstore.fleet.names import Names, ObjectName, mark_lengths
from kvstore.fleet.object_store import ObjectStore
from kvstore.fleet.options import RemoteOptions
from kvstore.storage.remote_file import RemoteFile
from kvstore.util.hashing import digest

MIB = 1 << 20
KEY = bytes(range(32))
BARS = {"publish": 1.25, "fetch": 1.4, "match_ms": 3.0, "put": 1.02}


class Nothing:
    """The local store of a client that has none."""

    def read(self, id: int) -> None:
        return None

    def exists(self, id: int) -> bool:
        return False


def client_of(url: str) -> FleetClient:
    index = RemoteIndex(RemoteFile(":memory:"), [Names(KEY, "bench")])
    return FleetClient(ObjectStore(url), index, Nothing(), RemoteOptions(url, (KEY,)))


def state_of(seed: int, mib: int) -> PublishedState:
    main = np.random.default_rng(seed).integers(0, 256, mib * MIB, dtype=np.uint8)
    tokens = np.arange(2048, dtype=np.int32) + 10_000 * seed
    part = PartFacts("main", FULL, main.size, main.size, digest(main))
    facts = StateFacts("bench", "learned", "default", "", 0, 2048, 0, None, 2048, (part,))
    return PublishedState(facts, tokens, main, None)


async def _plain_put(store: ObjectStore, data: np.ndarray[Any, Any]) -> None:
    pieces = (memoryview(data)[at : at + sealing.CHUNK] for at in range(0, data.size, sealing.CHUNK))
    await store.put("plain", data.size, pieces)  # type: ignore[arg-type]


async def _plain_get(store: ObjectStore, size: int) -> None:
    gate = asyncio.Semaphore(4)
    out = np.empty(size, np.uint8)

    async def one(at: int) -> None:
        async with gate:
            n = min(sealing.PIECE, size - at)
            out[at : at + n] = np.frombuffer(await store.get_range("plain", at, n), np.uint8)

    await asyncio.gather(*(one(at) for at in range(0, size, sealing.PIECE)))


async def transfer(url: str, mib: int, runs: int) -> dict[str, float]:
    """Medians of the ratios of publish to a plain put, and of fetch to a plain get in the same ranges; taken in turn."""
    put, get, publish_s, fetch_s = [], [], [], []
    for run in range(runs + 1):
        client = client_of(url)
        state = state_of(run + 1, mib)
        await client.poll()
        t0 = time.perf_counter()
        found = await client.publish(state, cuttable=False)
        t1 = time.perf_counter()
        await _plain_put(client.store, state.main)  # type: ignore[arg-type]
        t2 = time.perf_counter()
        assert found is not None
        fetched = await client.fetch(found)
        t3 = time.perf_counter()
        await _plain_get(client.store, state.main.size)  # type: ignore[arg-type]
        t4 = time.perf_counter()
        assert fetched.state.main.size == state.main.size
        await client.store.delete([found.path, "plain"])  # type: ignore[attr-defined]
        if run:  # the first one warms up
            put.append((t1 - t0) / (t2 - t1))
            get.append((t3 - t2) / (t4 - t3))
            publish_s.append(t1 - t0)
            fetch_s.append(t3 - t2)
    return {
        "publish": statistics.median(put), "fetch": statistics.median(get),
        "publish_mib_s": mib / statistics.median(publish_s), "fetch_mib_s": mib / statistics.median(fetch_s),
    }  # fmt: skip


def attention_state(n: int, seed: int, row: int = 4096) -> np.ndarray[Any, Any]:
    """A state of plain attention whose first half is the same for every seed."""
    pos = np.zeros((n, 3), "<i4")
    pos[:, 0], pos[:, 1] = np.arange(n), 1
    pieces = [np.array([1, n], "<u4").view(np.uint8), pos.view(np.uint8).ravel(), np.array([0, 1, 0, 0], "<u4").view(np.uint8)]
    for layer in range(2):
        rows = np.random.default_rng(layer).integers(0, 256, (n, row), np.uint8)
        rows[2000:] ^= np.uint8(seed)
        pieces += [np.array([1], "<i4").view(np.uint8), np.array([row], "<u8").view(np.uint8), rows.ravel()]
    return np.concatenate(pieces)


def chat(folder: Path) -> dict[str, float]:
    """Bytes of a chat over a published prefix: its object beside its state and beside what the local store holds of it."""
    url = f"file://{folder}/chat"
    first = np.arange(2400, dtype=np.int32)
    options: dict[str, Any] = {"fingerprint": "bench", "remote": url, "remote_key": KEY, "publish": "all"}
    with kvstore.Store(folder / "chat.db", **options) as store:
        assert store.remote is not None
        store.put(first[:2000], attention_state(2000, 0), entry_class="learned")
        store.remote.wait()
        before = store.remote.metrics()["remote_publish_bytes_total"]
        entry = store.put(first, attention_state(2400, 1))
        store.remote.wait()
        sent = store.remote.metrics()["remote_publish_bytes_total"] - before
    return {"object / local delta": sent / entry.stored, "object / state": sent / entry.size}


def index(folder: Path, n_names: int) -> dict[str, float]:
    """The index with a million names: taking them in, a lookup of 32,768 tokens, memory."""
    names = Names(KEY, "bench")
    file = RemoteFile(str(folder / "index"))
    known = RemoteIndex(file, [names])
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz234567"

    def word(n: int) -> str:
        return "".join(chance.choices(letters, k=n))

    def listed(number: int) -> Listed:
        n = int(min(60_000, max(300, chance.lognormvariate(7.6, 0.8))))
        pn = 0 if number % 100 == 0 else chance.randrange(256, n)
        marks = tuple(word(8) for _ in mark_lengths(n, pn))
        at, parent = f"{number % 24:02d}0000", word(16) if pn else "0"
        name = ObjectName(names.fp, "20261203", at, "n", n, word(16), word(16), parent, pn, marks)
        return Listed(name.path, n * 1000, 1)

    took = 0.0
    for start in range(0, n_names, 1000):
        page = [listed(number) for number in range(start, min(n_names, start + 1000))]
        began = time.perf_counter()
        known.take(names, page)
        took += time.perf_counter() - began
    tokens = np.arange(32_768, dtype=np.int32)
    target = names.name(names.chain(tokens[:20_000]), at=1e9, entry_class="learned", cuttable=True, state=word(16), parent=None)
    known.take(names, [Listed(target.path, 1, 1)])
    again = [Listed(target.path, 1, 1)] * 100

    def best(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(30):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3

    other = tokens + 1_000_000
    figures = {
        "names a second": n_names / took,
        "file MiB": os.path.getsize(folder / "index") / MIB,
        "process MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "miss ms": best(lambda: list(known.candidates([(names, names.chain(other))], 0))),
        "hit ms": best(lambda: list(known.candidates([(names, names.chain(tokens))], 0))),
        "poll of 100 known names ms": best(lambda: known.take(names, again)),
    }
    file.close()
    return figures


def puts(folder: Path, url: str | None, n: int) -> float:
    """Seconds of n puts of 4 MiB states, each followed by a match and a get."""
    options: dict[str, Any] = {} if url is None else {"remote": url, "remote_key": KEY}
    state = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8)
    path = folder / "puts.db"
    with kvstore.Store(path, fingerprint="bench", **options) as store:
        began = time.perf_counter()
        for number in range(n):
            tokens = np.arange(1000, dtype=np.int32) + 2000 * number
            state[:8] = np.frombuffer(np.int64(number).tobytes(), np.uint8)
            entry = store.put(tokens, state)
            store.match(tokens)
            store.get(entry.id)
        took = time.perf_counter() - began
    for file in folder.glob("puts.db*"):
        file.unlink()
    return took


def beside(folder: Path, url: str, runs: int, n: int) -> float:
    """The median ratio of puts with a remote to puts without, taken in turn."""
    ratios = []
    for run in range(runs + 1):
        order = (url, None) if run % 2 else (None, url)
        took = {each: puts(folder, each, n) for each in order}
        if run:
            ratios.append(took[url] / took[None])
    return statistics.median(ratios)


@contextmanager
def weed(folder: Path) -> Iterator[str | None]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import shutil

    if shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}") is None:
        yield None
        return
    import fleetkit

    with fleetkit.seaweed(folder):
        yield "s3://kvstore/bench"


def transfers(name: str, url: str, mib: int, runs: int) -> None:
    found = asyncio.run(transfer(url, mib, runs))
    print(
        f"  {name:10} publish / plain put {found['publish']:.2f} ({found['publish_mib_s']:,.0f} MiB/s)   "
        f"fetch and open / plain get {found['fetch']:.2f} ({found['fetch_mib_s']:,.0f} MiB/s)"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.py fleet", description=__doc__)
    parser.add_argument("--dir", type=Path, default=None, help="where the files go (default: a temporary folder)")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--no-s3", action="store_true", help="leave SeaweedFS out")
    parser.add_argument("--url", help="only publish and fetch, in this object store (the settings of obstore's environment)")
    args = parser.parse_args(argv)
    print(f"{args.mib} MiB, medians of {args.runs}; bars: publish {BARS['publish']}, fetch {BARS['fetch']}")
    if args.url is not None:
        transfers("this one", args.url, args.mib, args.runs)
        return 0
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=args.dir) as place:
        folder = Path(place)
        with nullcontext(None) if args.no_s3 else weed(folder / "weed") as s3:
            for name, url in (("folder", f"file://{folder}/bucket"), ("memory", "memory://bench"), ("SeaweedFS", s3)):
                if url is not None:
                    transfers(name, url, args.mib, args.runs)
        print("a chat of 400 tokens over a published prefix of 2,000")
        for what, value in chat(folder).items():
            print(f"  {what} {value:.3f}")
        print(f"puts of 4 MiB with a remote / without; bar {BARS['put']}")
        print(f"  with a folder {beside(folder, f'file://{folder}/bucket', args.runs, 30):.3f}")
        os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_ENDPOINT_URL="http://127.0.0.1:9")
        print(f"  with the store down {beside(folder, 's3://kvstore/down', args.runs, 30):.3f}")
        print(f"an index of {args.names:,} names; bar: a match takes at most {BARS['match_ms']:g} ms more")
        for what, value in index(folder, args.names).items():
            print(f"  {what} {value:,.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`bench.py store`: put and get beside a plain file with fsync, match at two sizes, open; medians of several runs."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore.storage import queries, queries_blobs, writers
from kvstore.util.hashing import digest as digest_of

MIB = 1 << 20
# A virtual machine is slow with memory that it touches for the first time: the page cache of the log, then of the file.
WARM_UP = 3


def timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """(seconds, result) of a call."""
    started = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - started, result


def write_plain(path: Path, data: np.ndarray) -> None:
    """The plain file that put is measured against: written in one go, fsync, as a program would that has nothing else."""
    with open(path, "wb", buffering=0) as f:
        view = memoryview(data)
        at = 0
        while at < len(view):
            at += f.write(view[at:])
        os.fsync(f.fileno())


def read_plain(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint8)


def put_and_get(
    folder: Path, mib: int, runs: int, ram_mib: float, *, write_behind: bool = False, fresh: bool = False
) -> dict[str, float]:
    """Medians of put, get and the plain file's write and read, taken in turn, in seconds, and of their ratios.

    fresh: each run has a new store; else they share one, whose file and log are there already.
    """
    data = np.random.default_rng(1).integers(0, 256, mib * MIB, dtype=np.uint8)
    runs_: list[tuple[float, ...]] = []
    plain, path = folder / "plain", folder / "bench.db"
    store = kvstore.Store(path, cache_ram_mib=ram_mib, write_behind=write_behind)
    for run in range(-WARM_UP, runs):
        data[:8] = np.frombuffer(np.int64(run).tobytes(), np.uint8)
        # In turns: memory that the machine touches for the first time costs whoever comes first.
        if run % 2:
            write, _ = timed(write_plain, plain, data)
        put, entry = timed(store.put, [run + WARM_UP, 2, 3], data)
        store.flush()
        time.sleep(1.5)  # the checkpoint runs behind the put; `sustained` measures it
        if not run % 2:
            write, _ = timed(write_plain, plain, data)
        reads, gets = [], []
        with kvstore.Store(path, cache_ram_mib=0, readonly=True) as cold:
            for _ in range(3):
                seconds, got = timed(read_plain, plain)
                del got
                reads.append(seconds)
                seconds, saved = timed(cold.get, entry.id)
                gets.append(seconds)
                if saved is None or not np.array_equal(saved.main, data):
                    raise SystemExit("a byte differs")
                del saved
        read, get = statistics.median(reads), statistics.median(gets)
        copy, _ = timed(data.copy)
        if run >= 0:
            runs_.append((write, put, read, get, copy, write / put, read / get))
        store.delete(entry.id)
        plain.unlink()
        if fresh:
            store.close()
            path.unlink()
            store = kvstore.Store(path, cache_ram_mib=ram_mib, write_behind=write_behind)
    store.close()
    path.unlink()
    names = ("plain write", "put", "plain read", "get", "memcpy", "write ratio", "read ratio")
    return dict(zip(names, map(statistics.median, zip(*runs_, strict=True)), strict=True))


def sustained(folder: Path, mib: int, n: int) -> float:
    """Seconds for n puts and the close that ends their checkpoints, over the time of n plain files with fsync."""
    data = np.random.default_rng(2).integers(0, 256, mib * MIB, dtype=np.uint8)

    def plain() -> None:
        for i in range(n):
            write_plain(folder / f"plain{i}", data)

    def puts() -> None:
        with kvstore.Store(folder / "sustained.db", cache_ram_mib=0) as store:
            for i in range(n):
                data[:8] = np.frombuffer(np.int64(i).tobytes(), np.uint8)
                store.put([i + 1], data)

    ratio = timed(plain)[0] / timed(puts)[0]
    for path in folder.iterdir():
        path.unlink()
    return ratio


def fill(path: Path, n_entries: int, n_tokens: int, seed: int = 3) -> list[np.ndarray]:
    """A store of many small entries, put straight into the tables in one transaction; gives some of the token lists."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 50000, n_tokens // 2, dtype=np.int32)
    some = []
    with kvstore.Store(path, cache_ram_mib=0) as store:
        store.put(system, b"prefix")
        core = store._core
        now, digest = core.now(), digest_of(b"prefix")
        with core.db.write() as c:
            fingerprint = queries.add_fingerprint(c, "")
            for i in range(n_entries):
                tokens = np.concatenate([system, rng.integers(0, 50000, n_tokens - len(system), dtype=np.int32)])
                # In the order of the index: else each of many inserts would write another page of it.
                tokens[len(system)] = np.uint32(i).byteswap().view(np.int32)
                key = tokens.astype("<i4").tobytes()
                entry = kvstore.Entry(
                    i + 1, n_tokens, 0, "normal", "default", now, now, None, None, 0, 1, n_tokens, "", None, 6, 6
                )
                queries.insert_entry(c, entry, fingerprint, key, True)
                blob = queries_blobs.stage_blob(c, "main", "full", 6, 6, writers.process_name())
                queries_blobs.insert_chunk(c, blob, 0, b"prefix")
                queries_blobs.finish_blob(c, blob, i + 1, digest, None)
                if i % (n_entries // 200 or 1) == 0:
                    some.append(tokens)
    return some


def match_and_open(folder: Path, n_entries: int, n_tokens: int, runs: int) -> tuple[float, float]:
    """(median seconds of a match, median seconds of an open) at so many entries."""
    path = folder / f"match{n_entries}.db"
    some = fill(path, n_entries, n_tokens)
    rng = np.random.default_rng(4)
    opens = []
    for _ in range(5):
        started = time.perf_counter()
        store = kvstore.Store(path, cache_ram_mib=0)
        opens.append(time.perf_counter() - started)
        store.close()
    times = []
    with kvstore.Store(path, cache_ram_mib=0) as store:
        for run in range(runs):
            tokens = some[run % len(some)].copy()
            at = int(rng.integers(n_tokens // 2 + 1, n_tokens))
            tokens[at:] = -1
            started = time.perf_counter()
            found = store.match(tokens)
            times.append(time.perf_counter() - started)
            if found is None or found.n_common != at:
                raise SystemExit("match is wrong")
    path.unlink()
    return statistics.median(times), statistics.median(opens)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py store", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--entries", type=int, default=100_000, help="0: no match benchmark")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the current folder)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd(), prefix="bench-") as name:
        folder = Path(name)
        for ram, fresh in ((0, False), (0, True), (8192, False)):
            f = put_and_get(folder, options.mib, options.runs, ram, fresh=fresh)
            print(
                f"{options.mib} MiB, cache_ram_mib {ram}, {'new' if fresh else 'used'} file:"
                f" put {f['put']:.3f} s, plain write + fsync {f['plain write']:.3f} s, speed x{f['write ratio']:.2f};"
                f" get {f['get']:.3f} s, plain read {f['plain read']:.3f} s, speed x{f['read ratio']:.2f}",
                flush=True,
            )
        f = put_and_get(folder, options.mib, options.runs, 8192, write_behind=True)
        print(f"write_behind: put holds its caller {f['put']:.3f} s, memcpy {f['memcpy']:.3f} s")
        ratio = sustained(folder, options.mib, 8)
        print(f"8 puts in a row, their checkpoints and the close with them: speed x{ratio:.2f} of 8 plain files", flush=True)
        if options.entries:
            base = match_and_open(folder, 1000, 2000, 1000)
            large = match_and_open(folder, options.entries, 2000, 1000)
            print(
                f"match: {base[0] * 1e6:.0f} us at 1,000 entries, {large[0] * 1e6:.0f} us at {options.entries:,},"
                f" x{large[0] / base[0]:.2f}; open: {base[1] * 1e3:.1f} ms and {large[1] * 1e3:.1f} ms"
            )
    return 0

"""`bench.py small`: puts of small states beside diskcache, and the bytes that a put writes beside its own."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvstore

SIZES = ((1 << 10, 2), (512 << 10, 1000), (512 << 10, 5800))  # bytes of the state, tokens


def rate(put: Callable[[int], object], n: int) -> float:
    started = time.perf_counter()
    for i in range(n):
        put(i)
    return n / (time.perf_counter() - started)


def written() -> int:
    """Bytes that this process handed to the kernel."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def fixed_cost(folder: Path, size: int, n_tokens: int, runs: int) -> float:
    """The median of the bytes that a put and the copy of its log write, less the bytes of the state in both."""
    rng = np.random.default_rng(5)
    beside = []
    with kvstore.Store(folder / "cost.db", cache_ram_mib=0) as store:
        for _ in range(runs):
            tokens = rng.integers(0, 50_000, n_tokens, dtype=np.int32)
            state = rng.integers(0, 256, size, dtype=np.uint8)
            time.sleep(2.5)  # the maintenance copies the log
            before = written()
            store.put(tokens, state)
            time.sleep(2.5)
            beside.append(written() - before - 2 * size)
    for path in folder.iterdir():
        path.unlink()
    return statistics.median(beside)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py small", description=__doc__)
    parser.add_argument("--puts", type=int, default=2000, help="of 1 KiB, a turn")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the current folder)")
    options = parser.parse_args(argv)
    value = os.urandom(1024)
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd(), prefix="bench-") as name:
        folder = Path(name)
        rates: dict[str, list[float]] = {"put": [], "put, write_behind": [], "diskcache": []}
        for run in range(options.runs):
            for label, behind in (("put", False), ("put, write_behind", True)):
                with kvstore.Store(folder / f"{run}{behind}.db", write_behind=behind) as store:

                    def put(i: int, store: kvstore.Store = store) -> object:
                        return store.put([i, 1], value)

                    rates[label].append(rate(put, options.puts))
            try:
                import diskcache
            except ImportError:
                continue
            with diskcache.Cache(str(folder / f"diskcache{run}")) as cache:
                rates["diskcache"].append(rate(lambda i, cache=cache: cache.set(i, value), options.puts))
        theirs = statistics.median(rates["diskcache"]) if rates["diskcache"] else None
        for label, found in rates.items():
            if found:
                ours = statistics.median(found)
                ratio = "" if theirs is None else f", x{ours / theirs:.2f} of diskcache"
                print(f"1 KiB, {label}: {ours:.0f}/s{ratio}", flush=True)
    if Path("/proc/self/io").exists():
        for size, n_tokens in SIZES:
            with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd(), prefix="bench-") as name:
                cost = fixed_cost(Path(name), size, n_tokens, options.runs)
            print(f"{size >> 10} KiB, {n_tokens} tokens: {cost / 1024:.0f} KiB beside the state, log and file", flush=True)
    return 0

"""`bench.py processes`: puts and gets of 1, 2 and 4 processes on one store, beside as many writing and reading plain files."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_store import read_plain, write_plain

import kvstore

MIB = 1 << 20


def work(folder: Path, way: str, number: int, mib: int, n: int) -> dict[str, float]:
    """One process: n puts, then n gets of its own states; seconds of each, from a common start."""
    data = np.random.default_rng(number).integers(0, 256, mib * MIB, dtype=np.uint8)
    store = kvstore.Store(folder / "kv.store", cache_ram_mib=0) if way == "kvstore" else None
    paths = [folder / f"{number}-{i}" for i in range(n)]
    ids: list[int] = []

    def put(i: int) -> None:
        data[:8] = np.frombuffer(np.int64(i).tobytes(), np.uint8)
        if store is None:
            write_plain(paths[i], data)
        else:
            ids.append(store.put([number, i, 1], data).id)

    def get(i: int) -> None:
        saved: Any = read_plain(paths[i]) if store is None else store.get(ids[i])
        if saved is None:
            raise SystemExit("a state is gone")

    seconds = {}
    for name, step in (("put", put), ("get", get)):
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        for i in range(n):
            step(i)
        seconds[name] = time.perf_counter() - started
    if store is not None:
        store.close()
    return seconds


def together(way: str, n_processes: int, mib: int, n: int, where: Path | None) -> dict[str, float]:
    """MiB a second of all processes: what they moved over the time of the slowest."""
    with tempfile.TemporaryDirectory(dir=where, prefix="bench-") as folder:
        if way == "kvstore":
            kvstore.Store(Path(folder) / "kv.store").close()
        words = [sys.executable, __file__, "--one", way, "--mib", str(mib), "--puts", str(n), "--dir", folder, "--number"]
        running = [
            subprocess.Popen([*words, str(number + 1)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number in range(n_processes)
        ]
        for _ in ("put", "get"):
            for each in running:
                assert each.stdout is not None
                each.stdout.readline()
            for each in running:
                assert each.stdin is not None
                each.stdin.write("go\n")
                each.stdin.flush()
        found = [json.loads(each.communicate()[0].splitlines()[-1]) for each in running]
    return {name: n_processes * n * mib / max(one[name] for one in found) for name in ("put", "get")}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py processes", description=__doc__)
    parser.add_argument("--mib", type=int, default=16, help="size of a state")
    parser.add_argument("--puts", type=int, default=10, help="of each process")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the current folder)")
    parser.add_argument("--one", choices=("kvstore", "plain files"), help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        print(json.dumps(work(options.dir, options.one, options.number, options.mib, options.puts)), flush=True)
        return 0
    print(f"states of {options.mib} MiB, {options.puts} a process; MiB/s of all processes, medians of {options.runs}")
    print(f"{'processes':>9} {'put':>8} {'plain':>8} {'ratio':>6} {'get':>8} {'plain':>8} {'ratio':>6}")
    for n_processes in (1, 2, 4):
        runs: dict[str, list[dict[str, float]]] = {"kvstore": [], "plain files": []}
        for _ in range(options.runs):
            for way, found in runs.items():
                found.append(together(way, n_processes, options.mib, options.puts, options.dir or Path.cwd()))
        ours, plain = (
            {name: statistics.median(run[name] for run in found) for name in ("put", "get")} for found in runs.values()
        )
        cells = [f"{ours[k]:8.0f} {plain[k]:8.0f} {ours[k] / plain[k]:6.2f}" for k in ("put", "get")]
        print(f"{n_processes:9} {' '.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

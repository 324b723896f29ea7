"""`bench.py caches`: put, get, match, delete and open of small states, beside the caches that people use today.

plain files: one file a state, as llama-server's `--slot-save-path` makes them, written with fsync; a match reads the tokens of
every file. diskcache: a SQLite cache by key; it has no match. LlamaDiskCache and LlamaRAMCache: those of llama-cpp-python.
kvstore and the plain files have a state on the disk when put returns; the other two do not sync.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_peers import synthetic
from bench_store import fill, timed, write_plain

import kvstore

Tokens = npt.NDArray[np.int32]
N_TOKENS, STATE_BYTES = 500, 6
MIB = 1 << 20


def tokens_of(i: int, system: Tokens) -> Tokens:
    """The tokens of entry i: a system prompt of half the length, then its own."""
    own = np.random.default_rng([7, i]).integers(0, 50_000, N_TOKENS - len(system), dtype=np.int32)
    return np.concatenate([system, own])


class Kvstore:
    def __init__(self, folder: Path, n: int) -> None:
        self._path = folder / "kv.store"
        self.some = fill(self._path, n, N_TOKENS)
        self.system = self.some[0][: N_TOKENS // 2]
        self._store = kvstore.Store(self._path, cache_ram_mib=0)

    def put(self, tokens: Tokens, state: bytes) -> None:
        self._store.put(tokens, state)

    def match(self, tokens: Tokens) -> int:
        found = self._store.match(tokens)
        return 0 if found is None else found.n_common

    def get(self, tokens: Tokens) -> bytes:
        found = self._store.match(tokens)
        saved = None if found is None else self._store.get(found.entry.id)
        return b"" if saved is None else saved.main.tobytes()

    def delete(self, tokens: Tokens) -> None:
        found = self._store.match(tokens)
        assert found is not None
        self._store.delete(found.entry.id)

    def open(self) -> None:
        kvstore.Store(self._path, cache_ram_mib=0).close()

    def close(self) -> None:
        self._store.close()


class Plain:
    """A folder of files, each with its tokens before its state."""

    def __init__(self, folder: Path, n: int) -> None:
        self._folder = folder / "plain"
        self._folder.mkdir()
        self.system = np.arange(1, N_TOKENS // 2 + 1, dtype=np.int32)
        self.some = []
        for i in range(n):
            tokens = tokens_of(i, self.system)
            self._path(tokens).write_bytes(tokens.tobytes() + b"prefix")
            if i % (n // 200 or 1) == 0:
                self.some.append(tokens)

    def _path(self, tokens: Tokens) -> Path:
        return self._folder / f"{hash(tokens.tobytes()) & (1 << 63) - 1:016x}"

    def put(self, tokens: Tokens, state: bytes) -> None:
        write_plain(self._path(tokens), np.frombuffer(tokens.tobytes() + state, np.uint8))

    def match(self, tokens: Tokens) -> int:
        best = 0
        for file in os.scandir(self._folder):
            theirs = np.fromfile(file.path, np.int32, N_TOKENS)
            n = min(len(theirs), len(tokens))
            parts = np.flatnonzero(theirs[:n] != tokens[:n])
            best = max(best, int(parts[0]) if parts.size else n)
        return best

    def get(self, tokens: Tokens) -> bytes:
        return self._path(tokens).read_bytes()[tokens.nbytes :]

    def delete(self, tokens: Tokens) -> None:
        self._path(tokens).unlink()

    def open(self) -> None:
        pass

    def close(self) -> None:
        shutil.rmtree(self._folder)


class DiskCache:
    def __init__(self, folder: Path, n: int) -> None:
        import diskcache

        self._make: Callable[[], Any] = lambda: diskcache.Cache(str(folder / "diskcache"), size_limit=1 << 40)
        self._cache = self._make()
        self.system = np.arange(1, N_TOKENS // 2 + 1, dtype=np.int32)
        self.some = []
        with self._cache.transact():
            for i in range(n):
                tokens = tokens_of(i, self.system)
                self._cache[tokens.tobytes()] = b"prefix"
                if i % (n // 200 or 1) == 0:
                    self.some.append(tokens)

    def put(self, tokens: Tokens, state: bytes) -> None:
        self._cache[tokens.tobytes()] = state

    match = None

    def get(self, tokens: Tokens) -> bytes:
        return bytes(self._cache[tokens.tobytes()])

    def delete(self, tokens: Tokens) -> None:
        del self._cache[tokens.tobytes()]

    def open(self) -> None:
        self._make().close()

    def close(self) -> None:
        self._cache.close()


class LlamaCache:
    """One of llama-cpp-python's caches: its match compares the tokens with those of every entry."""

    def __init__(self, folder: Path, n: int, on_disk: bool) -> None:
        from llama_cpp import LlamaDiskCache, LlamaRAMCache, LlamaState

        self._path, self._on_disk = str(folder / "llamadiskcache"), on_disk
        self._state: Callable[..., Any] = LlamaState
        self._make: Callable[[], Any] = (
            (lambda: LlamaDiskCache(self._path, 1 << 40)) if on_disk else (lambda: LlamaRAMCache(1 << 40))
        )
        self._cache = self._make()
        self.system = np.arange(1, N_TOKENS // 2 + 1, dtype=np.int32)
        self.some = []
        for i in range(n):
            tokens = tokens_of(i, self.system)
            # Not by its own way, which sums the sizes of all entries at each put.
            key, value = tuple(tokens.tolist()), self._of(tokens, b"prefix")
            (self._cache.cache if on_disk else self._cache.cache_state)[key] = value
            if i % (n // 200 or 1) == 0:
                self.some.append(tokens)

    def _of(self, tokens: Tokens, state: bytes) -> Any:
        scores = np.zeros((0, 0), np.single)
        return self._state(
            input_ids=tokens, scores=scores, n_tokens=len(tokens), llama_state=state, llama_state_size=len(state), seed=0
        )

    def put(self, tokens: Tokens, state: bytes) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # LlamaDiskCache tells of each step
            self._cache[tuple(tokens.tolist())] = self._of(tokens, state)

    def match(self, tokens: Tokens) -> int:
        found = self._cache._find_longest_prefix_key(tuple(tokens.tolist()))
        return 0 if found is None else len(found)

    def get(self, tokens: Tokens) -> bytes:
        key = tuple(tokens.tolist())
        return bytes((self._cache.cache if self._on_disk else self._cache.cache_state)[key].llama_state)

    def delete(self, tokens: Tokens) -> None:
        key = tuple(tokens.tolist())
        del (self._cache.cache if self._on_disk else self._cache.cache_state)[key]

    def open(self) -> None:
        if self._on_disk:
            self._make()

    def close(self) -> None:
        del self._cache


CACHES: dict[str, Callable[[Path, int], Any]] = {
    "kvstore": Kvstore,
    "plain files": Plain,
    "diskcache": DiskCache,
    "LlamaDiskCache": lambda folder, n: LlamaCache(folder, n, on_disk=True),
    "LlamaRAMCache": lambda folder, n: LlamaCache(folder, n, on_disk=False),
}


def median_of(call: Callable[..., Any], inputs: list[Any], most_seconds: float) -> float:
    """The median seconds of a call over its inputs, as many of them as the time allows."""
    taken: list[float] = []
    for words in inputs:
        taken.append(timed(call, *words)[0])
        if sum(taken) > most_seconds:
            break
    return statistics.median(taken)


def measure(make: Callable[[Path, int], Any], folder: Path, n: int, runs: int, most_seconds: float) -> dict[str, float | None]:
    cache = make(folder, n)
    rng = np.random.default_rng(9)
    new = [np.concatenate([cache.system, rng.integers(0, 50_000, N_TOKENS // 2, dtype=np.int32)]) for _ in range(runs)]
    state = rng.bytes(1024)
    known = cache.some[:runs]
    asked = [np.concatenate([tokens, [1, 2, 3]]).astype(np.int32) for tokens in known]
    found: dict[str, float | None] = {
        "put": median_of(cache.put, [(tokens, state) for tokens in new], most_seconds),
        "get": median_of(cache.get, [(tokens,) for tokens in known], most_seconds),
        "match": None if cache.match is None else median_of(cache.match, [(tokens,) for tokens in asked], most_seconds),
        "open": median_of(cache.open, [()] * 5, most_seconds),
        "delete": median_of(cache.delete, [(tokens,) for tokens in new], most_seconds),
    }
    cache.close()
    return found


def at_size(n: int, runs: int, most_seconds: float, where: Path | None) -> None:
    print(f"\n{n:,} entries of {N_TOKENS} tokens; microseconds, median of up to {runs}; puts of 1 KiB")
    print(f"{'':16}" + "".join(f"{name:>12}" for name in ("put", "get", "match", "open", "delete")))
    for name, make in CACHES.items():
        with tempfile.TemporaryDirectory(dir=where, prefix="bench-") as folder:
            try:
                found = measure(make, Path(folder), n, runs, most_seconds)
            except ImportError as error:
                print(f"{name:16} not installed: {error}")
                continue
        cells = ["none" if each is None else f"{each * 1e6:,.0f}" for each in found.values()]
        print(f"{name:16}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def disk(where: Path | None, n_chats: int = 100) -> None:
    """Bytes on the disk for conversations over one prompt of 2,000 tokens, 1 KiB a token, each with 100 tokens of its own."""
    n, own = 2100, 100
    state, _ = synthetic(n, own, 1, 512, transposed=False)
    prompt = np.arange(1, n - own + 1, dtype=np.int32)
    head, tail = n - own, own
    with tempfile.TemporaryDirectory(dir=where, prefix="bench-") as name:
        path = Path(name) / "kv.store"
        started = time.perf_counter()
        with kvstore.Store(path, cache_ram_mib=0, min_saved_mib=0) as store:
            store.put(prompt, synthetic(head, 1, 1, 512, transposed=False)[0], entry_class="learned")
            for chat in range(n_chats):
                rng = np.random.default_rng([5, chat])
                mine = state.copy()
                mine[-tail * 512 :] = rng.integers(0, 256, tail * 512, dtype=np.uint8)
                store.put(np.concatenate([prompt, rng.integers(0, 50_000, own, dtype=np.int32)]), mine)
        seconds = time.perf_counter() - started
        size = path.stat().st_size
    whole = n_chats * (state.size + 4 * n)
    print(f"\n{n_chats} conversations of 100 tokens over one prompt of 2,000, 1 KiB a token")
    print(f"kvstore      {size / MIB:8.1f} MiB, {seconds:.1f} s")
    print(f"slot files   {whole / MIB:8.1f} MiB, x{whole / size:.1f}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py caches", description=__doc__)
    parser.add_argument("--entries", type=int, nargs="*", default=[100, 10_000, 100_000])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="the most that one figure may take")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the current folder)")
    options = parser.parse_args(argv)
    for n in options.entries:
        at_size(n, options.runs, options.seconds, options.dir or Path.cwd())
    disk(options.dir or Path.cwd())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

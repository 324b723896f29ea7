"""Digests: the only module that imports xxhash."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..types import Bytes, Tokens
from .workers import Task, Workers

PARALLEL_BYTES = 1 << 20  # for less, a thread costs more than it saves
FAMILY_SYSTEM_TOKENS = 256
FAMILY_USER_TOKENS = 32


def digest(data: Any) -> bytes:
    """XXH3-128 of the bytes, big-endian (the canonical form). 16 bytes."""
    return bytes(xxhash.xxh3_128_digest(data))


def family(tokens: Tokens, n_system: int, user_start: int) -> int:
    """The family of a prompt: XXH3-64 of the little-endian int32 tokens of its system block, at most 256 of them.

    Without a system block: of the first 32 tokens of the first user turn, which starts at `user_start`.
    """
    block = tokens[: min(n_system, FAMILY_SYSTEM_TOKENS)] if n_system else tokens[user_start : user_start + FAMILY_USER_TOKENS]
    return int(xxhash.xxh3_64_intdigest(np.ascontiguousarray(block, dtype="<i4").tobytes()))


_POWERS = np.ones(1, np.uint64)


def prefix_hash(key: bytes) -> int:
    """The hash of a whole key, the last of `prefix_hashes`."""
    terms = _terms(key)
    return int(_mixed(terms.sum(dtype=np.uint64, keepdims=True))[0])


def prefix_hashes(key: bytes) -> npt.NDArray[np.int64]:
    """The 64-bit hash of every prefix of a key: element n - 1 is that of the first n tokens. 50 us for 4,000 tokens.

    The sum of mixed tokens times powers of an odd number, modulo 2^64, mixed again. Held in files, so it never changes.
    """
    return _mixed(np.cumsum(_terms(key), dtype=np.uint64))


def _terms(key: bytes) -> npt.NDArray[np.uint64]:
    global _POWERS
    tokens = np.frombuffer(key, "<u4").astype(np.uint64)
    if len(_POWERS) < len(tokens):
        powers = np.full(1 << (len(tokens) - 1).bit_length(), 0x9E6C63D0676A9A99, np.uint64)
        powers[0] = 1
        _POWERS = np.cumprod(powers, dtype=np.uint64)
    tokens += np.uint64(0x9E3779B97F4A7C15)
    tokens *= np.uint64(0xBF58476D1CE4E5B9)
    tokens ^= tokens >> np.uint64(32)
    tokens *= _POWERS[: len(tokens)]
    return tokens


def _mixed(sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    sums ^= sums >> np.uint64(29)
    sums *= np.uint64(0x94D049BB133111EB)
    sums ^= sums >> np.uint64(32)
    return sums.view(np.int64)


class Digests(Mapping[str, bytes]):
    """The digests of states by name. They are computed on access, or by workers after `begin`."""

    def __init__(self, **states: Bytes | None) -> None:
        self._states = {name: state for name, state in states.items() if state is not None}
        self._begun: dict[str, Task[bytes]] = {}
        self._known: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def begin(self, workers: Workers) -> None:
        """Starts computing. The states must not change until their digests were read, or `cancel` has returned."""
        with self._lock:
            for name in self._states.keys() - self._begun.keys() - self._known.keys():
                if self._states[name].size >= PARALLEL_BYTES:
                    self._begun[name] = workers.begin(functools.partial(_digest_beside, self._states[name]))

    def cancel(self) -> None:
        """Ends the work that `begin` started. A digest that is read later is computed then."""
        with self._lock:
            begun, self._begun = self._begun, {}
            for task in begun.values():
                task.cancel()

    @property
    def sizes(self) -> dict[str, int]:
        return {name: state.size for name, state in self._states.items()}

    def __getitem__(self, name: str) -> bytes:
        with self._lock:
            if name not in self._known:
                task = self._begun.pop(name, None)
                self._known[name] = digest(self._states[name]) if task is None else task.result()
            return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def _digest_beside(state: Bytes) -> bytes:
    """`digest` without the GIL, which only `update` releases."""
    hasher = xxhash.xxh3_128()
    hasher.update(state.data)
    return hasher.digest()


class Hasher:
    """XXH3-128 of bytes that arrive in pieces. A thread hashes large pieces while the caller reads the next one.

    A piece must not change until `digest` has returned.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._pieces: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
        self._executor: ThreadPoolExecutor | None = None

    def update(self, piece: Bytes) -> None:
        if self._executor is None and (piece.size < PARALLEL_BYTES or not self._start()):
            self._hash.update(piece.data)
            return
        self._pieces.put(piece)

    def _start(self) -> bool:
        executor = ThreadPoolExecutor(1, thread_name_prefix="kvstore-hash")
        try:
            executor.submit(self._run)
        except RuntimeError:  # the interpreter is shutting down
            return False
        self._executor = executor
        return True

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._hash.update(piece.data)

    def digest(self) -> bytes:
        """Waits until all pieces are hashed. 16 bytes, big-endian."""
        if self._executor is not None:
            self._pieces.put(None)
            self._executor.shutdown(wait=True)
            self._executor = None
        return self._hash.digest()

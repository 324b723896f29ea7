"""Digests: the only module that imports xxhash."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import xxhash

from .records import Tokens

DIGEST_BYTES = 16
FAMILY_SYSTEM_TOKENS = 256
FAMILY_USER_TOKENS = 32


def digest(data: Any) -> bytes:
    """XXH3-128 of the bytes, big-endian (the canonical form). 16 bytes."""
    return bytes(xxhash.xxh3_128_digest(data))


def family(tokens: Tokens, n_system: int, user_start: int) -> int:
    """The family of a prompt: XXH3-64 of the little-endian int32 tokens of its system block, at most 256 of them.

    Without a system block, of the first 32 tokens of the first user turn, which starts at `user_start`.
    """
    block = tokens[: min(n_system, FAMILY_SYSTEM_TOKENS)] if n_system else tokens[user_start : user_start + FAMILY_USER_TOKENS]
    return int(xxhash.xxh3_64_intdigest(np.ascontiguousarray(block, dtype="<i4").tobytes()))


class Hasher:
    """XXH3-128 of bytes that arrive in pieces, computed by a thread of its own while the caller moves the next piece.

    A piece must not change until `digest` has returned.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def update(self, piece: Any) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-hash", daemon=True)
            self._thread.start()
        self._pieces.put(piece)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._hash.update(piece)

    def digest(self) -> bytes:
        """Waits for the pieces; 16 bytes, big-endian."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
        return self._hash.digest()

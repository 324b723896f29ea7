"""Sealed objects, version 1, little-endian:

    0   8      KVSTOBJ1
    8   1 + 3  cipher: 1 = AES-256-GCM; zeros
    12  4      plain bytes of a chunk: 4 MiB
    16  8 + 8  plain bytes in all; zeros
    32  32     salt, random
    64         chunks: ciphertext, then a tag of 16 bytes

The key of an object is BLAKE2b(fleet key, "object" + salt). The nonce of a chunk is its number (u64) and whether it is the
last one (u32), big-endian, so no chunk can be dropped, moved or repeated. Associated data is the header, and what the
object's name says of its content: an object under another name does not open.

An opener believes nothing before its tag was checked, and compares every size with the one that the listing gave before it
allocates anything.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInputError, extra
from ..types import Bytes

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as _error:
    raise InvalidInputError("a remote needs cryptography", hint=extra("remote")) from _error

MAGIC = b"KVSTOBJ1"
CIPHER = 1
CHUNK = 4 << 20
TAG = 16
HEADER = struct.Struct("<8sB3sIQ8s32s")
PIECE = 4 * (CHUNK + TAG)  # sealed bytes of one ranged get, behind the header
CHUNKS_PER_PIECE = 4
MIN_BYTES = HEADER.size + TAG + 1


class RefusedError(Exception):
    """An object that must not be served; the text says why."""


def sealed_size(plain: int) -> int:
    return HEADER.size + plain + TAG * -(-plain // CHUNK)


def plain_size(sealed: int) -> int:
    """The plain bytes of an object of this size. Raises RefusedError for a size that no object has."""
    body = sealed - HEADER.size
    n_chunks = -(-body // (CHUNK + TAG))
    plain = body - TAG * n_chunks
    if plain <= 0 or sealed_size(plain) != sealed:
        raise RefusedError("its size is not that of a sealed object")
    return plain


def _cipher(key: bytes, salt: bytes) -> Any:
    return AESGCM(hashlib.blake2b(b"object" + salt, key=key, digest_size=32).digest())


def _nonce(number: int, last: bool) -> bytes:
    return struct.pack(">QI", number, last)


def _chunks(parts: Sequence[Any], size: int) -> Iterator[Any]:
    """The bytes of all parts in chunks; nothing is copied that fills a chunk by itself."""
    room = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        at = 0
        while at < len(view):
            n = min(CHUNK - len(room), len(view) - at)
            if not room and n == CHUNK:
                yield view[at : at + n]
            else:
                room += view[at : at + n]
                if len(room) == CHUNK:
                    yield room
                    room = bytearray()
            at += n
    if room:
        yield room


def seal(parts: Sequence[Any], key: bytes, sealed_name: str) -> Iterator[bytes | bytearray]:
    """The pieces of the sealed object that holds these parts, one after another."""
    size = sum(memoryview(part).nbytes for part in parts)
    salt = secrets.token_bytes(32)
    header = HEADER.pack(MAGIC, CIPHER, bytes(3), CHUNK, size, bytes(8), salt)
    aes, aad = _cipher(key, salt), header + sealed_name.encode()
    yield header
    n_chunks = -(-size // CHUNK)
    for number, chunk in enumerate(_chunks(parts, size)):
        nonce = _nonce(number, number == n_chunks - 1)
        if hasattr(aes, "encrypt_into"):  # without an allocation of its own it keeps its speed in two threads
            out = bytearray(len(chunk) + TAG)
            aes.encrypt_into(nonce, chunk, aad, out)
            yield out
        else:
            yield aes.encrypt(nonce, bytes(chunk), aad)


class Opener:
    """Opens one object whose pieces come in any order. Several threads may open pieces at once."""

    def __init__(self, header: Any, sealed: int, key: bytes, sealed_name: str) -> None:
        """header: the first 64 bytes; sealed: the size that the listing gave. Raises RefusedError."""
        data = bytes(header[: HEADER.size])
        if len(data) < HEADER.size:
            raise RefusedError("it has no whole header")
        magic, cipher, zeros, chunk, size, more_zeros, salt = HEADER.unpack(data)
        if magic != MAGIC:
            raise RefusedError("it is not a sealed object")
        if cipher != CIPHER or chunk != CHUNK or any(zeros) or any(more_zeros):
            raise RefusedError("it is sealed in a way that this version does not know")
        if plain_size(sealed) != size:
            raise RefusedError("its size is not the one that its header says")
        self.size = size
        self._n_chunks = -(-size // CHUNK)
        self._aes, self._aad = _cipher(key, salt), data + sealed_name.encode()
        self.plain: Bytes = np.empty(size, np.uint8)
        self._view = memoryview(self.plain.data)

    def open(self, data: Any, number: int) -> None:
        """Opens the chunks of a piece, of which the first has this number, into `plain`. Raises RefusedError."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), CHUNK + TAG):
            sealed = view[at : at + CHUNK + TAG]
            start = number * CHUNK
            out = self._view[start : start + len(sealed) - TAG]
            if len(sealed) <= TAG or len(out) != len(sealed) - TAG:
                raise RefusedError("it is cut off")
            try:
                if hasattr(self._aes, "decrypt_into"):
                    self._aes.decrypt_into(_nonce(number, number == self._n_chunks - 1), sealed, self._aad, out)
                else:
                    out[:] = self._aes.decrypt(_nonce(number, number == self._n_chunks - 1), bytes(sealed), self._aad)
            except (InvalidTag, ValueError) as error:
                raise RefusedError("it was changed, or sealed with another key or under another name") from error
            number += 1


def pieces(sealed: int) -> list[tuple[int, int, int]]:
    """(offset, length, number of the first chunk) of the ranges behind the first, which ends at `first_length`."""
    found = []
    for number, start in enumerate(range(HEADER.size + PIECE, sealed, PIECE), 1):
        found.append((start, min(PIECE, sealed - start), number * CHUNKS_PER_PIECE))
    return found


def first_length(sealed: int) -> int:
    return min(HEADER.size + PIECE, sealed)

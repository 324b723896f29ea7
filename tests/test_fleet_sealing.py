"""Sealed objects: known answers, every changed byte, and anything as an object."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fleetkit import KEY
from hypothesis import given
from hypothesis import strategies as st
from storekit import noise

from kvstore.fleet import sealing
from kvstore.fleet.sealing import CHUNK, HEADER, PIECE, TAG, Opener, RefusedError, seal, sealed_size

NAME = "aaaaaaaaaaaaaaaa/l-300-facts"


def sealed(*parts: Any, key: bytes = KEY, name: str = NAME) -> bytes:
    return b"".join(seal(parts, key, name))


def opened(data: bytes, *, size: int | None = None, key: bytes = KEY, name: str = NAME) -> bytes:
    size = len(data) if size is None else size
    first = data[: sealing.first_length(size)]
    opener = Opener(first, size, key, name)
    opener.open(first[HEADER.size :], 0)
    for start, length, number in reversed(sealing.pieces(size)):
        opener.open(data[start : start + length], number)
    return opener.plain.tobytes()


def test_a_sealed_object_has_the_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing.secrets, "token_bytes", lambda n: bytes(range(n)))
    data = sealed(b"hello, ", b"fleet")
    assert data[:64] == b"KVSTOBJ1" + b"\1\0\0\0" + b"\0\0\x40\0" + bytes([12]) + bytes(15) + bytes(range(32))
    assert data[64:].hex() == "2d71b442ee7ad3bd56662fbace713a1bfe58c1f67694ebc3b13e94de"
    assert opened(data) == b"hello, fleet"
    key = hashlib.blake2b(b"object" + data[32:64], key=KEY, digest_size=32).digest()
    aad = data[:64] + NAME.encode()
    assert AESGCM(key).decrypt(bytes(8) + b"\0\0\0\1", data[64:], aad) == b"hello, fleet"


@pytest.mark.parametrize("n", [1, 2, 15, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK, 4 * CHUNK + 1, 9 * CHUNK + 17])
def test_any_size_comes_back(n: int) -> None:
    plain = noise(n, n)
    data = sealed(plain[: n // 3], plain[n // 3 : n // 3], plain[n // 3 :])
    assert len(data) == sealed_size(n)
    assert opened(data) == plain


def test_every_changed_byte_is_refused() -> None:
    data = sealed(noise(1, 100))
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(RefusedError):
            opened(bytes(bad))


@pytest.mark.parametrize("change", ["swapped", "dropped", "repeated", "cut"])
def test_chunks_cannot_be_moved_dropped_or_repeated(change: str) -> None:
    data = sealed(noise(2, 3 * CHUNK))
    step = CHUNK + TAG
    head, chunks = data[:64], [data[64 + i * step : 64 + (i + 1) * step] for i in range(3)]
    bad = {
        "swapped": [chunks[1], chunks[0], chunks[2]],
        "dropped": chunks[:2],
        "repeated": [chunks[0], chunks[0], chunks[2]],
        "cut": [chunks[0], chunks[1], chunks[2][:-100]],
    }[change]
    with pytest.raises(RefusedError):
        opened(head + b"".join(bad))
    # Nor where the header was made to fit.
    body = b"".join(bad)
    plain = len(body) - TAG * -(-len(body) // step)
    fitted = bytearray(head)
    fitted[16:24] = plain.to_bytes(8, "little")
    with pytest.raises(RefusedError):
        opened(bytes(fitted) + body)


def test_another_key_or_name_is_refused() -> None:
    data = sealed(b"secret")
    for options in ({"key": bytes(32)}, {"name": NAME + "x"}, {"name": "b" + NAME[1:]}):
        with pytest.raises(RefusedError):
            opened(data, **options)


def test_a_size_that_the_listing_did_not_give_is_refused() -> None:
    data = sealed(noise(3, 1000))
    for size in (len(data) - 1, len(data) + 1, len(data) + 16, 0, 64, 80, 1 << 62):
        with pytest.raises(RefusedError):
            opened(data, size=size)


def test_a_header_alone_allocates_nothing() -> None:
    """A header that promises 2^60 bytes meets a listing that does not."""
    data = bytearray(sealed(b"x"))
    data[16:24] = (1 << 60).to_bytes(8, "little")
    with pytest.raises(RefusedError):
        Opener(bytes(data[:64]), len(data), KEY, NAME)


@given(st.binary(max_size=300))
def test_anything_is_refused(data: bytes) -> None:
    for candidate in (data, b"KVSTOBJ1" + data, sealed(b"x")[:64] + data):
        with pytest.raises((RefusedError, ValueError)):
            opened(candidate)


def test_the_key_of_an_object_depends_on_its_salt() -> None:
    a, b = sealed(b"same"), sealed(b"same")
    assert a[32:64] != b[32:64]
    assert a[64:] != b[64:]
    assert hashlib.blake2b(b"object" + a[32:64], key=KEY, digest_size=32).digest() != KEY


def test_pieces_cover_an_object_without_gaps() -> None:
    for size in (HEADER.size + 17, HEADER.size + PIECE, HEADER.size + PIECE + 17, HEADER.size + 5 * PIECE + 100):
        at = sealing.first_length(size)
        for number, (start, length, chunk) in enumerate(sealing.pieces(size), 1):
            assert (start, chunk) == (at, 4 * number)
            at += length
        assert at == size


def test_views_of_large_parts_are_not_copied() -> None:
    part = np.zeros(CHUNK, np.uint8)
    (chunk,) = sealing._chunks([part], CHUNK)
    assert np.shares_memory(np.frombuffer(chunk, np.uint8), part)

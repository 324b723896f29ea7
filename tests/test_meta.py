"""The meta block: bytes at their places, and every odd block that old stores hold."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidInputError, MetaBlockError
from kvstore.meta import MetaBlock, clean_excerpt
from kvstore.types import CLASSES, SOURCES

U64, I64 = st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
ID = st.integers(1, 2**64 - 1)
OPTIONAL = st.one_of(st.none(), I64.filter(bool))
BLOCKS = st.builds(
    MetaBlock, id=ID, entry_class=st.sampled_from(CLASSES), source=st.sampled_from(SOURCES), saved=st.booleans(),
    reused=st.booleans(), created_at=I64, last_used=I64, expires_at=OPTIONAL, ttl=OPTIONAL, hits=U64, family=U64,
    n_input=I64, excerpt=st.text().map(clean_excerpt), parent=st.one_of(st.none(), ID),
)  # fmt: skip


def raw(excerpt: bytes = b"", length: int | None = None, cls: int = 0, source: int = 0, parent: int | None = None,
        tail: bytes = b"", flag: int | None = None) -> bytes:  # fmt: skip
    block = bytearray(512)
    struct.pack_into("<Q5B", block, 0, 77, cls, source, 1, 0, (parent is not None) if flag is None else flag)
    struct.pack_into("<qqqqQQqH", block, 16, 1, 2, 3, 4, 5, 6, 7, len(excerpt) if length is None else length)
    block[74 : 74 + len(excerpt)] = excerpt
    if parent is not None:
        struct.pack_into("<Q", block, 504, parent)
    if tail:
        block[504:] = tail
    return bytes(block)


@given(BLOCKS)
def test_round_trip(meta: MetaBlock) -> None:
    block = meta.pack()
    assert len(block) == 512
    assert MetaBlock.unpack(block) == meta
    assert MetaBlock.unpack(block).problems == ()
    assert MetaBlock.unpack(block).pack() == block


@given(st.binary(min_size=512, max_size=512))
def test_any_512_bytes_unpack(block: bytes) -> None:
    meta = MetaBlock.unpack(block)
    if meta.id and meta.parent != 0:
        replace(meta, excerpt=meta.excerpt).pack()


def test_every_field_has_its_place() -> None:
    meta = MetaBlock(0x1122334455667788, "pinned", "admin", True, False, -1, 2, 3, 4, 5, 6, 7, "é", 9)
    block = meta.pack()
    assert block[:16] == bytes.fromhex("8877665544332211") + bytes([2, 3, 1, 0, 1, 0, 0, 0])
    assert struct.unpack_from("<qqqqQQqH", block, 16) == (-1, 2, 3, 4, 5, 6, 7, 2)
    assert block[74:77] == b"\xc3\xa9\0"
    assert block[504:] == struct.pack("<Q", 9)
    assert MetaBlock.unpack(bytearray(block)) == MetaBlock.unpack(memoryview(block)) == meta


@pytest.mark.parametrize("size", [0, 500, 511, 513])
def test_wrong_size(size: int) -> None:
    with pytest.raises(MetaBlockError, match=str(size)):
        MetaBlock.unpack(bytes(size))


@pytest.mark.parametrize(
    ("block", "excerpt"),
    [
        (raw(), ""),
        (raw(b"a" * 430), "a" * 430),
        (raw(b"b" * 438), "b" * 438),
        (raw("é".encode() * 218), "é" * 218),
        (raw("🦙".encode() * 109), "🦙" * 109),
        (raw(b"c" * 438, length=65535), "c" * 438),
        (raw("éé".encode() + b"\xc3"), "éé\ufffd"),
        (raw(b"one\ttwo\nthree\x00four"), "one two three four"),
        (raw(b"short", tail=b"\xff" * 8), "short"),
        (raw(b"d" * 430, parent=9), "d" * 430),
        (raw(b"d" * 430, parent=9, length=438), "d" * 430),
        (raw(b"d" * 430, parent=9, length=65535), "d" * 430),
        (raw(b"text", length=0), ""),
    ],
)
def test_excerpts_of_old_blocks(block: bytes, excerpt: str) -> None:
    meta = MetaBlock.unpack(block)
    assert meta.excerpt == excerpt
    assert meta.parent == (9 if block[12] else None)
    assert meta.problems == ()


def test_unknown_values_are_replaced_and_named() -> None:
    meta = MetaBlock.unpack(raw(cls=7, source=9))
    assert (meta.entry_class, meta.source) == ("normal", "default")
    assert [p.split(":")[0] for p in meta.problems] == ["unknown class 7", "unknown source 9"]
    assert MetaBlock.unpack(raw(flag=2)).parent is None
    assert MetaBlock.unpack(raw(flag=2)).problems
    assert MetaBlock.unpack(raw(parent=0)).problems
    assert MetaBlock.unpack(bytes(512)).problems == ("its id is 0",)


def test_hits_beyond_2_63() -> None:
    block = bytearray(raw())
    struct.pack_into("<Q", block, 48, 2**63 + 5)
    assert MetaBlock.unpack(block).hits == 2**63 + 5


@pytest.mark.parametrize(
    "change",
    [
        {"id": 0}, {"id": 2**64}, {"id": -1}, {"entry_class": "other"}, {"source": ""}, {"created_at": 2**63},
        {"last_used": -(2**63) - 1}, {"expires_at": 2**63}, {"ttl": 2**63}, {"hits": -1}, {"hits": 2**64},
        {"family": 2**64}, {"n_input": 2**63}, {"parent": 0}, {"parent": 2**64}, {"hits": 1.5}, {"n_input": "3"},
    ],
)  # fmt: skip
def test_values_out_of_range(change: dict) -> None:
    with pytest.raises(
        InvalidInputError, match=next(iter(change)).replace("entry_", "").replace("parent", "parent|id")
    ):
        replace(MetaBlock(1), **change).pack()


def test_long_excerpt_is_cut_with_and_without_parent() -> None:
    for parent in (None, 9):
        block = MetaBlock(1, excerpt="é" * 300, parent=parent).pack()
        assert MetaBlock.unpack(block).excerpt == "é" * 215
        assert struct.unpack_from("<H", block, 72) == (430,)


def test_clean_excerpt() -> None:
    assert clean_excerpt("a\x00b\x7fc\x85d\r\n") == "a b c d  "
    assert clean_excerpt(b"\xff\xfea") == "\ufffd\ufffda"
    assert clean_excerpt("\ud800x") == "\ufffdx"
    assert clean_excerpt(b"a" * 10**6) == "a" * 430
    assert clean_excerpt(memoryview(b"abc")) == "abc"
    assert clean_excerpt("🦙" * 200) == "🦙" * 107
    for limit in range(12):
        assert clean_excerpt("é🦙a".encode(), limit) == clean_excerpt("é🦙a", limit)


@given(st.one_of(st.text(), st.binary()), st.integers(0, 50))
def test_clean_excerpt_always_fits_and_is_stable(text: str | bytes, limit: int) -> None:
    got = clean_excerpt(text, limit)
    assert len(got.encode()) <= limit
    assert clean_excerpt(got, limit) == got
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in got)

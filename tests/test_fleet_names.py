"""Names of objects: known answers, what they reveal, and any string as a path."""

from __future__ import annotations

import base64
import hashlib
import struct

import pytest
from fleetkit import KEY, tokens
from hypothesis import given
from hypothesis import strategies as st

from kvstore.fleet.names import (
    CLASSES,
    MAX_TOKENS,
    Names,
    ObjectName,
    mark_lengths,
    parse_path,
)

NAMES = Names(KEY, "a model")
AT = 1_796_256_000.0  # 2026-12-03 00:00:00


def name_of(values: object, **options: object) -> ObjectName:
    chain = NAMES.chain(tokens(values))
    state = NAMES.state((bytes(16),))
    given = {"at": AT, "entry_class": "learned", "cuttable": True, "state": state, "parent": None, **options}
    return NAMES.name(chain, **given)  # type: ignore[arg-type]


def test_a_name_has_the_known_answer() -> None:
    assert name_of(range(300)).path == (
        "1/2dawslfyw2zuj3rz/20261203/000000-l-300-urnv6xtih3imixnu-ay77bx434233hfwt-0-0-yg637ehn3eswl7lneisjhffd"
    )


def test_the_known_answer_is_what_the_format_says() -> None:
    """Written down once more, from the description of the format alone."""
    key = hashlib.blake2b(b"names", key=KEY).digest()

    def h(data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=key, digest_size=size).digest()

    def b32(data: bytes) -> str:
        return base64.b32encode(data).decode().lower()

    data = b"".join(struct.pack("<i", token) for token in range(300))
    chain = {0: bytes(16)}
    for length in range(64, 301, 64):
        chain[length] = h(chain[length - 64] + data[4 * (length - 64) : 4 * length], 16)
    whole = b32(h(b"w" + chain[256] + data[4 * 256 :], 10))
    marks = "".join(b32(chain[length][:5]) for length in (64, 192, 256))
    state = b32(h(b"s" + bytes(16), 10))
    assert name_of(range(300)).path == f"1/{b32(h(b'fa model', 10))}/20261203/000000-l-300-{whole}-{state}-0-0-{marks}"


def test_a_capital_says_that_the_state_cannot_be_cut() -> None:
    name = name_of(range(300), cuttable=False)
    assert name.kind == "L"
    assert not name.cuttable
    assert name.lengths == (256,)
    assert name.entry_class == "learned"
    assert parse_path(name.path) == name


def test_marks_lie_close_at_the_end_and_double_from_the_start() -> None:
    assert mark_lengths(63, 0) == ()
    assert mark_lengths(64, 0) == (64,)
    assert mark_lengths(300, 0) == (64, 192, 256)
    assert mark_lengths(1000, 0) == (256, 512, 768, 896, 960)
    assert mark_lengths(1000, 800) == (896, 960)
    assert mark_lengths(1000, 999) == (960,)


@given(st.integers(0, MAX_TOKENS), st.data())
def test_marks_are_few_and_lie_between_parent_and_end(n: int, data: st.DataObject) -> None:
    pn = data.draw(st.integers(0, max(0, n - 1)))
    found = mark_lengths(n, pn)
    top = n // 64 * 64
    assert len(found) <= 20
    assert list(found) == sorted(set(found))
    assert all(length % 64 == 0 and (length > pn or length == top) and length <= top for length in found)
    assert (top in found) == (n >= 64)


@given(st.integers(64, MAX_TOKENS), st.data())
def test_a_name_fits_a_file_name_and_is_read_back(n: int, data: st.DataObject) -> None:
    pn = data.draw(st.integers(0, n - 1))
    kind = data.draw(st.sampled_from(sorted(CLASSES)))
    marks = tuple("a" * 8 for _ in mark_lengths(n, pn))
    parent = "b" * 16 if pn else "0"
    name = ObjectName("c" * 16, "20261203", "235959", kind, n, "d" * 16, "e" * 16, parent, pn, marks)
    assert len(name.path.rsplit("/", 1)[1]) < 255
    assert parse_path(name.path) == name


@given(st.text(max_size=300))
def test_any_string_is_a_name_or_none(text: str) -> None:
    for path in (text, f"1/{'a' * 16}/20261203/{text}", f"1/{'a' * 16}/{text}", f"1/{text}"):
        found = parse_path(path)
        assert found is None or found.path == path


GOOD = name_of(range(300)).path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1/", "2/"),
        ("/20261203/", "/20261303/"),
        ("/20261203/", "/2026120/"),
        ("/000000-", "/246060-"),
        ("-l-", "-x-"),
        ("-l-300-", "-l-0300-"),
        ("-l-300-", "-l-63-"),
        ("-l-300-", "-l-99999999999-"),
        ("-l-300-", "-l-3000-"),  # another number of marks
        ("-0-0-", "-0-64-"),
        ("-0-0-", "-aaaaaaaaaaaaaaaa-0-"),
        ("-0-0-", "-aaaaaaaaaaaaaaaa-300-"),
        ("-0-0-", "-0-0--"),
    ],
)
def test_what_is_not_a_name_is_ignored(old: str, new: str) -> None:
    assert parse_path(GOOD) is not None
    assert old in GOOD
    assert parse_path(GOOD.replace(old, new, 1)) is None


def test_one_mark_more_or_less_is_not_a_name() -> None:
    assert parse_path(GOOD[:-8]) is None
    assert parse_path(GOOD + "aaaaaaaa") is None
    assert parse_path(GOOD + "/x") is None


def test_names_are_blind() -> None:
    """Without the key nothing in a name depends on the tokens but their number: under another key all hashes differ."""
    other = Names(bytes(32), "a model")
    values = tokens(range(300))
    ours, theirs = NAMES.chain(values), other.chain(values)
    state = (bytes(16),)
    a = NAMES.name(ours, at=AT, entry_class="learned", cuttable=True, state=NAMES.state(state), parent=None)
    b = other.name(theirs, at=AT, entry_class="learned", cuttable=True, state=other.state(state), parent=None)
    assert (a.kind, a.n_tokens, a.day, a.time) == (b.kind, b.n_tokens, b.day, b.time)
    assert not {a.fp, a.whole, a.state, *a.marks} & {b.fp, b.whole, b.state, *b.marks}
    # With the key a token changes every hash of what follows it, and none before.
    changed = NAMES.chain(tokens([*range(200), 7, *range(201, 300)]))
    c = NAMES.name(changed, at=AT, entry_class="learned", cuttable=True, state=a.state, parent=None)
    assert c.whole != a.whole
    assert [x == y for x, y in zip(a.marks, c.marks, strict=True)] == [True, True, False]


def test_a_prefix_has_the_marks_of_its_continuation() -> None:
    short, long = NAMES.chain(tokens(range(300))), NAMES.chain(tokens(range(1000)))
    assert all(short.mark(length) == long.mark(length) for length in (64, 128, 192, 256))
    assert short.whole(NAMES.hasher, 300) == long.whole(NAMES.hasher, 300)


def test_a_name_that_lies_about_its_tokens_does_not_fit() -> None:
    chain = NAMES.chain(tokens(range(300)))
    name = name_of(range(300))
    assert NAMES.fits(name, chain)
    assert not NAMES.fits(name, NAMES.chain(tokens(range(1, 301))))
    assert not NAMES.fits(name, NAMES.chain(tokens(range(299))))
    assert not Names(KEY, "another model").fits(name, chain)

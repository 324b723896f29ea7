"""The helpers that every part shares: bytes as arrays, prefixes of token lists, integers in a range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import InvalidInputError, bkvd, layout
from kvstore.meta import MetaBlock
from kvstore.util.buffers import as_u8, common_prefix_length
from kvstore.util.validate import I64, U64, check_int


@pytest.mark.parametrize("data", [b"abc", bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)], ids=type)
def test_bytes_are_not_copied(data: Any) -> None:
    array = as_u8(data)
    assert array.tobytes() == b"abc"
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))


def test_wider_elements_are_seen_as_their_bytes() -> None:
    assert as_u8(np.arange(3, dtype="<u4").reshape(3, 1)).shape == (12,)
    assert as_u8(b"").shape == as_u8(np.empty((0, 4))).shape == (0,)


@pytest.mark.parametrize("data", ["text", None, 5, [1, 2], np.arange(8, dtype=np.uint8)[::2]], ids=repr)
def test_what_is_not_bytes_is_one_error_everywhere(data: Any) -> None:
    calls = (as_u8, layout.parse, lambda x: layout.crop(x, 1), bkvd.is_delta, bkvd.parent_id, lambda x: bkvd.encode(x, b"", 1))
    for call in calls:
        with pytest.raises(InvalidInputError, match=r"not bytes|not contiguous"):
            call(data)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1279, 1280, 1281, 5000])
def test_a_common_prefix_ends_at_the_first_difference(n: int) -> None:
    a = np.arange(5000, dtype=np.int32)
    b = a.copy()
    b[n:] += 1
    assert common_prefix_length(a, b) == n
    assert common_prefix_length(a[:n], a) == common_prefix_length(a, a[:n]) == n


@pytest.mark.parametrize("value", [-1, 11, 1.0, "5", None, True, np.bool_(True), 1 << 80, [3]], ids=repr)
def test_an_integer_error_names_the_argument_and_both_bounds(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^n_layer must be an integer in \[0, 10\]; it is "):
        check_int(value, "n_layer", 0, 10)


def test_integers_of_numpy_are_integers() -> None:
    assert [check_int(x, "x", 0, 9) for x in (np.int8(3), np.uint64(4), 5)] == [3, 4, 5]


def test_large_bounds_are_written_as_powers() -> None:
    for low, high, says in ((0, U64, "[0, 2^64 - 1]"), (-I64 - 1, I64, "[-2^63, 2^63 - 1]"), (1, 1 << 40, "[1, 2^40]")):
        with pytest.raises(InvalidInputError) as caught:
            check_int("x", "x", low, high)
        assert says in caught.value.message


def test_the_public_calls_name_their_bounds() -> None:
    with kvstore.Store(":memory:") as store:
        for says, call in (
            ("n_system must be an integer in [0, 3]", lambda: store.put([1, 2, 3], b"x", n_system=4)),
            ("ttl must be at least 1 second", lambda: store.put([1, 2, 3], b"x", ttl=0)),
            ("0 is not the id of an entry", lambda: store.get(0)),
            ("family must be an integer in [0, 2^64 - 1]", lambda: store.entries(family=-1)),
            ("min_saved must be an integer in [0, 2^63 - 1]", lambda: bkvd.encode(b"x", b"x", 1, min_saved=-1)),
            ("parent_id must be an integer in [0, 2^64 - 1]", lambda: bkvd.encode(b"x", b"x", 1 << 64)),
            ("hits must be an integer in [0, 2^64 - 1]", lambda: MetaBlock(1, hits=-1).pack()),
        ):
            with pytest.raises(InvalidInputError) as caught:
                call()
            assert says in str(caught.value)


def test_the_error_of_a_long_value_is_short() -> None:
    with kvstore.Store(":memory:") as store, pytest.raises(InvalidInputError) as caught:
        store.get("long " * 80)  # type: ignore[arg-type]
    assert len(caught.value.message) < 150

"""Chains of deltas: decoded link by link and composed, beside the oracle, with blocks of every size and broken links."""

from __future__ import annotations

import contextlib
import itertools
import struct
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import pytest
from bkvd_states import exact, real_pairs, state
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import bkvd
from kvstore.errors import DeltaError, InvalidInputError, KVStoreError

ABSENT = "its prefix is not in the cache"
FIRST_ID = 100


def literal(data: bytes) -> bytes:
    return struct.pack("<BQ", 1, len(data)) + data


def copy(at: int, n: int) -> bytes:
    return struct.pack("<BQQ", 0, at, n)


def delta_of(parent: bytes, parent_id: int, ops: list[bytes], size: int, **fields: int) -> bytes:
    header = {"parent_id": parent_id, "parent_size": len(parent), "parent_hash": oracle.sample_hash(parent), "size": size}
    return oracle.HEADER.pack(oracle.MAGIC, 1, *{**header, **fields}.values(), len(ops)) + b"".join(ops)


def random_chain(rng: np.random.Generator, depth: int, kind: str, most: int = 400) -> tuple[list[bytes], list[bytes]]:
    """(links, states) from the root to the leaf; the first link is the root's state, each other one a delta."""
    states = [rng.bytes(int(rng.integers(0, most)))]
    links = [states[0]]
    for i in range(1, depth):
        parent, ops, parts = states[-1], [], []
        at = 0
        for _ in range(int(rng.integers(0, 12)) if kind != "tiny" else 40):
            n = {"tiny": 1, "any": int(rng.integers(0, 60))}.get(kind, int(rng.integers(0, 30)))
            if rng.random() < 0.35 or not parent:
                parts.append(rng.bytes(min(n, 9)))
                ops.append(literal(parts[-1]))
            else:
                start = int(rng.integers(0, len(parent) + 1)) if kind != "rows" else at
                n = min(n, len(parent) - start)
                at = start + n
                parts.append(parent[start : start + n])
                ops.append(copy(start, n))
        if kind == "rows":
            parts.append(parent[at:])
            ops.append(copy(at, len(parent) - at))
        if kind == "any" and parent and sum(map(len, parts)) < most:
            parts.append(parent)
            ops.append(copy(0, len(parent)))
        states.append(b"".join(parts))
        links.append(delta_of(parent, FIRST_ID + i - 1, ops, len(states[-1])))
    return links, states


def in_blocks(data: bytes, n: int) -> Iterator[Any]:
    """Blocks of n bytes, one memory for all: nothing of an earlier block is left when the next one is asked for."""
    buffer = exact(bytes(min(n, len(data)) or 1))
    for at in range(0, len(data), n):
        part = data[at : at + n]
        buffer[: len(part)] = np.frombuffer(part, np.uint8)
        yield buffer[: len(part)]
        buffer[:] = 0xEE


def decoded(links: list[bytes], size: int, n: int = 1 << 20, *, ids: bool = True) -> bytes:
    chain = bkvd.ChainDecoder(size)
    for i in reversed(range(len(links))):
        chain.feed("bkvd" if i else "full", len(links[i]), in_blocks(links[i], n), id=FIRST_ID + i if ids else None)
        assert chain.parent_id == (bkvd.parent_id(links[i]) if i else 0)
    return chain.finish().tobytes()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    depth=st.integers(1, 60),
    kind=st.sampled_from(["any", "rows", "tiny", "short"]),
    n=st.one_of(st.integers(1, 70), st.just(1 << 20)),
)
def test_random_chains(seed: int, depth: int, kind: str, n: int) -> None:
    links, states = random_chain(np.random.default_rng(seed), depth, kind)
    assert decoded(links, len(states[-1]), n) == states[-1]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32), depth=st.integers(3, 20), kind=st.sampled_from(["any", "rows", "tiny", "short"]))
def test_composed_deltas_decode_as_their_two_links(seed: int, depth: int, kind: str) -> None:
    """Down to one delta against the root; the header is the lower link's, neighbouring ops of one kind are one."""
    links, states = random_chain(np.random.default_rng(seed), depth, kind)
    top = links[-1]
    for i in range(len(links) - 2, 0, -1):
        made = bkvd.compose(exact(top), exact(links[i]))
        assert made is not None
        top = made.data.tobytes()
        below = bkvd.header(links[i])
        assert bkvd.header(top) == (*below[:3], len(states[-1]), made.n_ops)
        assert bkvd.decode(exact(top), exact(states[i - 1]), below.parent_id).tobytes() == states[-1]
        ops = list(oracle.ops(top))
        assert made.shared == sum(n for code, _, n in ops if code == oracle.COPY)
        for (code, at, n), (code2, at2, _) in itertools.pairwise(ops):
            assert code != code2 or (code == oracle.COPY and at + n != at2)
        assert decoded([states[i - 1], top], len(states[-1]), ids=False) == states[-1]


def encoded_chain(states: list[bytes], *, content: bool = False) -> list[bytes]:
    links = [states[0]]
    for i in range(1, len(states)):
        delta = bkvd.encode(states[i], states[i - 1], FIRST_ID + i - 1, min_saved=0, content=content)
        assert delta is not None
        links.append(delta.data.tobytes())
    return links


def shuffled(rng: np.random.Generator, pos: Any) -> Any:
    """In another order of stretches of 20."""
    stretches = [pos[at : at + 20] for at in range(0, len(pos), 20)]
    return np.concatenate([stretches[i] for i in rng.permutation(len(stretches))])


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", ["grown", "turned", "shuffled"])
def test_chains_of_states(order: str, transposed: bool, content: bool) -> None:
    """A conversation by turns, with its cells in the order of positions, in that of a cache after reuse, or in any."""
    rng = np.random.default_rng(5)
    states = []
    for n in (40, 55, 56, 90, 130, 131, 170):
        pos = np.arange(n)
        pos = {"grown": pos, "turned": np.roll(pos, n // 3), "shuffled": shuffled(rng, pos)}[order]
        states.append(state(3, pos.tolist(), pos.tolist(), row=64, transposed=transposed))
    links = encoded_chain(states, content=content)
    for n in (1, 50, 1000, 1 << 20):
        assert decoded(links, len(states[-1]), n) == states[-1]
    top = links[-1]
    for link in links[-2:0:-1]:
        made = bkvd.compose(top, link)
        assert made is not None
        top = made.data.tobytes()
    assert bkvd.decode(top, states[0], FIRST_ID).tobytes() == states[-1]


@pytest.mark.parametrize("pair", real_pairs(), ids=lambda pair: pair[0].name)
def test_chains_of_real_states(pair: Any) -> None:
    """A state against its prefix, and again against itself."""
    prefix, child = (path.read_bytes() for path in pair)
    first = bkvd.encode(child, prefix, FIRST_ID, min_saved=0, content=True)
    again = bkvd.encode(child, child, FIRST_ID + 1, min_saved=0)
    if first is None or again is None:
        pytest.skip("nothing is shared")
    links = [prefix, first.data.tobytes(), again.data.tobytes()]
    assert decoded(links, len(child), 4096) == child
    made = bkvd.compose(again.data, first.data)
    assert made is not None
    assert bkvd.decode(made.data, prefix, FIRST_ID).tobytes() == child


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_large_outputs(seed: int) -> None:
    """More than 8 MiB, so that large pieces go around the cache: pieces of all sizes, at all alignments."""
    rng = np.random.default_rng(seed)
    states = [rng.bytes(3 << 20)]
    links = [states[0]]
    for i in range(1, 5):
        parent, ops, parts, total = states[-1], [], [], 0
        while total < (9 << 20) + seed:
            n = int(rng.choice([1, 17, 63, 64, 65, 200, 385, 4095, 4096, 5000, 8191, 20000, 70001, 1 << 20]))
            if rng.random() < 0.4:
                parts.append(rng.bytes(n))
                ops.append(literal(parts[-1]))
            else:
                at = int(rng.integers(0, len(parent) - n + 1))
                parts.append(parent[at : at + n])
                ops.append(copy(at, n))
            total += n
        states.append(b"".join(parts))
        links.append(delta_of(parent, FIRST_ID + i - 1, ops, total))
    for n in (1000 + seed, 100_000, 1 << 30):
        assert decoded(links, len(states[-1]), n) == states[-1]


def naive(links: list[bytes], size: int) -> bytes | str:
    """What a chain gives if no hash is checked: the state, or the first message from the leaf to the root."""
    expected, parents = size, []
    for level, link in enumerate(links[:0:-1]):
        if len(link) < oracle.HEADER.size or link[:8] != oracle.HEADER.pack(oracle.MAGIC, 1, 0, 0, 0, 0, 0)[:8]:
            return "not a shared state"
        _, _, id_, parent_size, _, claimed, n_ops = oracle.HEADER.unpack_from(link)
        if level and claimed != expected:
            return ABSENT
        zeros = bytes(parent_size)
        fixed = oracle.HEADER.pack(oracle.MAGIC, 1, id_, parent_size, oracle.sample_hash(zeros), claimed, n_ops)
        answer = oracle.decode(fixed + link[44:], zeros, id_)
        if isinstance(answer, str) or len(answer) != expected:
            return answer if isinstance(answer, str) else "size mismatch"
        expected = parent_size
        parents.append(fixed[:24])
    out = links[0]
    if len(out) != expected:
        return ABSENT if len(links) > 1 else "size mismatch"
    for link in links[1:]:
        _, _, id_, parent_size, _, claimed, n_ops = oracle.HEADER.unpack_from(link)
        fixed = oracle.HEADER.pack(oracle.MAGIC, 1, id_, parent_size, oracle.sample_hash(out), claimed, n_ops)
        answer = oracle.decode(fixed + link[44:], out, id_)
        assert isinstance(answer, bytes)
        out = answer
    return out


def tried(links: list[bytes], size: int, n: int) -> bytes | str:
    """`decoded`, or the message of its error; the samples are given as the headers have them, so they are not checked."""
    chain = bkvd.ChainDecoder(size)
    sample = None
    try:
        for i in reversed(range(len(links))):
            chain.feed("bkvd" if i else "full", len(links[i]), in_blocks(links[i], n), sample=sample)
            sample = bkvd.header(links[i]).parent_hash if i else None
        return chain.finish().tobytes()
    except DeltaError as error:
        return error.message
    except MemoryError:
        return "too large"


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    depth=st.integers(2, 5),
    kind=st.sampled_from(["any", "rows", "tiny"]),
    n=st.sampled_from([1, 7, 40, 1 << 20]),
    changes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 1 << 16), st.sampled_from("bqoct"), st.integers(0, 255)),
        min_size=1,
        max_size=3,
    ),
)
def test_a_broken_link_gives_the_message_of_decode(
    seed: int, depth: int, kind: str, n: int, changes: list[tuple[int, int, str, int]]
) -> None:
    """Bytes, length fields, op counts and the ends of links; what still decodes gives the bytes that decode gives."""
    links, states = random_chain(np.random.default_rng(seed), depth, kind)
    for which, where, what, value in changes:
        bad = bytearray(links[which % depth])
        if which % depth == 0 or len(bad) < 45:
            del bad[len(bad) - value % (len(bad) + 1) :]
        elif what == "t":
            del bad[where % len(bad) :]
        elif what == "o":
            struct.pack_into("<I", bad, 40, max(0, struct.unpack_from("<I", bad, 40)[0] + value % 5 - 2))
        elif what == "c":
            bad += bytes([value])
        elif what == "q" and len(bad) >= 53:
            values = [0, 1, 1 << 31, 1 << 63, (1 << 64) - 1]
            struct.pack_into("<Q", bad, 45 + where % (len(bad) - 52), values[value % 5])
        else:
            at = 32 + where % (len(bad) - 32)
            bad[at] = value
        links[which % depth] = bytes(bad)
    assert tried(links, len(states[-1]), n) == naive(links, len(states[-1]))


@settings(max_examples=300, deadline=None)
@given(
    ops=st.lists(st.binary(max_size=120), min_size=1, max_size=4),
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, (1 << 64) - 1)), min_size=5, max_size=5),
    n=st.integers(1, 60),
    n_ops=st.integers(0, 9),
    headers=st.booleans(),
)
def test_garbage_gives_an_error_or_bytes(ops: list[bytes], sizes: list[int], n: int, n_ops: int, headers: bool) -> None:
    links = [b"0123456789" * 20]
    for i, (ops_, size, parent_size) in enumerate(zip(ops, sizes, sizes[1:], strict=False)):
        head = oracle.HEADER.pack(oracle.MAGIC, 1, i, parent_size, 0, size, n_ops)
        links.insert(1, head + ops_ if headers else ops_)
    answer = tried(links, sizes[0], n)
    assert isinstance(answer, str) or len(answer) == sizes[0]
    for child, parent in zip(links[2:], links[1:], strict=False):
        with contextlib.suppress(DeltaError):
            bkvd.compose(exact(child), exact(parent))


def test_a_size_that_the_leaf_does_not_add_up_to_allocates_nothing() -> None:
    parent = bytes(1000)
    tracemalloc.start()
    try:
        for size in (1 << 30, 1 << 45, (1 << 64) - 1):
            for link in (delta_of(parent, 1, [copy(0, 1000), literal(b"x")], 1001), delta_of(parent, 1, [copy(0, 1)], size)):
                with pytest.raises(DeltaError, match="size mismatch"):
                    bkvd.ChainDecoder(size).feed("bkvd", len(link), [link])
            with pytest.raises(DeltaError, match="size mismatch"):
                bkvd.ChainDecoder(size).feed("full", len(parent), [parent])
            with pytest.raises(DeltaError, match="truncated"):
                bkvd.ChainDecoder(size).feed("full", size, [parent])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    huge = 1 << 62
    link = delta_of(parent, 1, [copy(0, huge)], huge, parent_size=huge)
    with pytest.raises(MemoryError, match=f"{huge} bytes"):
        bkvd.ChainDecoder(huge).feed("bkvd", len(link), [link])


def test_memory_grows_with_the_ops_not_with_the_pieces() -> None:
    """2,000 copies of a state that is 2,000 literals of one byte: four million pieces."""
    n = 2000
    root = bytes(range(256)) * 8
    middle = delta_of(root, 1, [copy((7 * i) % len(root), 1) for i in range(n)], n)
    of_middle = bytes(root[(7 * i) % len(root)] for i in range(n))
    leaf = delta_of(of_middle, 2, [copy(i % 3, n - i % 3) for i in range(n)], sum(n - i % 3 for i in range(n)))
    expected = b"".join(of_middle[i % 3 :] for i in range(n))
    tracemalloc.start()
    try:
        assert decoded([root, middle, leaf], len(expected), ids=False) == expected
        assert tracemalloc.get_traced_memory()[1] < 2 * len(expected) + (1 << 20)  # with the copy that tobytes makes
    finally:
        tracemalloc.stop()
    assert bkvd.compose(leaf, middle, limit=len(expected)) is None


def test_ranges_that_end_far_apart_are_sorted_and_read_once() -> None:
    """Copies back to front, inside each other, and many times the same."""
    rng = np.random.default_rng(1)
    root = rng.bytes(5000)
    for spans in (
        [(at, 7) for at in range(4990, -1, -10)],
        [(at, 5000 - 2 * at) for at in range(2500)],
        [(0, 5000 - at) for at in range(0, 5000, 50)],
        [(int(a), int(b)) for a, b in zip(rng.integers(0, 4000, 3000), rng.integers(0, 1000, 3000), strict=True)],
        [(17, 100)] * 300,
    ):
        middle = b"".join(root[at : at + n] for at, n in spans)
        links = [root, delta_of(root, FIRST_ID, [copy(at, n) for at, n in spans], len(middle))]
        top, left = [], len(middle)
        while left > 0:
            n = min(left, int(rng.integers(1, 200)))
            left -= n
            top.append((left, n))
        leaf = b"".join(middle[at : at + n] for at, n in top)
        links.append(delta_of(middle, FIRST_ID + 1, [copy(at, n) for at, n in top], len(leaf)))
        assert decoded(links, len(leaf), 100) == leaf


@pytest.mark.parametrize("n", [0, 1, 1000, (1 << 20) + 1, (2 << 20) - 1, 2 << 20, (2 << 20) + 5, 3 << 20])
def test_the_root_must_be_the_state_that_the_delta_was_made_from(n: int) -> None:
    root = np.random.default_rng(n).integers(0, 256, n, np.uint8).tobytes()
    link = delta_of(root, 7, [copy(0, n), literal(b"end")], n + 3)
    assert decoded([root, link], n + 3, 70_001, ids=False) == root + b"end"
    wrong: list[tuple[bytes, dict[str, int]]] = [
        (root, {"id": 8}),
        (root, {"sample": oracle.sample_hash(root) ^ 1}),
        (root + b"x", {}),
    ]
    wrong += [(root[:-1] + bytes([root[-1] ^ 1]), {}), (bytes([root[0] ^ 1]) + root[1:], {}), (root[1:], {})] if n else []
    for other, given_ in wrong:
        chain = bkvd.ChainDecoder(n + 3)
        chain.feed("bkvd", len(link), [link])
        assert chain.parent_id == 7
        with pytest.raises(DeltaError, match=ABSENT) as caught:
            chain.feed("full", len(other), in_blocks(other, 70_001), **given_)
        assert caught.value.wrong_parent


def test_a_link_must_be_the_one_that_the_link_before_was_made_from() -> None:
    links, states = random_chain(np.random.default_rng(3), 3, "any")
    middle = bkvd.header(links[1])
    for given_, link in (
        ({"id": FIRST_ID}, links[1]),
        ({"sample": oracle.sample_hash(states[1]) ^ 1}, links[1]),
        ({}, delta_of(states[0], middle.parent_id, [literal(bytes(len(states[1]) + 1))], len(states[1]) + 1)),
    ):
        chain = bkvd.ChainDecoder(len(states[2]))
        chain.feed("bkvd", len(links[2]), [links[2]], id=5, sample=5)  # nothing to compare with
        with pytest.raises(DeltaError, match=ABSENT):
            chain.feed("bkvd", len(link), [link], **given_)
        with pytest.raises(InvalidInputError):
            chain.feed("bkvd", len(links[1]), [links[1]])


def test_wrong_use() -> None:
    links, states = random_chain(np.random.default_rng(4), 3, "any")
    size = len(states[2])
    chain = bkvd.ChainDecoder(size)
    for bad in ("delta", "whole", ""):
        with pytest.raises(InvalidInputError):
            chain.feed(bad, 1, [b"x"])
    with pytest.raises(InvalidInputError):
        chain.feed("full", -1, [])
    with pytest.raises(DeltaError, match=ABSENT):
        chain.finish()
    chain.feed("bkvd", len(links[2]), [links[2]])
    with pytest.raises(DeltaError, match=ABSENT):
        chain.finish()
    chain.feed("bkvd", len(links[1]), [links[1]])
    chain.feed("full", len(links[0]), [links[0]])
    with pytest.raises(InvalidInputError, match="ended"):
        chain.feed("full", len(links[0]), [links[0]])
    assert chain.finish().tobytes() == states[2]
    for bad_blocks in (["text"], [None], 5):
        with pytest.raises((InvalidInputError, TypeError)):
            bkvd.ChainDecoder(size).feed("bkvd", 44, bad_blocks)  # type: ignore[arg-type]
    for wrong in (-1, 1 << 64, "5", None):
        with pytest.raises(InvalidInputError):
            bkvd.ChainDecoder(wrong)  # type: ignore[arg-type]
    broken = bkvd.ChainDecoder(size)

    def failing() -> Iterator[bytes]:
        yield links[2][:50]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="gone"):
        broken.feed("bkvd", len(links[2]), failing())
    with pytest.raises(InvalidInputError):
        broken.feed("bkvd", len(links[2]), [links[2]])


@pytest.mark.parametrize(
    "blocks", [lambda b: [b[:-1]], lambda b: [b, b"x"], lambda b: [b[:50], b"", b[50:], b""], lambda b: []]
)
def test_blocks_that_are_not_the_stored_bytes(blocks: Callable[[bytes], list[bytes]]) -> None:
    root = bytes(range(200))
    link = delta_of(root, 1, [copy(0, 200), literal(b"abcdef")], 206)
    given_ = blocks(link)
    chain = bkvd.ChainDecoder(206)
    if b"".join(given_) == link:
        chain.feed("bkvd", len(link), given_)
    else:
        with pytest.raises(DeltaError):
            chain.feed("bkvd", len(link), given_)
        return
    other = blocks(root)
    chain.feed("full", len(root), other)
    assert chain.finish().tobytes() == root + b"abcdef"


def test_a_whole_state_alone() -> None:
    data = np.random.default_rng(2).bytes(100_000)
    for n in (1, 1000, 1 << 20):
        chain = bkvd.ChainDecoder(len(data) if n > 1 else 3)
        chain.feed("full", len(data) if n > 1 else 3, in_blocks(data if n > 1 else data[:3], n))
        assert chain.finish().tobytes() == (data if n > 1 else data[:3])
    for stored, blocks in ((100_000, [data[:-1]]), (100_000, [data, b"x"]), (99_999, [data[:-1]])):
        with pytest.raises(DeltaError):
            bkvd.ChainDecoder(100_000).feed("full", stored, blocks)
    empty = bkvd.ChainDecoder(0)
    empty.feed("full", 0, [])
    assert empty.finish().tobytes() == b""


def test_header() -> None:
    link = delta_of(b"parent", 9, [copy(0, 6)], 6)
    header = bkvd.header(link[:44])
    assert header == bkvd.Header(9, 6, oracle.sample_hash(b"parent"), 6, 1) == bkvd.header(np.frombuffer(link, np.uint8))
    assert header.pack() == link[:44]
    for bad in (b"", link[:43], b"x" + link):
        with pytest.raises(DeltaError, match="not a shared state"):
            bkvd.header(bad)


def test_composing_broken_deltas() -> None:
    """The child is looked at first; the messages are those of decode."""
    base = bytes(range(256)) * 4
    middle = bytes(range(100)) + base[:300]
    parent = delta_of(base, 3, [literal(middle[:100]), copy(0, 300)], 400)
    child = delta_of(middle, 4, [copy(50, 200), literal(b"new"), copy(0, 50), copy(390, 10)], 263)
    made = bkvd.compose(child, parent)
    assert made is not None
    assert (made.n_ops, made.shared) == (4, 160)
    assert bkvd.decode(made.data, base, 3).tobytes() == middle[50:250] + b"new" + middle[:50] + middle[390:]
    for n in range(len(child)):
        expected = oracle.decode(child[:n], middle, 4)
        with pytest.raises(DeltaError, match=f"^{expected}$"):
            bkvd.compose(exact(child[:n]), exact(parent))
    for n in range(len(parent)):
        expected = oracle.decode(parent[:n], base, 3)
        with pytest.raises(DeltaError, match=f"^{expected}$"):
            bkvd.compose(exact(child), exact(parent[:n]))
    other = delta_of(base, 3, [literal(middle[:100]), copy(0, 299)], 399)
    with pytest.raises(DeltaError, match=ABSENT):
        bkvd.compose(child, other)
    size = made.data.size
    assert bkvd.compose(child, parent, limit=size) is not None
    assert [bkvd.compose(child, parent, limit=n) for n in (0, 43, 44, size - 1)] == [None] * 4
    with pytest.raises(InvalidInputError):
        bkvd.compose(child, parent, limit=-1)


@pytest.mark.parametrize("platform", [sys.platform, "other"])
def test_composing_large_deltas(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result outgrows its first room many times; elsewhere than on Linux it grows by realloc."""
    monkeypatch.setattr(sys, "platform", platform)
    rng = np.random.default_rng(6)
    base, data = rng.bytes(50_000), rng.bytes(300_000)
    pieces = [(int(at), int(n)) for at, n in zip(rng.integers(0, 40_000, 3000), rng.integers(0, 90, 3000), strict=True)]
    middle = data + b"".join(base[at : at + n] for at, n in pieces)
    parent = delta_of(base, 3, [literal(data), *(copy(at, n) for at, n in pieces)], len(middle))
    spans = [(int(at), int(n)) for at, n in zip(rng.integers(0, 200_000, 40), rng.integers(0, 200_000, 40), strict=True)]
    out = b"".join(middle[at : at + n] for at, n in spans)
    child = delta_of(middle, 4, [copy(at, n) for at, n in spans], len(out))
    made = bkvd.compose(child, parent)
    assert made is not None
    assert bkvd.decode(made.data, base, 3).tobytes() == out


def test_bytes_that_change_meanwhile_give_an_error_or_bytes() -> None:
    links, states = random_chain(np.random.default_rng(8), 6, "any")
    moving, stop, failures = [exact(link) for link in links], threading.Event(), []

    def disturb() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            link = moving[int(rng.integers(1, len(moving)))]
            link[int(rng.integers(40, link.size))] = int(rng.integers(0, 256))

    def read() -> None:
        try:
            for i in range(1500):
                chain = bkvd.ChainDecoder(len(states[-1]))
                try:
                    for k in reversed(range(len(moving))):
                        chain.feed("bkvd" if k else "full", moving[k].size, [moving[k]])
                    chain.finish()
                    bkvd.compose(moving[-1], moving[-2])
                except (KVStoreError, MemoryError):
                    moving[1 + i % 5][:] = np.frombuffer(links[1 + i % 5], np.uint8)
        except BaseException as error:  # noqa: BLE001 - the main thread fails for it
            failures.append(error)

    threads = [threading.Thread(target=target) for target in (read, disturb)]
    for thread in threads:
        thread.start()
    threads[0].join()
    stop.set()
    threads[1].join()
    assert not failures

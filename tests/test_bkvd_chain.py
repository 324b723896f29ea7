"""Chains of deltas: decoded link by link and composed, beside the oracle, with blocks of every size and broken links."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
from bkvd_states import exact
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import bkvd

Op = tuple[int, int, int]  # a COPY of (offset, length), or a literal of that length
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

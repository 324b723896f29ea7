"""The search by content: what it must find, and that no data keeps it for ever."""

from __future__ import annotations

from pathlib import Path

import bkvd_states
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from bkvd_states import Bytes, exact, state

from kvstore import bkvd

MIN_RUN = 4096
PAIRS = bkvd_states.real_pairs()


def window_hashes(data: Bytes) -> npt.NDArray[np.uint64]:
    """A polynomial hash of every window of MIN_RUN bytes."""
    factor = 0x9E3779B97F4A7C15 | 1
    powers = np.full(data.size + 1, factor, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((data.astype(np.uint64) + 1) * powers[:-1])])
    inverse = np.full(max(data.size - MIN_RUN + 1, 0), pow(factor, -1, 1 << 64), np.uint64)
    if inverse.size:
        inverse[0] = 1
    return (sums[MIN_RUN:] - sums[:-MIN_RUN])[: inverse.size] * np.cumprod(inverse)


def missed(delta: Bytes, parent: Bytes) -> int:
    """Windows of MIN_RUN bytes inside a literal that the parent has too."""
    known = np.sort(window_hashes(parent)) if parent.size >= MIN_RUN else np.zeros(1, np.uint64)
    whole, count = parent.tobytes(), 0
    for code, at, n in oracle.ops(delta.tobytes()):
        if code == oracle.LITERAL and n >= MIN_RUN:
            literal = delta[at : at + n]
            hashes = window_hashes(literal)
            at_or_after = np.minimum(np.searchsorted(known, hashes), known.size - 1)
            for i in np.flatnonzero(known[at_or_after] == hashes):
                count += literal[i : i + MIN_RUN].tobytes() in whole
    return count


def encoded(child: bytes | Bytes, parent: bytes | Bytes, min_saved: int = 0) -> Bytes:
    c, p = exact(child), exact(parent)
    delta = bkvd.encode(c, p, 7, min_saved=min_saved, content=True)
    assert delta is not None
    shared = sum(n for code, _, n in oracle.ops(delta.data.tobytes()) if code == oracle.COPY)
    assert shared == delta.shared
    assert len(list(oracle.ops(delta.data.tobytes()))) == delta.n_ops
    assert bkvd.decode(delta.data, p, 7).tobytes() == c.tobytes()
    plain = bkvd.encode(c, p, 7, min_saved=min_saved)
    assert plain is None or plain.data.size >= delta.data.size
    return delta.data


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].stem)
def test_real_states(pair: tuple[Path, Path]) -> None:
    parent, child = (np.fromfile(path, np.uint8) for path in pair)
    plain = bkvd.encode(child, parent, 7, min_saved=16)
    if plain is not None:
        assert bkvd.decode(plain.data, parent, 7).tobytes() == child.tobytes()
    delta = bkvd.encode(child, parent, 7, min_saved=0, content=True)
    if delta is None:
        assert plain is None
        return
    assert bkvd.decode(delta.data, parent, 7).tobytes() == child.tobytes()
    assert missed(delta.data, parent) == 0


def tails(rng: np.random.Generator, kind: str) -> tuple[bytes, bytes]:
    """Bytes behind a parent's and a child's cache: pieces of the parent's, moved, among the child's own."""
    size = 1 << 16

    def noise(n: int) -> bytes:
        return rng.bytes(n)

    parent = noise(size)
    if kind == "zeros between":
        parent = b"".join(noise(int(rng.integers(50, 3000))) + bytes(int(rng.integers(10, 6000))) for _ in range(16))
    elif kind == "constants":
        parent = b"".join(noise(900) + bytes(noise(2)) * int(rng.integers(5, 4000)) for _ in range(16))
    elif kind == "repeated rows":
        parent = noise(576) * 100 + noise(5000) + noise(96) * 50
    elif kind == "few values":
        parent = rng.integers(0, 2, size, np.uint8).tobytes()
    child = b""
    for _ in range(12):
        start, n = int(rng.integers(0, len(parent) - 100)), int(rng.integers(3000, 9000))
        child += noise(int(rng.integers(0, 5000))) + parent[start : start + n]
    return parent, child


@pytest.mark.parametrize("kind", ["noise", "zeros between", "constants", "repeated rows", "few values"])
@pytest.mark.parametrize("seed", range(8))
def test_moved_pieces(kind: str, seed: int) -> None:
    p, c = tails(np.random.default_rng([seed, len(kind)]), kind)
    parent, child = state(1, range(5), range(5), tail=p), state(1, range(7), range(7), tail=c)
    delta = encoded(child, parent)
    assert missed(delta, exact(parent)) == 0


@pytest.mark.parametrize("shift", [0, 1, 7, 100, 703, 4095])
@pytest.mark.parametrize("n", [4096, 4097, 5000, 70000])
def test_one_piece_of_a_large_parent(shift: int, n: int) -> None:
    """Large enough for the wide strides, and at the ends of the literal."""
    rng = np.random.default_rng([shift, n])
    p = rng.bytes(9 << 20)
    start = 1_000_003 + shift
    for before, after in ((0, 0), (5000 + shift, 10), (1, 4096)):
        c = rng.bytes(before) + p[start : start + n] + rng.bytes(after)
        parent, child = state(1, range(5), range(5), tail=p), state(1, range(5), range(5), tail=c)
        found = [op for op in oracle.ops(encoded(child, parent).tobytes()) if op[0] == oracle.COPY and op[2] >= n]
        assert len(found) == 1


@pytest.mark.parametrize("transposed", [False, True], ids=["by rows", "transposed"])
@pytest.mark.parametrize("filler", ["noise", "zeros", "much"])
def test_some_gaps_of_many(transposed: bool, filler: str) -> None:
    """Every layer has new rows; in some of them stand pieces of the parent. The others stay as the plain rule has them."""
    n_layer, row, old, new = 10, 1024, 500, 800
    size = (new - old) * row
    parent = exact(state(1, range(old), range(old), n_layer=n_layer, row=row, transposed=transposed))
    child = exact(state(1, range(new), range(new), n_layer=n_layer, row=row, transposed=transposed))
    assert parent.size > 8 << 20  # the wide strides
    rng = np.random.default_rng(len(filler))
    pieces = 0
    for layer in range(n_layer):
        end = 16 + 12 * new + 8 + (layer + 1) * (12 + new * row)
        gap = child[end - size : end]
        if filler == "zeros" and layer % 2:
            gap[:70000] = 0
        if filler == "much" or layer % 4 == 1:
            at, n = int(rng.integers(0, parent.size - size)), int(rng.integers(MIN_RUN, size // 2))
            place = int(rng.integers(0, size - n))
            gap[place : place + n] = parent[at : at + n]
            pieces += n
    delta = encoded(child, parent)
    plain = bkvd.encode(child, parent, 7, min_saved=0)
    assert plain is not None
    assert 0 <= plain.data.size - delta.size - pieces < 12 * old + 4096 * n_layer


def test_shorter_runs_are_left() -> None:
    rng = np.random.default_rng(5)
    p = rng.bytes(50000)
    c = rng.bytes(3000) + p[1000 : 1000 + MIN_RUN - 1] + rng.bytes(9000)
    parent, child = state(1, range(5), range(5), tail=p), state(1, range(5), range(5), tail=c)
    plain = bkvd.encode(child, parent, 7, min_saved=0)
    assert plain is not None
    assert encoded(child, parent).tobytes() == plain.data.tobytes()


def test_adjacent_copies_become_one() -> None:
    """What follows the last row of the parent on both sides belongs to the same copy."""
    p = np.random.default_rng(6).bytes(20000)
    blob = state(1, range(300), range(300), tail=p)
    assert [op[0] for op in oracle.ops(encoded(blob, blob).tobytes())].count(oracle.COPY) <= 6
    delta = bkvd.encode(blob, blob, 7, min_saved=0, content=True)
    assert delta is not None
    last = list(oracle.ops(delta.data.tobytes()))[-1]
    assert last[0] == oracle.COPY
    assert last[2] >= 20000 + 300 * 16


def test_a_refusal_holds_with_content() -> None:
    blob = state(1, range(5), range(5), tail=bytes(9000))
    other = struct_count(blob, 2)
    assert bkvd.encode(other, blob, 7, min_saved=0, content=True) is None
    assert bkvd.encode(blob, blob, 7, min_saved=len(blob), content=True) is None


def struct_count(blob: bytes, n: int) -> bytes:
    """The blob with another stream count: one more stream, empty, before the first."""
    return blob[:8] + n.to_bytes(4, "little") + bytes(4) + blob[12:]


@pytest.mark.parametrize(
    "piece",
    [b"\0", b"\1\2", b"\0\0\x80\x3f", bytes(range(12)), bytes(range(100)) * 2 + b"\7", bytes(4000) + bytes(range(96))],
    ids=["zeros", "two bytes", "four bytes", "period 12", "period 201", "period 4096"],
)
def test_no_data_makes_it_hang(piece: bytes) -> None:
    """A search that tried every place for every other would compare 10^13 bytes here, and not be done for hours."""
    size = 8 << 20
    p, c = (piece * (size // len(piece) + 1))[:size], (piece * (size // len(piece) + 1))[3 : size - 5]
    rng = np.random.default_rng(1)
    spoiled = np.frombuffer(c, np.uint8).copy()
    spoiled[::2003] = rng.integers(0, 256, spoiled[::2003].size)
    for tail in (c, spoiled.tobytes()):
        parent, child = state(1, range(5), range(5), tail=p), state(1, range(5), range(5), tail=tail)
        delta = bkvd.encode(child, parent, 7, min_saved=0, content=True)
        assert delta is not None
        assert bkvd.decode(delta.data, parent, 7).tobytes() == child

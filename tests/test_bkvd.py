"""The codec beside the oracle, on small random states, broken deltas and every kind of input."""

from __future__ import annotations

import array
import mmap
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from bkvd_states import exact, state
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import bkvd
from kvstore.errors import DeltaError, InvalidInputError, KVStoreError

ID = 0x1122334455667788
ROW_MAJOR = (state(3, range(40), range(40), row=64), state(3, range(50), range(50), row=64))


def both(child: bytes, parent: bytes, **options: Any) -> None:
    """The codec answers as the oracle does, and its delta decodes."""
    c, p = exact(child), exact(parent)
    mine, theirs = bkvd.encode(c, p, ID, **options), oracle.encode(child, parent, ID, **options)
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        assert (mine.data.tobytes(), mine.shared, mine.n_ops) == theirs
        assert bkvd.decode(exact(mine.data), p, ID).tobytes() == child
        assert oracle.decode(theirs[0], parent, ID) == child
    found = bkvd.encode(c, p, ID, content=True, **options)
    if found is not None:
        assert bkvd.decode(exact(found.data), p, ID).tobytes() == child
        assert mine is None or found.data.size <= mine.data.size


cells = st.lists(st.integers(0, 12), min_size=0, max_size=14)


@settings(max_examples=300, deadline=None)
@given(
    parent_pos=st.lists(st.integers(0, 12), max_size=13, unique=True),
    child_pos=cells,
    changed=st.sets(st.integers(0, 12), max_size=4),
    double=st.booleans(),
    shape=st.sampled_from(
        [(16, False, 2, 0), (64, False, 2, 8), (32, True, 2, 0), (32, True, 4, 0), (8, True, 2, 12), (8, True, 4, 8)]
    ),
    layers=st.integers(1, 3),
    tails=st.tuples(st.binary(max_size=40), st.binary(max_size=40)),
)
def test_small_states(
    parent_pos: list[int],
    child_pos: list[int],
    changed: set[int],
    double: bool,
    shape: tuple[int, bool, int, int],
    layers: int,
    tails: tuple[bytes, bytes],
) -> None:
    row, transposed, element, ext = shape
    if double and parent_pos:
        parent_pos = [*parent_pos, parent_pos[0]]
    common: dict[str, Any] = {"n_layer": layers, "row": row, "transposed": transposed, "element": element, "ext": ext}
    parent = state(1, parent_pos, parent_pos, tail=tails[0], **common)
    child = state(1, child_pos, [p + 100 * (p in changed) for p in child_pos], tail=tails[1], **common)
    for options in ({"cell_ext": ext}, {}):
        both(child, parent, min_saved=0, **options)
        both(child, parent, min_saved=300, **options)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_larger_states(transposed: bool, seed: int) -> None:
    """Shuffled, interleaved, partly changed cells; several growths of the output, several lines of each loop."""
    rng = np.random.default_rng(seed)
    n = 400
    parent_pos = rng.permutation(n) if seed % 2 else np.roll(np.arange(n), 100)
    child_pos = np.concatenate([np.arange(0, n, 2), np.arange(1, n + 50, 2)]) if seed % 3 else np.arange(n + 37)
    content = child_pos + 1000 * (rng.random(child_pos.size) < 0.1 * (seed % 3))
    common: dict[str, Any] = {"n_layer": 3, "row": 32, "transposed": transposed}
    parent = state(2, parent_pos.tolist(), parent_pos.tolist(), **common)
    child = state(2, child_pos.tolist(), content.tolist(), **common)
    both(child, parent, min_saved=0)
    both(child, parent, min_saved=1000)


@pytest.mark.parametrize("width", [2, 4])
def test_narrow_cells_that_differ_and_agree_by_chance(width: int) -> None:
    """Few values, so that runs of equal and of different cells of all lengths occur at all alignments."""
    rng = np.random.default_rng(width)
    blobs = []
    for _ in range(2):
        blob = bytearray(state(1, range(300), range(300), row=64, transposed=True, element=width))
        at = len(blob) - 64 * 300
        for _ in range(200):
            start, n = int(rng.integers(at, len(blob) - 200)), int(rng.integers(1, 200))
            blob[start : start + n] = bytes([int(rng.integers(0, 3))]) * n
        blobs.append(bytes(blob))
    both(blobs[1], blobs[0], min_saved=0)


def valid() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    child, parent = ROW_MAJOR[1], ROW_MAJOR[0]
    delta = bkvd.encode(child, parent, ID, min_saved=0)
    assert delta is not None
    return delta.data.copy(), exact(parent)


def answer(delta: bytes, parent: Any) -> bytes | str:
    try:
        return bkvd.decode(exact(delta), parent, ID).tobytes()
    except DeltaError as error:
        return error.message
    except MemoryError:
        return "too large"


def test_every_truncation() -> None:
    delta, parent = valid()
    whole = delta.tobytes()
    for n in [*range(150), *range(150, len(whole), 31)]:
        assert answer(whole[:n], parent) == oracle.decode(whole[:n], parent.tobytes(), ID)


def test_mutations() -> None:
    """Single bytes, length fields and op counts, in the ops alone (the header has its own test)."""
    rng = np.random.default_rng(9)
    delta, parent = valid()
    whole, base = delta.tobytes(), parent.tobytes()
    values = [0, 1, len(base), len(base) + 1, 1 << 31, 1 << 63, (1 << 64) - 1]
    for _ in range(1500):
        bad = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(32, min(len(bad) - 8, 400)))
            if rng.random() < 0.5:
                bad[at] = int(rng.integers(0, 256))
            else:
                struct.pack_into("<Q", bad, at, values[int(rng.integers(0, len(values)))])
        assert answer(bytes(bad), parent) == oracle.decode(bytes(bad), base, ID)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 6), st.integers(0, 400))
def test_garbage(ops: bytes, n_ops: int, size: int) -> None:
    parent = exact(b"0123456789" * 10)
    header = oracle.HEADER.pack(oracle.MAGIC, 1, ID, parent.size, bkvd.sample_hash(parent), size, n_ops)
    for blob in (ops, header + ops):
        assert answer(blob, parent) == oracle.decode(blob, parent.tobytes(), ID)
        assert bkvd.is_delta(blob) == (bkvd.size(blob) == size and blob.startswith(header))
        assert bkvd.encode(blob, blob, ID, min_saved=0) is None


def test_header() -> None:
    delta, parent = valid()
    assert (bkvd.is_delta(delta), bkvd.parent_id(delta), bkvd.size(delta)) == (True, ID, len(ROW_MAJOR[1]))
    for blob in (b"", b"BKVD", ROW_MAJOR[0], delta[:43].copy()):
        assert (bkvd.is_delta(blob), bkvd.parent_id(blob), bkvd.size(blob)) == (False, 0, 0)
    for base, id_ in ((None, ID), (parent, ID + 1), (parent[1:].copy(), ID), (b"", ID)):
        with pytest.raises(DeltaError, match="its prefix is not in the cache"):
            bkvd.decode(delta, base, id_)
    with pytest.raises(DeltaError, match="its prefix is not in the cache"):
        bkvd.decode(delta, parent, ID, parent_hash=1)
    assert bkvd.decode(delta, parent, ID, parent_hash=bkvd.sample_hash(parent)).tobytes() == ROW_MAJOR[1]
    other = bkvd.encode(ROW_MAJOR[1], parent, ID, min_saved=0, parent_hash=bkvd.sample_hash(parent))
    assert other is not None
    assert other.data.tobytes() == delta.tobytes()


@pytest.mark.parametrize("n", [0, 1, 7, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 5])
def test_sample_hash(n: int) -> None:
    data = np.random.default_rng(n).integers(0, 256, n, np.uint8)
    assert bkvd.sample_hash(data) == oracle.sample_hash(data.tobytes())


def test_inputs_of_every_kind(tmp_path: Path) -> None:
    child, parent = ROW_MAJOR[1], ROW_MAJOR[0]
    first = bkvd.encode(child, parent, ID, min_saved=0)
    assert first is not None
    kinds: list[Any] = [
        bytes,
        bytearray,
        memoryview,
        lambda b: array.array("B", b),
        lambda b: np.frombuffer(b, np.uint8),
    ]
    for make in kinds:
        delta = bkvd.encode(make(child), make(parent), ID, min_saved=0)
        assert delta is not None
        assert delta.data.tobytes() == first.data.tobytes()
        assert bkvd.decode(make(delta.data.tobytes()), make(parent), ID).tobytes() == child
    path = tmp_path / "delta"
    path.write_bytes(first.data.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert bkvd.is_delta(mapped)
        assert bkvd.decode(mapped, parent, ID).tobytes() == child
    even = np.frombuffer(parent, np.uint8)[::2]
    for bad in ("text", 5, None, even, memoryview(parent)[::-1]):
        with pytest.raises(InvalidInputError):
            bkvd.encode(child, bad, ID)
        with pytest.raises(InvalidInputError):
            bkvd.is_delta(bad)
    for options in ({"min_saved": -1}, {"parent_hash": 1 << 64}):
        with pytest.raises(InvalidInputError):
            bkvd.encode(child, parent, ID, **{"min_saved": 0, **options})
    for id_ in (-1, 1 << 64, "1"):
        with pytest.raises(InvalidInputError):
            bkvd.encode(child, parent, id_)  # type: ignore[arg-type]


def test_out() -> None:
    delta, parent = valid()
    child = ROW_MAJOR[1]
    out = np.zeros(len(child), np.uint8)
    assert bkvd.decode(delta, parent, ID, out) is out
    assert out.tobytes() == child
    buffer = bytearray(len(child))
    assert bkvd.decode(delta, parent, ID, out=buffer).size == len(child)
    assert buffer == child
    for bad in (np.zeros(len(child) - 1, np.uint8), np.zeros(len(child) + 1, np.uint8), bytes(len(child))):
        with pytest.raises(InvalidInputError):
            bkvd.decode(delta, parent, ID, bad)
    with pytest.raises(InvalidInputError, match=f"{len(child) - 1}.*{len(child)}"):
        bkvd.decode(delta, parent, ID, out[1:])
    joint = np.zeros(parent.size + len(child), np.uint8)
    joint[: parent.size] = parent
    with pytest.raises(InvalidInputError, match="shares memory"):
        bkvd.decode(delta, joint[: parent.size], ID, joint[10 : 10 + len(child)])


@pytest.mark.parametrize("offset", range(0, 64, 7))
def test_streaming_copy(offset: int) -> None:
    """Large outputs go around the cache, line by line: ops of all lengths, outputs at all alignments."""
    rng = np.random.default_rng(offset)
    parent = rng.integers(0, 256, 1 << 20, np.uint8)
    ops, parts, total = [], [], 0
    while total < 9 << 20:
        n = int(rng.choice([0, 1, 3, 15, 63, 64, 65, 200, 5000, 1 << 20]))
        if rng.random() < 0.3:
            n = min(n, 200)
            parts.append(rng.bytes(n))
            ops.append(struct.pack("<BQ", 1, n) + parts[-1])
        else:
            at = int(rng.integers(0, parent.size - n + 1))
            parts.append(parent[at : at + n].tobytes())
            ops.append(struct.pack("<BQQ", 0, at, n))
        total += n
    header = oracle.HEADER.pack(oracle.MAGIC, 1, ID, parent.size, bkvd.sample_hash(parent), total, len(ops))
    whole = np.zeros(total + 128, np.uint8)
    start = offset + (-whole.ctypes.data) % 64
    out = whole[start : start + total]
    assert bkvd.decode(header + b"".join(ops), parent, ID, out) is out
    assert out.tobytes() == b"".join(parts)
    assert not whole[:start].any()
    assert not whole[start + total :].any()


def test_an_output_far_larger_than_its_delta() -> None:
    """17 KB of valid ops that add up to 4 GiB: checked as a whole before anything is allocated."""
    parent, n_ops = np.zeros(1 << 22, np.uint8), 1 << 10
    op = struct.pack("<BQQ", 0, 0, parent.size)
    size = n_ops * parent.size
    header = oracle.HEADER.pack(oracle.MAGIC, 1, ID, parent.size, bkvd.sample_hash(parent), size, n_ops)
    with pytest.raises(InvalidInputError, match=f"{size}"):
        bkvd.decode(header + op * n_ops, parent, ID, np.zeros(1, np.uint8))
    with pytest.raises(DeltaError, match="size mismatch"):
        bkvd.decode(header + op * n_ops + b"\0", parent, ID)


def test_no_room_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    delta, parent = valid()

    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(bkvd.np, "empty", full)
    with pytest.raises(MemoryError, match=f"{len(ROW_MAJOR[1])} bytes"):
        bkvd.decode(delta, parent, ID)


def test_the_output_without_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux the output grows by realloc."""
    monkeypatch.setattr(bkvd.sys, "platform", "other")
    big = state(4, range(300), range(300), row=2048), state(4, range(400), range(400), row=2048)
    theirs = oracle.encode(big[1], big[0], ID, min_saved=0)
    mine = bkvd.encode(big[1], big[0], ID, min_saved=0)
    assert theirs is not None
    assert mine is not None
    assert mine.data.tobytes() == theirs[0]
    test_larger_states(True, 2)


def test_threads() -> None:
    """The calls release the GIL and share nothing; a delta that changes meanwhile gives an error or bytes, no crash."""
    child, parent = ROW_MAJOR[1], ROW_MAJOR[0]
    first = bkvd.encode(child, parent, ID, min_saved=0)
    assert first is not None
    moving, stop, failures = first.data.copy(), threading.Event(), []

    def work() -> None:
        try:
            for _ in range(200):
                delta = bkvd.encode(child, parent, ID, min_saved=0, content=True)
                assert delta is not None
                assert bkvd.decode(delta.data, parent, ID).tobytes() == child
        except BaseException as error:  # noqa: BLE001 - the main thread fails for it
            failures.append(error)

    def disturb() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            moving[int(rng.integers(40, moving.size))] = int(rng.integers(0, 256))

    def read() -> None:
        try:
            for _ in range(2000):
                try:
                    bkvd.decode(moving, parent, ID)
                except (KVStoreError, MemoryError):
                    moving[:] = first.data
        except BaseException as error:  # noqa: BLE001 - the main thread fails for it
            failures.append(error)

    threads = [threading.Thread(target=target) for target in (work, work, read, disturb)]
    for thread in threads:
        thread.start()
    for thread in threads[:3]:
        thread.join()
    stop.set()
    threads[3].join()
    assert not failures

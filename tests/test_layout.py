"""layout.parse: real states, every measured layout rebuilt, old forms, tails, malformed and hostile input."""

from __future__ import annotations

import csv
import json
import mmap
import os
import random
import re
import struct
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path

import layout_states as build
import numpy as np
import pytest
from workkit import calls

from kvstore import layout
from kvstore.errors import LayoutError
from kvstore.layout.reader import MAX_TENSORS

STATES = Path(__file__).parent / "data" / "states"
FOLDERS = [STATES, *(Path(f) for f in [os.environ.get("KVSTORE_TEST_STATES")] if f)]
EXPECTED = []
for folder in FOLDERS:
    for name, want in json.loads((folder / "expected.json").read_text()).items():
        EXPECTED.append((folder / name, want))
with (STATES / "layouts.tsv").open() as f:
    TABLE = list(csv.DictReader(f, delimiter="\t"))
PREFIX = list(range(99))


@pytest.mark.parametrize(("path", "want"), EXPECTED, ids=[f"{p.parent.name}/{p.name}" for p, _ in EXPECTED])
def test_real_states(path: Path, want: dict) -> None:
    blob = path.read_bytes()
    found = layout.parse(blob)
    assert found.as_dict() == want
    for part in found.attention:
        if part.n_cells:
            assert layout.parse(blob, part.cell_ext).as_dict() == want


@pytest.mark.parametrize("row", TABLE, ids=[r["name"] for r in TABLE])
def test_every_measured_layout(row: dict) -> None:
    """Structure and byte counts of every row of the measured tables, in each envelope."""
    parts, partial, want, _ = build.described(row["parts"])
    state = b"".join(parts)
    stated = re.match(r"(\d+) hdr \+ ([\d +]+?)(?: SCKP\((\d+)\))? = (\d+)$", row["bytes"])
    assert stated
    n_checkpoints = int(stated.group(3) or 0)
    sizes = [int(x) for x in stated.group(2).split("+")]
    appendix = b""
    if n_checkpoints:
        appendix = build.checkpoints(*((94 + i, 0, 93 + i, b"".join(partial)) for i in range(n_checkpoints)))
        assert len(appendix) == sizes.pop()
    assert [len(p) for p in parts] == sizes
    blob = build.slot_file(state + appendix, version=int(row["file"][1]), packed=row["tokens"] == "packed")
    assert len(blob) == int(stated.group(4))
    head = len(blob) - len(state) - len(appendix)

    found = layout.parse(blob)
    got = found.as_dict()
    assert (found.envelope, found.n_tokens, found.file_version) == ("slot file", 99, int(row["file"][1]))
    assert [{k: v for k, v in p.items() if k not in ("from", "to")} for p in got["parts"]] == want
    assert (found.state_at, found.state_size) == (head, len(state))
    assert [(p.start, p.stop) for p in found.parts] == [
        (head + sum(sizes[:i]), head + sum(sizes[: i + 1])) for i in range(len(sizes))
    ]
    assert (found.checkpoints is not None) == bool(n_checkpoints)
    assert found.tail is None
    assert found.can_crop == all(p["kind"] == "attention" and sum(p["cells"]) == 99 for p in want)
    for envelope, bare in (("sequence", state + appendix), ("sequence, with header", build.HEADER + state)):
        again = layout.parse(bare)
        assert again.envelope == envelope
        assert [p.stop - p.start for p in again.parts] == sizes
        assert again.n_positions == 99


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("envelope", ["slot", "memory", "context", "outputs"])
def test_states_before_the_stream_count(bare: bool, v_trans: bool, envelope: str) -> None:
    whole = envelope in ("context", "outputs")
    ids = () if bare and not whole else (0,)
    state = build.attention(
        PREFIX,
        rot=None,
        n_stream=None,
        table=build.cell_table(PREFIX, ids=ids),
        v_trans=v_trans,
        k=(3, "f16", 256),
        v=(3, "f16", 256),
    )
    blob = {
        "slot": build.slot_file(state, version=2, packed=False),
        "memory": state,
        "context": build.context(state),
        "outputs": build.context(state, outputs=(2, 2 * 50, 0)),
    }[envelope]
    found = layout.parse(blob)
    assert [p.kind for p in found.parts] == ["attention"]
    (part,) = found.attention
    assert (part.n_stream, part.cells, part.n_layer, part.v_layers, part.stop) == (None, (99,), 3, 3, len(blob))
    assert found.stream_counts == (1,)
    assert found.can_crop == (not whole)
    assert found.state_size == len(state)


def test_two_caches_before_the_stream_count() -> None:
    table = build.cell_table(PREFIX)
    state = b"".join(build.attention(PREFIX, rot=None, n_stream=None, table=table, label=50 * i) for i in (0, 1))
    for blob in (state, build.slot_file(state, version=2, packed=False), build.context(state, outputs=(1, 50, 0))):
        found = layout.parse(blob)
        assert [(p.n_stream, p.cells, p.v_layers) for p in found.attention] == [(None, (99,), 2)] * 2
        assert found.stream_counts == (1, 1)


def test_old_recurrent_and_old_f32_attention() -> None:
    found = layout.parse(build.recurrent(layers=3, n=3))
    assert found.parts[0].kind == "recurrent"
    f32 = build.attention(
        PREFIX, rot=None, n_stream=None, table=build.cell_table(PREFIX, ids=()), k=(2, "f32", 64), v=(2, "f32", 64)
    )
    assert layout.parse(f32).parts[0].kind == "attention"


def test_context_with_outputs_logits_and_several_sequences() -> None:
    table = build.cell_table(PREFIX, ids=(0, 1)) + build.cell_table(range(99, 134), ids=(0,))
    pos = list(range(134))
    state = build.attention(pos, table=table, rot=None) + build.recurrent((133, 98), ids=((0,), (1, 2)))
    for outputs in (None, (0, 0, 0), (1, 50, 16)):
        blob = build.context(state, b"jamba", outputs)
        found = layout.parse(blob)
        assert found.envelope == "context"
        assert found.state_at == len(blob) - len(state)
        assert [p.cells for p in found.parts] == [(134,), (2,)]
        assert found.attention[0].n_seq is None
        np.testing.assert_array_equal(found.streams[0].pos, pos)
        assert not found.can_crop
    session = struct.pack("<III2i", 0x6767736E, 9, 2, 5, 6) + build.context(state, b"jamba", (1, 50, 16))
    found = layout.parse(session)
    assert (found.envelope, found.n_tokens, found.file_version) == ("session file", 2, 9)


@pytest.mark.parametrize("ext", [0, 8, 12])
@pytest.mark.parametrize("rot", [None, (0, 0), (64, 0), (4096, 128)])
@pytest.mark.parametrize("v", [None, (2, "f16", 128)])
@pytest.mark.parametrize("n", [1, 2, 64])
def test_every_combination_is_told_apart(ext: int, rot: tuple | None, v: tuple | None, n: int) -> None:
    for v_trans in (False, True):
        state = build.attention(range(n), ext=ext, rot=rot, v=v, v_trans=v_trans)
        for tail in ((), (build.recurrent(),), (build.attention(range(n), ext=ext, rot=rot, v=v, label=50),)):
            found = layout.parse(state + b"".join(tail))
            part = found.attention[0]
            assert (part.cell_ext, part.rotation, part.v_layers, part.n_layer) == (ext, rot, 2 if v else 0, 2)
            assert len(found.parts) == 1 + len(tail)
            assert part.stop == len(state)


def test_streams_hold_positions_extra_bytes_and_sections() -> None:
    pos = [5, 3, 0, 1, 2, 4]
    state = build.attention(pos, ext=12, v_trans=True, n_stream=3, slot=1)
    found = layout.parse(np.frombuffer(build.HEADER + state, np.uint8))
    empty, stream, _ = found.streams
    assert (empty.n_cells, empty.sections, found.stream_counts, found.n_cells) == (0, (), (3,), 6)
    assert stream.pos.dtype == np.int32
    assert stream.pos.flags.c_contiguous
    assert stream.ext.flags.c_contiguous
    np.testing.assert_array_equal(stream.pos, pos)
    assert stream.ext[1].tobytes() == struct.pack("<iii", 3, 3, 1003)
    kinds = [(s.width, s.rows, s.type, s.is_v) for s in stream.sections]
    assert kinds == [(128, 1, 1, False)] * 2 + [(2, 64, 1, True)] * 2
    blob = build.HEADER + state
    for layer in (0, 1):
        at = stream.sections[layer].start
        assert blob[at : at + 128 * 6] == build.rows(layer, pos, 128).tobytes()
    assert stream.stop == stream.sections[-1].start + 64 * 2 * 6 == found.parts[0].stop - 4


def test_anything_bytes_like_is_taken_and_not_copied() -> None:
    state = build.attention(PREFIX)
    for blob in (state, bytearray(state), memoryview(state), np.frombuffer(state, np.uint8)):
        assert layout.parse(blob).size == len(state)
    assert layout.parse(np.frombuffer(state, "<u4")).size == len(state)
    with pytest.raises(TypeError):
        layout.parse(np.frombuffer(state, np.uint8)[::2])


def test_override_of_the_extra_bytes() -> None:
    table = b"".join(struct.pack("<iI16si", p, 1, bytes([p]) * 16, 0) for p in PREFIX)
    state = build.attention(PREFIX, table=table)
    with pytest.raises(LayoutError):
        layout.parse(state)
    assert layout.parse(state, 16).attention[0].cell_ext == 16
    with pytest.raises(LayoutError):
        layout.parse(state, -1)
    with pytest.raises(LayoutError):
        layout.parse(build.attention(PREFIX, ext=8), 0)


def test_sequence_ids() -> None:
    for n_seq in (1, 2, 3, 256):
        state = build.attention(PREFIX, table=build.cell_table(PREFIX, n_seq=n_seq))
        assert layout.parse(build.HEADER + state).attention[0].n_seq == n_seq
    for bad in ((256,), (-1,), tuple(range(257))):
        with pytest.raises(LayoutError):
            layout.parse(build.attention(PREFIX, table=build.cell_table(PREFIX, ids=bad)))


# tails


def test_an_unknown_tail_is_kept() -> None:
    noise = np.random.default_rng(3).bytes(10_000)
    for state in (build.attention(PREFIX), build.attention(PREFIX, v=None), build.attention(PREFIX) * 2):
        found = layout.parse(state + noise)
        assert found.tail == (len(state), len(state) + 10_000)
        assert found.parts[-1].stop == len(state)
        assert not found.can_crop
        assert found.as_dict()["tail"] == [len(state), len(state) + 10_000]
    unknown = layout.parse(build.attention(PREFIX) + b"SCKP" + struct.pack("<II", 2, 0) + noise)
    assert unknown.tail is not None
    assert unknown.checkpoints is None


def test_a_damaged_part_is_no_tail() -> None:
    first, second, tail = build.attention(PREFIX), build.attention(PREFIX[67:], label=50), build.recurrent()
    appendix = build.checkpoints((95, 94, 94, tail))
    for keep, more in ((first, second), (first, tail), (first + tail, appendix)):
        for cut in (30, 200, len(more) // 2):
            with pytest.raises(LayoutError, match=r"cut short|not what its header says"):
                layout.parse(keep + more[:cut])
    with pytest.raises(LayoutError):
        layout.parse(first + tail + appendix + b"\0")
    with pytest.raises(LayoutError):
        layout.parse(first[: len(first) - 100])  # inside V: not an MLA cache with a tail


# malformed, each a patch of a good state (no header, 300 cells of 12 bytes, words from 3608 on)

GOOD = build.attention(range(300), rot=None, k=(4, "f16", 256), v=(4, "f16", 256))
MALFORMED = {
    "stream_count_zero": (0, "<I", 0),
    "stream_count_65": (0, "<I", 65),
    "cell_count_huge": (4, "<I", 2**32 - 1),
    "cell_count_one_more": (4, "<I", 301),
    "negative_position": (8, "<i", -1),
    "sequence_count_0": (12, "<I", 0),
    "sequence_count_257": (12, "<I", 257),
    "sequence_id_256": (16, "<i", 256),
    "v_trans_2": (3608, "<I", 2),
    "layer_count_0": (3612, "<I", 0),
    "layer_count_4097": (3612, "<I", 4097),
    "type_unknown": (3616, "<i", 77),
    "type_negative": (3616, "<i", -1),
    "row_size_0": (3620, "<Q", 0),
    "row_size_odd": (3620, "<Q", 255),
    "row_size_huge": (3620, "<Q", (1 << 24) + 2),
    "row_size_overflows": (3620, "<Q", 2**63),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    assert layout.parse(GOOD).n_cells == 300
    at, fmt, value = MALFORMED[name]
    blob = bytearray(GOOD)
    struct.pack_into(fmt, blob, at, value)
    with pytest.raises(LayoutError) as e:
        layout.parse(blob)
    assert "byte" in str(e.value)


def test_malformed_transposed_v() -> None:
    good = build.attention(range(300), rot=None, v_trans=True, k=(1, "f16", 256), v=(1, "f16", 256))
    at = layout.parse(good).streams[0].sections[1].start - 12
    for values in ((1, 4, 128), (1, 0, 128), (8, 34, 4), (1, 2, 0), (1, 2, (1 << 20) + 1), (1, 2, 129)):
        blob = bytearray(good)
        struct.pack_into("<iII", blob, at, *values)
        try:
            found = layout.parse(blob)
        except LayoutError:
            continue
        assert found.tail is not None  # the header no longer reads as one: bytes after a cache without V


def test_error_says_what_is_wrong() -> None:
    blob = bytearray(GOOD)
    struct.pack_into("<I", blob, 3608, 2)
    with pytest.raises(LayoutError, match="transposed V is 2"):
        layout.parse(blob)
    with pytest.raises(LayoutError, match="empty"):
        layout.parse(b"")
    with pytest.raises(LayoutError, match="token list"):
        layout.parse(build.slot_file(GOOD)[:50])


# hostile


@pytest.mark.parametrize("name", ["llama-2026.10.11549-fa-prefix.bin", "jamba-2026.10.11549-fa-prefix.bin"])
def test_truncation_anywhere(name: str) -> None:
    blob = (STATES / name).read_bytes()
    ends = [*range(3000), *range(3000, len(blob), 97), *range(len(blob) - 50, len(blob))]
    for end in ends:
        try:
            found = layout.parse(blob[:end])
        except LayoutError:
            continue
        assert found.parts[-1].stop <= end


def test_garbage_and_mutations() -> None:
    r = random.Random(5)
    blobs = [p.read_bytes() for p, _ in EXPECTED[::7]]
    worst = 0
    for _ in range(1500):
        kind = r.random()
        if kind < 0.2:
            blob = bytearray(r.randbytes(r.randrange(1, 400)))
        elif kind < 0.4:
            blob = bytearray(struct.pack("<100i", *(r.choice([0, 1, 2, 3, 64, 99, -1]) for _ in range(100))))
        else:
            blob = bytearray(r.choice(blobs))
            for _ in range(r.randrange(1, 5)):
                blob[r.randrange(min(len(blob), 3000))] = r.randrange(256)
        worst = max(worst, calls(lambda blob=blob: parsed(blob)))  # type: ignore[misc]
    assert worst < 40_000  # a good state takes some thousand


def parsed(blob: bytes) -> None:
    """Parses, and looks at what comes of it; a state that is not understood will do as well."""
    with suppress(LayoutError):
        found = layout.parse(blob)
        for s in found.streams:
            assert all(x.start + x.width * x.rows * s.n_cells <= len(blob) for x in s.sections)
        found.as_dict()


@pytest.mark.parametrize("word", [0, 1, 2, 0x00010001, 0xFFFFFFFF])
def test_megabytes_of_one_word(word: int) -> None:
    """Neither the work nor the memory grows with them."""
    for head in (b"", build.HEADER, struct.pack("<I", 5) + b"llama"):
        work = []
        for n in (5_000, 5_000_000):
            blob = head + np.full(n, word, "<u4").tobytes()
            tracemalloc.start()
            work.append(calls(lambda blob=blob: refused(blob)))  # type: ignore[misc]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 8 << 20
        assert work[1] <= work[0] + 100


def refused(blob: bytes) -> None:
    with pytest.raises(LayoutError):
        layout.parse(blob)


def test_many_cells_with_differing_sequence_counts_take_bounded_work() -> None:
    """Each cell is looked at a few times, by however many candidates; beyond a million none is."""
    cell = struct.pack("<iIi", 1, 1, 0) + struct.pack("<iIii", 1, 2, 0, 1)
    for n, most in ((1_000, 100_000), (200_000, 200_000 * 40), (1_200_000, 10_000)):
        blob = build.context(struct.pack("<II", 1, n) + cell * (n // 2) + struct.pack("<II", 5, 5))
        assert calls(lambda blob=blob: refused(blob)) < most  # type: ignore[misc]


def test_many_tensors_and_checkpoints_take_bounded_work() -> None:
    tensor = struct.pack("<iQ", 1, 2) + b"ab"
    stream = struct.pack("<IiIiII", 1, 0, 1, 0, 0, 2048) + tensor * 2048
    small = struct.pack("<IIiIiII", 1, 1, 0, 1, 0, 0, 1) + tensor
    recurrent = struct.pack("<IiIII", 1, 0, 0, 0, 4096) + (struct.pack("<iQ", 0, 4) + b"abcd") * 8000
    for blob in (
        (struct.pack("<I", 64) + stream * 64) * 4 + b"end",
        small * 100_000,
        recurrent,
        small + b"SCKP" + struct.pack("<II", 1, 60_000) + bytes(40) * 60_000 + b"end",
        small + b"SCKP" + struct.pack("<II", 1, 2**32 - 1) + bytes(4000),
    ):
        assert calls(lambda blob=blob: refused(blob)) < 16 * MAX_TENSORS  # type: ignore[misc]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="pages are counted where Linux says so")
def test_tensor_bytes_are_not_read() -> None:
    """Of a state in a mapped file, only the pages with headers and cells are touched."""
    n, layers, row = 15_000, 64, 4096
    tensor = row * n
    cells = np.zeros(n, "<i4,<u4,<i4")
    cells["f0"], cells["f1"] = np.arange(n), 1
    head = struct.pack("<II", 1, n) + cells.tobytes() + struct.pack("<II", 0, layers)
    with tempfile.TemporaryFile() as file:
        file.truncate(len(head) + 2 * layers * (12 + tensor))
        file.write(head)
        for layer in range(2 * layers):
            file.seek(len(head) + layer * (12 + tensor))
            file.write(struct.pack("<iQ", 1, row))
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            assert layout.parse(mapped).attention[0].v_layers == layers
            (resident,) = [
                int(line.split()[1])
                for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
                for line in block.splitlines()
                if line.startswith("Rss:") and f" {os.fstat(file.fileno()).st_ino} " in block.splitlines()[0] + " "
            ]
            del mapped
    assert resident * 1024 < len(head) + 2 * layers * (1 << 17)  # of 7.8 GB

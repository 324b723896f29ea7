"""Recurrent parts: where they end, the one row without a type word, and damaged parts whose end would be a guess."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import layout_states as build
import numpy as np
import pytest

from kvstore import layout
from kvstore.errors import LayoutError

STATES = Path(__file__).parent / "data" / "states"
PREFIX = list(range(99))
EXTRA = [(0, 4608), (1, 4608), (2, 4608), (2, 2), (0, 3072), (1, 1 << 16)]


def cache(n: int = 99, rot: tuple[int, int] | None = (0, 0), **more: object) -> bytes:
    return build.attention(range(n), k=(1, "f16", 128), v=(1, "f16", 128), ext=12, rot=rot, **more)  # type: ignore[arg-type]


def indexer(n: int = 99, rot: tuple[int, int] | None = (0, 0), row: int = 256, **more: object) -> bytes:
    return build.attention(range(n), k=(1, "f16", row), v=None, ext=12, rot=rot, label=70, **more)  # type: ignore[arg-type]


def rec(pos: int = 98, extra: tuple[int, int] | None = (1, 4608), **more: object) -> bytes:
    return build.recurrent((pos,), layers=4, n=3, r=3072, s=32768, extra=extra, **more)  # type: ignore[arg-type]


def spans(blob: bytes) -> list[tuple[str, int]]:
    found = layout.parse(blob)
    assert found.tail is None
    assert found.parts[-1].stop == found.state_at + found.state_size
    return [(p.kind, p.stop - p.start) for p in found.parts]


@pytest.mark.parametrize("extra", [None, *EXTRA])
@pytest.mark.parametrize("rot", [None, (0, 0), (64, 0)])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_the_extra_row_in_every_envelope(extra: tuple | None, rot: tuple | None, before: int, after: int) -> None:
    parts = [*[cache(rot=rot)] * before, rec(extra=extra), *[indexer(rot=rot)] * after]
    kinds = ["attention"] * before + ["recurrent"] + ["attention"] * after
    want = [(kind, len(part)) for kind, part in zip(kinds, parts, strict=True)]
    state = b"".join(parts)
    appendix = build.checkpoints((60, 0, 59, rec(59, extra)))
    whole = [*parts[:before], rec(extra=extra, ids=((0,),)), *parts[before + 1 :]]
    for blob in (state, build.HEADER + state, build.slot_file(state), build.slot_file(state + appendix), state + appendix):
        assert spans(blob) == want
        part = next(p for p in layout.parse(blob).parts if p.kind == "recurrent")
        assert (part.n_layer, part.n_tensors, part.rows, part.extra_row) == (4, 3, (3072, 32768), extra)
        assert not layout.parse(blob).can_crop
    session = struct.pack("<III2i", 0x6767736E, 11, 2, 5, 6)
    for outputs in (None, (1, 50, 16)):
        blob = build.context(b"".join(whole), b"qwen4exp", outputs)
        assert [kind for kind, _ in spans(blob)] == kinds
        assert spans(session + blob) == spans(blob)


@pytest.mark.parametrize("extra", [None, *EXTRA])
def test_a_context_of_two_sequences(extra: tuple | None) -> None:
    table = build.cell_table(PREFIX, ext=12, ids=(0, 1))
    both = build.recurrent((98, 40), layers=4, n=3, r=3072, s=32768, ids=((0,), (1,)), extra=extra)
    state = cache(table=table) + both + indexer(table=table)
    found = layout.parse(build.context(state, b"qwen4exp"))
    assert [p.cells for p in found.parts] == [(99,), (2,), (99,)]
    assert found.parts[1].stop - found.parts[1].start == len(both)
    split = [build.attention(range(n), n_stream=None, rot=(0, 0))[:] for n in (30, 40)]
    blob = build.context(struct.pack("<I", 2) + b"".join(split) + both)
    assert [p.cells for p in layout.parse(blob).parts] == [(30, 40), (2,)]


@pytest.mark.parametrize("extra", [(0, 4608), (2, 4608)])
def test_the_extra_row_where_there_is_no_s(extra: tuple) -> None:
    part = rec(extra=extra)
    no_s = build.recurrent((98,), layers=4, n=3, r=1024, s=0, extra=extra)
    for kept in (part, no_s):
        for after in (b"", indexer(), indexer(100)):
            want = [("recurrent", len(kept))] + ([("attention", len(after))] if after else [])
            assert spans(kept + after) == want


def test_a_row_that_is_none() -> None:
    """More rows than one, one of odd or no bytes, or one among the S tensors, is not understood, nor is its end guessed."""
    good = rec()
    at = good.index(struct.pack("<Q", 4608))
    for row in (0, 4607, (1 << 24) + 2, 4600, 2**63):
        blob = good[:at] + struct.pack("<Q", row) + good[at + 8 :]
        for state in (blob, cache() + blob, cache() + blob + indexer()):
            with pytest.raises(LayoutError):
                layout.parse(state)
    twice = good[:at] + good[at : at + 8 + 4608] + good[at:]
    behind_s = rec(extra=None) + good[at : at + 8 + 4608]
    for blob in (twice, behind_s + indexer()):
        with pytest.raises(LayoutError):
            layout.parse(cache() + blob)


def test_crop_and_convert_keep_the_extra_row() -> None:
    def state(n: int, **more: object) -> bytes:
        return cache(n, **more) + rec(n - 1) + indexer(n, **more)

    appendix = build.checkpoints((40, 0, 39, rec(39)), (60, 0, 59, rec(59)))
    for wrap in (lambda s, n: s, lambda s, n: build.HEADER + s, build.slot_file):
        blob = wrap(state(99) + appendix, 99)
        assert layout.parse(blob).crop_points == (40, 60)
        assert layout.crop(blob, 40).tobytes() == wrap(state(40), 40)
        assert layout.crop(blob, 60).tobytes() == wrap(state(60) + build.checkpoints((40, 0, 39, rec(39))), 60)
        assert layout.crop(blob, 99).tobytes() == blob
    foreign = state(99) + build.checkpoints((40, 0, 39, rec(39, extra=(0, 4608))))
    with pytest.raises(LayoutError, match="checkpoint there"):
        layout.crop(foreign, 40)
    turned = state(99, v_trans=True) + appendix
    assert layout.convert(state(99) + appendix, turned).tobytes() == turned
    assert layout.convert(turned, state(99) + appendix).tobytes() == state(99) + appendix
    old = cache(rot=None) + rec() + indexer(rot=None)
    assert layout.convert(old, build.HEADER + state(3)).tobytes() == build.HEADER + state(99)
    with pytest.raises(LayoutError, match="recurrent states differ"):
        layout.convert(state(99), cache(3) + rec(2, extra=None) + indexer(3))
    with pytest.raises(LayoutError, match="different parts"):
        layout.convert(state(99), cache(3) + rec(2))
    with pytest.raises(LayoutError, match="different parts"):
        layout.convert(build.attention(PREFIX, rot=None) * 2, build.attention(PREFIX[:3]), checkpoints=True)


def test_real_states_in_other_envelopes() -> None:
    blob = (STATES / "qwen4exp-2026.10.11549-seq-prefix.bin").read_bytes()
    sizes = spans(blob)
    assert [s for _, s in sizes] == [27768, 112228, 27756]
    assert spans(blob[8:]) == spans(build.slot_file(blob[8:])) == sizes
    assert layout.convert(blob, blob).tobytes() == blob
    part = layout.parse(blob).parts[1]
    assert isinstance(part, layout.RecurrentPart)
    appendix = build.checkpoints((99, 0, 98, blob[part.start : part.stop]))
    assert spans(build.slot_file(blob[8:] + appendix)) == sizes
    assert layout.parse(blob[8 : part.stop]).parts[1].stop == part.stop - 8


# ends


def test_r_and_s_of_one_size_end_only_where_nothing_can_be_missing() -> None:
    """n_layer counts all layers: with fewer tensors of one size, a part cut inside R would look whole."""
    whole = build.recurrent(layers=3, n=3, r=64, s=64)
    assert spans(whole) == [("recurrent", len(whole))]
    some = build.recurrent(layers=4, n=3, r=64, s=64)
    r_only = build.recurrent(layers=4, n=4, r=1536, s=8192)[: 20 + 4 * (12 + 1536)]
    for blob in (some, r_only, r_only[: 20 + 2 * (12 + 1536)]):
        for state in (blob, cache() + blob, cache() + blob + indexer()):
            with pytest.raises(LayoutError):
                layout.parse(state)


@pytest.mark.parametrize("state", [build.attention(PREFIX), build.attention(PREFIX, v=None), build.recurrent()])
def test_a_word_that_moves_the_end_of_a_part_leaves_no_tail(state: bytes) -> None:
    """Layer counts, row sizes, types and the word for a transposed V: what follows is rest of the part, not unknown."""
    found = layout.parse(state)
    heads = range(20, 60, 4) if found.parts[0].kind == "recurrent" else range(4 + 4 + 99 * 12, 4 + 4 + 99 * 12 + 40, 4)
    starts = [s.start - 12 for part in found.attention for s in part.streams[0].sections]
    for at in [*heads, *(start + k for start in starts for k in (0, 4, 8))]:
        for value in (0, 1, 2, 8, 30, 64, 128, 200, 256, 1 << 16, 2**31, 2**32 - 1):
            blob = bytearray(state)
            struct.pack_into("<I", blob, at, value)
            try:
                got = layout.parse(blob)
            except LayoutError:
                continue
            assert got.tail is None, (at, value)
            assert got.parts[-1].stop == len(state)


@pytest.mark.parametrize("n_stream", [1, 3])
def test_a_part_that_is_cut_short_is_no_tail(n_stream: int) -> None:
    first = build.attention(PREFIX, n_stream=n_stream, slot=n_stream - 1)
    context = build.attention(PREFIX, table=build.cell_table(PREFIX, ids=(0, 1)))
    more = [
        (first, build.attention(PREFIX[67:], label=50, n_stream=n_stream, slot=n_stream - 1), False),
        (first, rec(extra=None), False),
        (first + rec(), build.attention(PREFIX, v=None, n_stream=n_stream, slot=n_stream - 1), False),
        (context, build.recurrent((98, 97), ids=((0,), (1,))), True),
        (first + rec(), build.checkpoints((40, 0, 39, rec(39))), False),
    ]
    for head, part, is_context in more:
        wrap = build.context if is_context else (lambda s: build.HEADER + s)
        assert layout.parse(wrap(head + part)).tail is None
        for cut in (*range(4, 80), len(part) // 2, len(part) - 1):
            with pytest.raises(LayoutError):
                layout.parse(wrap(head + part[:cut]))


def test_an_unknown_tail_after_a_recurrent_part() -> None:
    noise = np.random.default_rng(3).bytes(10_000)
    for state in (rec(), cache() + rec(), cache() + rec() + build.attention(PREFIX, ext=12, v=None)):
        found = layout.parse(state + noise)
        assert found.tail == (len(state), len(state) + len(noise))
        assert found.parts[-1].stop == len(state)


def test_one_type_a_tensor_group() -> None:
    state = bytearray(build.attention(PREFIX))
    second = layout.parse(state).streams[0].sections[1].start - 12
    struct.pack_into("<i", state, second, 30)
    with pytest.raises(LayoutError, match="types"):
        layout.parse(state)


def test_damaged_states_raise_layout_errors_only() -> None:
    """Cut, extended, and with words changed: parse, crop and convert give an answer or a LayoutError, in little memory."""
    r = random.Random(11)
    paths = sorted(STATES.glob("*.bin"))
    small = build.slot_file(cache() + rec() + indexer() + build.checkpoints((60, 0, 59, rec(59))))
    for blob in [small, *(p.read_bytes() for p in r.sample(paths, 12))]:
        parts = layout.parse(blob).parts
        near = [p for part in parts for p in range(part.start, min(part.start + 80, len(blob) - 4), 4)]
        for _ in range(60):
            bad = bytearray(blob)
            kind = r.random()
            if kind < 0.5:
                old = struct.unpack_from("<I", bad, at := r.choice(near))[0]
                struct.pack_into("<I", bad, at, r.choice([0, 1, 2, 64, 2**31, old ^ 1, (old * 2) % 2**32, old // 2]))
            elif kind < 0.8:
                del bad[r.choice(parts).stop - r.randrange(30) :]
            else:
                bad += r.randbytes(r.randrange(1, 60))
            for call in (
                lambda b: layout.parse(b).as_dict(),
                lambda b: [layout.crop(b, n) for n in (5, *layout.parse(b).crop_points)],
                lambda b: layout.convert(b, blob),  # noqa: B023
                lambda b: layout.convert(blob, b),  # noqa: B023
            ):
                try:
                    call(bad)
                except LayoutError:
                    continue

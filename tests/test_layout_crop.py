"""layout.crop and what a layout says of where it can be cut."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import layout_states as build
import numpy as np
import pytest

from kvstore import layout, slotfile
from kvstore.errors import LayoutError

STATES = Path(__file__).parent / "data" / "states"
FOLDERS = [STATES, *(Path(f) for f in [os.environ.get("KVSTORE_TEST_STATES")] if f)]
PAIRS = [
    (path, prefix)
    for folder in FOLDERS
    for path in sorted(folder.glob("*-a*.bin"))
    if (prefix := path.with_name(path.name.replace("-a", "-prefix"))).exists()
]


@pytest.mark.parametrize(("path", "prefix"), PAIRS, ids=[f"{p.parent.name}/{p.name}" for p, _ in PAIRS])
def test_cut_state_is_the_engines_own(path: Path, prefix: Path) -> None:
    """A state that went on from a prefix, cut there, is the prefix's file to the byte; a hybrid at a checkpoint.

    A window's file gains the checkpoint that the engine made later, when it went on from there.
    """
    blob = path.read_bytes()
    found = layout.parse(blob)
    if not found.can_crop and 99 not in found.crop_points:
        assert found.crop_limit(99) < 99
        with pytest.raises(LayoutError, match="cannot cut to 99"):
            layout.crop(blob, 99)
        return
    assert found.crop_limit(99) == 99
    cut, own = layout.crop(blob, 99).tobytes(), prefix.read_bytes()
    if not found.can_crop and len(found.attention) > 1:
        (last,) = [c for c in found.checkpoints or () if c.n_tokens == 99]
        before = layout.parse(own)
        at, count = before.state_at + before.state_size, len(before.checkpoints or ()) + 1
        own = own[:at] + b"SCKP" + struct.pack("<II", 1, count) + own[at + 12 :] + blob[last.start : last.stop]
    assert cut == own


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("ext", [0, 12])
@pytest.mark.parametrize("n_stream", [None, 1, 3])
def test_cells_in_any_order(v_trans: bool, ext: int, n_stream: int | None) -> None:
    order = [*range(127, 200), *range(127)]
    shuffled = random.Random(1).sample(order, len(order))
    for pos in (order, shuffled, list(range(200))):
        rot = None if n_stream is None else (64, 0)
        for n in (1, 126, 127, 128, 199):
            common = {
                "ext": ext,
                "v_trans": v_trans,
                "rot": rot,
                "n_stream": n_stream,
                "slot": 1 if n_stream == 3 else 0,
            }
            whole = build.attention(pos, **common)
            want = build.attention([p for p in pos if p < n], **common)
            assert layout.crop(whole, n).tobytes() == want
            two = whole + build.attention(pos, label=70, **common)
            if n_stream:
                assert layout.crop(two, n).tobytes() == want + build.attention(
                    [p for p in pos if p < n], label=70, **common
                )


def test_slot_file_token_list_is_cut_too() -> None:
    for packed in (False, True):
        blob = build.slot_file(build.attention(range(99)), packed=packed)
        assert layout.crop(blob, 50).tobytes() == build.slot_file(
            build.attention(range(50)), n_tokens=50, packed=packed
        )
    whole = layout.crop(blob, 99)
    assert whole.tobytes() == blob
    assert not np.shares_memory(whole, np.frombuffer(blob, np.uint8))


def test_what_cannot_be_cut_says_why() -> None:
    attention, window, tail = build.attention(range(99)), build.attention(range(67, 99), label=50), build.recurrent()
    cases = [
        (attention + window, "not every cache"),
        (attention + tail, "recurrent"),
        (build.context(attention), "whole context"),
        (attention + np.random.default_rng(1).bytes(500), "not understood"),
        (build.attention([*range(50), *range(60, 99), *range(99, 109)]), "not every cache"),
        (build.attention([*range(98), 97]), "not every cache"),
    ]
    for blob, why in cases:
        assert not layout.parse(blob).can_crop
        with pytest.raises(LayoutError, match=why):
            layout.crop(blob, 60)
    with pytest.raises(LayoutError, match="has 99"):
        layout.crop(attention, 100)
    for n in (0, -1):
        with pytest.raises(LayoutError):
            layout.crop(attention, n)


def test_checkpoints() -> None:
    full, tail = build.attention(range(99)), build.recurrent((98,))
    at_40, at_60 = build.recurrent((39,)), build.recurrent((59,))
    blob = build.HEADER + full + tail + build.checkpoints((40, 39, 39, at_40), (60, 59, 59, at_60))
    found = layout.parse(blob)
    assert found.crop_points == (40, 60)
    assert [found.crop_limit(n) for n in (0, 39, 40, 59, 60, 98, 99, 1000)] == [0, 0, 40, 40, 60, 60, 99, 99]
    earlier = build.checkpoints((40, 39, 39, at_40))
    assert layout.crop(blob, 60).tobytes() == build.HEADER + build.attention(range(60)) + at_60 + earlier
    assert layout.crop(blob, 40).tobytes() == build.HEADER + build.attention(range(40)) + at_40
    with pytest.raises(LayoutError, match="checkpoints at 40, 60") as e:
        layout.crop(blob, 50)
    assert e.value.checkpoints == [40, 60]  # type: ignore[attr-defined]


def test_checkpoint_of_a_window_and_a_recurrent_state_behind_an_empty_base() -> None:
    def state(n: int) -> bytes:
        return build.attention(range(n), k=None, v=None) + partial(n)

    def partial(n: int) -> bytes:
        return build.attention(range(max(0, n - 32), n), label=50) + build.recurrent((n - 1,), r=1024, s=0)

    own = build.checkpoints((60, 28, 59, partial(60)))
    cut = layout.crop(build.slot_file(state(99) + own), 60)
    # A server goes on from a window only by a checkpoint.
    assert cut.tobytes() == build.slot_file(state(60) + own, n_tokens=60)


def test_checkpoint_that_does_not_belong_is_refused() -> None:
    full, tail = build.attention(range(99)), build.recurrent((98,))
    other = [
        build.recurrent((39,), r=1024),
        build.recurrent((39,), layers=5),
        build.recurrent((70,)),
        build.attention(range(40)),
        build.recurrent((39,))[:-5],
        build.attention(range(40)) * 2 + build.recurrent((39,)),
    ]
    for partial in other:
        blob = full + tail + build.checkpoints((40, 39, 39, partial))
        with pytest.raises(LayoutError, match="checkpoint there"):
            layout.crop(blob, 40)
    gap = build.attention([*range(30), *range(31, 99)]) + tail + build.checkpoints((40, 39, 39, build.recurrent((39,))))
    with pytest.raises(LayoutError, match="lacks positions"):
        layout.crop(gap, 40)


def test_images() -> None:
    """Tokens of an image share positions: such a state is cut at its checkpoints alone, and counts its cells."""
    pos = [*range(10), *[10] * 20, *range(14, 60)]
    ext = b"".join(struct.pack("<iIiiii", p, 1, p, p, i, 0) for i, p in enumerate(pos))
    plain = build.attention(pos, ext=12, table=ext)
    found = layout.parse(plain)
    assert (found.can_crop, found.n_positions, found.crop_limit(70)) == (False, 76, 0)
    with pytest.raises(LayoutError):
        layout.crop(plain, 70)
    blob = plain + build.recurrent((59,)) + build.checkpoints((40, 23, 23, build.recurrent((23,))))
    cut = layout.parse(layout.crop(blob, 40))
    assert cut.attention[0].cells == (40,)
    assert int(cut.streams[0].pos.max()) == 23


def test_no_cut_inside_a_media_chunk() -> None:
    tokens = np.array([5, 6, *[-1] * 20, *range(50, 70)], np.int32)
    file = slotfile.SlotFile(
        tokens, np.frombuffer(build.attention(range(42)), np.uint8), 4, True, (slotfile.Media(2, b"chunk"),)
    )
    blob = slotfile.to_bytes(file)
    for n, media in ((2, 0), (22, 1), (30, 1)):
        cut = slotfile.read(layout.crop(blob, n))
        np.testing.assert_array_equal(cut.tokens, tokens[:n])
        assert len(cut.media) == media
    with pytest.raises(LayoutError, match="media chunk"):
        layout.crop(blob, 10)


def test_only_the_output_is_allocated() -> None:
    import tracemalloc

    n = 4000
    blob = build.attention(range(n), k=(4, "f16", 256), v=(4, "f16", 256), v_trans=True)
    layout.crop(blob, 5)
    tracemalloc.start()
    out = layout.crop(blob, n - 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < out.nbytes + 20 * n

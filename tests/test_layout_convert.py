"""layout.convert: rows are moved to where another server expects them, and nothing else is touched."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import layout_states as build
import numpy as np
import pytest

from kvstore import layout, slotfile
from kvstore.errors import LayoutError

STATES = Path(__file__).parent / "data" / "states"
MORE = os.environ.get("KVSTORE_TEST_STATES")
PREFIX = list(range(99))
TOKENS = np.arange(1000, 1099, dtype=np.int32)


def _real(name: str) -> bytes:
    for folder in (STATES, Path(MORE or STATES)):
        if (folder / name).exists():
            return (folder / name).read_bytes()
    pytest.skip(f"{name} is not here")


def _described(found: layout.Layout) -> list[dict]:
    return [{k: v for k, v in p.as_dict().items() if k not in ("from", "to")} for p in found.parts]


@pytest.mark.parametrize("arch", ["llama", "qwen2vl", "deepseek2", "gemma3", "jamba", "lfm2", "mamba"])
@pytest.mark.parametrize("version", ["2026.10.11549", "2026.9.11063", "0.2.14"])
def test_flash_attention_on_and_off(arch: str, version: str) -> None:
    fa, nofa = _real(f"{arch}-{version}-fa-prefix.bin"), _real(f"{arch}-{version}-nofa-prefix.bin")
    turned = layout.convert(fa, nofa)
    want, got = layout.parse(nofa), layout.parse(turned)
    assert got.as_dict() == want.as_dict()
    assert layout.convert(turned, fa).tobytes() == fa
    for a, b in zip(layout.parse(fa).streams, got.streams, strict=True):
        for x, y in zip(a.sections, b.sections, strict=True):
            if x.is_v:
                rows = np.frombuffer(fa, "u1")[x.start : x.start + x.width * a.n_cells].reshape(a.n_cells, -1, y.width)
                turned_rows = turned[y.start : y.start + x.width * a.n_cells].reshape(y.rows, a.n_cells, y.width)
                np.testing.assert_array_equal(rows.transpose(1, 0, 2), turned_rows)


@pytest.mark.parametrize("arch", ["llama", "qwen2vl", "deepseek2"])
def test_file_and_memory(arch: str) -> None:
    file, memory = _real(f"{arch}-2026.10.11549-fa-prefix.bin"), _real(f"{arch}-2026.10.11549-seq-prefix.bin")
    assert layout.convert(file, memory).tobytes() == memory
    assert layout.convert(file, layout.parse(memory)).tobytes() == memory
    tokens = slotfile.read(file).tokens
    assert layout.convert(memory, file, tokens=tokens).tobytes() == file
    with pytest.raises(LayoutError, match="tokens="):
        layout.convert(memory, file)


@pytest.mark.parametrize("arch", ["llama", "qwen2vl", "gemma3", "jamba"])
def test_one_buffer_and_a_buffer_a_slot(arch: str) -> None:
    one, split = _real(f"{arch}-2026.10.11549-seq-a.bin"), _real(f"{arch}-2026.10.11549-seq0of2split.bin")
    assert _described(layout.parse(layout.convert(one, split))) == _described(layout.parse(split))
    assert layout.convert(layout.convert(one, split), one).tobytes() == one
    assert layout.convert(layout.convert(one, split, slot=1), one).tobytes() == one


@pytest.mark.parametrize("arch", ["llama", "qwen2vl", "deepseek2", "jamba"])
@pytest.mark.parametrize("option", ["fa", "nofa"])
def test_versions(arch: str, option: str) -> None:
    blobs = {v: _real(f"{arch}-{v}-{option}-prefix.bin") for v in ("0.2.14", "2026.9.11063")}
    new = _real(f"{arch}-2026.10.11549-fa-prefix.bin")
    for old in blobs.values():
        got = layout.parse(layout.convert(old, new))
        want = layout.parse(new)
        assert _described(got) == _described(want)
        assert (got.file_version, got.tokens_packed, got.state_at) == (4, True, want.state_at)
        for a, b in zip(got.streams, want.streams, strict=True):
            np.testing.assert_array_equal(a.ext, b.ext)
        assert layout.convert(layout.convert(old, new), old).tobytes() == old


def test_window_saved_whole() -> None:
    old, new = _real("gemma3-0.2.14-fa-prefix.bin"), _real("gemma3-2026.9.11063-fa-prefix.bin")
    got = layout.parse(layout.convert(old, new))
    assert got.as_dict() == layout.parse(new).as_dict()
    np.testing.assert_array_equal(got.streams[1].pos, range(67, 99))
    long = layout.parse(layout.convert(_real("gemma3-0.2.14-fa-a.bin"), new))
    np.testing.assert_array_equal(long.streams[1].pos, range(102, 134))


def test_checkpoints_go_along_or_stay_behind() -> None:
    fa, nofa = _real("gemma3-2026.10.11549-fa-a.bin"), build_nofa_gemma()
    turned = layout.convert(fa, nofa)
    got = layout.parse(turned)
    assert got.checkpoints is not None
    assert [c.n_tokens for c in got.checkpoints] == [95, 99, 130]
    c = got.checkpoints[1]
    assert layout.parse(turned[c.target[0] : c.target[1]]).attention[0].v_transposed
    assert layout.convert(turned, fa).tobytes() == fa
    assert layout.parse(layout.convert(fa, _real("gemma3-2026.9.11063-fa-prefix.bin"))).checkpoints is None
    draft = build.attention(PREFIX) + build.recurrent()
    appendix = bytearray(build.checkpoints((40, 39, 39, build.recurrent((39,)))))
    struct.pack_into("<Q", appendix, len(appendix) - 16, 3)
    appendix[len(appendix) - 8 : len(appendix) - 8] = b"abc"
    blob = draft + appendix
    with pytest.raises(LayoutError, match="draft"):
        layout.convert(blob, blob)


def build_nofa_gemma() -> bytes:
    """A window state with V transposed and a checkpoint, as gemma3 has it."""
    k = {"k": (1, "f16", 128), "v": (1, "f16", 128), "v_trans": True}
    w = {"k": (5, "f16", 128), "v": (5, "f16", 128), "v_trans": True, "label": 50}
    window = build.attention(PREFIX[67:], **w)
    return build.slot_file(build.attention(PREFIX, **k) + window + build.checkpoints((95, 0, 94, window)))


@pytest.mark.parametrize("bare", [False, True])
def test_states_of_early_2025(bare: bool) -> None:
    table = build.cell_table(PREFIX, ids=() if bare else (0,))
    old = build.attention(PREFIX, rot=None, n_stream=None, table=table)
    new = build.HEADER + build.attention(PREFIX)
    assert layout.convert(old, new).tobytes() == new
    assert layout.convert(new, old).tobytes() == old


def test_slot_and_sequence_id() -> None:
    state = build.attention(PREFIX)
    like = build.attention(PREFIX, n_stream=3, slot=1, table=build.cell_table(PREFIX, ids=(1,)))
    assert layout.convert(state, like).tobytes() == like
    want = build.attention(PREFIX, n_stream=3, slot=2, table=build.cell_table(PREFIX, ids=(2,)))
    assert layout.convert(state, like, slot=2).tobytes() == want
    unified = build.attention(PREFIX, table=build.cell_table(PREFIX, ids=(5,)))
    assert layout.convert(state, unified).tobytes() == unified
    with pytest.raises(LayoutError, match="slot 3"):
        layout.convert(state, like, slot=3)


def test_tokens_of_m_rope_cells() -> None:
    order = [*range(50, 99), *range(50)]
    eight, twelve = build.attention(order, ext=8), build.attention(order, ext=12)
    assert layout.convert(eight, twelve, tokens=TOKENS).tobytes() == twelve
    assert layout.convert(twelve, eight).tobytes() == eight
    with pytest.raises(LayoutError, match="tokens="):
        layout.convert(eight, twelve)
    with pytest.raises(LayoutError, match="cannot be told"):
        layout.convert(eight, twelve, tokens=TOKENS[:50])
    with pytest.raises(LayoutError, match="0 extra"):
        layout.convert(build.attention(order), twelve, tokens=TOKENS)


def test_refusals() -> None:
    state = build.attention(PREFIX)
    q8 = {"k": (2, "q8_0", 68), "v": (2, "q8_0", 68)}
    cases = [
        (state, build.attention(PREFIX, **q8), "KV type"),
        (state, build.attention(PREFIX, k=(3, "f16", 128), v=(3, "f16", 128)), "another model"),
        (state, build.attention(PREFIX, v=None), "another model"),
        (state, state + build.recurrent(), "different parts"),
        (state + build.recurrent(), state + build.recurrent(s=4096), "recurrent states differ"),
        (build.attention(PREFIX, **q8, rot=None), build.attention(PREFIX, **q8, rot=(64, 64)), "rotated"),
        (build.context(state), state, "whole context"),
        (state, build.context(state), "whole context"),
        (state + np.random.default_rng(1).bytes(400), state, "not understood"),
        (build.attention(PREFIX, table=build.cell_table(PREFIX, n_seq=2)), state, "one sequence"),
        (state, struct.pack("<II", 1, 0), "no cells"),
    ]
    for blob, like, why in cases:
        with pytest.raises(LayoutError, match=why):
            layout.convert(blob, like)

"""Builds llama.cpp states of any layout, byte by byte, for the tests. Rows depend on layer and position alone."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
ELEMENT = {0: 4, 1: 2, 30: 2}
HEADER = struct.pack("<Ii", 0xAF143CD8, 0)


def rows(label: int, pos: Sequence[int], width: int) -> np.ndarray:
    """shape (n_cells, width), uint8; a position has the same row wherever it stands."""
    table = np.random.default_rng(label).integers(0, 256, (max(pos) + 1, width), np.uint8)
    return table[np.asarray(pos)]


def cell_table(pos: Sequence[int], ext: int = 0, n_seq: int = 1, ids: Sequence[int] | None = None) -> bytes:
    out = []
    for p in pos:
        extra = struct.pack("<iii", p, p, 1000 + p)[:ext]
        seq = list(range(n_seq)) if ids is None else list(ids)
        out.append(struct.pack("<iI", p, len(seq)) + extra + struct.pack(f"<{len(seq)}i", *seq))
    return b"".join(out)


def attention(
    pos: Sequence[int],
    *,
    k: tuple[int, str, int] | None = (2, "f16", 128),
    v: tuple[int, str, int] | None = (2, "f16", 128),
    ext: int = 0,
    v_trans: bool = False,
    rot: tuple[int, int] | None = (0, 0),
    n_stream: int | None = 1,
    slot: int = 0,
    table: bytes | None = None,
    label: int = 0,
) -> bytes:
    """One cache whose cells are all in stream `slot`. `k` and `v` are (layers, type, bytes of a row)."""
    out = [] if n_stream is None else [struct.pack("<I", n_stream), bytes(4 * slot)]
    out.append(struct.pack("<I", len(pos)))
    out.append(cell_table(pos, ext) if table is None else table)
    out.append(struct.pack("<II", v_trans, k[0] if k else 0))
    if rot is not None:
        out.append(struct.pack("<II", *rot))
    for is_v, spec in enumerate((k, v)):
        for layer in range(spec[0] if spec else 0):
            assert spec is not None
            kind, row = TYPES[spec[1]], spec[2]
            data = rows(label + 1000 * is_v + layer, pos, row)
            if is_v and v_trans:
                el = ELEMENT[kind]
                out.append(struct.pack("<iII", kind, el, row // el))
                data = data.reshape(len(pos), row // el, el).transpose(1, 0, 2)
            else:
                out.append(struct.pack("<iQ", kind, row))
            out.append(data.tobytes())
    if n_stream is not None:
        out.append(bytes(4 * (n_stream - 1 - slot)))
    return b"".join(out)


def recurrent(
    pos: Sequence[int] = (98,),
    *,
    layers: int = 4,
    n: int = 2,
    r: int = 1536,
    s: int = 8192,
    ids: Sequence[Sequence[int]] | None = None,
    extra: tuple[int, int] | None = None,
) -> bytes:
    """A recurrent state of f32 tensors, `n` R and `n` S; `ids` lists each cell's sequence ids (whole contexts).

    `extra` is the R tensor that one more row follows, and the bytes of that row, which has no type word.
    """
    out = [struct.pack("<I", len(pos))]
    for i, p in enumerate(pos):
        seq = ids[i] if ids else ()
        out.append(struct.pack(f"<iI{len(seq)}i", p, len(seq), *seq))
    out.append(struct.pack("<II", 0, layers))
    for label, row in ((7, r), (8, s)):
        for layer in range(n):
            out.append(struct.pack("<iQ", 0, row))
            out.append(np.random.default_rng([label, layer]).bytes(row * len(pos)))
            if extra is not None and (label, layer) == (7, extra[0]):
                out.append(struct.pack("<Q", extra[1]))
                out.append(np.random.default_rng(9).bytes(extra[1] * len(pos)))
    return b"".join(out)


def checkpoints(*blobs: tuple[int, int, int, bytes]) -> bytes:
    """The appendix; each checkpoint is (n_tokens, pos_min, pos_max, partial state without header)."""
    out = [b"SCKP", struct.pack("<II", 1, len(blobs))]
    for n, low, high, partial in blobs:
        out.append(struct.pack("<qiiQ", n, low, high, len(partial) + 8) + HEADER + partial + bytes(16))
    return b"".join(out)


def slot_file(state: bytes, n_tokens: int = 99, version: int = 4, packed: bool = True) -> bytes:
    words = list(range(100, 100 + n_tokens))
    if packed:
        words = [-1, 1, n_tokens, *words, 0]
    return struct.pack(f"<III{len(words)}i", 0x67677371, version, len(words), *words) + state


def context(state: bytes, arch: bytes = b"llama", outputs: tuple[int, int, int] | None = None) -> bytes:
    """A whole context; `outputs` (n_outputs, n_logits, n_embd) are there in builds up to mid 2025."""
    head = struct.pack("<I", len(arch)) + arch
    if outputs is not None:
        n, logits, embd = outputs
        head += struct.pack(f"<I{n}i", n, *range(n))
        head += struct.pack("<Q", logits) + np.arange(logits, dtype="<f4").tobytes()
        head += struct.pack("<Q", embd) + np.arange(embd, dtype="<f4").tobytes()
    return head + state


# described layouts

_PART = re.compile(r"(KV|REC)\(([^)]*)\)")
_TENSORS = re.compile(r"([KVRS]) (?:(\d+)x(\w+)/(\d+)|none)")


def described(text: str) -> tuple[list[bytes], list[bytes], list[dict[str, object]], int]:
    """From a description such as `n_stream {3}; KV(cells 99, pos 0-98, ...) then REC(...) then SCKP`: the parts' bytes,
    those a checkpoint repeats, what `as_dict` must say of each part (without offsets), and the number of streams."""
    n_stream = int(m.group(1)) if (m := re.search(r"n_stream \{(\d+)\}", text)) else 1
    parts, expected = [], []
    found = _PART.findall(text)
    for kind, inner in found:
        tensors = {t[0]: (int(t[1]), t[2], int(t[3])) if t[1] else None for t in _TENSORS.findall(inner)}
        number = {key: int(value) for key, value in re.findall(r"(cells|ext|v_trans|layers) (\d+)", inner)}
        first, last = (int(x) for x in re.findall(r"pos (\d+)(?:-(\d+))?", inner)[0] if x) if kind == "KV" else (98, 98)
        if kind == "REC":
            r, s = tensors["R"], tensors["S"]
            assert r
            assert s
            parts.append(recurrent(layers=number["layers"], n=r[0], r=r[2], s=s[2]))
            expected.append({"kind": "recurrent", "cells": [1], "n_layer": number["layers"]})
            continue
        rot = re.search(r"rot (\d+)/(\d+)", inner)
        rotation = (int(rot.group(1)), int(rot.group(2))) if rot else None
        k, v = tensors["K"], tensors["V"]
        slot = n_stream // 2
        parts.append(
            attention(
                range(first, last + 1), k=k, v=v, ext=number["ext"], v_trans=bool(number["v_trans"]), rot=rotation,
                n_stream=n_stream, slot=slot, label=10 * len(parts),
            )
        )  # fmt: skip
        cells = [0] * n_stream
        cells[slot] = number["cells"]
        expected.append(
            {
                "kind": "attention", "n_stream": n_stream, "cells": cells, "cell_ext": number["ext"],
                "k_row": [k[2]] if k else [], "n_layer": k[0] if k else 0,
                "rotation": list(rotation) if rotation else None, "v_layers": v[0] if v else 0,
                "v_transposed": bool(number["v_trans"]),
            }
        )  # fmt: skip
    # A checkpoint repeats all but a first attention cache: the window, the recurrent state.
    partial = parts if len(parts) == 1 else parts[1:]
    return parts, partial, expected, n_stream

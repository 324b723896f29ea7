"""States for the codec's tests: small random ones, and the real ones that are at hand."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def exact(data: bytes | Bytes) -> Bytes:
    """The same bytes in an allocation of exactly their size, so that a sanitizer sees every access beyond them."""
    return np.array(np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8))


def state(
    seed: int,
    pos: Sequence[int],
    content: Sequence[int],
    *,
    n_layer: int = 2,
    row: int = 16,
    transposed: bool = False,
    element: int = 2,
    ext: int = 0,
    tail: bytes = b"",
) -> bytes:
    """One attention cache with its header; cells of equal content have equal rows. `tail` follows it."""
    out = [struct.pack("<IiII", 0xAF143CD8, 0, 1, len(pos))]
    for p in pos:
        out.append(struct.pack("<iI", p, 1) + bytes((p * 7 + k) & 255 for k in range(ext)) + struct.pack("<i", 0))
    if pos:
        out.append(struct.pack("<II", transposed, n_layer))
    for layer in range(2 * n_layer if pos else 0):
        rows = np.empty((len(pos), row), np.uint8)
        for i, key in enumerate(content):
            rows[i] = np.frombuffer(np.random.default_rng([seed, layer, key]).bytes(row), np.uint8)
        if layer >= n_layer and transposed:
            out.append(struct.pack("<iII", {2: 1, 4: 0}[element], element, row // element))
            rows = np.ascontiguousarray(rows.reshape(len(pos), -1, element).transpose(1, 0, 2))
        else:
            out.append(struct.pack("<iQ", 1, row))
        out.append(rows.tobytes())
    return b"".join(out) + tail


def real_pairs() -> list[tuple[Path, Path]]:
    """(prefix, continuation) of every pair in tests/data/states and in the folder that KVSTORE_TEST_STATES names."""
    folders = [Path(__file__).parent / "data" / "states"]
    if extra := os.environ.get("KVSTORE_TEST_STATES"):
        folders.append(Path(extra))
    pairs = {}
    for folder in folders:
        for prefix in sorted(folder.glob("*-prefix*.bin")):
            child = prefix.with_name(prefix.name.replace("-prefix", "-a"))
            if child.exists():
                pairs[prefix.name] = (prefix, child)
    return list(pairs.values())

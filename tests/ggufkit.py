"""Small GGUF files for tests, written by hand: an adapter, and copies of a model with other numbers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGN = 32


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<If", 6, value)


def write(path: Path, metadata: Mapping[str, str | float], tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """A GGUF file of version 3 with float32 tensors; the rows of an array are those of the tensor."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(name) + _value(value) for name, value in metadata.items())
    body = b""
    for name, array in tensors.items():
        shape = array.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(body))
        data = array.astype("<f4").tobytes()
        body += data + bytes(-len(data) % _ALIGN)
    path.write_bytes(head + bytes(-len(head) % _ALIGN) + body)


def write_lora(path: Path, seed: int, n_embd: int = 128, n_out: int = 128, rank: int = 2) -> Path:
    """An adapter of the first layer's keys for the tiny llama model. Seed 0 gives one that changes nothing."""
    rng = np.random.default_rng(seed)
    a: Any = rng.standard_normal((rank, n_embd))
    b: Any = rng.standard_normal((n_out, rank)) * (seed > 0)
    write(
        path,
        {
            "general.type": "adapter",
            "general.architecture": "llama",
            "adapter.type": "lora",
            "adapter.lora.alpha": 2.0,
        },
        {"blk.0.attn_k.weight.lora_a": a, "blk.0.attn_k.weight.lora_b": b},
    )
    return path


def with_numbers(source: Path, path: Path, numbers: Mapping[str, int]) -> Path:
    """A copy of a GGUF file with more metadata: numbers of 32 bits."""
    data = source.read_bytes()
    magic, version, n_tensors, n_keys = struct.unpack("<4sIQQ", data[:24])
    more = b"".join(_string(name) + struct.pack("<II", 4, value) for name, value in numbers.items())
    filler = _string("test.filler") + struct.pack("<I", 8)
    # The tensors stay aligned where the header grows by a multiple of the alignment.
    more += filler + _string("x" * (-(len(more) + len(filler) + 8) % _ALIGN))
    path.write_bytes(struct.pack("<4sIQQ", magic, version, n_tensors, n_keys + len(numbers) + 1) + more + data[24:])
    return path

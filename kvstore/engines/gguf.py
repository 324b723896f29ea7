"""What tells one GGUF model file from another, read without loading it.

    u32 'GGUF' | u32 version | u64 n_tensors | u64 n_kv | n_kv x (string key, u32 type, value)
    | n_tensors x (string name, u32 n_dims, u64 x n_dims, u32 type, u64 offset) | padding | tensor data

A string is u64 length and bytes; an array is u32 type, u64 count, values. All little-endian (version 2 and 3).
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import InvalidInputError

MAX_HEADER = 256 << 20  # vocabularies of 256k tokens with merges take about 20 MB
MAX_COUNT = 1 << 24
# Fine-tunes share names and shapes; that they share all of these bytes as well is not to be expected.
SAMPLES, SAMPLE_BYTES = 16, 64 << 10
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """`digest` covers the header, the size and samples of the tensors, of all shards; `metadata` has the scalars."""

    digest: str
    size: int
    metadata: dict[str, Any]


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.left = min(size, MAX_HEADER)
        self.hash = hashlib.sha256()

    def take(self, n: int) -> bytes:
        if n > self.left:
            raise InvalidInputError("the GGUF header is cut short, or longer than any model's")
        data = self.file.read(n)
        if len(data) != n:
            raise InvalidInputError("the GGUF header is cut short")
        self.left -= n
        self.hash.update(data)
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        n = int(self.number("Q"))
        if n > MAX_COUNT:
            raise InvalidInputError(f"the GGUF header counts {n} of something")
        return n

    def string(self) -> str:
        return self.take(self.count()).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A scalar or string; an array is read over, and is None."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise InvalidInputError(f"the GGUF header has a value of the unknown type {kind}")
            return self.number(_SCALARS[kind])
        item, n = int(self.number("I")), self.count()
        if item in _SCALARS:
            self.take(n * struct.calcsize("<" + _SCALARS[item]))
        else:
            for _ in range(n):
                if item != _STRING:
                    raise InvalidInputError("the GGUF header has an array of arrays")
                self.take(self.count())
        return None


def _read_one(path: str) -> ModelFile:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        reader = _Reader(file, size)
        if reader.take(4) != b"GGUF":
            raise InvalidInputError(f"{path} is no GGUF file")
        version = int(reader.number("I"))
        if version not in (2, 3):
            raise InvalidInputError(f"{path} is GGUF version {version}")
        n_tensors, n_kv = reader.count(), reader.count()
        metadata = {}
        for _ in range(n_kv):
            key = reader.string()
            value = reader.value(int(reader.number("I")))
            if value is not None:
                metadata[key] = value
        for _ in range(n_tensors):
            reader.string()
            n_dims = int(reader.number("I"))
            if n_dims > 16:
                raise InvalidInputError(f"a tensor of {path} has {n_dims} dimensions")
            reader.take(8 * n_dims + 4 + 8)
        data_at = file.tell()
        reader.hash.update(struct.pack("<Q", size))
        for i in range(SAMPLES):
            file.seek(data_at + max(0, size - data_at - SAMPLE_BYTES) * i // (SAMPLES - 1))
            reader.hash.update(file.read(SAMPLE_BYTES))
        return ModelFile(reader.hash.hexdigest(), size, metadata)


def read(path: str | os.PathLike[str]) -> ModelFile:
    """The model at a path, with the shards beside it. Raises OSError, InvalidInputError."""
    path = os.fspath(path)
    first = _read_one(path)
    shard = _SHARD.search(path)
    if shard is None:
        return first
    digest, size = hashlib.sha256(), 0
    n = min(int(shard[2]), 1000)
    for i in range(1, n + 1):
        name = f"{path[: shard.start()]}-{i:05d}-of-{shard[2]}.gguf"
        part = first if i == int(shard[1]) else _read_one(name)
        digest.update(bytes.fromhex(part.digest))
        size += part.size
    return ModelFile(digest.hexdigest(), size, first.metadata)

"""What every reader of BKVD needs: the header, the parent hash, and the kernel's codes as the format's messages."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from ._native import ffi, lib
from .errors import DeltaError
from .types import Bytes
from .util.buffers import as_u8

MAGIC = 0x44564B42
VERSION = 1
HEADER = struct.Struct("<IIQQQQI")

_MESSAGES = {
    lib.KV_TRUNCATED: "truncated",
    lib.KV_TRUNCATED_LITERAL: "truncated literal",
    lib.KV_COPY_RANGE: "copy out of range",
    lib.KV_UNKNOWN_OP: "unknown op",
    lib.KV_SIZE_MISMATCH: "size mismatch",
    lib.KV_NOT_SHARED: "not a shared state",
}


class Header(NamedTuple):
    """The fields of a delta's header. `size` and `n_ops` are claims until the ops have been checked."""

    parent_id: int
    parent_size: int
    parent_hash: int
    size: int
    n_ops: int

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, *self)


def header(blob: Any) -> Header:
    """The header of a delta, or of its first 44 bytes and more. Raises DeltaError if `blob` has none."""
    found = read_header(as_u8(blob, "blob"))
    if found is None:
        raise DeltaError("not a shared state")
    return found


def read_header(data: Bytes) -> Header | None:
    """The header; None if `data` is not a delta."""
    if data.size < HEADER.size:
        return None
    magic, version, *fields = HEADER.unpack(data[: HEADER.size].tobytes())
    return Header(*fields) if (magic, version) == (MAGIC, VERSION) else None


def is_delta(blob: Any) -> bool:
    """Whether `blob` starts with the full header of a delta of version 1."""
    return read_header(as_u8(blob, "blob")) is not None


def parent_id(blob: Any) -> int:
    """The id of the parent that a delta was encoded against; 0 if `blob` is not a delta."""
    found = read_header(as_u8(blob, "blob"))
    return 0 if found is None else found.parent_id


def size(blob: Any) -> int:
    """The size of the state, as the header of a delta claims it; 0 if `blob` is not a delta."""
    found = read_header(as_u8(blob, "blob"))
    return 0 if found is None else found.size


def sample_hash(blob: Any) -> int:
    """The parent hash of a whole state (see `kvstore.bkvd`)."""
    data = as_u8(blob, "blob")
    with ffi.from_buffer("uint8_t[]", data) as p:
        return int(lib.kv_sample_hash(p, data.size))


def wrong_parent() -> DeltaError:
    return DeltaError("its prefix is not in the cache", wrong_parent=True)


def check(code: int) -> None:
    """Raises the DeltaError of a code of the kernel."""
    if code == lib.KV_WRONG_PARENT:
        raise wrong_parent()
    if code != lib.KV_OK:
        raise DeltaError(_MESSAGES[code])
